"""A plan relies on nothing that fails in a call of the stub: neither of SWEEP nor of BENCH."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_agent.compiler.derive import drafts
from kernel_agent.oracle import describe
from kernel_agent.pairs.spec import ShapeEntry
from kernel_agent.pairs.userfile import read_file
from kernel_agent.sandbox import Sandbox

WINDOWS = """
import torch
import triton
import triton.language as tl

from kernel_agent import autodiff


@triton.jit
def windows_kernel(X, Y, hop, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    x = tl.load(X + tl.program_id(0) * hop + lanes)
    tl.store(Y + tl.program_id(0) * BLOCK + lanes, x * x)


@autodiff
def stub(x, hop):
    count = (x.numel() - 32) // hop + 1
    y = torch.empty(count, 32, device=x.device)
    windows_kernel[(count,)](x, y, hop, BLOCK=32)
    return y


SWEEP = [dict(N=130, hop=40), dict(N=96, hop=32)]


def make_args(N, hop, device="cuda"):
    return torch.randn(N, device=device), hop
"""


@pytest.mark.parametrize("hop", [8, 64])
def test_windows_that_overlap_at_sizes_of_real_work_alone_are_added(hop: int, tmp_path: Path, sandbox: Sandbox) -> None:
    # The gate calls SWEEP alone, where windows lie apart: a store was printed, and a check that raised in every call
    # with the real hop. Where none overlap the store and its check are right.
    path = tmp_path / "windows.py"
    path.write_text(WINDOWS)
    facts = read_file(path).model_copy(update={"bench": (ShapeEntry(dims={"N": 4096, "hop": hop}),)})
    (found,), _ = drafts(describe(facts, sandbox), sandbox, most=1)
    assert ("stored once only if hop >= BLOCK" in found.candidate.backward) == (hop == 64)
    assert ("tl.atomic_add" in found.candidate.backward) == (hop == 8)
