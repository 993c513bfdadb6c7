"""Outputs of a candidate's own forward that lie in memory of an argument, where the user's do not."""

from __future__ import annotations

import pytest

from kernel_agent.gate import GateOptions, Status, check
from kernel_agent.oracle import Truths, describe
from kernel_agent.pairs.userfile import read_file

QUICK = GateOptions(seeds=(0,), odd_sizes=0, max_cases=4)
PAIR = """import torch
import triton
import triton.language as tl

META = dict(
    slug="kept", family="dropout_rng", op="scale", schema=1, techniques=(), saves=(), grads=("x",),
    dtypes=("float32",), license="Apache-2.0", origin="original",
)


# --- forward ---
@triton.jit
def _scale(X, Y, p, n, step, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + i, tl.load(X + i * step, mask=i < n) * (1.0 - p), mask=i < n)


def forward(x, p):
    BEFORE
    y = torch.empty_like(x)
    _scale[(triton.cdiv(x.numel(), 64),)](x, y, p, x.numel(), x.stride(0), BLOCK=64)
    return y, (p,)


# --- backward ---
def backward(saved, g):
    dx = torch.empty(g.shape, dtype=g.dtype, device=g.device)
    _scale[(triton.cdiv(g.numel(), 64),)](g, dx, saved[0], g.numel(), g.stride(0), BLOCK=64)
    return dx


# --- check ---
SWEEP = (dict(n=100, p=0.5), dict(n=130, p=0.0))


def make_args(n, p, device="cpu", seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(device), p
"""


def text(before: str = "") -> str:
    return PAIR.replace("BEFORE", before or "pass")


@pytest.fixture
def verdict(tmp_path, sandbox):
    """Of a candidate, with another text as the user's."""

    def judged(candidate: str, users: str):
        path = tmp_path / "kept.py"
        path.write_text(users)
        spec = describe(read_file(path), sandbox)
        return check(spec, candidate, sandbox, QUICK, truths=Truths(spec, sandbox), diagnose=False)

    return judged


@pytest.mark.parametrize("given", ["x", "x.view(-1)"], ids=["itself", "a_view"])
def test_an_argument_is_no_output_where_the_users_forward_makes_one(verdict, given):
    # Nothing is dropped at p = 0, and the values are right: an activation in place on the output changes the input.
    seen = verdict(text(f"if p == 0.0: return {given}, (p,)"), text())
    assert seen.status is Status.WRONG_FORWARD, seen.message
    assert "output `y` shares memory with an argument" in seen.message


def test_a_copy_of_an_argument_is_an_output(verdict):
    seen = verdict(text("if p == 0.0: return x.clone(), (p,)"), text())
    assert seen.green, seen.message


def test_an_argument_may_be_an_output_where_it_is_one_of_the_users_forward(verdict):
    seen = verdict(text("if p == 0.0: return x, (p,)"), text("if p == 0.0: return x.view(-1), (p,)"))
    assert seen.green, seen.message
