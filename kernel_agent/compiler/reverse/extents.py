"""How many trips a loop makes at most, as a Python expression over what a launch knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import VEILS, Op, Value, bare, constant, is_setting


@dataclass(frozen=True)
class Range:
    """Between which numbers an integer lies in all programs and trips, both included."""

    low: str
    """A Python expression in brackets, a name or a number."""
    high: str
    natural: bool = False
    """Whether it is known not to be negative."""

    @property
    def exact(self) -> bool:
        """Whether it is one number."""
        return self.low == self.high


class Extents:
    """Ranges of the integers of a kernel.

    Expressions name scalar arguments, constexprs, `grid0`, `grid1`, `grid2`, and tensors of integers: what is loaded
    lies between the least and the largest that they hold, which costs the launch a look at the device.
    """

    def __init__(self, loops: Mapping[Value, Op]) -> None:
        """`loops`: index of every loop -> the loop."""
        self._loops = loops
        self._known: dict[Value, Range] = {}

    def trips(self, loop: Op) -> str:
        """An upper bound of the trips of a loop. Raises CannotDerive where a launch cannot know it."""
        size = segment_size(loop) if loop.code is Code.FOR else None
        if size is not None:
            return str(size.attributes["symbol"])
        found = loop.operands[:3] if loop.code is Code.FOR else _counter(loop)
        if found is None:
            raise CannotDerive(
                "a while loop carries values that its backward needs from every trip, and how many trips "
                "it makes is not known before the launch",
                remedy="count its trips, and stop at a bound: `while go_on and step < limit`",
            )
        start, stop, step = found
        length, stride = self._beyond(stop, start) or self._apart(stop, start), _at_least_one(self.of(step))
        if stride == "1":
            return f"max({length}, 0)"
        return f"max(-(-{length} // {stride}), 0)"

    def _apart(self, stop: Value, start: Value) -> str:
        """At most how far a value lies behind another, of their ranges alone."""
        first, last = self.of(start), self.of(stop)
        return last.high if first.low == "0" else f"({last.high} - {first.low})"

    def _beyond(self, stop: Value, start: Value) -> str | None:
        """The same where the one is computed from the other, and what they have in common does not count; else None."""
        stop, start = bare(stop), bare(start)
        if stop is start:
            return "0"
        op = stop.producer
        if op is not None and op.code is Code.ADD:
            for kept, added in (op.operands, op.operands[::-1]):
                found = self._beyond(kept, start)
                if found is not None:
                    return _plus(found, self.of(added).high)
        if op is not None and op.code is Code.LOAD and _follows(op, start):
            name, far = op.base.name, self._apart(stop, start)
            near = f"{name}.is_contiguous() and {name}.numel() > 1"
            return f"(int({name}.flatten().diff().max()) if {near} else {far})"
        if op is not None and op.code is Code.MIN:
            either = [found for value in op.operands if (found := self._beyond(value, start)) is not None]
            if either:
                return either[0] if len(either) == 1 else f"min({', '.join(either)})"
        return None

    def of(self, value: Value) -> Range:
        """The range of an integer. Raises CannotDerive."""
        if value not in self._known:
            self._known[value] = self._of(value)
        return self._known[value]

    def _of(self, value: Value) -> Range:
        op = value.producer
        if op is None:
            return self._argument(value)
        if op.code is Code.CONST:
            text = str(op.attributes["symbol"] or constant(value))
            return _one(
                text if text.isidentifier() or text.isdigit() else f"({text})", bool((constant(value) or 0) >= 0)
            )
        if op.code is Code.PROGRAM_ID:
            return Range("0", f"(grid{op.attributes['axis']} - 1)", True)
        if op.code is Code.NUM_PROGRAMS:
            return _one(f"grid{op.attributes['axis']}", True)
        if op.code in VEILS:
            return self.of(op.operands[0])
        if op.code is Code.LOAD and op.mask is None and not value.is_float:
            low, high = (f"(int({op.base.name}.{end}()) if {op.base.name}.numel() else 0)" for end in ("min", "max"))
            return Range(low, high)
        rule = _RULES.get(op.code)
        if rule is None:
            raise _unknown(value)
        operands = op.operands[1:] if op.code is Code.SELECT else op.operands
        return rule(*(self.of(operand) for operand in operands))

    def _argument(self, value: Value) -> Range:
        loop = self._loops.get(value)
        if loop is not None:
            start, stop = self.of(loop.operands[0]), self.of(loop.operands[1])
            return Range(start.low, f"({stop.high} - 1)", start.natural)
        if not value.name or value.shape or value.is_float or value.depth > 0:
            raise _unknown(value)
        return _one(value.name)


def segment_size(loop: Op) -> Op | None:
    """The constexpr that no trips of a loop are more than: it ends at `start + SEGMENT * step`, or before."""
    start, stop, step = (bare(value) for value in loop.operands[:3])
    ends = stop.producer.operands if stop.producer is not None and stop.producer.code is Code.MIN else ()
    for end in map(bare, ends):
        if end.producer is None or end.producer.code is not Code.ADD:
            continue
        for first, length in (end.producer.operands, end.producer.operands[::-1]):
            stride = bare(length).producer
            if bare(first) is not start or stride is None:
                continue
            factors = [bare(one) for one in stride.operands] if stride.code is Code.MUL else [step, bare(length)]
            sizes = [one.producer for one in factors if one is not step and is_setting(one)]
            if len(sizes) == 1 and (step in factors or constant(step) == 1):
                return sizes[0]
    return None


def _follows(load: Op, start: Value) -> bool:
    """Whether a load without a mask is of what lies behind that which another value was loaded from."""
    before = start.producer
    if before is None or before.code is not Code.LOAD or before.base is not load.base:
        return False
    step = bare(load.offset).producer
    if load.mask is not None or before.mask is not None or step is None or step.code is not Code.ADD:
        return False
    return any(
        bare(one) is bare(before.offset) and constant(bare(other)) == 1
        for one, other in (step.operands, step.operands[::-1])
    )


def _counter(loop: Op) -> tuple[Value, ...] | None:
    """Start, bound and step of what a WHILE counts up as long as it is less than a bound, whatever else it asks for."""
    test, body = loop.blocks
    conditions = [test.yields[0]]
    while conditions:
        op = conditions.pop().producer
        if op is not None and op.code is Code.AND:
            conditions.extend(op.operands)
        if op is None or op.code is not Code.CMP or op.attributes["predicate"] != "lt" or op.attributes.get("unsigned"):
            continue
        count, bound = op.operands
        if count not in test.arguments or count.is_float or count not in test.yields[1:]:
            continue
        place = test.arguments.index(count)
        step = _step(body.yields[place], body.arguments[test.yields.index(count, 1) - 1])
        if step is not None:
            return loop.operands[place], bound, step
    return None


def _step(value: Value, count: Value) -> Value | None:
    """What is added to a count, if that is a positive constant."""
    op = value.producer
    if op is None or op.code is not Code.ADD or count not in op.operands:
        return None
    step = op.operands[1 if op.operands[0] is count else 0]
    return step if (constant(step) or 0) > 0 else None


def _unknown(value: Value) -> CannotDerive:
    what = f"`{value.name}`" if value.name else "a value"
    return CannotDerive(
        f"how often a loop runs depends on {what}{value.where}, which is not known before the launch, "
        "and the backward must keep something of every trip",
        remedy="bound the loop by arguments of the kernel, and mask the trips that are too many",
    )


def _one(text: str, natural: bool = False) -> Range:
    return Range(text, text, natural)


def _add(a: Range, b: Range) -> Range:
    return Range(_plus(a.low, b.low), _plus(a.high, b.high), a.natural and b.natural)


def _plus(a: str, b: str) -> str:
    return b if a == "0" else a if b == "0" else f"({a} + {b})"


def _sub(a: Range, b: Range) -> Range:
    return Range(f"({a.low} - {b.high})", a.high if b.low == "0" else f"({a.high} - {b.low})")


def _mul(a: Range, b: Range) -> Range:
    if (a.natural and b.natural) or (a.exact and b.exact):
        low = "0" if "0" in (a.low, b.low) else f"({a.low} * {b.low})"
        return Range(low, low if a.exact and b.exact else f"({a.high} * {b.high})", a.natural and b.natural)
    corners = ", ".join(dict.fromkeys(f"{x} * {y}" for x in (a.low, a.high) for y in (b.low, b.high)))
    return Range(f"min({corners})", f"max({corners})")


def _floordiv(a: Range, b: Range) -> Range:
    """By a number that is positive. Cut towards zero, as the kernel does, quotients of negative numbers are larger."""
    least = _at_least_one(b)
    if a.natural:
        return Range("0" if a.low == "0" else f"({a.low} // {b.high})", f"({a.high} // {least})", True)
    return Range(f"min({a.low} // {least}, 0)", f"(max({a.high}, 0) // {least})")


def _at_least_one(divisor: Range) -> str:
    """The least that a divisor, or a step, may be: the kernel divides by no zero, though a range may reach there."""
    return divisor.low if divisor.exact else f"max({divisor.low}, 1)"


def _rem(a: Range, b: Range) -> Range:
    return Range("0" if a.natural else f"(1 - {b.high})", f"({b.high} - 1)", a.natural)


def _smaller(a: Range, b: Range) -> Range:
    return Range(f"min({a.low}, {b.low})", f"min({a.high}, {b.high})", a.natural and b.natural)


def _larger(a: Range, b: Range) -> Range:
    return Range(f"max({a.low}, {b.low})", f"max({a.high}, {b.high})", a.natural or b.natural)


def _either(a: Range, b: Range) -> Range:
    return a if a == b else Range(f"min({a.low}, {b.low})", f"max({a.high}, {b.high})", a.natural and b.natural)


_RULES: dict[Code, Callable[..., Range]] = {
    Code.ADD: _add,
    Code.SUB: _sub,
    Code.MUL: _mul,
    Code.FLOORDIV: _floordiv,
    Code.REM: _rem,
    Code.MIN: _smaller,
    Code.MAX: _larger,
    Code.SELECT: _either,
}
