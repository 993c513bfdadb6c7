"""`unswizzled`: a grid of one axis that the kernel itself cuts into two, as a grid of two axes.

Kernels number tiles in an order that is kind to the cache: in rows of tiles, or in groups of rows. Which program has
which tile does not matter for what is computed; that each tile has one program does, and is proved by the shape of
the arithmetic and one equation between numbers of the launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.schedule.linear import Form, Kind
from kernel_agent.compiler.schedule.polynomial import ONE, Polynomial
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.rebuild import Copier, emptied
from kernel_agent.compiler.ssa.uses import captured
from kernel_agent.compiler.ssa.value import Kernel, Op, Value

AXES = 3
"""Of a grid."""


@dataclass(frozen=True)
class Unswizzled:
    """The same work on another grid."""

    kernel: Kernel
    launch: Launch
    facts: tuple[str, ...]
    """Python expressions: the old grid has as many programs as the new one. None where it always has."""


@dataclass(frozen=True)
class Cut:
    """Two scalars that together tell the number of a program along the first axis, each from 0 on."""

    rows: Value
    cols: Value
    row_count: Polynomial
    col_count: Polynomial
    facts: tuple[str, ...]
    """See `Unswizzled`."""


def unswizzled(kernel: Kernel, launch: Launch) -> Unswizzled | None:
    """The kernel with what it cuts its first axis into as the first two; None where it needs the number itself."""
    if len(launch.grid) >= AXES:
        return None
    forms = Forms(kernel, launch)
    for cut in _cuts(forms):
        copier = _Cutter(kernel, cut)
        found = prune(copier.copy())
        if copier.number in captured([found.body]) or launch.calls.refute(cut.facts):
            continue
        arguments = [value for value in found.arguments if value is not copier.number]
        whole = Kernel(found.name, arguments, found.body, dict(found.extents), dict(found.constants))
        grid = (_positive(cut.row_count), _positive(cut.col_count), *launch.grid[1:])
        return Unswizzled(whole, replace(launch, grid=grid), cut.facts)
    return None


def _cuts(forms: Forms) -> Iterator[Cut]:
    """Ways in which a kernel cuts its first axis, those in groups first."""
    ops = list(forms.kernel.ops)
    for op in ops:
        found = _grouped(forms, op, ops) if op.code is Code.FLOORDIV else None
        if found is not None:
            yield found
    programs = forms.launch.grid[0]
    for op in ops:
        if op.code is Code.FLOORDIV and _is_number(op.operands[0]):
            width = forms.of(op.operands[1]).invariant
            rest = next((o.result for o in ops if o.code is Code.REM and o.operands == op.operands), None)
            if width is not None and width.printable and rest is not None:
                text = f"({programs.text()} // ({width.text()}))"
                fact = f"{programs.text()} % ({width.text()}) == 0"
                yield Cut(op.result, rest, Polynomial.symbol(text, positive=True), width, (fact,))


def _grouped(forms: Forms, op: Op, ops: list[Op]) -> Cut | None:
    """Groups of `size` rows of tiles, numbered column by column, the last group with the rows that are left:

    number = group * (size * cols) + col * rows_here + row, with rows_here = min(rows - group * size, size).
    """
    within, here = op.operands
    cut = _in_group(forms, within)
    if cut is None:
        return None
    number, wide = cut
    limit = here.producer
    if limit is None or limit.code is not Code.MIN:
        return None
    for left, size in (limit.operands, limit.operands[::-1]):
        if left.producer is None or left.producer.code is not Code.SUB:
            continue
        rows, first = left.producer.operands
        tall, count = (forms.of(value).invariant for value in (size, rows))
        if tall is None or count is None or not _first_of_group(forms, first, number, wide, tall):
            continue
        cols = wide.quotient(tall)
        if cols is None or not cols.printable or not count.printable:
            continue
        for add in ops:
            if add.code is Code.ADD and first in add.operands:
                other = add.operands[1 - add.operands.index(first)].producer
                # Any numbers that follow each other have all remainders by the rows of the group, one each.
                if other is not None and other.code is Code.REM and other.operands in ((within, here), (number, here)):
                    programs, tiles = forms.launch.grid[0], count * cols
                    facts = () if programs == tiles else (f"{programs.text()} == {tiles.text()}",)
                    return Cut(add.result, op.result, count, cols, facts)
    return None


def _in_group(forms: Forms, within: Value) -> tuple[Value, Polynomial] | None:
    """The number of a tile, and how many tiles a group has, where a value is the remainder: as `number % width`, or
    what `number // width` groups leave."""
    op = within.producer
    if op is None or op.code not in (Code.REM, Code.SUB) or not _is_number(op.operands[0]):
        return None
    number, other = op.operands
    if op.code is Code.REM:
        width = forms.of(other).invariant
        return None if width is None else (number, width)
    groups = forms.of(other)
    for atom, width in groups.terms:
        whole = atom.kind is Kind.QUOTIENT and atom.divisor == width and atom.whole == forms.of(number)
        if whole and groups == Form.of({atom: width}):
            return number, width
    return None


def _first_of_group(forms: Forms, first: Value, number: Value, wide: Polynomial, tall: Polynomial) -> bool:
    """Whether a value is (number // wide) * tall."""
    op = first.producer
    if op is None or op.code is not Code.MUL:
        return False
    for group, size in (op.operands, op.operands[::-1]):
        quotient = group.producer
        if quotient is not None and quotient.code is Code.FLOORDIV and quotient.operands[0] is number:
            return forms.of(size).invariant == tall and forms.of(quotient.operands[1]).invariant == wide
    return False


def _is_number(value: Value) -> bool:
    op = value.producer
    return op is not None and op.code is Code.PROGRAM_ID and op.attributes["axis"] == 0


def _positive(count: Polynomial) -> Polynomial:
    """As an extent of a grid that has programs."""
    if len(count.terms) == 1 and len(count.terms[0][0]) == 1 and count.terms[0][1] == 1:
        return Polynomial.symbol(count.terms[0][0][0].text, positive=True)
    return count * ONE


class _Cutter(Copier):
    """Puts programs of the new axes in the place of what the old one was cut into."""

    def __init__(self, source: Kernel, cut: Cut) -> None:
        self.number = Value("i32", (), "number")
        super().__init__(source, Builder(emptied(source, arguments=[*source.arguments, self.number])))
        self.b.written = self.written
        self.cut = cut

    def pure(self, op: Op) -> None:
        """Programs."""
        if op.results == (self.cut.rows,):
            self[op.result] = self.b.program_id(0, op.result.name)
        elif op.results == (self.cut.cols,):
            self[op.result] = self.b.program_id(1, op.result.name)
        elif op.code in (Code.PROGRAM_ID, Code.NUM_PROGRAMS):
            axis = op.attributes["axis"]
            if axis == 0:
                self[op.result] = self.number
            else:
                b = self.b
                self[op.result] = b.program_id(axis + 1) if op.code is Code.PROGRAM_ID else b.num_programs(axis + 1)
        else:
            super().pure(op)
