"""Adjoints of tile functions: right for every family, readable, and refused where they would not be right."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from tile_functions import PAIRS, POSITIVE, Pair, rmsnorm, root, torch_rmsnorm, torch_root
from torch import Tensor

from kernel_agent import check_tile, grad
from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.errors import InputError

SHAPES = "x=[M, N] fp16, w=[N], eps=fp32"


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_adjoint_is_that_of_torch(pair: Pair) -> None:
    # the truth is another program's autograd: a wrong rule, a lost branch or a tape of the wrong trip differs from it
    derived = grad(pair.function, shapes=pair.shapes)
    verdict = check_tile(
        pair.function, derived, pair.reference, shapes=pair.shapes, seeds=(0,), inputs=pair.inputs or None
    )
    assert verdict.green, f"{verdict}\n{derived.source}"


def test_one_adjoint_is_right_at_all_sizes_of_named_extents() -> None:
    # compared at 16 x 32 and at 64 x 32: a number in the text that should have been a name is wrong at one of them
    derived = grad(rmsnorm, ("w", "x"), SHAPES)
    verdict = check_tile(rmsnorm, derived, torch_rmsnorm, shapes=SHAPES, wrt=("w", "x"), seeds=(0,))
    assert verdict.green, verdict


def test_source_reads_as_a_person_would_write_it() -> None:
    derived = grad(rmsnorm, ("x", "w"), SHAPES, name="rmsnorm_bwd")
    assert (
        derived.source
        == '''\
import triton
import triton.language as tl


@triton.jit
def rmsnorm_bwd(x, w, eps, d_y, d_rstd):
    """Adjoints of `rmsnorm` by x and w.

    x [M, N] fp16, w [N] fp32, eps fp32; d_y [M, N] and d_rstd [M]: cotangents of what `rmsnorm` returns.
    Returns [M, N] fp32, [N] fp32.
    """
    tl.static_assert(len(x.shape) == 2 and x.dtype == tl.float16, "x must be [M, N] fp16")
    M: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    tl.static_assert(len(w.shape) == 1 and w.shape[0] == N and w.dtype == tl.float32, "w must be [N] fp32")
    tl.static_assert(M >= 2 and M <= 4096, "M must be 2 to 4096, which this was derived for")
    tl.static_assert(N >= 2 and N <= 4096, "N must be 2 to 4096, which this was derived for")
    tl.static_assert(len(d_y.shape) == 2 and d_y.shape[0] == M and d_y.shape[1] == N, "d_y must be [M, N]")
    d_y = d_y.to(tl.float32)
    tl.static_assert(len(d_rstd.shape) == 1 and d_rstd.shape[0] == M, "d_rstd must be [M]")
    d_rstd = d_rstd.to(tl.float32)
    total = tl.sum(x * x, axis=1).to(tl.float32) / N + eps
    rstd = tl.rsqrt(total)
    x_tile = x.to(tl.float32)
    d_y_tile = d_y * w[None, :]
    d_rstd_tile = (d_rstd + tl.sum(d_y_tile * x_tile, axis=1)) * -0.5 * (rstd * rstd * rstd)
    return (
        d_y_tile * rstd[:, None] + (d_rstd_tile / N)[:, None] * (x_tile * 2.0),
        tl.sum(d_y * (x_tile * rstd[:, None]), axis=0),
    )
'''
    )


def test_adjoints_of_narrow_floats_are_float32() -> None:
    # a cotangent of float16 is widened before anything is made of it: sums in the adjoint would lose it otherwise
    text = grad(narrow, shapes="x=[16] fp16").source
    assert "Returns [16] fp32." in text
    assert "    d_out = d_out.to(tl.float32)\n" in text


@triton.jit
def narrow(x):
    return x * x


def test_state_of_a_loop_is_computed_again() -> None:
    # a tile function has no memory for a tape: the way back goes through earlier trips, and says so
    text = grad(root, shapes="x=[16]").source
    assert "Every trip of the way back runs the loop again" in text
    assert "for before in range(0, trip):" in text


def test_state_that_the_adjoint_does_not_need_is_not_computed_again() -> None:
    text = grad(PAIRS_BY_NAME["summed"].function, shapes="x=[16] fp16").source
    assert "before" not in text


PAIRS_BY_NAME = {pair.name: pair for pair in PAIRS}


@triton.jit
def long_recurrence(x):
    y = x
    for _ in range(1000):
        y = y - 0.01 * y * y
    return y


@triton.jit
def by_size(x):
    if x.shape[0] > 64:
        y = x * 2
    else:
        y = x * x
    return y


@triton.jit
def by_width(x):
    return tl.sum(tl.flip(x, 0))


@triton.jit
def by_program(x):
    return x * tl.program_id(0)


@triton.jit
def nothing(x):
    pass


@triton.jit
def from_bits(x):
    return (x.to(tl.int32, bitcast=True) + 1).to(tl.float32, bitcast=True)


@triton.jit
def loading(x):
    return tl.load(x + tl.arange(0, 16))


@pytest.mark.parametrize(
    ("function", "shapes", "message"),
    [
        (loading, "x=[16]", "calls `tl.load`, and a tile function has no pointers"),  # Triton speaks of dimensions
        (long_recurrence, "x=[16]", "a loop of 1000 trips"),
        (by_program, "x=[16]", "which program it runs in"),
        (from_bits, "x=[16]", "made of bits"),
        (by_width, "x=[N]", "changes with the extent N"),
        (rmsnorm, "x=[8, 16], w=[8], eps=fp32", "incompatible dimensions"),
    ],
)
def test_what_cannot_be_derived_is_refused_with_a_remedy(function, shapes: str, message: str) -> None:
    with pytest.raises(CannotDerive, match=message) as caught:
        grad(function, shapes=shapes)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (torch_rmsnorm, {"shapes": "x=[8]"}, "no @triton.jit function"),
        (rmsnorm, {"shapes": "x=[8, 16], w=[16]"}, "says nothing of `eps`"),
        (rmsnorm, {"shapes": f"{SHAPES}, z=[3]"}, "extent 3"),
        (rmsnorm, {"shapes": f"{SHAPES}, z=[4]"}, "names `z`, which is no parameter"),
        (rmsnorm, {"shapes": SHAPES, "wrt": ("x", "y")}, "wrt names `x`, `y` of `rmsnorm`"),
        (rmsnorm, {"wrt": 3}, "wrt names `3` of `rmsnorm`"),
        (rmsnorm, {"shapes": "x=[8, 16], w=[16], eps=i32", "wrt": "eps"}, "`eps` of rmsnorm has no adjoint"),
        (rmsnorm, {"shapes": "x=[M, N] fp12, w=[N], eps=fp32"}, "no tile and no scalar"),
        (nothing, {"shapes": "x=[8]"}, "`nothing` returns nothing"),
        (nothing, {}, "how many tiles nothing returns"),
        (rmsnorm, {"shapes": "x=[eps, N], w=[N], eps=fp32"}, "`eps` is an extent and a parameter"),
    ],
)
def test_wrong_arguments_are_said(function, options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        grad(function, **options)
    assert caught.value.remedy


def test_sizes_at_which_a_function_does_something_else_are_asserted() -> None:
    # up to 64 it squares x: called at 128 without the assertion, the adjoint would be another function's
    assert "tl.static_assert(N >= 2 and N <= 64" in grad(by_size, shapes="x=[N]").source


def test_adjoint_of_an_adjoint_is_the_second_derivative() -> None:
    def gradient(x: Tensor, d_y: Tensor) -> Tensor:
        x = x if x.requires_grad else x.clone().requires_grad_()
        return torch.autograd.grad(torch_root(x), x, d_y, create_graph=True)[0]

    first = grad(root, shapes="x=[4]")
    shapes = "x=[4], d_y=[4]"
    assert check_tile(first, grad(first, shapes=shapes), gradient, shapes=shapes, inputs=POSITIVE, seeds=(0,)).green


def test_adjoint_by_what_has_no_influence_is_zero_and_has_its_extents() -> None:
    derived = grad(detached, shapes="x=[4], y=[8]")
    assert check_tile(detached, derived, lambda x, y: x * 2, shapes="x=[4], y=[8]", seeds=(0,)).green


@triton.jit
def detached(x, y):
    return x * 2


@triton.jit
def chosen(x, MODE: tl.constexpr, LOW: tl.constexpr, SIZE: tl.constexpr = None):
    if MODE == "square":
        x = x * x
    return tl.maximum(x, LOW)


def test_constexprs_are_asserted_whatever_they_are() -> None:
    # the branch that was derived is that of MODE: with another one, another function would be called
    shapes = {"x": (8,), "MODE": "'square'", "LOW": float("-inf")}
    derived = grad(chosen, shapes=shapes)
    for assertion in ('MODE == "square"', 'LOW == float("-inf")', "SIZE is None"):
        assert f"tl.static_assert({assertion}," in derived.source
    assert check_tile(chosen, derived, torch.square, shapes=shapes, seeds=(0,)).green
