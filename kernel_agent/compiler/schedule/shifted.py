"""`Windower`: a kernel whose programs own elements instead of outputs, and add to each what taps of windows add there.

See `windows`, which finds what it is built by.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.schedule.counted import Counted, span_of
from kernel_agent.compiler.schedule.forms import Forms
from kernel_agent.compiler.schedule.linear import Form, Kind
from kernel_agent.compiler.schedule.materialize import on_axis
from kernel_agent.compiler.schedule.polynomial import ONE
from kernel_agent.compiler.schedule.regrid import Regrid, Regridder
from kernel_agent.compiler.schedule.seen import Seen, all_seen
from kernel_agent.compiler.schedule.sites import Site
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.rebuild import Copier, emptied
from kernel_agent.compiler.ssa.value import Kernel, Op, Value, walk

if TYPE_CHECKING:
    from kernel_agent.compiler.schedule.windows import Count

MOST_LOADS = 256
"""Loads that all taps together do again."""
_DIGITS = frozenset((Code.PROGRAM_ID, Code.FLOORDIV, Code.REM))


class Windower(Copier):
    """Writes the kernel."""

    def __init__(
        self,
        source: Kernel,
        forms: Forms,
        counts: Sequence[Count],
        added: Sequence[tuple[Site, Form]],
        regrids: Sequence[Regrid] = (),
    ) -> None:
        """`added`: the additions in the order of the counts' shifts, and their addresses but for the counts' digits.
        `regrids`: axes of the grid that are digits of other sizes now."""
        base = added[0][0].op.base
        super().__init__(source, Builder(emptied(source, name=f"{source.name}_{base.name}"), frozenset((base,))))
        self.forms = forms
        self.counts = counts
        self.added = {site.op: (tap, rest) for tap, (site, rest) in enumerate(added)}
        self.loops = {site.op: site.loops for site, _ in added}
        self.regrids = {one.axis: one for one in regrids}
        self.write = Regridder(forms, self, self.regrids)
        self.seen = all_seen(source, forms, [count.number for count in counts])
        self.moving = self._closure({value for seen in self.seen for value in seen.values})
        if any(bound in self.moving for loops in self.loops.values() for loop in loops for bound in loop.operands[:3]):
            # The loop is gone through by the program that owns elements, for outputs of other numbers than its own.
            raise CannotDerive("which trips add to a window depends on the number of the output")
        self.places: list[list[Value]] = []
        """By count, the coordinates of the elements."""
        self.inside: list[Value] = []
        """By count, which of them there are."""
        needed = [value for op in self.added for value in op.operands]
        wide = any(value.element == "i64" for seen in self.seen for value in seen.replaced)
        self.element = "i64" if wide else "i32"
        for seen in self.seen:
            if seen.wide:
                seen.lanes.ask(needed)
        loads = {op for op in walk(source.body) if op.code is Code.LOAD and op.result in self.moving}
        if len(loads) * len(added) > MOST_LOADS:
            raise CannotDerive("taps would load again what all outputs of their windows were computed from")

    def copy(self) -> Kernel:
        """The whole kernel."""
        b = self.b
        for count, seen in zip(self.counts, self.seen, strict=True):
            number = count.number
            width = self.write.number(number.width, self.element)
            program = b.cast(self.write.atom(number.program, ()), self.element)
            n = b.add(b.mul(program, width), b.cast(self._lanes(seen, number), self.element))
            self.inside.append(b.compare("lt", n, self.write.number(count.total, self.element)))
            digits, rest = [], n
            for axis in count.axes[:-1]:
                size = self.write.number(axis.high - axis.low, self.element)
                digits.append(b.elementwise(Code.REM, (rest, size)))
                rest = b.elementwise(Code.FLOORDIV, (rest, size))
            digits.append(rest)
            self.places.append(
                [
                    b.add(d, self.write.number(axis.low, self.element))
                    for d, axis in zip(digits, count.axes, strict=True)
                ]
            )
        return super().copy()

    def _closure(self, start: set[Value]) -> frozenset[Value]:
        """Values that depend on some, loops that hold one as wholes."""
        found = set(start)
        known = -1
        while known != len(found):
            known = len(found)
            for op in self.source.ops:
                inner = [nested for block in op.blocks for nested in walk(block)]
                used = [*op.operands, *(value for nested in inner for value in nested.operands)]
                if any(value in found for value in used):
                    found.update(value for value in op.results if not self._steady(value))
                    found.update(value for block in op.blocks for value in block.arguments[1:])
        return frozenset(found)

    def _steady(self, value: Value) -> bool:
        """Whether an integer is known not to depend on the numbers, whatever it is computed from."""
        if value.is_float or value.element == "i1":
            return False
        form = self.forms.of(value)
        return not any(count.number.concerns(atom) for count in self.counts for atom, _ in form.terms)

    def around(self, op: Op) -> tuple[Op, ...]:
        """Loops around an addition."""
        return self.loops[op]

    def pure(self, op: Op) -> None:
        """How many programs the forward had is told, and which one a program would be there."""
        if op.code is Code.NUM_PROGRAMS:
            self[op.result] = self.write.number(self.forms.of(op.result).base, op.result.element)
            return
        form = self.forms.of(op.result) if self.regrids and op.code in _DIGITS else Form()
        digit = form.terms[0][0] if len(form.terms) == 1 and form.terms[0][1] == ONE and not form.base.terms else None
        if op.code is Code.PROGRAM_ID and op.attributes["axis"] in self.regrids:
            self[op.result] = self.regrids[op.attributes["axis"]].beside(self.b, self.write)
        elif digit is not None and self.write.has(digit):
            self[op.result] = self.write.atom(digit, ())
        else:
            super().pure(op)

    def _lanes(self, seen: Seen, number: Counted) -> Value:
        if not seen.wide:
            return self.b.const(0)
        value, axis = next(iter(seen.lanes.axes.items()))
        if number.part is None:
            return self.b.arange(0, value.shape[axis], number.width.text() if number.width.symbols else None)
        return self.write.atom(number.part, (value.shape[axis],))

    def effect(self, op: Op) -> None:
        """Additions."""
        if self.slicing or op not in self.added:
            if op.code is not Code.ATOMIC_ADD:  # else a tap that no output has
                super().effect(op)
            return
        tap, rest = self.added[op]
        inner = _Tap(self, tap, op)
        b, shape = self.b, op.offset.shape
        stored = inner[op.stored]
        mask = None if op.mask is None else inner[op.mask]
        offset = self.write.form(rest, shape, op.offset.element)
        for which, (count, seen) in enumerate(zip(self.counts, self.seen, strict=True)):
            axis = seen.axis(op.offset)
            for guard in (inner.guards[which], self.inside[which]):
                here = on_axis(self, guard, len(shape), axis)
                mask = here if mask is None else b.logical_and(mask, here)
            for place, y in zip(count.axes, self.places[which], strict=True):
                if place.unit.terms:
                    at = b.cast(on_axis(self, y, len(shape), axis), op.offset.element)
                    offset = b.add(offset, b.mul(at, self.write.number(place.unit, op.offset.element)))
        self.b.store(self[op.base], b.whole(offset, shape), stored, mask, Code.ATOMIC_ADD)


class _Tap(Copier):
    """Copies what one tap adds, at the outputs that elements belong to."""

    def __init__(self, outer: Windower, tap: int, op: Op) -> None:
        super().__init__(outer.source, outer.b)
        self.outer = outer
        self.guards: list[Value] = []
        """By count, whether there is such an output, but for what the addition's own mask leaves out."""
        self.complete: list[Value] = []
        """The same, and what that leaves out."""
        self.digits: list[list[Value]] = []
        self.op_offset, self.shape = op.offset, op.offset.shape
        around = {id(loop) for loop in outer.around(op)}
        self.nested = {
            value
            for loop in outer.source.ops
            if loop.blocks and id(loop) not in around
            for block in loop.blocks
            for value in (*block.arguments, *(v for inner in walk(block) for v in inner.results))
        }
        """What loops compute that are copied for the tap."""
        b, write = outer.b, outer.write
        for count, places in zip(outer.counts, outer.places, strict=True):
            found, there = [], b.const(True, "i1")
            sizes = [*count.number.radices, None]
            for axis, y, size in zip(count.axes, places, sizes, strict=True):
                if not axis.moves:
                    found.append(y)
                    continue
                moved = write.form(axis.shifts[tap], (), outer.element)
                gone = b.sub(y, moved) if axis.signs[tap] > 0 else b.sub(moved, y)
                there = b.logical_and(there, b.compare("ge", gone, b.const(0, outer.element)))
                if axis.step != ONE:
                    step = write.number(axis.step, outer.element)
                    whole = b.compare("eq", b.elementwise(Code.REM, (gone, step)), b.const(0, outer.element))
                    there = b.logical_and(there, whole)
                    gone = b.elementwise(Code.FLOORDIV, (gone, step))
                if size is not None:
                    there = b.logical_and(there, b.compare("lt", gone, write.number(size, outer.element)))
                found.append(gone)
            self.digits.append(found)
            n = self._number(len(self.digits) - 1)
            complete = b.logical_and(there, b.compare("lt", n, write.number(count.outputs, outer.element)))
            self.guards.append(there if count.guarded[tap] else complete)
            self.complete.append(complete)

    def __getitem__(self, old: Value) -> Value:
        own = super().find(old)
        if own is None and old not in self.outer.moving and old not in self.nested:
            return self.outer[old]
        return super().__getitem__(old)

    def find(self, old: Value) -> Value | None:
        """Loops around the addition are the outer copier's."""
        found = super().find(old)
        if found is None and old not in self.outer.moving:
            return self.outer.find(old)
        if found is None and any(old in seen.replaced for seen in self.outer.seen):
            found = self[old] = self._replaced(old)
        return found

    def pure(self, op: Op) -> None:
        """Integers that depend on the number of an output are computed from the element's coordinates."""
        if any(result in seen.replaced for seen in self.outer.seen for result in op.results):
            self.find(op.result)
            return
        if op.code is Code.PROGRAM_ID:
            self[op.result] = self._axis(op)
            return
        for which, count in enumerate(self.outer.counts):
            if self._counts(count, op):
                self[op.result] = self._program(which)
                return
        try:
            super().pure(op)
        except ValueError as error:
            raise CannotDerive("what a program adds as a whole does not go with the elements") from error

    def _axis(self, op: Op) -> Value:
        """An axis of the grid, some digits of which are those of the outputs that lanes belong to."""
        b, outer, write = self.b, self.outer, self.outer.write
        total = b.cast(outer[op.result], outer.element)
        for which, count in enumerate(self.outer.counts):
            program = count.number.program
            if op.attributes["axis"] not in {source.number for source in program.sources}:
                continue
            if program.kind is Kind.PROGRAM:
                return self._program(which)
            span = span_of(program)
            if span is None or span.whole != self.outer.forms.of(op.result):
                raise CannotDerive("programs do not only count outputs")
            gone = self._program(which)
            if not outer.write.has(program):  # else the axis as it is has no such digit
                gone = b.sub(gone, b.cast(write.atom(program, ()), outer.element))
            total = b.add(total, b.mul(gone, write.number(span.low, outer.element)))
        return total

    def _program(self, which: int) -> Value:
        """The programs of the outputs that lanes belong to."""
        b, outer = self.b, self.outer
        count, seen = outer.counts[which], outer.seen[which]
        n = self._number(which)
        if not seen.wide:
            return n
        program = b.elementwise(Code.FLOORDIV, (n, outer.write.number(count.number.width, outer.element)))
        return on_axis(self, program, len(self.shape), seen.axis(self.op_offset))

    def _number(self, which: int) -> Value:
        """Of the outputs that lanes belong to."""
        b, outer = self.b, self.outer
        n = b.const(0, outer.element)
        for place, digit in zip(outer.counts[which].number.places, self.digits[which], strict=True):
            n = b.add(n, b.mul(digit, outer.write.number(place, outer.element)))
        return n

    def _counts(self, count: Count, op: Op) -> bool:
        """Whether an operation gives the programs that count, and not the number."""
        plain = op.code in (Code.REM, Code.FLOORDIV)
        return plain and self.outer.forms.of(op.result) == Form.of({count.number.program: ONE})

    def _replaced(self, value: Value) -> Value:
        outer, b = self.outer, self.b
        form = outer.forms.of(value)
        total: Value | None = None
        for which, (count, seen) in enumerate(zip(outer.counts, outer.seen, strict=True)):
            found = count.number.digits(form)
            if found is None:
                raise CannotDerive("programs or lanes do not only count outputs")
            form = found.rest
            for place, number in found.parts.items():
                at = on_axis(self, self.digits[which][place], len(value.shape), seen.axis(value))
                index = b.cast(at, value.element, held=at.element != value.element)
                part = b.mul(index, outer.write.number(number, value.element))
                total = part if total is None else b.add(total, part)
        rest = outer.write.form(form, value.shape, value.element)
        return rest if total is None else b.add(total, rest)

    def load(self, op: Op) -> None:
        """Nothing is read for outputs that are not there. A load without a mask was for all of a program, and the
        forward may have had no program so far on."""
        if op.result not in self.outer.moving:
            super().load(op)
            return
        if op.base in self.written and not op.attributes.get("saved"):
            raise CannotDerive(f"{op.base.name} is read and written")
        b, offset = self.b, self.whole(op.offset)
        shape = offset.shape
        mask = None if op.mask is None else self[op.mask]
        of_program = not op.offset.shape and bool(offset.shape)
        guards = self.complete if of_program or op.mask is None else self.guards
        for guard, seen in zip(guards, self.outer.seen, strict=True):
            axes = [seen.lanes.axes[v] for v in op.operands if v in seen.lanes.axes]
            axis = axes[0] if axes else None if seen.wide else 0
            if of_program:
                axis = seen.axis(self.op_offset)
            if axis is not None:
                here = on_axis(self, guard, len(shape), axis)
                mask = here if mask is None else b.logical_and(mask, here)
        other = None if op.other is None else self[op.other]
        if other is None and mask is not None:
            other = b.zero(op.result)
        self[op.result] = b.load(self[op.base], offset, mask, other, op.result.name)

    def loop(self, op: Op) -> None:
        """Loops are the same for all lanes."""
        if any(self[bound].shape for bound in op.operands[:3]):
            raise CannotDerive("a loop of a tap has other bounds for other elements")
        super().loop(op)

    def branch(self, op: Op) -> None:
        """So are branches."""
        if self[op.operands[0]].shape:
            raise CannotDerive("a branch of a tap is taken for some elements")
        super().branch(op)
