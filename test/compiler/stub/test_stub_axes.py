"""`axes_nested`, which stubs call before their launches, says yes only of axes whose elements never meet."""

import itertools

import pytest
import torch

from kernel_agent.compiler.plan import NESTED
from kernel_agent.compiler.stub.lines import APART

Axes = tuple[tuple[int, int], ...]


def nested(axes: Axes) -> bool:
    """What the function that is printed into stubs says."""
    scope: dict[str, object] = {}
    exec(APART, scope)
    found = scope[NESTED](*axes)  # type: ignore[operator]
    assert isinstance(found, bool)
    return found


def elements(axes: Axes) -> list[int]:
    """The address of every index."""
    places = itertools.product(*(range(size) for _, size in axes))
    return [sum(index * stride for index, (stride, _) in zip(place, axes, strict=True)) for place in places]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_axes_of_a_tensor_are_nested_in_whatever_order_it_lies(order: tuple[int, ...]) -> None:
    tensor = torch.empty(2, 3, 5).permute(order)
    assert nested(tuple(zip(tensor.stride(), tensor.shape, strict=True)))


def test_axes_of_an_expanded_tensor_are_not_nested() -> None:
    tensor = torch.empty(4, 1).expand(4, 3)
    assert not nested(tuple(zip(tensor.stride(), tensor.shape, strict=True)))


@pytest.mark.parametrize("heads", [1, 2])
def test_an_axis_of_one_index_may_step_as_far_as_another(heads: int) -> None:
    # With one head its stride is that of a row: the backward of attention refused what its forward takes.
    tensor = torch.empty(2, 3, heads, 5)
    assert nested(tuple(zip(tensor.stride(), tensor.shape, strict=True)))


def test_axes_that_are_nested_never_meet() -> None:
    # A comparison with the strides alone, or >= for >, would say yes of (2, 2), (1, 3) and of (4, 2), (2, 3).
    sides = list(itertools.product(range(7), range(1, 4)))
    cases = list(itertools.product(sides, repeat=2))
    said = [axes for axes in cases if nested(axes)]
    assert 0 < len(said) < len(cases)
    met = [axes for axes in said if len(set(elements(axes))) < len(elements(axes))]
    assert met == []
