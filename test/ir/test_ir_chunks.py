"""Launches of many programs run in chunks: what is found and what is computed does not depend on where they are cut."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from gradient_check import check_gradients
from torch import Tensor

from kernel_agent.ir import ExecOptions, FindingKind, execute

_ONE_BY_ONE = ExecOptions(memory=1 << 10)


@triton.jit
def _stored_by_all(X, Y, N, SHIFT, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    tl.store(Y + pid * (BLOCK - SHIFT) + c, tl.load(X + pid * BLOCK + c))


def stored(x: Tensor, overlap: int) -> Tensor:
    programs = x.numel() // 16
    y = torch.empty(programs * (16 - overlap) + overlap, device=x.device)
    _stored_by_all[(programs,)](x, y, x.numel(), overlap, BLOCK=16)
    return y


@pytest.mark.parametrize("options", [ExecOptions(), _ONE_BY_ONE], ids=["together", "one by one"])
def test_programs_that_overlap_by_one_element_race_in_any_chunks(options):
    # chunks that touch disjoint ranges are not compared element by element: one shared element must still show
    execution = execute(stored, (torch.randn(8 * 16), 1), {}, options=options)
    assert {finding.kind for finding in execution.findings} == {FindingKind.RACE}
    assert execute(stored, (torch.randn(8 * 16), 0), {}, options=options).findings == ()


@triton.jit
def _read_after_neighbour(X, Y, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    tl.store(Y + pid * BLOCK + c, tl.load(X + pid * BLOCK + c))
    if pid == 7:
        tl.store(X + c, tl.load(Y + c) + 1.0)


def read_after_neighbour(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _read_after_neighbour[(8,)](x, y, BLOCK=16)
    return y


@pytest.mark.parametrize("options", [ExecOptions(), _ONE_BY_ONE], ids=["together", "one by one"])
def test_a_read_of_what_an_earlier_chunk_wrote_is_a_race(options):
    findings = execute(read_after_neighbour, (torch.randn(8 * 16),), {}, options=options).findings
    assert {finding.buffer for finding in findings if finding.kind is FindingKind.RACE} >= {"Y"}


@triton.jit
def _squares(X, Y, N, BLOCK: tl.constexpr):
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + c, mask=c < N)
    tl.store(Y + c, x * x * x, mask=c < N)


def many_launches(x: Tensor) -> Tensor:
    for _ in range(6):
        y = torch.empty_like(x)
        _squares[(triton.cdiv(x.numel(), 64),)](x, y, x.numel(), BLOCK=64)
        x = y * 0.5
    return x


def test_several_launches_share_one_budget():
    # each launch alone fits: what the first ones keep must count against the later ones
    def saved(memory: int) -> int:
        total = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal total
            total += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            execute(many_launches, (torch.rand(1000),), {}, leaves=(0,), options=ExecOptions(memory=memory))
        return total

    assert saved(1 << 19) < saved(1 << 30) / 2


def test_checkpointed_launches_in_a_row_have_exact_gradients():
    def reference(x: Tensor) -> Tensor:
        for _ in range(6):
            x = x**3 * 0.5
        return x

    check_gradients(many_launches, (torch.rand(300) + 0.5,), reference, options=ExecOptions(memory=1 << 14))


@triton.jit
def _masked_copy(X, Y, N, M, BLOCK: tl.constexpr):
    r = tl.program_id(0) * 4 + tl.arange(0, 4)
    c = tl.arange(0, BLOCK)
    x = tl.load(X + r[:, None] * N + c[None, :], mask=(r < M)[:, None] & (c < N)[None, :], other=7.0)
    tl.store(Y + r[:, None] * BLOCK + c[None, :], x, mask=(r < M)[:, None])


def masked_copy(x: Tensor) -> Tensor:
    y = torch.empty(x.shape[0], 16, device=x.device)
    _masked_copy[(triton.cdiv(x.shape[0], 4),)](x, y, x.shape[1], x.shape[0], BLOCK=16)
    return y


@pytest.mark.parametrize("shape", [(8, 16), (8, 13), (7, 16), (5, 3)])
def test_masks_that_let_everything_or_some_columns_or_some_rows_through(shape):
    # full masks, masks of one dimension and masks of two take different ways to the same elements
    pad = 16 - shape[1]
    check_gradients(masked_copy, (torch.randn(shape),), lambda x: torch.nn.functional.pad(x, (0, pad), value=7.0))
