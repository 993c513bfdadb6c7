"""What several calls with the same arguments say of the order of a kernel's sums, on tensors in place of results."""

from __future__ import annotations

import torch

from kernel_agent.bench.native import chances
from kernel_agent.bench.native_child import Repeats
from kernel_agent.gate import GradientScore


def test_calls_that_agree_in_every_bit_have_nothing_to_send():
    first = (torch.ones(4), None)
    repeats = Repeats(first)
    repeats.add((torch.ones(4), None))
    assert repeats.tensors() == {}


def test_calls_lie_as_far_apart_as_the_extremes_of_all_of_them():
    # The last call alone is 1 away from the first one: what lies between others must not be lost.
    repeats = Repeats((torch.tensor([1.0, 5.0]),))
    for value in (4.0, -2.0, 0.0):
        repeats.add((torch.tensor([value, 5.0]),))
    sent = repeats.tensors()
    assert sent["again.0"].tolist() == [0.0, 5.0], "judged by the rule as well"
    assert sent["width.0"].tolist() == [6.0, 0.0]


def test_a_gradient_of_another_shape_in_a_later_call_is_sent_to_be_judged():
    repeats = Repeats((torch.ones(4),))
    repeats.add((torch.ones(5),))
    assert repeats.tensors().keys() == {"again.0"}


def test_what_differs_is_said_in_elements_and_in_units_of_what_is_allowed():
    same = GradientScore(grad="x", passed=True, ratio=0.1)
    other = GradientScore(grad="w", passed=True, ratio=0.1, spread=0.03, differing=7)
    (said,) = chances("M=4 N=8", (same, other), {"x": 32, "w": 8})
    assert said.startswith("M=4 N=8: 7 of 8 elements of the gradient of `w` differ between 5 calls")
    assert "by up to 0.03 of the error that is allowed" in said
