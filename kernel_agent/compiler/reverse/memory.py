"""What a kernel does to memory, as far as its derivative depends on it: stores that count, loads of what was stored.

The adjoint of a store is a load of the output's cotangent at the same addresses, and that of a load an addition to the
gradient there. That is right where what was stored last stands at the end, and where what is read was there before the
launch. `Accesses` proves it, or refuses.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.reverse.disjoint import Apart, depends_on
from kernel_agent.compiler.reverse.programs import Axes
from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.uses import written_to
from kernel_agent.compiler.ssa.value import Block, Kernel, Op, Value

_WRITES = (Code.STORE, Code.ATOMIC_ADD, Code.ATOMIC)
_TO_ITS_OWN = "write the result to a tensor of its own, which the kernel does not read"


@dataclass(frozen=True)
class Place:
    """An access and where it is."""

    op: Op
    blocks: tuple[Block, ...]
    """Around it, the kernel's body first."""
    parents: tuple[Op, ...]
    """Around it, the outermost first."""
    position: int
    """In the order of the source."""


@dataclass
class Accesses:
    """The accesses of a kernel to arguments it writes to."""

    forwarded: dict[Op, Op] = field(default_factory=dict)
    """Load -> the store before it that wrote what it reads."""
    overwritten: set[Op] = field(default_factory=set)
    """Stores of which nothing is left: their values have no cotangent from memory."""
    consumed: set[Value] = field(default_factory=set)
    """Arguments whose stores may meet within a program: what the last one had of the cotangent, those before it do not
    have any more, so the way back takes it away as it goes."""
    saved: set[Op] = field(default_factory=set)
    """Loads of what the forward leaves in an argument: they read the same after it."""
    gone: set[Op] = field(default_factory=set)
    """Loads of what the kernel itself overwrites: their values cannot be had again."""
    facts: tuple[str, ...] = ()
    """Python over names of the launch: what has to hold for stores not to meet."""

    @classmethod
    def of(cls, kernel: Kernel, written: frozenset[Value], calls: Calls | None = None) -> Accesses:
        """`written`: arguments whose cotangent is given. `calls`: launches that were seen, on whose numbers it may rely
        where that is noted in `facts`. Raises CannotDerive for accesses whose effect is not sure."""
        found = cls()
        places = accesses_to(kernel, written_to(kernel.body))
        axes, apart = Axes(kernel), Apart(kernel, calls)
        for base, accesses in places.items():
            found._loads(base, accesses)
            if base in written:
                found._stores(base, accesses, axes, apart)
        found.facts = tuple(apart.facts)
        return found

    def _loads(self, base: Value, accesses: list[Place]) -> None:
        for place in accesses:
            if place.op.code is not Code.LOAD:
                continue
            if place.op.attributes.get("saved"):
                self.saved.add(place.op)
                continue
            before = [other for other in accesses if other.op.code in _WRITES and may_precede(other, place)]
            if not before:
                self.gone.add(place.op)
                continue
            last = before[-1]
            if not gives(last, place):
                raise CannotDerive(
                    f"{base.name} is written and read again{place.op.offset.where}, "
                    "which need not be the same addresses",
                    remedy=f"keep the value in a variable instead, or {_TO_ITS_OWN}",
                )
            self.forwarded[place.op] = last.op

    def _stores(self, base: Value, accesses: list[Place], axes: Axes, apart: Apart) -> None:
        """Every element that is stored keeps its value, or it is known which stores lose theirs."""
        writes = [place for place in accesses if place.op.code in _WRITES]
        if any(place.op.code is Code.ATOMIC for place in writes):
            raise CannotDerive(
                f"{base.name} is updated by an atomic that is not an addition: that has no derivative rule",
                remedy="mark the output as one without gradient, or use atomic_add",
            )
        if len({place.op.code for place in writes}) > 1:
            raise CannotDerive(
                f"{base.name} is both stored to and added to: what is left of the store is not sure",
                remedy="fill the tensor in a launch of its own, or use one of the two only",
            )
        if writes[0].op.code is Code.ATOMIC_ADD:
            return
        for place in writes:
            _by_one_program(base, place, axes)
        pairs = [(earlier, later) for n, later in enumerate(writes) for earlier in writes[:n]]
        hidden = {earlier.op for earlier, later in pairs if _hides(later, earlier)}
        left = [place for place in writes if place.op not in hidden]
        again = any(not _moves(place) for place in left)
        if again or any(
            _may_meet(earlier, later, apart) for earlier, later in pairs if hidden.isdisjoint((earlier.op, later.op))
        ):
            self.consumed.add(base)
        else:
            self.overwritten.update(hidden)


def _by_one_program(base: Value, place: Place, axes: Axes) -> None:
    """Refuse a store that all programs along an axis make, since each of them would take the cotangent for its own."""
    op = place.op
    known = axes.of(op.offset, *(() if op.mask is None else (op.mask,))) | axes.leaving | axes.around(place.parents)
    if axes.used - known:
        axis = min(axes.used - known)
        raise CannotDerive(
            f"all programs along axis {axis} of the grid store to the same elements of {base.name}{op.offset.where}",
            remedy=f"let one store, `if tl.program_id({axis}) == 0`, or mark the output as one without gradient",
        )


def _moves(place: Place) -> bool:
    """Whether a store goes somewhere else in every trip of every loop around it."""
    return all(
        depends_on(place.op.offset, block)
        for parent, block in zip(place.parents, place.blocks[1:], strict=True)
        if parent.code in (Code.FOR, Code.WHILE)
    )


def _hides(later: Place, earlier: Place) -> bool:
    """Whether nothing is left of a store after a later one."""
    return (
        later.op.offset is earlier.op.offset
        and (later.op.mask is None or later.op.mask is earlier.op.mask)
        and later.blocks[-1] in earlier.blocks
    )


def _may_meet(earlier: Place, later: Place, apart: Apart) -> bool:
    return not _exclusive(earlier, later) and not apart.proved(earlier.op, later.op)


def accesses_to(kernel: Kernel, targets: Collection[Value]) -> dict[Value, list[Place]]:
    """The accesses to some arguments, by argument, in the order of the source."""
    found: dict[Value, list[Place]] = {}
    for place in _places(kernel.body):
        if place.op.base in targets:
            found.setdefault(place.op.base, []).append(place)
    return found


def _places(body: Block) -> Iterator[Place]:
    """All accesses, in order."""
    count = 0

    def visit(block: Block, blocks: tuple[Block, ...], parents: tuple[Op, ...]) -> Iterator[Place]:
        nonlocal count
        for op in block.ops:
            count += 1
            if op.code in (Code.LOAD, *_WRITES):
                yield Place(op, (*blocks, block), parents, count)
            for inner in op.blocks:
                yield from visit(inner, (*blocks, block), (*parents, op))

    yield from visit(body, (), ())


def may_precede(write: Place, load: Place) -> bool:
    """Whether a write may run before a load in one program: it stands before it, or in a loop around both."""
    if _exclusive(write, load):
        return False
    shared = [
        op for op, other in zip(write.parents, load.parents, strict=False) if op is other and op.code is not Code.IF
    ]
    return write.position < load.position or bool(shared)


def gives(store: Place, load: Place) -> bool:
    """Whether a load reads exactly what a store before it wrote, in the same trip."""
    return (
        store.op.code is Code.STORE
        and store.position < load.position
        and store.blocks[-1] in load.blocks
        and store.op.offset is load.op.offset
        and (store.op.mask is None or store.op.mask is load.op.mask)
    )


def _exclusive(one: Place, other: Place) -> bool:
    """Whether two accesses stand in different branches of one condition, outside of loops in common."""
    for n, (parent, twin) in enumerate(zip(one.parents, other.parents, strict=False)):
        if parent is not twin or parent.code in (Code.FOR, Code.WHILE):
            return False
        if one.blocks[n + 1] is not other.blocks[n + 1]:
            return True
    return False
