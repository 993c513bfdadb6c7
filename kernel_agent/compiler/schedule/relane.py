"""`relaned`: lanes that count taps and channels together, as a loop over taps whose lanes are channels.

A product of few channels takes several taps at once: `j = start + lane` has the tap `j // C` and the channel `j % C`.
The lanes of one trip move the pixel by different shifts then, which no owner of elements could undo. What a lane adds
does not depend on its neighbours, and lanes behind the last tap add nothing: there may be a trip for each tap instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.schedule.lanewise import Lanewise
from kernel_agent.compiler.schedule.linear import Form, Kind
from kernel_agent.compiler.schedule.polynomial import ONE, Polynomial
from kernel_agent.compiler.schedule.sites import Site, negatives, sites
from kernel_agent.compiler.schedule.visited import constant_of
from kernel_agent.compiler.ssa.code import EFFECTS, Code
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.uses import Uses
from kernel_agent.compiler.ssa.value import Kernel, Op, Value, constant, is_constant, unspread, walk

_PARTS = frozenset((Code.FLOORDIV, Code.REM))
_MOVES = frozenset((Code.EXPAND, Code.TRANS))


@dataclass(frozen=True)
class _Lanes:
    """A loop whose trips and lanes count taps and channels."""

    places: Value
    """Trip and lane as one number."""
    taps: Value
    channels: Value
    """How many a tap has."""
    count: Polynomial
    """Of taps."""
    known: Set[Op]
    """Whether a tap is one of those."""
    axes: Mapping[Value, int]
    """Of what is computed in the loop, the axis along which lanes count."""


def relaned(kernel: Kernel, launch: Launch) -> Kernel | None:
    """The kernel with such loops over taps; None where there are none. Raises CannotDerive where lanes meet."""
    forms, uses = Forms(kernel, launch), Uses.of(kernel)
    found = {op: lanes for op in kernel.ops if op.code is Code.FOR and (lanes := _lanes(forms, uses, op)) is not None}
    return prune(_Relaner(kernel, found).copy()) if found else None


def _lanes(forms: Forms, uses: Uses, loop: Op) -> _Lanes | None:
    start, stop, step, *carries = loop.operands
    (block,) = loop.blocks
    if carries or loop.attributes["reverse"] or not is_constant(start, 0) or any(op.blocks for op in block.ops):
        return None
    index = block.arguments[0]
    (places, *others) = [op.result for op in uses[index]] or [index]
    width = forms.of(step).invariant
    if others or width is None or not _counts(places, index, forms, width):
        return None
    parts = uses[places]
    if {op.code for op in parts} != _PARTS or any(op.operands[0] is not places for op in parts):
        return None
    channels, *different = {unspread(op.operands[1]) for op in parts}
    size = forms.of(channels).invariant
    if different or size is None or constant(channels) is None or any(op.attributes.get("unsigned") for op in parts):
        return None
    end = forms.of(stop).invariant
    count = None if end is None else end.quotient(size)
    (taps,) = {op.result for op in parts if op.code is Code.FLOORDIV}
    effects = sites(block, EFFECTS)
    if count is None or end is None or any(site.op.code is not Code.ATOMIC_ADD for site in effects):
        return None
    if end.quotient(width) is None and not all(_ends(forms, site, loop, size, count) for site in effects):
        return None
    lanes = Lanewise({places: 0})
    lanes.ask(operand for site in effects for operand in site.op.operands)
    shaped = [op.result for op in walk(block) if op.code in (Code.FULL, Code.BROADCAST, Code.RESHAPE)]
    if any(value in lanes.axes for value in shaped):
        return None
    asked = {op for op in uses[taps] if op.code is Code.CMP and op.attributes["predicate"] == "lt"}
    known = {op for op in asked if op.operands[0] is taps and forms.of(op.operands[1]).invariant == count}
    return _Lanes(places, taps, channels, count, known, lanes.axes)


def _counts(places: Value, index: Value, forms: Forms, width: Polynomial) -> bool:
    """Whether a tile is a loop's index and as many lanes as the loop steps by."""
    op = places.producer
    if op is None or op.code is not Code.ADD or len(places.shape) != 1:
        return False
    (other,) = [operand for operand in op.operands if unspread(operand) is not index] or [index]
    form = forms.of(other)
    atoms = [atom for atom, number in form.terms if atom.kind is Kind.LANE and number == ONE]
    return len(form.terms) == len(atoms) == 1 and not form.base.terms and atoms[0].extent == width


def _ends(forms: Forms, site: Site, loop: Op, size: Polynomial, count: Polynomial) -> bool:
    """Whether an addition asks for its tap to be one of those that there are."""
    trip = forms.trip(loop)
    for part in negatives(forms, site):
        if len(part.terms) == 1 and part.terms[0][1] == ONE and (part.base + count).surely(0):
            ((atom, _),) = part.terms
            whole = atom.whole or Form()
            if atom.kind is Kind.QUOTIENT and atom.divisor == size and any(one == trip for one, _ in whole.terms):
                return True
    return False


class _Relaner(Copier):
    """Writes the loops."""

    def __init__(self, source: Kernel, found: Mapping[Op, _Lanes]) -> None:
        super().__init__(source)
        self.found = found
        self.inner: _Lanes | None = None
        """Of the loop that is copied."""

    def loop(self, op: Op) -> None:
        """A FOR."""
        lanes = self.found.get(op)
        if lanes is None:
            super().loop(op)
            return
        b, (block,) = self.b, op.blocks
        count, size = constant_of(b, lanes.count), constant(lanes.channels)
        if count is None or type(size) is not int:
            raise CannotDerive("how many taps there are is not a constant")
        channels, extents = self[lanes.channels], b.kernel.extents
        made = channels.producer
        symbol = None if made is None else made.attributes.get("symbol")
        if symbol is not None and extents.setdefault(size, symbol) != symbol:
            raise CannotDerive(f"tiles of {extents[size]} and of {symbol} lanes have one name")

        def body(tap: Value, _: list[Value]) -> Sequence[Value]:
            self.inner = lanes
            channel = b.arange(0, size, symbol)
            self[lanes.places] = b.add(b.mul(tap, channels), channel)
            for inner in block.ops:
                if inner.code in _PARTS and inner.operands[0] is lanes.places:
                    self[inner.result] = tap if inner.code is Code.FLOORDIV else channel
                elif lanes.places not in inner.results:
                    self.op(inner)
            self.inner = None
            return []

        b.loop((self[op.operands[0]], count, b.const(1)), [], body, index_name=lanes.taps.name)

    def whole(self, old: Value) -> Value:
        """With as many lanes as there are channels."""
        if self.inner is None or old not in self.inner.axes:
            return super().whole(old)
        shape = list(old.shape)
        shape[self.inner.axes[old]] = int(constant(self.inner.channels) or 0)
        return self.b.whole(self[old], shape)

    def pure(self, op: Op) -> None:
        """Where all lanes have one tap, that is a number."""
        if self.inner is not None and op.code in _MOVES and not self[op.operands[0]].shape:
            self[op.result] = self[op.operands[0]]
            return
        if self.inner is not None and op in self.inner.known:
            self[op.result] = self.b.const(True, "i1")
            return
        try:
            super().pure(op)
        except (ValueError, AssertionError) as error:
            raise CannotDerive("lanes of taps meet a tile of other lanes") from error
