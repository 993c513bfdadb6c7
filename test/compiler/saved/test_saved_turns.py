"""Online softmax whose trips need not all take part, whose rows may be empty, or of which some lanes are not stored."""

from __future__ import annotations

import pytest
import saved_forwards as forwards
import triton
import triton.language as tl
from saved_checks import Forward, empty, kernel_from, ran, same_gradients, seeded

from kernel_agent.compiler.saved.gauge import use_gauge
from kernel_agent.compiler.saved.outputs import Saved
from kernel_agent.compiler.saved.prepare import prepared


def _turned(forward: Forward) -> Saved:
    return use_gauge(forward.kernel, frozenset(forward.written))


@pytest.mark.parametrize("blind", [False, True], ids=["every lane", "a lane without numbers"])
def test_trips_that_a_condition_leaves_out_need_no_tape(blind: bool) -> None:
    # The maximum lies in a branch: looked for among the yields of the loop alone, it would not be found.
    forward = forwards.softmax_of_some_trips("empty", blind=blind)
    saved = prepared(forward.kernel, frozenset(forward.written))
    forward.forward_again(saved.kernel)
    backward, plain = forward.backward(saved.kernel), forward.backward(forward.kernel)
    same_gradients(backward, plain)
    assert plain.tapes > 0
    assert (backward.loops, backward.tapes) == (1, 0)
    assert "lse_ptr" in saved.read


def test_a_row_that_nothing_was_found_for_stays_known_by_its_infinite_log_sum_exp() -> None:
    # With a sum of 1 for rows that have none, what is stored in their place would lose its gradient.
    forward = forwards.softmax_of_some_trips("instead", blind=True)
    saved = prepared(forward.kernel, frozenset(forward.written))
    forward.forward_again(saved.kernel)
    backward = forward.backward(saved.kernel)
    same_gradients(backward, forward.backward(forward.kernel))
    assert backward.tapes == 0
    assert backward.gradients["z_ptr"][2] != 0


def test_a_condition_that_depends_on_the_maximum_keeps_the_tape() -> None:
    forward = forwards.softmax_of_some_trips("found")
    saved = _turned(forward)
    assert saved.kernel is forward.kernel
    assert any("which trips take part depends on what the loop has found" in text for text in saved.remarks)


def test_a_number_for_rows_that_are_not_stored_does_not_hide_the_softmax() -> None:
    # where(row < rows, sum, 1) is neither a sum nor a constant, but no row beyond is ever stored.
    forward = forwards.softmax_of_some_trips("rows")
    saved = prepared(forward.kernel, frozenset(forward.written))
    forward.forward_again(saved.kernel)
    backward = forward.backward(saved.kernel)
    same_gradients(backward, forward.backward(forward.kernel))
    assert (backward.loops, backward.tapes) == (1, 0)
    assert "lse_ptr" in saved.read


def test_a_number_for_rows_that_are_stored_is_part_of_the_result() -> None:
    forward = forwards.softmax_of_some_trips("more rows")
    saved = _turned(forward)
    assert saved.kernel is forward.kernel
    assert any("changes when it shifts" in text for text in saved.remarks)


@triton.jit
def softmax_unrolled(x_ptr, y_ptr, stride, n, BLOCK: tl.constexpr, KIND: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    m = tl.full((BLOCK,), -float("inf"), tl.float32)
    mass = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, n, 3):
        before = m
        for u in tl.static_range(3):
            x = tl.load(x_ptr + lanes * stride + first + u, mask=lanes * 0 + first + u < n, other=-float("inf"))
            m_new = tl.maximum(m, x)
            mass = mass * tl.exp((before if KIND == "twice" else m) - m_new) + tl.exp(x - m_new)
            m = m_new
    tl.store(y_ptr + lanes, m + tl.log(mass))


def unrolled(kind: str = "") -> Forward:
    given = {"x_ptr": 3 * seeded(4, 11), "y_ptr": empty(4), "stride": 11, "n": 11}
    kernel = kernel_from(
        softmax_unrolled, {"x_ptr": "*fp32", "y_ptr": "*fp32", "stride": "i32", "n": "i32"}, BLOCK=4, KIND=kind
    )
    return ran(kernel, (1,), given, ["x_ptr"], ["y_ptr"])


def test_a_trip_of_several_steps_needs_no_tape() -> None:
    # Each step has a maximum of its own: with that of the last alone in place of all, the sum would be another.
    forward = unrolled()
    saved = prepared(forward.kernel, frozenset(forward.written))
    forward.forward_again(saved.kernel)
    backward, plain = forward.backward(saved.kernel), forward.backward(forward.kernel)
    same_gradients(backward, plain)
    assert plain.tapes > 0
    assert backward.tapes == 0


def test_a_step_that_rescales_by_more_than_its_own_raise_keeps_the_tape() -> None:
    # exp(first - second) is taken twice by the second step: the sum is no longer one of exponentials at one maximum.
    forward = unrolled("twice")
    saved = _turned(forward)
    assert saved.kernel is forward.kernel
    assert any("is not multiplied with exp(old - new)" in text for text in saved.remarks)
