"""What only some ways through a stub bind is saved by all of them, as None by the others."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from kernel_agent.compiler.derive import derive
from kernel_agent.compiler.stub.forward import Kept
from kernel_agent.compiler.stub.partly import none_where_unbound, sometimes_bound
from kernel_agent.gate.options import GateOptions
from kernel_agent.oracle import describe
from kernel_agent.pairs.userfile import read_file
from kernel_agent.sandbox import Sandbox

QUICK = GateOptions(seeds=(0,), max_elements=1 << 12, odd_sizes=1, max_cases=6)

SOMETIMES = {
    "if a:\n        k = 1": {"k"},
    "if a:\n        k = 1\n    else:\n        k, m = 2, 3": {"m"},
    "if a:\n        k = 1\n    elif b:\n        k = 2\n    else:\n        raise ValueError": set(),
    "k = 0\n    if a:\n        k = 1": set(),
    "for k in a:\n        m = k": set(),
}


@pytest.mark.parametrize("body", SOMETIMES)
def test_a_name_that_not_every_branch_binds_is_found(body: str) -> None:
    (function,) = ast.parse(f"def stub(a, b):\n    {body}\n    return a\n").body
    assert isinstance(function, ast.FunctionDef)
    assert sometimes_bound(function) == SOMETIMES[body]


def test_what_is_asked_of_a_name_that_a_call_lacks_is_none() -> None:
    # `None.shape` would raise in the forward of every call that goes the other way. An attribute is no name.
    kept = (Kept("k", "k"), Kept("k_shape", "k.shape"), Kept("x_k", "x.k"))
    saved, first = none_where_unbound(kept, frozenset({"k"}))
    assert [one.expression for one in saved] == ["k", "k.shape if k is not None else None", "x.k"]
    assert first == ("k = None",)


FORWARD = """
import torch
import triton
import triton.language as tl

from kernel_agent import autodiff


@triton.jit
def square_kernel(X, Y, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + at, mask=at < N, other=0.0)
    tl.store(Y + at, x * x, mask=at < N)


@autodiff
def square(x, wanted, reduction):
    y = torch.empty_like(x)
    square_kernel[(triton.cdiv(x.numel(), 64),)](x, y, x.numel(), BLOCK=64)
    if reduction == "none":
        return y
    count = wanted.sum()
    return y.sum() / count


SWEEP = [dict(N=40, reduction="none"), dict(N=33, reduction="mean")]


def make_args(N, reduction, device="cuda"):
    return torch.randn(N, device=device), torch.ones(N, dtype=torch.int64, device=device), reduction
"""


def test_a_stub_that_returns_before_it_counts_has_no_count(tmp_path: Path, sandbox: Sandbox) -> None:
    # `count` was saved by every call, and those that had returned before it was bound raised UnboundLocalError.
    path = tmp_path / "forward.py"
    path.write_text(FORWARD)
    found = derive(describe(read_file(path), sandbox), sandbox, options=QUICK)
    assert found.verdict.green, found.verdict.message
    assert "    count = None\n" in (found.draft.candidate.forward or "")
