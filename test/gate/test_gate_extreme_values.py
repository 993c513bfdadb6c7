"""Inputs that are zero or large: formulas that are right elsewhere divide by zero there, or overflow."""

from __future__ import annotations

import pytest
import torch

from kernel_agent.gate import GateOptions, Status, check
from kernel_agent.gate.rule import breaks
from kernel_agent.oracle import Truths, describe
from kernel_agent.oracle.values import redistribute
from kernel_agent.pairs.userfile import read_file
from kernel_agent.pairs.values import EXTREME, Values

PAIR = """import torch
import triton
import triton.language as tl

META = dict(
    slug="pointwise", family="activation", op="pointwise", schema=1, techniques=(), saves=(), grads=("x",),
    dtypes=("float32",), license="Apache-2.0", origin="original",
)


# --- forward ---
@triton.jit
def _fwd(X, Y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + i, mask=i < n, other=0.0)
    tl.store(Y + i, FORWARD, mask=i < n)


def forward(x):
    y = torch.empty_like(x)
    _fwd[(triton.cdiv(x.numel(), 64),)](x, y, x.numel(), BLOCK=64)
    return y, (x,)


# --- backward ---
@triton.jit
def _bwd(DY, X, DX, n, step, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(DY + i * step, mask=i < n, other=0.0)
    x = tl.load(X + i, mask=i < n, other=0.0)
    tl.store(DX + i, g * (SLOPE), mask=i < n)


def backward(saved, g):
    (x,) = saved
    dx = torch.empty_like(x)
    _bwd[(triton.cdiv(x.numel(), 64),)](g, x, dx, x.numel(), g.stride(0), BLOCK=64)
    return dx


# --- check ---
SWEEP = (dict(n=100), dict(n=130))


def make_args(n, device="cpu", seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(device)
"""
SILU = "x * tl.sigmoid(x)"
SILU_SLOPE = "s + x * s * (1.0 - s)"
HONEST = SILU_SLOPE.replace("s", "SIGMOID").replace("SIGMOID", "tl.sigmoid(x)")
OVERFLOWS = SILU_SLOPE.replace("s", "SIGMOID").replace("SIGMOID", "(tl.exp(x) / (1.0 + tl.exp(x)))")
DIVIDES = SILU_SLOPE.replace("s", "SIGMOID").replace("SIGMOID", "(x * tl.sigmoid(x) / x)")
RELU = "tl.maximum(x, 0.0)"
ROOT = "tl.where(x < 0.0, -tl.exp(0.5 * tl.log(-x)), tl.exp(0.5 * tl.log(x)))"
ROOT_SLOPE = "0.5 / tl.sqrt(tl.abs(x))"


@pytest.fixture
def verdict(tmp_path, sandbox):
    """Of a pointwise function and what is taken for its slope, at some values beside the usual cases."""

    def judged(forward: str, slope: str, *values: Values):
        path = tmp_path / "pointwise.py"
        path.write_text(PAIR.replace("FORWARD", forward).replace("SLOPE", slope))
        spec = describe(read_file(path), sandbox)
        options = GateOptions(seeds=(0,), odd_sizes=0, max_cases=30, values=values)
        return check(spec, spec.facts.source, sandbox, options, truths=Truths(spec, sandbox), diagnose=False)

    return judged


@pytest.mark.parametrize(
    ("slope", "values"), [(OVERFLOWS, Values.LARGE), (DIVIDES, Values.ZEROS)], ids=["overflows", "divides_by_zero"]
)
def test_a_slope_that_is_not_finite_where_the_exact_one_is_finite_is_red(verdict, slope, values):
    # A half network's logits are beyond 88, and padding and what a ReLU left are zero; random numbers are neither.
    usual = [other for other in Values if other not in EXTREME]
    assert verdict(SILU, slope, *usual).green, "no other values see it"
    seen = verdict(SILU, slope, values)
    assert seen.status is Status.NOT_FINITE, seen.message
    assert f"values={values.value}" in str(seen.case)


@pytest.mark.parametrize("slope", ["tl.where(x > 0.0, 1.0, 0.0)", "tl.where(x >= 0.0, 1.0, 0.0)"])
def test_either_side_of_a_kink_is_green(verdict, slope):
    # The truth holds one of several gradients at zero; whoever takes another one is not wrong.
    seen = verdict(RELU, slope, *EXTREME)
    assert seen.green, seen.message
    assert {case.values for case in seen.cases} >= EXTREME
    assert not any("values left out" in note for note in seen.notes), seen.notes


def test_an_honest_slope_is_green_and_not_compared_at_extreme_values(verdict):
    seen = verdict(SILU, HONEST, *EXTREME)
    assert seen.green, seen.message
    assert all(bool(case.grads) is (case.values not in EXTREME) for case in seen.cases)


def test_a_slope_without_an_end_is_asked_of_nobody(verdict):
    # The root of zero is zero and has no slope: whatever a truth makes of it, an honest backward may divide by zero.
    seen = verdict(ROOT, ROOT_SLOPE, Values.ZEROS)
    assert seen.green, seen.message
    assert any("do not confirm the truth" in note for note in seen.notes), seen.notes


def test_only_what_is_not_finite_beside_a_finite_truth_breaks():
    finite, broken = torch.tensor([1.0, 2.0]), torch.tensor([1.0, torch.nan])
    assert breaks(broken, finite)
    assert not breaks(finite, broken), "the truth has no answer there"
    assert not breaks(broken, broken)
    assert not breaks(finite + 1, finite)


def test_zeros_fill_elements_and_whole_rows():
    x = torch.randn(8, 24, generator=torch.Generator().manual_seed(3))
    assert redistribute([x], Values.ZEROS) == 1
    assert (x == 0).all(dim=1).tolist() == [row % 4 == 1 for row in range(8)]
    assert bool((x.view(-1)[::8] == 0).all())
