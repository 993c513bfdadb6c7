"""Values that are no tensors are compared by one text on both sides."""

from __future__ import annotations

from typing import NamedTuple

import numpy
import pytest
import torch

from kernel_agent.oracle.plainform import plain_form
from kernel_agent.pairs.observe import holds_tensors


class Pair(NamedTuple):
    """A tuple of a class of its own."""

    a: int
    b: int


@pytest.mark.parametrize(
    ("value", "same"),
    [
        (torch.Size([1000]), (1000,)),
        (Pair(1, 2), (1, 2)),
        (numpy.int64(3), 3),
        (numpy.float64(0.5), 0.5),
        ({"a": torch.Size([2])}, {"a": (2,)}),
        (object(), object()),
        (lambda: 1, lambda: 2),
    ],
)
def test_the_way_a_value_travelled_does_not_change_its_form(value, same):
    assert plain_form(value) == plain_form(same)


@pytest.mark.parametrize(
    ("value", "other"),
    [((1,), (2,)), ((1,), 1), ((1,), [1]), ("1", 1), (True, 1), (1, 1.0), (None, "None"), ((1, 2), ((1, 2),))],
)
def test_different_values_have_different_forms(value, other):
    assert plain_form(value) != plain_form(other)


def test_tensors_inside_a_value_are_seen_and_a_tensor_itself_is_none_of_them():
    assert holds_tensors((1, [torch.ones(1)]))
    assert holds_tensors({"a": torch.ones(1)})
    assert not holds_tensors(torch.ones(1))
    assert not holds_tensors(torch.Size([3]))
