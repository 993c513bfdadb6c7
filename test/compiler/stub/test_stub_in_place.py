"""Launches that overwrite memory, whole or in part: each takes its part of the cotangent, and leaves the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_agent.compiler.derive import derive
from kernel_agent.compiler.derived import Derived
from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.gate.options import GateOptions
from kernel_agent.oracle import describe
from kernel_agent.pairs.userfile import read_file
from kernel_agent.sandbox import Sandbox

QUICK = GateOptions(seeds=(0,), max_elements=1 << 12, odd_sizes=1, max_cases=4)

KERNELS = """
import torch
import triton
import triton.language as tl

from kernel_agent import autodiff


@triton.jit
def twice_kernel(X, Y, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + at, mask=at < N, other=0.0)
    tl.store(Y + at, x * 2.0, mask=at < N)


@triton.jit
def wave_kernel(X, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + at, mask=at < N, other=0.0)
    tl.store(X + at, tl.sin(x), mask=at < N)


@triton.jit
def flip_kernel(X, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + at, mask=at < N, other=0.0)
    tl.store(X + at, -x, mask=at < N)


@autodiff
"""

REST = """

SWEEP = [dict(N=90), dict(N=41)]


def make_args(N, device="cuda"):
    return (torch.randn(N, device=device),)
"""

IN_PLACE = """def stub(x):
    N = x.numel()
    y = torch.empty_like(x.contiguous())
    grid = (triton.cdiv(N, 32),)
    twice_kernel[grid](x.contiguous(), y, N, BLOCK=32)
    {kernel}[grid](y, {count}, BLOCK=32)
    return y
"""

INTO_A_PART = """def stub(x):
    x = x.contiguous()
    N, half = x.numel(), x.numel() // 2
    y = torch.empty_like(x)
    twice_kernel[(triton.cdiv(N, 32),)](x, y, N, BLOCK=32)
    rest = y[half:]
    twice_kernel[(triton.cdiv(half, 32),)](x, rest, half, BLOCK=32)
    return y
"""

OF_THE_INPUT = """def stub(x):
    wave_kernel[(triton.cdiv(x.numel(), 32),)](x, x.numel(), BLOCK=32)
    return x
"""

TWO_NAMES = """def stub(x):
    x = x.contiguous()
    N = x.numel()
    y = torch.empty_like(x)
    grid = (triton.cdiv(N, 32),)
    twice_kernel[grid](x, y, N, BLOCK=32)
    twice_kernel[grid](y, y, N, BLOCK=32)
    return y
"""


def derived(stub: str, folder: Path, sandbox: Sandbox) -> Derived:
    path = folder / "forward.py"
    path.write_text(KERNELS + stub + REST)
    return derive(describe(read_file(path), sandbox), sandbox, options=QUICK)


def test_what_a_launch_overwrites_is_cloned_where_the_gradient_needs_it(tmp_path: Path, sandbox: Sandbox) -> None:
    # The cosine is of what y held before: that of what it holds at the end would be another gradient.
    found = derived(IN_PLACE.format(kernel="wave_kernel", count="N"), tmp_path, sandbox)
    assert found.verdict.green
    assert "y_before = y.clone()" in found.draft.candidate.forward


def test_nothing_is_cloned_for_a_launch_whose_gradient_does_not_need_it(tmp_path: Path, sandbox: Sandbox) -> None:
    found = derived(IN_PLACE.format(kernel="flip_kernel", count="N"), tmp_path, sandbox)
    assert found.verdict.green
    assert "clone" not in found.draft.candidate.forward
    # All of y was overwritten: no cotangent is left for the launch before, and none is set to zero.
    assert "flip_kernel_left" not in found.draft.candidate.backward


def test_elements_that_a_launch_leaves_alone_pass_their_cotangents_on(tmp_path: Path, sandbox: Sandbox) -> None:
    # Half of y is turned round in place; the gradient of the other half is 2, and would be 0 if all had been stored to.
    found = derived(IN_PLACE.format(kernel="flip_kernel", count="N // 2"), tmp_path, sandbox)
    assert found.verdict.green
    assert "flip_kernel_left" in found.draft.candidate.backward


def test_a_launch_into_a_part_of_what_another_wrote_takes_its_part_of_the_cotangent(
    tmp_path: Path, sandbox: Sandbox
) -> None:
    # Both launches store to the second half: if both took its cotangent, x would get it twice.
    found = derived(INTO_A_PART, tmp_path, sandbox)
    assert found.verdict.green
    assert "left_of_y" in found.draft.candidate.backward


def test_a_stub_may_overwrite_its_input(tmp_path: Path, sandbox: Sandbox) -> None:
    # The pair overwrites it as the stub does, and takes the cosine of what was there before.
    found = derived(OF_THE_INPUT, tmp_path, sandbox)
    assert found.verdict.green
    assert "x_before = x.clone()" in found.draft.candidate.forward
    assert "if x_before.stride() != " in found.draft.candidate.backward


def test_memory_that_is_read_by_one_name_and_overwritten_by_another_is_refused(
    tmp_path: Path, sandbox: Sandbox
) -> None:
    with pytest.raises(CannotDerive, match="reads through `X` what it overwrites through `Y`"):
        derived(TWO_NAMES, tmp_path, sandbox)
