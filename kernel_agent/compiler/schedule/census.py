"""`census_of`: a launch that counts how often rows of a gradient would be stored to, where only memory can tell.

Rows that an index names, that a bisection finds or that wrap around an edge are often others for every program, but
nothing in the kernel says so. Their addresses are row * width + place. That the place tells what is stored within a row
is proved; which row each program, trip and lane has is counted before anything is stored, by the operations of the
kernel itself, one number for a row. Where a row is counted twice the backward raises.

Rows that turn out to have one element each say nothing: where a place in a matrix is all that memory tells, as the
label of a row, elements are counted by the longer rows that they lie in. Where no two lie in one, all are apart.

Whether that is of use depends on the rows: it is had only where none was counted twice in calls that were seen, and
where rows drawn at random would have been.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kernel_agent.compiler.errors import CannotDerive, OutOfBounds
from kernel_agent.compiler.plan import Buffer, Census, Fact, Fill, Step
from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.schedule.forms import Forms
from kernel_agent.compiler.schedule.linear import Kind
from kernel_agent.compiler.schedule.named import Named, around, named
from kernel_agent.compiler.schedule.polynomial import ONE
from kernel_agent.compiler.schedule.resized import resized
from kernel_agent.compiler.schedule.sites import Site
from kernel_agent.compiler.schedule.starts import Start, ways
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.evaluate import evaluate
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.rebuild import Copier, emptied
from kernel_agent.compiler.ssa.text import text
from kernel_agent.compiler.ssa.uses import Uses, captured, written_to
from kernel_agent.compiler.ssa.value import Kernel, Op, Value

MOST_PROGRAMS, MOST_ROWS = 2048, 1 << 20
"""Of a call whose rows are counted here."""
CHANCE = 4.0
"""Pairs of equal rows that calls would be expected to have, were rows drawn at random."""


def census_of(forms: Forms, written: Sequence[Site], tensor: str, name: str) -> Census | None:
    """The launch for all additions to the gradient `name` of `tensor`; None where there is none, or would not help."""
    calls = forms.launch.calls
    if not calls.typical or not written or any(site.op.code is not Code.ATOMIC_ADD for site in written):
        return None
    for starts in ways(forms, written[0]):
        found = [named(forms, site, starts) for site in written]
        rows = [one for one in found if one is not None]
        axes = {atom.number for one in rows for atom in one.told if atom.kind is Kind.PROGRAM}
        if len(rows) < len(found) or any(one.programs != axes for one in rows):
            continue
        try:
            made = _counting(forms, rows, name)
        except CannotDerive:
            continue
        if not _tells_programs(made.kernel, axes):
            continue
        width = starts.width.text()
        grid = tuple(extent.text() if axis in axes else "1" for axis, extent in enumerate(forms.launch.grid))
        number = f"triton.cdiv({tensor}.numel(), {width})"
        step = Step(made.kernel, grid, {made.width: width, made.number: number})
        counts = Buffer(made.counts, "i32", Fill.ZEROS, shape=(number,))
        texts = dict.fromkeys(
            [f"{tensor}.is_contiguous()", *starts.facts, *(fact for one in rows for fact in one.facts)]
        )
        reason = f"rows of {name} lie one behind the other"
        facts = tuple(Fact(fact, reason, tensor) for fact in texts)
        whole = rows[0].whole if len(rows) == 1 else ""
        census = Census(name, counts, step, width, whole, facts)
        if not calls.refute(texts) and _is_meant(census, calls):
            return census
    return None


# --- the kernel


@dataclass(frozen=True)
class _Made:
    """A kernel that counts, and the names of what it is given beside what the other has."""

    kernel: Kernel
    counts: str
    width: str
    number: str


def _counting(forms: Forms, rows: Sequence[Named], name: str) -> _Made:
    """Counts rows. Raises CannotDerive where one comes from a loop's carries, or from memory that is written to."""
    source = forms.kernel
    counts = Value("*i32", (), source.free_name(f"{name}_stores"))
    width, number = (Value("i64", (), source.free_name(one)) for one in ("row_size", "num_rows"))
    own = _without_gradients(source)
    made = emptied(source, name=f"{own}_{counts.name}", arguments=[*source.arguments, counts, width, number])
    copier = Copier(source, Builder(made, frozenset((counts,))))
    for one in rows:
        around(copier, forms, one, partial(_count, copier, forms, one, (counts, width, number)))
    kernel = prune(made)
    used = set(captured([kernel.body]))
    kept = [value for value in kernel.arguments if value in used]
    kernel = Kernel(kernel.name, kept, kernel.body, dict(kernel.extents), dict(kernel.constants))
    return _Made(kernel, counts.name, width.name, number.name)


def _without_gradients(kernel: Kernel) -> str:
    """The name of a kernel without the gradients at its end: `_fwd_backward_dK_dV` counts what is added to dK alone."""
    written, name = {value.name for value in written_to(kernel.body)}, kernel.name
    while (parts := name.rpartition("_"))[2] in written:
        name = parts[0]
    return name


def _count(copier: Copier, forms: Forms, rows: Named, given: tuple[Value, Value, Value]) -> None:
    """One more for each row that an addition has. A row that is none has no elements: nothing is added to it."""
    b = copier.b
    counts, width, number = given
    start = Start(copier, forms, rows.starts)
    offset = start.of(rows.site.op.offset, ONE)
    if offset is None or start.beside.terms:
        raise CannotDerive("places within a row do not start with its first element")
    row = b.elementwise(Code.FLOORDIV, (b.cast(offset, "i64"), width))
    spread = {axis for axis, extent in enumerate(row.shape) if extent != 1}
    if not spread <= {atom.number for atom in rows.told if atom.kind is Kind.LANE}:
        raise CannotDerive("all lanes of a row would be counted")
    mask = b.logical_and(b.compare("ge", row, b.const(0, "i64")), b.compare("lt", row, number))
    for value in rows.asked:
        mask = b.logical_and(mask, copier[value])
    b.store(counts, row, b.const(1, "i32"), mask, Code.ATOMIC_ADD)


def _tells_programs(kernel: Kernel, axes: set[int]) -> bool:
    """Whether rows may depend on all of a program's number, and on no number of programs that is not counted. Programs
    of which only a quotient or only a remainder is asked have the same row where another launch has more of them."""
    uses = Uses.of(kernel)
    for op in kernel.ops:
        if op.code is Code.NUM_PROGRAMS and op.attributes["axis"] not in axes:
            return False
        if op.code is Code.PROGRAM_ID:
            parts: list[Op] = []
            pending = [op.result]
            while pending:
                for use in uses[pending.pop()]:
                    if use.code is Code.CAST:
                        pending.append(use.result)
                    else:
                        parts.append(use)
            if len({part.code for part in parts}) == 1 and parts[0].code in (Code.FLOORDIV, Code.REM):
                return False
    return True


# --- calls that were seen


_MEANT: WeakKeyDictionary[Calls, dict[Hashable, bool]] = WeakKeyDictionary()


def _is_meant(census: Census, calls: Calls) -> bool:
    """Whether no row is counted twice in calls that were seen, where rows drawn at random would be. Kernels of several
    schedules count alike: each count is evaluated once."""
    step = census.step
    constants = tuple((op.attributes["value"], op.result.element) for op in step.kernel.ops if op.code is Code.CONST)
    asked = (
        text(step.kernel),
        constants,
        step.grid,
        tuple(step.scalars.items()),
        census.counts.name,
        census.counts.shape,
    )
    known = _MEANT.setdefault(calls, {})
    if asked not in known:
        known[asked] = _is_found_meant(census, calls.names)
    return known[asked]


def _is_found_meant(census: Census, calls: Sequence[Mapping[str, Any]]) -> bool:
    expected = 0.0
    for names in calls:
        try:
            counts = _counted(census, names)
        except (NameError, TypeError, AttributeError, ZeroDivisionError, KeyError, OutOfBounds, CannotDerive):
            return False
        if counts is None or not counts.numel():
            continue
        if int(counts.max()) > 1:
            return False
        stored = int(counts.sum())
        expected += stored * (stored - 1) / 2 / counts.numel()
    return expected >= CHANCE


def _counted(census: Census, names: Mapping[str, Any]) -> Tensor | None:
    """The counts of a call; None of one that is too large."""
    step = census.step
    grid = [int(eval(extent, dict(names))) for extent in step.grid]
    scalars = {name: int(eval(told, dict(names))) for name, told in step.scalars.items()}
    (number,) = (int(eval(extent, dict(names))) for extent in census.counts.shape)
    if math.prod(grid) > MOST_PROGRAMS or number > MOST_ROWS:
        return None
    counts = torch.zeros(number, dtype=torch.int32)
    given = {**names, **scalars, census.counts.name: counts}
    kernel = resized(step.kernel, names)
    evaluate(kernel, grid, {value.name: given[value.name] for value in kernel.arguments})
    return counts
