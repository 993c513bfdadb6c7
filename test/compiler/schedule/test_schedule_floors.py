"""Programs from a number on count what is theirs from there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from schedule_kernels import add_to, block_of, made

from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.schedule.limits import Limits
from kernel_agent.compiler.schedule.ownership import Ownership, owned
from kernel_agent.compiler.schedule.sites import sites
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.evaluate import evaluate
from kernel_agent.compiler.ssa.value import Kernel, Value

BLOCK = 4


def above(limit: str, counted: str) -> Kernel:
    """Rows of n columns: programs from a number on, or from none, add to the columns behind as many tiles as they are
    above another one, as far as there are n."""

    def build(b: Builder, x: Value, dx: Value, n: Value, first: Value, other: Value) -> None:
        numbers = {"first": first, "other": other}
        pid = b.program_id(0)
        cols = block_of(b, b.sub(pid, numbers[counted]), BLOCK, "BLOCK")
        at = b.add(b.mul(b.program_id(1), n), cols)

        def adding() -> list[Value]:
            add_to(b, dx, at, b.const(1.0, "f32"), b.compare("lt", cols, n))
            return []

        nothing: Callable[[], list[Value]] = list
        if not limit:
            adding()
        elif limit.startswith("below "):
            b.branch(b.compare("lt", pid, numbers[limit.removeprefix("below ")]), adding, nothing)
        else:
            b.branch(b.compare("lt", pid, numbers[limit]), nothing, adding)

    return made("X:*f32 dX:*f32 n first other", build, BLOCK=BLOCK)


def own(kernel: Kernel, *calls: dict[str, object]) -> Ownership:
    return owned(kernel, {"X": "dX"}, Launch.like_forward(2, Calls(calls)))


def is_stored(found: Ownership) -> bool:
    return [op.code for op in found.kernel.ops if op.code in (Code.STORE, Code.ATOMIC_ADD)] == [Code.STORE]


def call(n: int, first: int, grid0: int, **names: int) -> dict[str, object]:
    known = {"n": n, "first": first, "other": first, "grid0": grid0, "grid1": 3, "BLOCK": BLOCK}
    return {**known, "X": torch.zeros(3, n), **names}


def test_columns_of_programs_from_a_number_on_are_stored_and_cover_the_rows() -> None:
    # Counted from 0, a column of these is less than n and `first` tiles more: the next row has such columns, too.
    found = own(above("first", "first"))
    assert is_stored(found)
    assert [fact.expression for fact in found.facts] == []
    whole, launch = found.empty_if["dX"], call(7, 2, 4)
    assert eval(whole, launch)
    memory = torch.full((3, 7), torch.nan)
    evaluate(found.kernel, (4, 3), {**{k: launch[k] for k in ("X", "n", "first", "other")}, "dX": memory})
    assert torch.equal(memory, torch.ones(3, 7))


@pytest.mark.parametrize(
    "launch",
    [
        pytest.param(call(7, 2, 3), id="a tile too few"),
        pytest.param(call(7, 5, 4), id="no program from that number on"),
        pytest.param(call(7, -1, 4), id="all from less than nothing on"),
        pytest.param({**call(7, 2, 4), "X": torch.zeros(4, 7)}, id="a row too many"),
    ],
)
def test_columns_that_no_program_has_keep_zeros(launch: dict[str, object]) -> None:
    # Where memory started empty these would be NaN. Programs from -1 on begin with the second tile.
    assert not eval(own(above("first", "first")).empty_if["dX"], launch)


@pytest.mark.parametrize("limit", ["", "below first"])
def test_programs_that_may_be_below_the_number_stay_atomic(limit: str) -> None:
    # Their columns are negative: they lie in the row before.
    assert not is_stored(own(above(limit, "first"), call(7, 2, 4)))


def test_programs_from_another_number_on_are_stored_only_if_that_is_no_less() -> None:
    kernel = above("other", "first")
    assert is_stored(own(kernel, call(7, 2, 4, other=3)))
    assert not is_stored(own(kernel, call(7, 2, 4, other=1)))


def below() -> Kernel:
    """Programs below a number add to columns of n."""

    def build(b: Builder, x: Value, dx: Value, n: Value, first: Value) -> None:
        pid = b.program_id(0)
        cols = block_of(b, pid, BLOCK, "BLOCK")

        def adding() -> list[Value]:
            add_to(b, dx, b.add(b.mul(b.program_id(1), n), cols), b.const(1.0, "f32"), b.compare("lt", cols, n))
            return []

        b.branch(b.compare("lt", pid, first), adding, list)

    return made("X:*f32 dX:*f32 n first", build, BLOCK=BLOCK)


def test_programs_below_a_number_cover_the_rows_if_their_tiles_reach_the_end() -> None:
    # The grid may have as many tiles as that takes when those that take part have not.
    whole = own(below()).empty_if["dX"]
    assert eval(whole, call(7, 2, 4))
    assert not eval(whole, call(7, 1, 4))
    assert not eval(whole, call(7, 2, 1))


def joined(early: int = 0, *, floor: bool = True) -> Kernel:
    """Columns from `first` on, as far as n, of rows that two tensors make, which are the second's own. `early`: so many
    columns of the first are taken with them; without a `floor` all are."""

    def build(b: Builder, x: Value, dx: Value, n: Value, first: Value) -> None:
        cols = block_of(b, b.program_id(0), BLOCK, "BLOCK")
        mask = b.compare("lt", cols, b.add(first, n))
        if floor:
            mask = b.logical_and(mask, b.compare("ge", cols, b.sub(first, b.const(early))))
        at = b.sub(b.add(b.mul(b.program_id(1), n), cols), first)
        add_to(b, dx, at, b.const(1.0, "f32"), mask)

    return made("X:*f32 dX:*f32 n first", build, BLOCK=BLOCK)


def test_columns_of_the_second_of_two_tensors_are_stored_and_cover_it() -> None:
    found = own(joined(), call(7, 5, 3))
    assert is_stored(found)
    whole, launch = found.empty_if["dX"], call(7, 5, 3)
    assert eval(whole, launch)
    memory = torch.full((3, 7), torch.nan)
    evaluate(found.kernel, (3, 3), {"X": launch["X"], "n": 7, "first": 5, "dX": memory})
    assert torch.equal(memory, torch.ones(3, 7))
    # Tiles that end before the last column; columns from before the first on, which no lane has.
    assert not eval(whole, call(7, 5, 2))
    assert not eval(whole, call(7, -2, 3))


@pytest.mark.parametrize("kernel", [joined(1), joined(floor=False)])
def test_columns_of_the_first_of_two_tensors_among_them_leave_all_atomic(kernel: Kernel) -> None:
    # They are counted as the last columns of the row before.
    assert not is_stored(own(kernel, call(7, 5, 3)))


@pytest.mark.parametrize("floor", [False, True])
def test_limits_that_are_asked_for_alone_begin_with_zero(floor: bool) -> None:
    # Who asks for these takes a row to be whole: a label in columns that the mask leaves out would get no gradient.
    kernel = joined(floor=floor)
    (site,) = sites(kernel.body, frozenset((Code.ATOMIC_ADD,)))
    found = Limits.of(Forms(kernel, Launch.like_forward(2)), site, [site.op.mask])
    assert (found is None) == floor
