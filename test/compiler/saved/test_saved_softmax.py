"""Maxima that are subtracted have no derivative, and a stored softmax is its own exponential, where that is proved."""

from __future__ import annotations

import pytest
import saved_forwards as forwards
import torch
from saved_checks import Forward, close, empty, ran, same_gradients, seeded, tensor

from kernel_agent.compiler.saved.prepare import prepared
from kernel_agent.compiler.saved.quotients import use_quotients
from kernel_agent.compiler.saved.softmax import settle_maxima
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel, Value


def _searches(forward: Forward) -> int:
    """Comparisons of floats: for where a maximum was."""
    kernel = forward.backward(prepared(forward.kernel, frozenset(forward.written)).kernel).kernel
    return sum(op.code is Code.CMP and op.operands[0].is_float for op in kernel.ops)


def test_the_backward_of_a_stored_softmax_reads_the_result_and_nothing_else() -> None:
    for forward in (forwards.softmax_row(), forwards.softmax_rows(), forwards.row_of("softmax")):
        settled = prepared(forward.kernel, frozenset(forward.written))
        backward = forward.backward(settled.kernel)
        same_gradients(backward, forward.backward(forward.kernel))
        assert backward.loads("x_ptr") == 0
        assert backward.loads("y_ptr") > 0
        assert (backward.count(Code.REDUCE_MAX), backward.count(Code.EXP), backward.count(Code.SUM)) == (0, 0, 1)


def test_the_gradient_of_a_softmax_from_its_result_is_that_of_torch() -> None:
    forward = forwards.row_of("softmax")
    backward = forward.backward(prepared(forward.kernel, frozenset(forward.written)).kernel)
    x = tensor(forward.arguments["x_ptr"])[:, :13].clone().requires_grad_()
    torch.manual_seed(11)
    cotangent = torch.randn(3, 16, dtype=torch.float64)[:, :13]
    (expected,) = torch.autograd.grad(x.softmax(1), x, cotangent)
    close(backward.gradients["x_ptr"][:, :13], expected, "gradient of x")


@pytest.mark.parametrize("kind", ["log softmax", "entropy weights"])
def test_what_needs_the_maximum_itself_keeps_the_input(kind: str) -> None:
    forward = forwards.row_of(kind)
    settled = settle_maxima(forward.kernel)
    # The result of entropy weights moves with the maximum: that one keeps its derivative. No number comes from y.
    assert settled.read == frozenset()
    assert (settled.kernel is forward.kernel) is (kind == "entropy weights")
    same_gradients(forward.backward(settled.kernel), forward.backward(forward.kernel))


def test_a_maximum_that_shows_in_the_result_keeps_its_derivative() -> None:
    forward = forwards.row_of("exponentials")
    assert settle_maxima(forward.kernel).kernel is forward.kernel
    assert _searches(forward) == 1


def test_lanes_whose_exponentials_are_not_zero_outside_of_the_mask_are_not_read_back() -> None:
    # With zeros for padding the sum has exponentials of lanes that were never stored.
    forward = forwards.row_of("softmax", padding=0.0)
    settled = settle_maxima(forward.kernel)
    assert settled.read == frozenset()
    assert settled.kernel is not forward.kernel
    same_gradients(forward.backward(settled.kernel), forward.backward(forward.kernel))


def test_a_maximum_found_by_a_loop_of_its_own_needs_no_search() -> None:
    forward = forwards.softmax_in_three_passes()
    backward = forward.backward(prepared(forward.kernel, frozenset(forward.written)).kernel)
    plain = forward.backward(forward.kernel)
    same_gradients(backward, plain)
    assert _searches(forward) == 0
    assert plain.tapes > 0
    assert backward.tapes == 0


@pytest.mark.parametrize("name", ["softmax_by_lanes", "softmax_looped", "softmax_in_three_passes"])
def test_a_softmax_in_several_loops_is_taken_from_its_result(name: str) -> None:
    forward = getattr(forwards, name)()
    backward = forward.backward(prepared(forward.kernel, frozenset(forward.written)).kernel)
    same_gradients(backward, forward.backward(forward.kernel))
    assert (backward.loads("x_ptr"), backward.tapes, backward.count(Code.EXP)) == (0, 0, 0)
    assert backward.loads("y_ptr") > 0


@pytest.mark.parametrize("kind", ["one more", "fewer", "squares"])
def test_a_quotient_by_another_sum_is_no_softmax(kind: str) -> None:
    # A sum that starts at one, leaves the last column out or is of other exponentials: none is that of what is divided.
    forward = forwards.softmax_by_lanes(kind, n=33)
    settled = use_quotients(forward.kernel, frozenset(forward.written))
    assert settled.kernel is forward.kernel


def test_a_largest_value_that_is_not_the_only_result_of_its_loop_keeps_its_derivative() -> None:
    # asking for the smallest overwrote that the largest shifts, and the gradient lacked all of the largest's part
    forward = forwards.spread_of_a_row()
    assert settle_maxima(forward.kernel).kernel is forward.kernel
    x = tensor(forward.arguments["x_ptr"]).clone().requires_grad_()
    backward = forward.backward(prepared(forward.kernel, frozenset(forward.written)).kernel)
    torch.manual_seed(11)
    cotangent = torch.randn(3, dtype=torch.float64)
    (expected,) = torch.autograd.grad(x.amax(1) - x.amin(1), x, cotangent)
    close(backward.gradients["x_ptr"], expected, "gradient of x")


def test_a_sum_that_may_be_negative_is_not_taken_for_one() -> None:
    # With weights of both signs no maximum makes the sum 1: asked for its sign, the backward took the other branch.
    arguments = [Value("*f32", (), name) for name in ("X", "W", "Y", "Z")]
    kernel = Kernel("weighed", arguments)
    b = Builder(kernel)
    cols = b.arange(0, 8)
    places = b.add(b.mul(b.program_id(0), b.const(8)), cols)
    x, weight = b.load(arguments[0], places), b.load(arguments[1], cols)
    e = b.unary(Code.EXP, b.sub(x, b.reduce(Code.REDUCE_MAX, x, 0)))
    total = b.sum(b.mul(e, weight), 0)
    y = b.div(e, total)
    b.store(arguments[2], places, y)
    b.store(
        arguments[3], places, b.mul(y, b.select(b.compare("gt", total, b.const(0.0, "f32")), b.const(3.0, "f32"), y))
    )
    given = {"X": seeded(4, 8), "W": -seeded(8, seed=3).abs(), "Y": empty(4, 8), "Z": empty(4, 8)}
    forward = ran(kernel, (4,), given, ["X"], ["Z"])
    backward = forward.backward(prepared(forward.kernel, frozenset(forward.written)).kernel)
    same_gradients(backward, forward.backward(forward.kernel))


def _softmax_of_rows(kind: str) -> Forward:
    """Of 4 rows in one tile, times a number that has to do with their maxima."""
    arguments = [Value("*f32", (), name) for name in ("X", "Y")]
    kernel = Kernel("rows", arguments)
    b = Builder(kernel)
    places = b.add(b.mul(b.expand(b.arange(0, 4), 1), b.const(8)), b.expand(b.arange(0, 8), 0))
    x = b.load(arguments[0], places)
    largest = b.reduce(Code.REDUCE_MAX, x, 1)
    e = b.unary(Code.EXP, b.sub(x, b.expand(largest, 1)))
    y = b.div(e, b.expand(b.sum(e, 1), 1))
    away = b.sub(largest, b.reduce(Code.REDUCE_MIN, largest, 0))
    whole = b.sub(largest, b.cast(b.cast(largest, "i32"), "f32"))
    factor = {"spread": b.expand(away, 1), "fractions": b.expand(whole, 1), "": b.const(1.0, "f32")}[kind]
    b.store(arguments[1], places, b.mul(y, factor))
    return ran(kernel, (1,), {"X": 2 * seeded(4, 8), "Y": empty(4, 8)}, ["X"], ["Y"])


@pytest.mark.parametrize("kind", ["spread", "fractions"])
def test_maxima_of_rows_keep_their_derivatives_where_they_may_not_shift_apart(kind: str) -> None:
    # One shift of all rows leaves the spread of their maxima as it is, and a shift by one what is behind the point;
    # the gradient of the row with the largest maximum was wrong.
    forward = _softmax_of_rows(kind)
    assert settle_maxima(forward.kernel).kernel is forward.kernel
    assert settle_maxima(_softmax_of_rows("").kernel).kernel is not forward.kernel
    same_gradients(
        forward.backward(prepared(forward.kernel, frozenset(forward.written)).kernel), forward.backward(forward.kernel)
    )


@pytest.mark.parametrize("kind", ["", "squared", "base 2"])
def test_a_stored_log_sum_exp_is_the_maximum_at_which_the_sum_is_one(kind: str) -> None:
    # Squared, those of the rows that are not there, which are taken for infinite, meet zeros: `same_gradients` sees NaN
    # in the gradient of w, which sums over rows.
    forward = forwards.log_sums_of_rows(kind)
    settled = prepared(forward.kernel, frozenset(forward.written))
    backward = forward.backward(settled.kernel)
    same_gradients(backward, forward.backward(forward.kernel))
    assert "lse_ptr" in settled.read
    assert backward.count(Code.REDUCE_MAX) == backward.count(Code.LOG) == backward.count(Code.LOG2) == 0


@pytest.mark.parametrize("kind", ["one less", "another sum"])
def test_a_log_sum_exp_that_is_not_stored_of_all_rows_or_is_of_something_else_keeps_the_maximum(kind: str) -> None:
    # The fifth row counts, too, and memory has none of it; weighted sums need not be positive for no maximum.
    forward = forwards.log_sums_of_rows(kind)
    backward = forward.backward(prepared(forward.kernel, frozenset(forward.written)).kernel)
    same_gradients(backward, forward.backward(forward.kernel))
    assert backward.count(Code.REDUCE_MAX) == 1


@pytest.mark.parametrize(
    ("forward", "lost"), [(forwards.log_sums_of_rows(), "lse_ptr"), (forwards.row_of("softmax"), "y_ptr")]
)
def test_where_the_result_is_overwritten_later_the_maximum_has_no_derivative_all_the_same(
    forward: Forward, lost: str
) -> None:
    # Given up with what was to be read, it is searched for where it was.
    settled = prepared(forward.kernel, frozenset(forward.written), frozenset((lost,)))
    backward = forward.backward(settled.kernel)
    same_gradients(backward, forward.backward(forward.kernel))
    assert lost not in settled.read
    assert not any(op.code is Code.CMP and op.operands[0].is_float for op in backward.kernel.ops)
