"""`rastered`: windows whose places programs compute, as tiles at fixed places that a loop goes through.

A tile of queries reads keys from `clamp(first - r, 0, n - w)` on, so that no key knows its place in a window before the
program does. What the window adds lane by lane is added by tiles `[i, i + BLOCK)` as well, of which each program meets
one or two: the kernel asks whether it does, and each lane whether the window has it. Then tiles are the trips of a
loop over one range for all programs, which owners can be cut from. Sums over all of a window stay in front of the loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from kernel_agent.compiler.errors import CannotDerive, DoesNotApply
from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.schedule.linear import Kind
from kernel_agent.compiler.schedule.polynomial import ONE, Polynomial
from kernel_agent.compiler.schedule.sites import Site, mask_forms, sites
from kernel_agent.compiler.ssa.code import ELEMENTWISE, Code
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.value import Kernel, Op, Value, unspread

OF_TILES = "rasters"
"""Attribute of the loop: what it takes from before it belongs to a window as a whole."""
_SPREADS = frozenset((Code.FULL, Code.BROADCAST))


@dataclass(frozen=True)
class Rastered:
    """A kernel that adds the same, in a loop over tiles at fixed places."""

    kernel: Kernel
    facts: tuple[str, ...]
    """Python: no window begins in front of the first tile."""


@dataclass(frozen=True)
class _Window:
    """Indices `start + arange`."""

    indices: Value
    start: Value
    size: int
    end: Value
    """Indices that anything is added for are less."""
    added: tuple[Op, ...]


def rastered(kernel: Kernel, launch: Launch) -> Rastered:
    """The kernel with additions of windows in such a loop. Raises DoesNotApply where there are none, or where what they
    add is not known lane by lane."""
    forms = Forms(kernel, launch)
    added = sites(kernel.body, frozenset((Code.ATOMIC_ADD,)))
    top = [site for site in added if site.block is kernel.body and not site.conditions]
    for op in kernel.body.ops:
        start = next((one for one in lane_starts(op) if _is_placed(forms, one)), None)
        if start is None:
            continue
        facts = _not_negative(forms, start)
        lanewise = Lanes(kernel.body.ops, op.result)
        mine = [site for site in top if lanewise.axes.get(site.op.offset)]
        ends = {_end(forms, site, start, lanewise.axes[site.op.offset]) for site in mine}
        if facts is None or len(ends) != 1 or None in ends or launch.calls.refute(facts):
            continue
        (end,) = ends
        assert end is not None
        window = _Window(op.result, start, op.result.shape[0], end, tuple(site.op for site in mine))
        made = prune(_Rasterer(kernel, window, lanewise).copy())
        return Rastered(made, tuple(facts))
    raise DoesNotApply("no window of lanes begins where a program says")


def lane_starts(op: Op) -> Iterator[Value]:
    """Numbers that an operation adds lanes from 0 on to: where what it computes may begin."""
    if op.code is not Code.ADD or len(op.result.shape) != 1:
        return
    for one, other in (op.operands, op.operands[::-1]):
        start, lane = unspread(one), other.producer
        whole = lane is not None and lane.code is Code.ARANGE and lane.attributes["start"] == 0
        if whole and not start.shape and other.shape == op.result.shape:
            yield start


def _is_placed(forms: Forms, start: Value) -> bool:
    """Whether a number of its program is no sum of products."""
    kinds = [atom.kind for atom, _ in forms.of(start).terms]
    return kinds == [Kind.OPAQUE] and {atom.kind for atom in forms.reads(start)} == {Kind.PROGRAM}


def _not_negative(forms: Forms, value: Value) -> list[str] | None:
    """Facts under which a number is at least 0; None where it may be anything."""
    op = value.producer
    form = forms.of(value)
    if form.not_negative:
        return []
    if not form.terms and form.base.printable:
        return [f"{form.base.text()} >= 0"]
    if op is None or op.attributes.get("unsigned") or op.code not in (Code.MIN, Code.MAX):
        return None
    parts = [_not_negative(forms, operand) for operand in op.operands]
    known = [part for part in parts if part is not None]
    if op.code is Code.MAX:
        return min(known, key=len, default=None)
    return [fact for part in known for fact in part] if len(known) == len(parts) else None


def _end(forms: Forms, site: Site, start: Value, axes: Set[int]) -> Value | None:
    """The argument that a mask says all indices of a window to be less than, where something is added."""
    (opaque,) = [atom for atom, _ in forms.of(start).terms]
    arguments = {value.name: value for value in forms.kernel.arguments if value.element == "i32"}
    for negative in [] if site.op.mask is None else mask_forms(forms, site.op.mask):
        if negative is None:
            continue
        coefficients = negative.coefficients
        rest = [atom for atom in coefficients if atom != opaque]
        lanes = [atom.number for atom in rest if atom.kind is Kind.LANE and coefficients[atom] == ONE]
        if coefficients.get(opaque) == ONE and len(rest) == 1 and lanes == list(axes):
            symbols = [name for name in arguments if Polynomial.symbol(name) == -negative.base]
            if symbols:
                return arguments[symbols[0]]
    return None


class Lanes:
    """Along which axes of each value the lanes of a window lie, where each is computed of its own lane alone."""

    def __init__(self, ops: Sequence[Op], indices: Value) -> None:
        """`ops`: of the block that computes the indices."""
        self.axes: dict[Value, frozenset[int]] = {indices: frozenset((0,))}
        """Of values that have any."""
        self.mixed: set[Value] = set()
        """Values that may have lanes of the window, but not lane by lane."""
        self.size = indices.shape[0]
        known = {indices}
        for op in ops:
            for result in op.results:
                if result not in known:
                    self._see(op, result)

    def _see(self, op: Op, result: Value) -> None:
        tile = self.size in result.shape
        if tile and (op.blocks or any(value in self.mixed for value in op.operands)):
            self.mixed.add(result)
            return
        moving = [value for value in op.operands if self.axes.get(value)]
        if not moving:
            return
        found = self._moved(op, result)
        if found is None and tile:
            self.mixed.add(result)
        elif found:
            self.axes[result] = found

    def _moved(self, op: Op, result: Value) -> frozenset[int] | None:
        """None where it does not show."""
        given = [self.axes.get(value, frozenset()) for value in op.operands]
        if op.code is Code.EXPAND:
            axis = op.attributes["axis"]
            return frozenset(old + (old >= axis) for old in given[0])
        if op.code is Code.TRANS:
            return frozenset(op.attributes["order"].index(old) for old in given[0])
        if op.code is Code.DOT and len(result.shape) == 2 and not any(given[2:]):
            found = (given[0] & {0}) | (given[1] & {1})
            return None if found and (given[0] & {1} or given[1] & {0}) else found
        if op.code in (Code.SUM, Code.REDUCE_MAX, Code.REDUCE_MIN):
            axis = op.attributes["axis"]
            found = frozenset(old - (old > axis) for old in given[0] if old != axis)
            return None if found and axis in given[0] else found
        if op.code in ELEMENTWISE or op.code in _SPREADS or op.code is Code.LOAD:
            return frozenset().union(*given)
        return None


class _Rasterer(Copier):
    """Moves additions into the loop."""

    def __init__(self, source: Kernel, window: _Window, lanewise: Lanes) -> None:
        super().__init__(source)
        self.window = window
        self.lanewise = lanewise

    def copy(self) -> Kernel:
        """The whole kernel."""
        self.block(self.source.body)
        b, window = self.b, self.window
        size = b.extent(window.size)

        def body(first: Value, _: list[Value]) -> Sequence[Value]:
            start = self[window.start]
            meets = b.logical_and(
                b.compare("lt", start, b.add(first, size)), b.compare("gt", start, b.sub(first, size))
            )

            def tile() -> list[Value]:
                self._add(_Tile(self, first))
                return []

            b.branch(meets, tile, list)
            return []

        bounds = (b.const(0), self[window.end], size)
        name = f"{window.indices.name or 'window'}_start"
        b.loop(bounds, (), body, index_name=name, rasters=True)
        return b.kernel

    def effect(self, op: Op) -> None:
        """All but what the loop adds."""
        if op not in self.window.added:
            super().effect(op)

    def _add(self, tile: _Tile) -> None:
        """What the lanes of a tile add that the window has."""
        b, window = self.b, self.window
        start, places = self[window.start], tile[window.indices]
        inside = b.logical_and(
            b.compare("ge", places, start), b.compare("lt", places, b.add(start, b.extent(window.size)))
        )
        for op in window.added:
            (axis,) = self.lanewise.axes[op.offset]
            there = inside
            for other in range(len(op.offset.shape)):
                there = there if other == axis else b.expand(there, other)
            stored = tile[op.stored]
            mask = None if op.mask is None else tile[op.mask]
            b.store(self[op.base], tile.whole(op.offset), b.select(there, stored, b.zero(stored)), mask, op.code)


class _Tile(Copier):
    """Copies what depends on the lanes of a window, as it is for those of a tile."""

    def __init__(self, around: _Rasterer, first: Value) -> None:
        super().__init__(around.source, around.b)
        self.around = around
        window = around.window
        symbol = self.source.extents.get(window.size)
        self[window.indices] = self.b.add(first, self.b.arange(0, window.size, symbol))

    def find(self, old: Value) -> Value | None:
        """What lies in front of the loop, or was copied for the tile."""
        found = super().find(old)
        if found is not None or old in self.around.lanewise.axes:
            return found
        if old in self.around.lanewise.mixed:
            raise CannotDerive("what lanes of a window add depends on others of it")
        return self.around.find(old)
