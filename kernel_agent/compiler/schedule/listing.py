"""`listed`: a launch that writes down which row of a gradient each addition goes to, so that torch can sort them.

Additions are numbered by the programs and trips that name rows, as if their loops were one: whoever reads the number
knows which program and trip it is of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.plan import Buffer, Fill, Step
from kernel_agent.compiler.schedule.forms import Forms
from kernel_agent.compiler.schedule.linear import Kind
from kernel_agent.compiler.schedule.named import Named, around
from kernel_agent.compiler.schedule.polynomial import ONE, Polynomial
from kernel_agent.compiler.schedule.starts import Start
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.rebuild import Copier, emptied
from kernel_agent.compiler.ssa.uses import captured
from kernel_agent.compiler.ssa.value import Kernel, Op, Value


@dataclass(frozen=True)
class Digit:
    """A program or a trip, as a digit of the number of an addition."""

    axis: int | None
    """Of the grid."""
    loop: Op | None
    extent: Polynomial


@dataclass(frozen=True)
class Numbering:
    """Numbers of additions, one for all programs and trips that name a row."""

    digits: tuple[Digit, ...]
    """The highest first."""

    @classmethod
    def of(cls, forms: Forms, rows: Named) -> Numbering:
        """Raises CannotDerive where a launch does not tell how many there are."""
        found = []
        loops = {forms.trip(loop): loop for loop in rows.site.loops}
        for atom in sorted(rows.told, key=lambda one: one.key):
            if atom.kind not in (Kind.PROGRAM, Kind.TRIP):
                raise CannotDerive("lanes of a tile add to rows of their own")
            if atom.extent is None or not atom.extent.printable:
                raise CannotDerive("how often its rows are named is not known before the launch")
            axis = atom.number if atom.kind is Kind.PROGRAM else None
            found.append(Digit(axis, loops.get(atom), atom.extent))
        return cls(tuple(found))

    @property
    def count(self) -> Polynomial:
        """How many numbers there are."""
        return reduce(Polynomial.__mul__, (digit.extent for digit in self.digits), ONE)

    def number(self, copier: Copier) -> Value:
        """Of an addition, where its programs and the indices of its loops are in sight."""
        b = copier.b
        found: Value | None = None
        for digit in self.digits:
            if digit.axis is not None:
                own, extent = b.program_id(digit.axis), b.num_programs(digit.axis)
            else:
                assert digit.loop is not None
                start, step = copier[digit.loop.operands[0]], copier[digit.loop.operands[2]]
                index = copier[digit.loop.blocks[0].arguments[0]]
                own = b.elementwise(Code.FLOORDIV, (b.sub(index, start), step))
                extent = trips(copier, digit.loop)
            own = b.cast(own, "i64")
            found = own if found is None else b.add(b.mul(found, b.cast(extent, "i64")), own)
        assert found is not None
        return found


def trips(copier: Copier, loop: Op) -> Value:
    """How many a loop makes whose bounds a launch fixes."""
    b = copier.b
    start, stop, step = copier.all(loop.operands[:3])
    return b.elementwise(Code.FLOORDIV, (b.add(b.sub(stop, start), b.sub(step, b.const(1, step.element))), step))


@dataclass(frozen=True)
class Listed:
    """The launch, and what it writes."""

    step: Step
    rows: Buffer
    """By number of the addition its row, from 1 on; 0 where it is none."""
    count: Polynomial
    """Rows of the gradient."""


def listed(forms: Forms, rows: Named, numbering: Numbering, tensor: str, name: str) -> Listed:
    """The launch for the additions `rows` to the gradient `name` of `tensor`. Raises CannotDerive where a row comes
    from a loop's carries, or from memory that is written to."""
    source = forms.kernel
    buffer = Value("*i32", (), source.free_name(f"{name}_rows_named"))
    width, number = row_size(source, rows.starts.width), Value("i64", (), source.free_name("num_rows"))
    own = [width] if width not in source.arguments else []
    arguments = [*source.arguments, buffer, *own, number]
    made = emptied(source, name=f"{source.name}_{buffer.name}", arguments=arguments)
    copier = Copier(source, Builder(made, frozenset((buffer,))))

    def write() -> None:
        b = copier.b
        row, there = _row(copier, forms, rows, (width, number))
        row = b.select(there, b.add(row, b.const(1, "i64")), b.const(0, "i64"))
        b.store(buffer, numbering.number(copier), b.cast(row, "i32"))

    around(copier, forms, rows, write)
    kernel = prune(made)
    used = set(captured([kernel.body]))
    kept = [value for value in kernel.arguments if value in used]
    kernel = Kernel(kernel.name, kept, kernel.body, dict(kernel.extents), dict(kernel.constants))
    size = rows.starts.width.text()
    count = f"triton.cdiv({tensor}.numel(), {size})"
    axes = {digit.axis for digit in numbering.digits}
    grid = tuple(extent.text() if axis in axes else "1" for axis, extent in enumerate(forms.launch.grid))
    step = Step(kernel, grid, {**{value.name: size for value in own}, number.name: count})
    held = Buffer(buffer.name, "i32", Fill.ZEROS, shape=(numbering.count.text(),))
    return Listed(step, held, Polynomial.symbol(count, positive=True))


def _row(copier: Copier, forms: Forms, rows: Named, given: Sequence[Value]) -> tuple[Value, Value]:
    """The row of an addition, and whether it is one of the gradient's that takes part."""
    b = copier.b
    width, number = given
    start = Start(copier, forms, rows.starts)
    offset = start.of(rows.site.op.offset, ONE)
    if offset is None or start.beside.terms:
        raise CannotDerive("places within a row do not start with its first element")
    while offset.shape:
        if any(extent != 1 for extent in offset.shape):
            raise CannotDerive("lanes of a tile add to rows of their own")
        offset = b.sum(offset, 0)
    row = b.elementwise(Code.FLOORDIV, (b.cast(offset, "i64"), b.cast(width, "i64")))
    there = b.logical_and(b.compare("ge", row, b.const(0, "i64")), b.compare("lt", row, number))
    for value in rows.asked:
        condition = copier[value]
        if condition.shape:
            raise CannotDerive("lanes of a tile add to rows of their own")
        there = b.logical_and(there, condition)
    return row, there


def row_size(kernel: Kernel, width: Polynomial) -> Value:
    """Elements of a row, as an argument: one that the kernel has, or a new one."""
    for value in kernel.arguments:
        if value.element == "i32" and Polynomial.symbol(value.name) == width:
            return value
    return Value("i32", (), kernel.free_name("row_size"))


def told_loops(forms: Forms, rows: Named) -> tuple[Op, ...]:
    """Loops whose trips name rows."""
    return tuple(loop for loop in rows.site.loops if forms.trip(loop) in rows.told)
