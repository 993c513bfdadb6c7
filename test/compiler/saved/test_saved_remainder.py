"""Steps behind loops over whole tiles: trips of loops, where the text shows that they are."""

from __future__ import annotations

import pytest
import saved_forwards as forwards
from saved_checks import same_gradients

from kernel_agent.compiler.saved.prepare import prepared
from kernel_agent.compiler.saved.remainder import with_last_trips
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel


def _count(kernel: Kernel, code: Code) -> int:
    return sum(op.code is code for op in kernel.ops)


@pytest.mark.parametrize("n", [9, 32, 37])
def test_a_masked_step_behind_whole_tiles_is_a_trip_of_their_loop(n: int) -> None:
    # Fewer elements than a tile, no remainder, and both: all trips go through the mask, which holds in whole tiles.
    forward = forwards.log_sum_in_whole_tiles(n=n)
    found = with_last_trips(forward.kernel)
    assert (_count(found, Code.FOR), _count(found, Code.IF)) == (1, 0)
    forward.forward_again(found)


@pytest.mark.parametrize("last", ["another factor", "an element less"])
def test_a_step_that_does_something_else_is_a_loop_of_its_own(last: str) -> None:
    # One loop that did the step in every trip would be wrong of whole tiles.
    forward = forwards.log_sum_in_whole_tiles(last)
    found = with_last_trips(forward.kernel)
    assert (_count(found, Code.FOR), _count(found, Code.IF)) == (2, 0)
    forward.forward_again(found)


@pytest.mark.parametrize("last", ["", "another factor"])
def test_online_softmax_in_whole_tiles_needs_no_tape(last: str) -> None:
    forward = forwards.log_sum_in_whole_tiles(last)
    saved = prepared(forward.kernel, frozenset(forward.written))
    backward, plain = forward.backward(saved.kernel), forward.backward(forward.kernel)
    same_gradients(backward, plain)
    assert plain.tapes > 0
    assert backward.tapes == 0


def test_a_kernel_without_such_a_step_is_the_same() -> None:
    kernel = forwards.softmax_looped().kernel
    assert with_last_trips(kernel) is kernel
