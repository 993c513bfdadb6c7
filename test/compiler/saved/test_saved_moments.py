"""Running means and squares without tapes, where they are known to end in sums."""

from __future__ import annotations

import pytest
import saved_forwards as forwards
from saved_checks import close, same_gradients, tensor

from kernel_agent.compiler.saved.moments import use_moments
from kernel_agent.compiler.saved.prepare import prepared
from kernel_agent.compiler.ssa.code import Code


@pytest.mark.parametrize("n", [forwards.N, 13], ids=["every lane", "lanes without numbers"])
def test_running_moments_of_lanes_need_no_tape(n: int) -> None:
    forward = forwards.moments_by_lanes(n=n)
    saved = use_moments(forward.kernel)
    forward.forward_again(saved.kernel)
    backward, plain = forward.backward(saved.kernel), forward.backward(forward.kernel)
    same_gradients(backward, plain)
    assert plain.tapes > 0
    assert backward.tapes == 0


def test_the_variance_of_a_row_has_the_gradient_of_its_definition() -> None:
    # Both adjoints could share a mistake in what the loop is taken to compute.
    forward = forwards.moments_by_lanes()
    x = tensor(forward.arguments["x_ptr"])
    close(tensor(forward.arguments["y_ptr"]), x.var(1), "the forward")
    found = forward.backward(use_moments(forward.kernel).kernel).gradients["x_ptr"]
    away = x - x.mean(1, keepdim=True)
    slopes = (found * away).sum(1, keepdim=True) / (away * away).sum(1, keepdim=True)
    close(found, slopes * away, "the gradient")


@pytest.mark.parametrize("n", [forwards.N, 13], ids=["every lane", "lanes without numbers"])
def test_moments_of_lanes_that_are_merged_have_the_derivative_of_one_sample(n: int) -> None:
    # Lane by lane the row is read twice, and the merge takes two scans: here it is read once, about the stored mean.
    forward = forwards.moments_of_rows(n=n)
    x = tensor(forward.arguments["x_ptr"])
    close(tensor(forward.arguments["y_ptr"]), x.var(1), "the forward")
    found = prepared(forward.kernel, frozenset(["y_ptr", "mean_ptr"]))
    backward = forward.backward(found.kernel)
    same_gradients(backward, forward.backward(forward.kernel))
    assert (backward.tapes, backward.count(Code.SCAN), backward.count(Code.REDUCE)) == (0, 0, 0)
    assert backward.loads("x_ptr") == x.numel()


def test_lanes_that_are_merged_without_the_gap_between_their_means_keep_the_derivative_of_that() -> None:
    # Squares about each lane's mean, summed, are none about one mean: the gradient differs, and each lane's is needed.
    forward = forwards.moments_of_rows(gap=False)
    backward = forward.backward(use_moments(forward.kernel).kernel)
    same_gradients(backward, forward.backward(forward.kernel))
    assert backward.loads("x_ptr") == 2 * tensor(forward.arguments["x_ptr"]).numel()


def test_squares_alone_keep_their_tape_where_they_are_not_around_the_new_mean() -> None:
    # (x - m) (x - m) of the mean before adds up to something else: its derivative is not that of a sum around the mean.
    forward = forwards.moments_by_lanes("before")
    backward = forward.backward(use_moments(forward.kernel).kernel)
    same_gradients(backward, forward.backward(forward.kernel))
    assert backward.tapes > 0


@pytest.mark.parametrize("kind", ["a start", "before", "fewer"])
def test_what_is_nearly_a_running_moment_keeps_its_gradient(kind: str) -> None:
    # `fewer`: the last number moves the mean and is not counted.
    forward = forwards.moments_by_lanes(kind)
    same_gradients(forward.backward(use_moments(forward.kernel).kernel), forward.backward(forward.kernel))


def test_a_mean_that_counts_other_numbers_is_left_as_it_is() -> None:
    forward = forwards.moments_by_lanes("fewer")
    assert use_moments(forward.kernel).kernel is forward.kernel
