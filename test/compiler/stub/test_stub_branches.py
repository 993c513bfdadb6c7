"""A backward of some launches is for the branches that led to them, and asks for these before it launches."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from kernel_agent.compiler.derive import drafts
from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.stub.branches import branches_taken
from kernel_agent.oracle import describe
from kernel_agent.pairs.userfile import read_file
from kernel_agent.sandbox import Sandbox

STUB = """
def stub(x, n, b):
    if x.stride(0) != 1:
        x = x.contiguous()
    if n < 10:
        small[(1,)](x)
    elif n < 100 and b:
        middle[(1,)](x)
    else:
        large[(1,)](x)
    if b is not None:
        bias[(1,)](x, b)
    return x
"""
LINES = {name: STUB.split("\n").index(f"        {name}[(1,)](x)") + 1 for name in ("small", "middle", "large")}
BIAS = STUB.split("\n").index("        bias[(1,)](x, b)") + 1

FORWARD = """
import torch
import triton
import triton.language as tl

from kernel_agent import autodiff


@triton.jit
def square_kernel(X, Y, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(X + at, mask=at < n, other=0.0)
    tl.store(Y + at, x * x, mask=at < n)


@triton.jit
def cube_kernel(X, Y, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(X + at, mask=at < n, other=0.0)
    tl.store(Y + at, x * x * x, mask=at < n)


@autodiff
def stub(x):
    y = torch.empty_like(x)
    n = x.numel()
    if n < 20:
        square_kernel[(1,)](x, y, n, BLOCK=64)
    else:
        cube_kernel[(1,)](x, y, n, BLOCK=64)
    return y


SWEEP = [dict(N=16)]


def make_args(N, device="cuda"):
    return (torch.randn(N, device=device),)
"""


def taken(*lines: int) -> list[str]:
    function = ast.parse(STUB).body[0]
    assert isinstance(function, ast.FunctionDef)
    return [f"{ast.unparse(one.test)} is {one.holds}" for one in branches_taken(function, lines)]


def test_branches_that_led_to_launches_are_told_with_those_that_led_past_others():
    assert taken(LINES["small"]) == ["n < 10 is True", "b is not None is False"]
    assert taken(LINES["middle"], BIAS) == ["n < 10 is False", "n < 100 and b is True", "b is not None is True"]
    assert taken(LINES["large"], BIAS)[1] == "n < 100 and b is False"


def test_a_branch_whose_side_cannot_be_told_is_refused():
    with pytest.raises(CannotDerive, match="which side of the `if` in line 5 was taken"):
        taken(BIAS)


def test_the_backward_of_one_branch_refuses_calls_that_take_the_other(tmp_path: Path, sandbox: Sandbox):
    # No entry of SWEEP shows the cubes: without the question, their gradient would silently be that of squares.
    path = tmp_path / "branched.py"
    path.write_text(FORWARD)
    written, _ = drafts(describe(read_file(path), sandbox), sandbox, ("owned",))
    backward = written[0].candidate.backward
    assert "if not n < 20:\n        raise NotImplementedError(" in backward or "if not (n < 20):" in backward
