"""Online softmax whose trips need not all take part, whose rows may be empty, or of which some lanes are not stored."""

from __future__ import annotations

import pytest
import saved_forwards as forwards
from saved_checks import Forward, same_gradients

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
