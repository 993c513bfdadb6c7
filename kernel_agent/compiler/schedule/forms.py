"""`Forms`: the linear form of every integer of a kernel, and what any value depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.schedule.linear import Atom, Form, Kind, lanes, moved_atom, quotient_of, remainder_of
from kernel_agent.compiler.schedule.polynomial import ONE, ZERO, Polynomial, ceiling, parsed
from kernel_agent.compiler.ssa.code import ELEMENTWISE, Code
from kernel_agent.compiler.ssa.value import Kernel, Op, Value, constant, walk

UNKNOWN = Atom(Kind.OPAQUE, -1)
"""What a value depends on that may be anything at any time."""

_SIGNS = {Code.FLOORDIV: "//", Code.REM: "%"}
_CALLS = {Code.MIN: "min", Code.MAX: "max"}


@dataclass(frozen=True)
class Launch:
    """What a kernel is launched with, in terms of the forward's launch."""

    grid: tuple[Polynomial, ...]
    """Programs along each axis."""
    scalars: Mapping[str, Polynomial] = field(default_factory=dict)
    """Arguments that the forward did not have."""
    calls: Calls = field(default_factory=Calls)
    """Of the forward."""

    @classmethod
    def like_forward(cls, rank: int, calls: Calls | None = None) -> Launch:
        """On the forward's grid of `rank` axes."""
        calls = calls or Calls()
        return cls(tuple(ONE if axis in calls.single else grid_extent(axis) for axis in range(rank)), calls=calls)


class Forms:
    """Forms of one kernel, computed on demand.

    `begins`: by axis, the program from which on all programs are that are asked about; they are counted from there.
    """

    def __init__(self, kernel: Kernel, launch: Launch, begins: Mapping[int, Polynomial] | None = None) -> None:
        self.kernel = kernel
        self.launch = launch
        self.begins = begins or {}
        self.loops: dict[int, Op] = {}
        """By id of a block's argument: the loop around."""
        self.written: set[Value] = set()
        """Pointer arguments that the kernel writes to."""
        names = {name for op in kernel.ops if op.code is Code.ARANGE and (name := op.attributes.get("symbol"))}
        self.positive = frozenset(names | set(kernel.extents.values()))
        self._loads: dict[int, Op] = {}
        self._forms: dict[int, Form] = {}
        self._reads: dict[int, frozenset[Atom]] = {}
        for op in kernel.ops:
            if op.code in (Code.FOR, Code.WHILE):
                self.loops.update((value.id, op) for block in op.blocks for value in block.arguments)
            elif op.code in (Code.STORE, Code.ATOMIC_ADD, Code.ATOMIC):
                self.written.add(op.base)
            elif op.code is Code.LOAD and op.mask is None and not op.result.shape:
                self._loads[op.result.id] = op

    # --- forms

    def of(self, value: Value) -> Form:
        """The form of an integer; one opaque atom where it has none."""
        if value.id not in self._forms:
            self._forms[value.id] = self._form(value) or self._opaque(value)
        return self._forms[value.id]

    def trip(self, loop: Op) -> Atom:
        """The atom that counts a loop's trips."""
        start, stop, step = (self.of(value).invariant for value in loop.operands[:3])
        extent = None
        if start is not None and stop is not None and step is not None:
            extent = ceiling(stop - start, step)
        return Atom(Kind.TRIP, loop.blocks[0].arguments[0].id, extent=extent)

    def load(self, atom: Atom) -> Op | None:
        """The load of a scalar, from memory that the kernel does not write to, that an opaque atom is."""
        op = self._loads.get(atom.number) if atom.kind is Kind.OPAQUE else None
        return None if op is None or op.base in self.written else op

    def program(self, axis: int) -> Atom:
        """The atom of an axis of the grid."""
        return Atom(Kind.PROGRAM, axis, extent=self._programs(axis) - self.begins.get(axis, ZERO))

    def _programs(self, axis: int) -> Polynomial:
        return self.launch.grid[axis] if axis < len(self.launch.grid) else ONE

    def _opaque(self, value: Value) -> Form:
        reads = self.reads(value)
        if not reads and not value.shape:
            return Form(base=Polynomial.symbol(f"{value.name}.{value.id}", printable=False))
        return Form.of({Atom(Kind.OPAQUE, value.id, reads=reads): ONE})

    def _form(self, value: Value) -> Form | None:
        op = value.producer
        if op is None:
            return self._source(value)
        code, operands = op.code, op.operands
        if code is Code.CONST:
            number = constant(value)
            if op.attributes.get("open") and value.element != "i1":
                return Form(base=Polynomial.symbol(op.attributes["symbol"], positive=True, printable=False))
            if type(number) is not int:
                return None
            symbol = op.attributes.get("symbol")
            return Form(base=self._named(symbol, number) if symbol else Polynomial.integer(number))
        if code is Code.PROGRAM_ID:
            axis = op.attributes["axis"]
            return Form.of({self.program(axis): ONE}, self.begins.get(axis, ZERO))
        if code is Code.NUM_PROGRAMS:
            return Form(base=self._programs(op.attributes["axis"]))
        if code is Code.ARANGE:
            return self._arange(op)
        if value.is_float or value.element == "i1" or code is Code.LOAD:
            return None
        if code in (Code.ADD, Code.SUB):
            left, right = (self.of(operand) for operand in operands)
            return left + right if code is Code.ADD else left - right
        if code is Code.NEG:
            return self.of(operands[0]).times(Polynomial.integer(-1))
        if code in (Code.MUL, Code.SHL):
            return self._product(op)
        if code in _SIGNS or code in _CALLS:
            return self._divided(op)
        kept = code is Code.CAST and not op.attributes.get("unsigned")
        if kept and (op.attributes.get("held") or _widens(operands[0], value)):
            return self.of(operands[0])
        return self._reshaped(op)

    def _named(self, symbol: str, number: int) -> Polynomial:
        """Of a number that the source calls by an expression over constexprs."""
        return parsed(symbol, number, self.positive, self.kernel.constants)

    def _source(self, value: Value) -> Form | None:
        """Of arguments: of the kernel, or the index of a loop."""
        loop = self.loops.get(value.id)
        if loop is None:
            if value.is_float or value.is_pointer:
                return None
            return Form(base=self.launch.scalars.get(value.name) or Polynomial.symbol(value.name))
        if loop.code is Code.FOR and loop.blocks[0].arguments[0] is value:
            step = self.of(loop.operands[2]).invariant
            if step is not None:
                return self.of(loop.operands[0]) + Form.of({self.trip(loop): step})
        return None

    def _arange(self, op: Op) -> Form:
        start, end, symbol = op.attributes["start"], op.attributes["end"], op.attributes.get("symbol")
        count = self._named(symbol, end - start) if symbol else Polynomial.integer(end - start)
        return Form.of({Atom(Kind.LANE, 0, extent=count): ONE}, Polynomial.integer(start))

    def _product(self, op: Op) -> Form | None:
        left, right = (self.of(operand) for operand in op.operands)
        if op.code is Code.SHL:
            places = right.base.number if right.invariant is not None else None
            return None if places is None or places < 0 else left.times(Polynomial.integer(1 << places))
        if left.invariant is not None:
            return right.times(left.base)
        return left.times(right.base) if right.invariant is not None else None

    def _divided(self, op: Op) -> Form | None:
        """FLOORDIV, REM, MIN, MAX: of what a launch fixes a symbol, else of an index a quotient or a remainder."""
        whole, other = (self.of(operand) for operand in op.operands)
        if op.attributes.get("unsigned"):
            return None
        if whole.invariant is not None and other.invariant is not None:
            return Form(base=_computed(op.code, whole.base, other.base))
        if op.code not in _SIGNS or other.invariant is None or not self._not_negative(whole):
            return None
        divisor = other.base
        exact = whole.over(divisor)
        if exact is not None:
            return exact if op.code is Code.FLOORDIV else Form()
        make = remainder_of if op.code is Code.REM else quotient_of
        return Form.of({make(whole, divisor): ONE})

    def _not_negative(self, form: Form) -> bool:
        """Proved of a value wherever it is computed: within a loop from `part * each` to no more than `(part + 1) *
        each` there is a trip, so `each` is at least 1."""
        ran = [length for atom, _ in form.terms for length in self._lengths(atom)]
        known = all(atom.kind is not Kind.OPAQUE and (c.surely(0) or c in ran) for atom, c in form.terms)
        return known and form.base.surely(0)

    def _lengths(self, atom: Atom) -> list[Polynomial]:
        """Numbers that are at least 1 in every trip of a loop, since the index has not reached its end."""
        loop = self.loops.get(atom.number) if atom.kind is Kind.TRIP else None
        if loop is None or loop.code is not Code.FOR:
            return []
        index = self.of(loop.blocks[0].arguments[0])
        left = [index - self.of(end) for end in sides(self, loop.operands[1], Code.MIN)]
        return [-form.base for form in left if form.rises and {other for other, _ in form.terms} <= {atom}]

    def _reshaped(self, op: Op) -> Form | None:
        """Of operations that only move lanes."""
        if op.code in (Code.FULL, Code.BROADCAST):
            return self.of(op.operands[0])
        if op.code in (Code.EXPAND, Code.TRANS):
            return relabelled(op, self.of(op.operands[0]))
        if op.code is Code.RESHAPE:
            before = [axis for axis, extent in enumerate(op.operands[0].shape) if extent != 1]
            after = [axis for axis, extent in enumerate(op.result.shape) if extent != 1]
            if [op.operands[0].shape[axis] for axis in before] == [op.result.shape[axis] for axis in after]:
                places = dict(zip(before, after, strict=True))
                return self.of(op.operands[0]).moved(lambda old: places.get(old, old))
        return None

    # --- dependence

    def reads(self, value: Value) -> frozenset[Atom]:
        """The programs, trips and lanes that a value depends on; `UNKNOWN` among them where that cannot be said.

        Lanes of what is not elementwise are all its own.
        """
        if value.id not in self._reads:
            self._reads[value.id] = self._find_reads(value)
        return self._reads[value.id]

    def _find_reads(self, value: Value) -> frozenset[Atom]:
        op = value.producer
        if op is None:
            loop = self.loops.get(value.id)
            if loop is None:
                return frozenset()
            if loop.code is Code.FOR and loop.blocks[0].arguments[0] is value:
                bounds = (self.reads(loop.operands[0]), self.reads(loop.operands[2]))
                return frozenset((self.trip(loop),)).union(*bounds)
            return self._inside(loop) | frozenset(lanes(value.shape))
        if op.code is Code.PROGRAM_ID:
            return frozenset((self.program(op.attributes["axis"]),))
        if op.code is Code.ARANGE:
            return frozenset(lanes(value.shape))
        if op.code is Code.TAPE_LOAD or (op.code is Code.LOAD and op.base in self.written):
            return frozenset((UNKNOWN,))
        if op.blocks:
            own = frozenset((self.trip(op),)) if op.code is Code.FOR else frozenset()
            return (self._inside(op) - own) | frozenset(lanes(value.shape))
        found = frozenset(read for operand in op.operands for read in self.reads(operand))
        if op.code is Code.EXPAND:
            axis = op.attributes["axis"]
            return frozenset(moved_atom(read, lambda old: old + (old >= axis)) for read in found)
        if all(operand.shape in (value.shape, ()) for operand in op.operands) or _broadcasts(op):
            return found
        return frozenset(read for read in found if read.kind is not Kind.LANE) | frozenset(lanes(value.shape))

    def _inside(self, op: Op) -> frozenset[Atom]:
        """What anything in the blocks of an operation depends on, and its operands; no lanes."""
        nested = [inner for block in op.blocks for inner in walk(block)]
        own = {value.id for inner in nested for value in inner.results}
        own |= {value.id for inner in (op, *nested) for block in inner.blocks for value in block.arguments}
        found: set[Atom] = set()
        used = [*op.operands, *(value for inner in nested for value in inner.operands)]
        used += [value for inner in (op, *nested) for block in inner.blocks for value in block.yields]
        for value in used:
            if value.id not in own:
                found |= self.reads(value)
        for inner in (op, *nested):
            if inner.code is Code.FOR:
                found.add(self.trip(inner))
            elif inner.code in (Code.WHILE, Code.TAPE_LOAD) or (inner.code is Code.LOAD and inner.base in self.written):
                found.add(UNKNOWN)
            elif inner.code is Code.PROGRAM_ID:
                found.add(self.program(inner.attributes["axis"]))
        return frozenset(atom for atom in found if atom.kind is not Kind.LANE)


def sides(forms: Forms, value: Value, code: Code) -> list[Value]:
    """What a value is the least or the largest of: a bound by it is one by each. Numbers of a launch stay one."""
    op = value.producer
    if op is None or op.code is not code or op.attributes.get("unsigned") or forms.of(value).invariant is not None:
        return [value]
    return [side for operand in op.operands for side in sides(forms, operand, code)]


def relabelled(op: Op, form: Form) -> Form:
    """A form of the operand of an EXPAND or TRANS as one of its result."""
    if op.code is Code.TRANS:
        return form.moved(op.attributes["order"].index)
    axis = op.attributes["axis"]
    return form.moved(lambda old: old + (old >= axis))


def grid_extent(axis: int) -> Polynomial:
    """Programs along an axis."""
    return Polynomial.symbol(f"grid{axis}", positive=True)


def quotient(left: Polynomial, right: Polynomial) -> Polynomial:
    """left // right of sizes, as what a kernel computes of them is called."""
    return _computed(Code.FLOORDIV, left, right)


def _computed(code: Code, left: Polynomial, right: Polynomial) -> Polynomial:
    """A symbol for what a launch can compute; division is of sizes, which are not negative."""
    printable = left.printable and right.printable
    if code in _CALLS:
        return Polynomial.symbol(f"{_CALLS[code]}({left.text()}, {right.text()})", printable=printable)
    exact = left.quotient(right)
    if exact is not None:
        return exact if code is Code.FLOORDIV else ZERO
    rounded = left - right + ONE
    if code is Code.FLOORDIV and len(rounded.terms) < len(left.terms):
        return ceiling(rounded, right)  # (n + d - 1) // d
    a, b = left.number, right.number
    if a is not None and b is not None and a >= 0 and b > 0:
        return Polynomial.integer(a // b if code is Code.FLOORDIV else a % b)
    sides = [p.text() if p.text().isidentifier() or p.text().isdigit() else f"({p.text()})" for p in (left, right)]
    return Polynomial.symbol(f"({sides[0]} {_SIGNS[code]} {sides[1]})", printable=printable)


def _widens(before: Value, after: Value) -> bool:
    """Whether a conversion keeps every value."""
    integers = ("i8", "i16", "i32", "i64")
    known = before.element in integers and after.element in integers
    return known and integers.index(before.element) <= integers.index(after.element)


def _broadcasts(op: Op) -> bool:
    """Whether operands of other shapes only broadcast."""
    return op.code in ELEMENTWISE or op.code in (Code.FULL, Code.BROADCAST, Code.LOAD)
