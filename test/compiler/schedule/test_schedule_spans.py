"""Rows that trips add to from some row on, as memory says, are summed by owners of tiles at fixed places."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
from picked_tiles import listed, summed
from schedule_kernels import add_to, block_of, made, matrix

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.schedule.ownership import WRITES
from kernel_agent.compiler.schedule.pickers import Pickers, pickers
from kernel_agent.compiler.schedule.rasters import Lanes
from kernel_agent.compiler.schedule.sites import sites
from kernel_agent.compiler.schedule.spans import span
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel, Value

SIZE, D, HEADS = 4, 8, 2
LENGTHS = [3, 9, 0, 1, 6, 4]
"""Of sequences that lie one behind the other: their tiles begin anywhere."""
ROWS = sum(LENGTHS) + 2
"""The last two belong to none."""


def packed(*, across: bool = False, shift: int = 0) -> Kernel:
    """Programs go through the rows of a sequence, tile by tile, and add A B + 1 to each tile, where B has the rows of C
    by their place in the sequence. `across`: each row gets what all rows of its trip add. `shift`: rows in front."""

    def build(b: Builder, x: Value, a: Value, c: Value, dx: Value, bounds: Value, heads: Value) -> None:
        sequence, head = b.program_id(0), b.program_id(1)
        first, end = b.load(bounds, sequence), b.load(bounds, b.add(sequence, b.const(1)))
        lanes, cols = b.arange(0, SIZE, "SIZE"), b.arange(0, D, "D")
        right = b.load(a, matrix(b, block_of(b, sequence, D, "D"), b.const(D), cols, b.const(1)))

        def trip(start: Value, _: list[Value]) -> list[Value]:
            rows = b.add(start, lanes)
            mask = b.expand(b.compare("lt", rows, end), 1)
            place = matrix(b, b.sub(rows, first), b.const(D), cols, b.const(1))
            left = b.load(c, place, mask, b.const(0.0, "f32"))
            value = b.add(b.dot(left, right, "ieee"), b.const(1.0, "f32"))
            if across:
                value = b.dot(b.dot(left, b.trans(left, (1, 0)), "ieee"), value, "ieee")
            at = b.add(b.mul(rows, heads), head)
            add_to(b, dx, matrix(b, at, b.const(D), cols, b.const(1)), value, mask)
            return []

        b.loop((b.sub(first, b.const(shift)) if shift else first, end, b.const(SIZE, "i32", "SIZE")), [], trip)

    return made("X:*f32 A:*f32 C:*f32 dX:*f32 Bounds:*i32 heads", build, SIZE=SIZE, D=D)


def call() -> dict[str, Any]:
    return {
        "triton": triton,
        "torch": torch,
        "X": torch.zeros(ROWS * HEADS, D),
        "A": torch.randn(len(LENGTHS) * D, D, dtype=torch.float64),
        "C": torch.randn(max(LENGTHS), D, dtype=torch.float64),
        "Bounds": torch.tensor([0, *LENGTHS]).cumsum(0).int(),
        "SIZE": SIZE,
        "D": D,
        "heads": HEADS,
        "grid0": len(LENGTHS),
        "grid1": HEADS,
    }


def owners(kernel: Kernel, **numbers: Any) -> Pickers:
    return pickers(kernel, {"X": "dX"}, Launch.like_forward(2, Calls(({**call(), **numbers},))))


def test_rows_of_tiles_that_begin_anywhere_have_the_sum_of_all_that_is_added_to_them() -> None:
    # A trip meets two tiles where it begins between: were it listed for one, rows would miss what it adds; were its
    # lanes not asked, a tile would have the products of the sequence beside it, and read C in front of its first row.
    given = call()
    torch.testing.assert_close(*summed(packed(), owners(packed()), given, (len(LENGTHS), HEADS)))


def test_rows_in_front_of_the_first_raise() -> None:
    # Their owner would be none, and in the forward they are in front of the tensor, or of another one's.
    with pytest.raises(ValueError, match="below 0"):
        listed(owners(packed(shift=1)), call())


def test_owners_ask_for_rows_one_behind_the_other() -> None:
    # As many rows as the tensor has are owned, and no more: a tensor with a gap has memory of others in that place.
    facts = owners(packed()).facts
    scope = {**call(), "X": torch.zeros(ROWS * HEADS, 2 * D)[:, :D]}
    assert not all(eval(text, scope) for text in facts)
    assert all(eval(text, call()) for text in facts)


def test_what_lanes_add_by_others_of_their_trip_is_left_to_atomics() -> None:
    # A tile at a fixed place has other rows together than a trip has.
    with pytest.raises(CannotDerive):
        owners(packed(across=True))
    (site,) = sites(packed(across=True).body, WRITES)
    with pytest.raises(CannotDerive, match="no rows from one on"):
        span(Forms(packed(across=True), Launch.like_forward(2)), [site], site.loops[0])


def test_products_that_also_sum_over_the_lanes_of_a_window_are_none_of_its_lanes() -> None:
    # Rows times rows: of the result each row belongs to a lane, and is a sum over all.
    def build(b: Builder, x: Value, dx: Value, first: Value) -> None:
        rows = b.add(first, b.arange(0, SIZE, "SIZE"))
        tile = b.load(x, matrix(b, rows, b.const(D), b.arange(0, D, "D"), b.const(1)))
        both = b.dot(tile, b.trans(tile, (1, 0)), "ieee")
        b.store(dx, matrix(b, rows, b.const(D), b.arange(0, D, "D"), b.const(1)), b.dot(both, tile, "ieee"))
        b.store(dx, rows, b.sum(both, 1))

    kernel = made("X:*f32 dX:*f32 first", build, SIZE=SIZE, D=D)
    (rows,) = [op.result for op in kernel.ops if op.code is Code.ADD and op.result.shape == (SIZE,)]
    lanes = Lanes(kernel.body.ops, rows)
    one, other = [op.stored for op in kernel.ops if op.code is Code.STORE]
    assert {one, other} <= lanes.mixed
