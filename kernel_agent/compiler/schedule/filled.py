"""`filled`: programs that leave before they store a gradient, as those of a row whose label is ignored, store zeros.

Else somebody has to write zeros to all of it before, which the other programs then write once more: of the gradient of
logits that is a third of all that a cross entropy moves. Such a program stores where it would have stored if it had
gone on. Nothing that it loads is needed for that, and that no place lies outside of the tensor is asked of each launch,
where a constexpr says so: the places are as many as the tensor has elements, all different, and begin with the first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from kernel_agent.compiler.plan import Axis
from kernel_agent.compiler.schedule.coverage import stored_axes
from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.schedule.ownership import WRITES, proof
from kernel_agent.compiler.schedule.sites import Site, sites, whole_bounds
from kernel_agent.compiler.schedule.widen import whole_if
from kernel_agent.compiler.ssa.code import CONTROL, Code
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.uses import captured
from kernel_agent.compiler.ssa.value import Block, Kernel, Op, Value, walk


@dataclass(frozen=True)
class Whole:
    """What a gradient's stores would reach if every program made them."""

    condition: str
    """Expression of whether that is every element there is, and nothing else."""
    axes: tuple[Axis, ...]
    """See `Buffer`."""


def whole_without_ways(
    kernel: Kernel, tensor: str, name: str, launch: Launch, checked: Collection[str] = ()
) -> Whole | None:
    """Of the gradient `name` of `tensor`; None where it is stored to in several places, or indices keep programs from
    that. `checked`: expressions that hold in every launch."""
    site, ways = _around(kernel, name, launch)
    if site is None or not ways:
        return None
    always = _Always(kernel, site, ways).copy()
    forms = Forms(always, launch)
    (whole,) = (one for one in sites(always.body, WRITES) if one.op.base.name == name)
    apart = proof(forms, [whole])
    if isinstance(apart, str):
        return None
    facts = whole_if(forms, whole, tensor, lambda *_: True)
    asked = (*facts, *(text for text in apart.facts() if text not in checked))
    if not facts or not launch.calls.show(asked):
        return None
    return Whole(" and ".join(asked), stored_axes(forms, [whole]))


def filled(kernel: Kernel, name: str, launch: Launch, setting: str) -> Kernel | None:
    """The kernel with a constexpr `setting`, of whether programs that leave the gradient `name` out store its zeros;
    None where it is not known where these would go."""
    site, ways = _around(kernel, name, launch)
    return None if site is None or not ways else _Filler(kernel, site, ways, setting).copy()


def _around(kernel: Kernel, name: str, launch: Launch) -> tuple[Site | None, list[_Way]]:
    """The only store to a gradient and the ways around it; no ways where zeros cannot be stored on each."""
    found = [site for site in sites(kernel.body, WRITES) if site.op.base.name == name]
    if len(found) != 1 or found[0].op.code is not Code.STORE:
        return None, []
    ways = _ways(kernel, found[0], Forms(kernel, launch))
    return found[0], [] if _needs_loads(found[0], ways) else ways


@dataclass(frozen=True)
class _Way:
    """An IF around a store, or a LEAVE_IF in front of it, that memory decides."""

    op: Op
    inside: frozenset[Op]
    """What does not run where the store does not."""
    side: Block | None
    """Of an IF: the one with the store."""


def _ways(kernel: Kernel, site: Site, forms: Forms) -> list[_Way]:
    """The ways around a store; none where one is decided by indices, whose programs have nothing to store."""
    found = []
    conditions = dict(site.conditions)
    for block, later in _blocks(kernel.body, ()):
        for place, op in enumerate(block.ops):
            if op.code not in (Code.IF, Code.LEAVE_IF) or op.operands[0] not in conditions:
                continue
            side = next((inner for inner in op.blocks if inner in site.sides), None)
            if op.code is Code.IF and side is None:
                continue
            if op.code is Code.LEAVE_IF and block is not kernel.body:
                return []
            if whole_bounds(forms, op.operands[0], holds=conditions[op.operands[0]]) is not None:
                return []
            behind = (*walk(side),) if side is not None else (*_within(block.ops[place + 1 :]), *later)
            found.append(_Way(op, frozenset(behind), side))
    return found if len(found) == len(site.conditions) else []


def _blocks(block: Block, later: tuple[Op, ...]) -> list[tuple[Block, tuple[Op, ...]]]:
    """Blocks, each with what runs behind it."""
    found = [(block, later)]
    for place, op in enumerate(block.ops):
        behind = (*_within(block.ops[place + 1 :]), *later)
        for inner in op.blocks:
            found += _blocks(inner, behind)
    return found


def _within(ops: Sequence[Op]) -> list[Op]:
    return [one for op in ops for one in (op, *(inner for block in op.blocks for inner in walk(block)))]


def _needs_loads(site: Site, ways: Sequence[_Way]) -> bool:
    """Whether where the store goes depends on what is loaded behind a way around it: such a place may be anywhere."""
    inside = frozenset[Op]().union(*(way.inside for way in ways))
    loops = [loop for loop in site.loops if loop in inside]
    if any(loop.code is not Code.FOR for loop in loops):
        return True
    stack = [site.op.offset, *([] if site.op.mask is None else [site.op.mask])]
    stack += [bound for loop in loops for bound in loop.operands[:3]]
    done: set[Value] = set()
    while stack:
        value = stack.pop()
        op = value.producer
        if value in done or op is None or op not in inside:
            continue
        done.add(value)
        if any(one.code in (Code.LOAD, *CONTROL - {Code.IF}) for one in _within([op])):
            return True
        stack.extend((*op.operands, *captured(op.blocks)))
    return False


class _Always(Copier):
    """A kernel of which every program makes the store, by which it is asked where the store goes."""

    def __init__(self, source: Kernel, site: Site, ways: Sequence[_Way]) -> None:
        super().__init__(source)
        self.site = site
        self.sides = {way.op: way.side for way in ways}

    def branch(self, op: Op) -> None:
        """An IF."""
        side = self.sides.get(op)
        if side is None:
            super().branch(op)
            return
        kept = self.kept(op)
        for place, new in zip(kept, self.block(side, kept), strict=True):
            self[op.results[place]] = new

    def effect(self, op: Op) -> None:
        """The store is an addition, as proofs have it."""
        if op in self.sides or self.slicing:
            return
        if op is not self.site.op:
            super().effect(op)
            return
        mask = None if op.mask is None else self[op.mask]
        self.b.store(self[op.base], self.whole(op.offset), self[op.stored], mask, Code.ATOMIC_ADD)


class _Filler(Copier):
    """Stores zeros on the ways around a store."""

    def __init__(self, source: Kernel, site: Site, ways: Sequence[_Way], setting: str) -> None:
        super().__init__(source)
        self.site = site
        self.ways = {way.op: way for way in ways}
        self.setting = setting
        self.b.kernel.constants[setting] = True

    def branch(self, op: Op) -> None:
        """An IF."""
        way = self.ways.get(op)
        if way is None or self.slicing:
            super().branch(op)
            return
        kept = self.kept(op)

        def side(block: Block) -> list[Value]:
            found = self.block(block, kept)
            if block is not way.side:
                self._fill(way)
            return found

        then, other = op.blocks
        found = self.b.branch(self[op.operands[0]], lambda: side(then), lambda: side(other))
        for place, new in zip(kept, found, strict=True):
            self[op.results[place]] = new

    def block(self, block: Block, kept: Iterable[int] | None = None) -> list[Value]:
        """What runs behind a LEAVE_IF is the other side of an IF: no program leaves after it has changed memory."""
        if block is not self.source.body:
            return super().block(block, kept)
        return self._rest(block.ops)

    def _rest(self, ops: Sequence[Op]) -> list[Value]:
        for place, op in enumerate(ops):
            way = self.ways.get(op) if op.code is Code.LEAVE_IF else None
            if way is not None:
                self._parted(way, ops[place + 1 :])
                break
            self.op(op)
        return []

    def _parted(self, way: _Way, ops: Sequence[Op]) -> None:
        def leaving() -> list[Value]:
            self._fill(way)
            return []

        self.b.branch(self[way.op.operands[0]], leaving, lambda: self._rest(ops))

    def _fill(self, way: _Way) -> None:
        loops = [loop for loop in self.site.loops if loop in way.inside]

        def stored() -> list[Value]:
            _zeros(self.aside(), self.site.op, loops)
            return []

        self.b.branch(self.b.setting(self.setting), stored, list)


def _zeros(copier: Copier, store: Op, loops: Sequence[Op]) -> None:
    """A store of zeros in all trips of some loops."""
    b = copier.b
    if not loops:
        mask = None if store.mask is None else copier[store.mask]
        zero = b.zero(store.stored)
        b.store(copier[store.base], copier.whole(store.offset), b.whole(zero, store.offset.shape), mask)
        return
    (block,) = loops[0].blocks

    def trip(index: Value, _: list[Value]) -> list[Value]:
        inner = copier.aside()
        inner[block.arguments[0]] = index
        _zeros(inner, store, loops[1:])
        return []

    start, stop, step = copier.all(loops[0].operands[:3])
    b.loop((start, stop, step), [], trip)
