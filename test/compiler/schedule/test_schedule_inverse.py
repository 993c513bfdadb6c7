"""Rows that a list in memory names, each program for a part of it, are summed by owners of the sorted places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
from schedule_kernels import add_to, made
from sorted_rows import stored_and_added
from torch import Tensor

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.schedule.forms import Launch
from kernel_agent.compiler.schedule.heirs import Heirs
from kernel_agent.compiler.schedule.inverse import inverted
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel, Value

ROWS, WIDTH, BLOCK, LANES = 11, 6, 8, 4
Change = Callable[[Builder, Value, Value], Value]


def messages(
    *,
    stop: Change | None = None,
    step: int = LANES,
    weight: Change | None = None,
    masked: bool = True,
    listed: Change | None = None,
    stored: bool = False,
    chosen: bool = False,
) -> Kernel:
    """Programs add W[e] * Y[program] to the row of dX that List[e] names, for the places e between two of their bounds.

    `stop`: of the loop, made of the end and the begin; `step`: of it; `weight`: made of W[e] and the lanes; `masked`:
    whether the addition asks where its places end; `listed`: the mask of the list, made of that of places and them;
    `stored`: they also store the sum of W[e] * Y[program] to dW[e]; `chosen`: they add to rows from 0 on.
    """

    def build(b: Builder, x: Value, w: Value, y: Value, dx: Value, dw: Value, *lists: Value) -> None:
        bounds, rows, width = lists
        node, f, lanes = b.program_id(0, "node"), b.arange(0, BLOCK, "BLOCK"), b.arange(0, LANES, "LANES")
        begin, end = b.load(bounds, node), b.load(bounds, b.add(node, b.const(1)))
        inside = b.compare("lt", f, width)
        shared = b.load(y, b.add(b.mul(node, width), f), inside, b.const(0.0, "f32"))

        def trip(start: Value, _: list[Value]) -> list[Value]:
            e = b.add(start, lanes)
            there = b.compare("lt", e, end)
            row = b.load(rows, e, listed(b, there, e) if listed else there, b.const(0))
            factor = b.load(w, e, there, b.const(0.0, "f32"))
            factor = weight(b, factor, lanes) if weight else factor
            at = b.add(b.mul(b.expand(row, 1), width), b.expand(f, 0))
            mask = b.expand(inside, 0)
            mask = b.logical_and(b.expand(there, 1), mask) if masked else mask
            if chosen:
                mask = b.logical_and(mask, b.compare("ge", b.expand(row, 1), b.const(0)))
            message = b.mul(b.expand(factor, 1), b.expand(shared, 0))
            add_to(b, dx, at, message, mask)
            if stored:
                b.store(dw, e, b.sum(message, 1), there)
            return []

        last = stop(b, end, begin) if stop else end
        b.loop((begin, last, b.const(step, "i32", "LANES" if step == LANES else None)), [], trip)

    arguments = "X:*f32 W:*f32 Y:*f32 dX:*f32 dW:*f32 Bounds:*i32 List:*i32 width"
    return made(arguments, build, BLOCK=BLOCK, LANES=LANES)


def call(rows: Tensor, bounds: Tensor) -> dict[str, Any]:
    return {
        "triton": triton,
        "X": torch.zeros(ROWS, WIDTH),
        "W": torch.randn(len(rows), dtype=torch.float64),
        "dW": torch.full((len(rows),), float("nan"), dtype=torch.float64),
        "Y": torch.randn(len(bounds) - 1, WIDTH, dtype=torch.float64),
        "List": rows.int(),
        "Bounds": bounds.int(),
        "BLOCK": BLOCK,
        "LANES": LANES,
        "width": WIDTH,
        "grid0": len(bounds) - 1,
    }


def heirs_of(kernel: Kernel, given: dict[str, Any]) -> Heirs | None:
    return inverted(kernel, "X", "dX", Launch.like_forward(1, Calls((given,))))


EVEN = call(torch.randint(0, ROWS, (40,)), torch.tensor([0, 7, 7, 19, 40]))


def few(lengths: Tensor, before: int = 0) -> dict[str, Any]:
    """Programs with lists of some lengths, behind places that none has."""
    bounds = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))) + before
    return call(torch.randint(1, ROWS, (int(bounds[-1]),)), bounds)


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(EVEN, id="some programs have no places"),
        pytest.param(few(torch.tensor([3, 0, 9, 2]), before=5), id="places that none has come first"),
        pytest.param(few(torch.tensor([0, 0, 3, *[0] * 30, 1, *[0] * 9, 2, 1, 1, 0])), id="many programs have none"),
        pytest.param(few(torch.randint(0, 3, (150,))), id="many programs have few"),
        pytest.param(few(torch.tensor([70, 1, 65])), id="few programs have many"),
    ],
)
def test_owners_of_rows_store_what_all_places_that_name_them_add(given: dict[str, Any]) -> None:
    # Places are numbered from the first program's first on, and their programs are looked up between two that are
    # known: one that is off by one takes another program's cotangent. Row 0 is often named by none, and holds NaN.
    found = heirs_of(messages(), given)
    assert found is not None
    torch.testing.assert_close(*stored_and_added(messages(), found, given, (given["grid0"],)))


def test_what_programs_store_at_their_places_the_owners_of_rows_store() -> None:
    # Each place has one owner, whichever it is: one that stores to another's place leaves NaN at its own.
    given = {**EVEN, "dW": torch.full((40,), float("nan"), dtype=torch.float64)}
    kernel = messages(stored=True)
    found = inverted(kernel, "X", "dX", Launch.like_forward(1, Calls((given,))), beside=True)
    assert found is not None
    torch.testing.assert_close(*stored_and_added(kernel, found, given, (given["grid0"],)))
    programs = torch.repeat_interleave(torch.arange(4), given["Bounds"].diff())
    torch.testing.assert_close(given["dW"], given["W"] * given["Y"][programs].sum(1))


def test_what_is_stored_where_nothing_may_be_added_is_refused() -> None:
    # A place that adds to no row is in no owner's list: what was stored there would be missing.
    kernel = messages(chosen=True, stored=True)
    assert inverted(kernel, "X", "dX", Launch.like_forward(1, Calls((EVEN,))), beside=True) is None


def test_tiles_of_places_are_one_lane_of_the_owner() -> None:
    # With the forward's lanes the owner would add each place once for every lane.
    found = heirs_of(messages(), EVEN)
    assert found is not None
    (added,) = (op for op in found.kernel.ops if op.code is Code.ATOMIC_ADD)
    assert added.offset.shape == (1, BLOCK)


def test_bounds_have_to_rise_and_lists_to_lie_in_one_piece() -> None:
    # Were a place one of two programs, its owner would add what one of them does.
    found = heirs_of(messages(), EVEN)
    assert found is not None
    asked = {fact.expression for fact in found.facts}
    assert {"bounds_rise(Bounds)", "List.is_contiguous()", "X.is_contiguous()"} <= asked


def sooner(b: Builder, end: Value, begin: Value) -> Value:
    return b.elementwise(Code.MIN, (end, b.add(begin, b.const(8))))


def of_marked(b: Builder, there: Value, e: Value) -> Value:
    return b.logical_and(there, b.compare("ne", e, b.const(3)))


@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(messages(stop=sooner), id="a program leaves places out"),
        pytest.param(messages(step=2), id="places have several lanes"),
        pytest.param(messages(step=8), id="places between the tiles are left out"),
        pytest.param(messages(masked=False), id="places of the next program are added to, too"),
        pytest.param(messages(listed=of_marked), id="places that are not read add to the first row"),
    ],
)
def test_lists_whose_places_are_not_one_program_s_each_are_refused(kernel: Kernel) -> None:
    # The owner of a row goes through all places that name it, each once.
    assert heirs_of(kernel, EVEN) is None


def by_lane(b: Builder, factor: Value, lanes: Value) -> Value:
    return b.mul(factor, b.cast(lanes, "f32"))


def by_all(b: Builder, factor: Value, _: Value) -> Value:
    return b.mul(factor, b.sum(factor, 0))


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        pytest.param(by_lane, "told apart by more than their places", id="a lane of the tile"),
        pytest.param(by_all, "sums over places", id="all places of the tile"),
    ],
)
def test_what_depends_on_the_tile_of_a_place_is_refused(weight: Change, reason: str) -> None:
    # The owner has one place at a time: which lane of which tile it was is not known there.
    with pytest.raises(CannotDerive, match=reason):
        heirs_of(messages(weight=weight), EVEN)


def test_many_places_of_few_rows_stay_atomic() -> None:
    # A program would do one after the other what all processors can share.
    with pytest.raises(CannotDerive, match="one addition after the other"):
        heirs_of(messages(), few(torch.tensor([400, 100])))
