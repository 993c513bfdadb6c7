"""Room for the gradient of a part of a larger tensor is filled with zeros unless all of it is stored to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kernel_agent.compiler.stub.lines import ROOM

ROWS, COLS, WIDE = 4, 3, 8


@pytest.fixture(autouse=True)
def _empty_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def room(x: torch.Tensor, **given: Any) -> torch.Tensor:
    scope: dict[str, Any] = {"torch": torch}
    exec(ROOM, scope)
    made = scope["gradient_room"](x, **given)
    assert made.stride() == x.stride()
    assert isinstance(made, torch.Tensor)
    return made


def part() -> torch.Tensor:
    return torch.ones(ROWS, WIDE)[:, :COLS]


def test_a_part_that_is_stored_to_along_its_axes_is_not_filled() -> None:
    assert room(part(), zeros=False, stored=((1, COLS), (WIDE, ROWS))).isnan().all()


def test_axes_that_step_through_memory_as_one_are_one() -> None:
    heads = torch.ones(ROWS, WIDE)[:, :6].unflatten(1, (2, 3))
    assert room(heads, zeros=False, stored=((WIDE, ROWS), (1, 6))).isnan().all()


@pytest.mark.parametrize("stored", [(), ((1, COLS * ROWS),), ((2, COLS), (WIDE, ROWS)), ((1, COLS), (WIDE, ROWS - 1))])
def test_a_part_that_other_elements_are_stored_to_is_filled(stored: tuple[tuple[int, int], ...]) -> None:
    # As many elements may have been stored to between the rows: what is left of the part would be anything.
    assert room(part(), zeros=False, stored=stored).eq(0).all()


def test_fewer_stores_than_elements_fill_whatever_the_axes() -> None:
    assert room(part(), zeros=True, stored=((1, COLS), (WIDE, ROWS))).eq(0).all()
