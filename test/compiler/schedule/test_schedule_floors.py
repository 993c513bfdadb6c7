"""Programs from a number on count what is theirs from there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton
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


def parted(limit: str) -> Kernel:
    """Programs from a number on add to n elements, rows of `width` of which lie `step` apart, by what is above that."""

    def build(b: Builder, x: Value, dx: Value, n: Value, width: Value, step: Value, first: Value) -> None:
        pid = b.program_id(0)
        place = block_of(b, b.sub(pid, first), BLOCK, "BLOCK")
        at = b.add(b.mul(b.elementwise(Code.FLOORDIV, (place, width)), step), b.elementwise(Code.REM, (place, width)))

        def adding() -> list[Value]:
            add_to(b, dx, at, b.const(1.0, "f32"), b.compare("lt", place, n))
            return []

        b.branch(b.compare("lt", pid, b.add(first, b.const(-1)) if limit == "one less" else first), list, adding)

    return made("X:*f32 dX:*f32 n width step first", build, BLOCK=BLOCK)


def own_parts(limit: str = "") -> Ownership:
    return owned(parted(limit), {"X": "dX"}, Launch.like_forward(1))


def test_heads_of_programs_from_a_number_on_are_stored_by_quotient_and_remainder() -> None:
    # From 0 on the index could be negative, and what a quotient of that is tells no row.
    found = own_parts()
    assert is_stored(found)
    names = {"n": 6, "width": 3, "step": 5, "first": 2, "grid0": 4, "BLOCK": BLOCK, "X": torch.zeros(2, 3)}
    assert all(eval(fact.expression, dict(names)) for fact in found.facts)
    assert not all(eval(fact.expression, {**names, "step": 2}) for fact in found.facts)
    assert eval(found.empty_if["dX"], dict(names))
    assert not eval(found.empty_if["dX"], {**names, "grid0": 3})
    memory = torch.full((10,), torch.nan)
    evaluate(found.kernel, (4,), {**{k: names[k] for k in ("X", "n", "width", "step", "first")}, "dX": memory})
    assert memory.isnan().tolist() == ([False] * 3 + [True] * 2) * 2


def test_axes_of_heads_are_those_of_the_quotient_and_the_remainder() -> None:
    # A gradient that is laid out as a part of a larger tensor is not filled with zeros where its axes are these.
    (rows, columns) = own_parts().axes["dX"]
    assert (rows.stride, columns.stride, columns.size) == ("step", "1", "width")
    scope = {"triton": triton, "n": 6, "width": 3}
    assert eval(rows.size, scope) == 2
    assert eval(rows.size, {**scope, "n": 7}) == 3  # no tensor of 7 elements has 3 rows of 3


def test_heads_of_programs_that_may_be_below_the_number_stay_atomic() -> None:
    # Of the program before it places are negative: their quotients are those of other rows.
    assert not is_stored(own_parts("one less"))
