"""What a kernel does to memory, as far as its derivative depends on it: stores that count, loads of what was stored.

The adjoint of a store is a load of the output's cotangent at the same addresses, and that of a load an addition to the
gradient there. That is right where what was stored last stands at the end, and where what is read was there before the
launch. `Accesses` proves it, or refuses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.reverse.disjoint import depends_on, disjoint
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
    saved: set[Op] = field(default_factory=set)
    """Loads of what the forward leaves in an argument: they read the same after it."""
    gone: set[Op] = field(default_factory=set)
    """Loads of what the kernel itself overwrites: their values cannot be had again."""
    remarks: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, kernel: Kernel, written: frozenset[Value]) -> Accesses:
        """`written`: arguments whose cotangent is given. Raises CannotDerive for accesses whose effect is not sure."""
        found = cls()
        places: dict[Value, list[Place]] = {}
        targets = written_to(kernel.body)
        for place in _places(kernel.body):
            if place.op.base in targets:
                places.setdefault(place.op.base, []).append(place)
        for base, accesses in places.items():
            found._loads(base, accesses)
            if base in written:
                found._stores(base, accesses)
        return found

    def _loads(self, base: Value, accesses: list[Place]) -> None:
        for place in accesses:
            if place.op.code is not Code.LOAD:
                continue
            if place.op.attributes.get("saved"):
                self.saved.add(place.op)
                continue
            before = [other for other in accesses if other.op.code in _WRITES and _may_precede(other, place)]
            if not before:
                self.gone.add(place.op)
                continue
            last = before[-1]
            if not _gives(last, place):
                raise CannotDerive(
                    f"{base.name} is written and read again{_line(place.op)}, which need not be the same addresses",
                    remedy=f"keep the value in a variable instead, or {_TO_ITS_OWN}",
                )
            self.forwarded[place.op] = last.op

    def _stores(self, base: Value, accesses: list[Place]) -> None:
        """Every element that is stored keeps its value, or the store it is lost by is known."""
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
            self._once(base, place)
        for n, later in enumerate(writes):
            for earlier in writes[:n]:
                self._apart(base, earlier, later)

    def _once(self, base: Value, place: Place) -> None:
        """A store in a loop goes somewhere else in every trip."""
        for parent, block in zip(place.parents, place.blocks[1:], strict=True):
            if parent.code in (Code.FOR, Code.WHILE) and not depends_on(place.op.offset, block):
                raise CannotDerive(
                    f"a loop stores to the same elements of {base.name} in every trip{_line(place.op)}",
                    remedy="store once, after the loop",
                )

    def _apart(self, base: Value, earlier: Place, later: Place) -> None:
        if _exclusive(earlier, later) or disjoint(earlier.op, later.op):
            return
        same = earlier.op.offset is later.op.offset and (later.op.mask is None or later.op.mask is earlier.op.mask)
        if same and later.blocks[-1] in earlier.blocks:
            self.overwritten.add(earlier.op)
            return
        raise CannotDerive(
            f"two stores to {base.name} may meet{_line(earlier.op)}{_line(later.op)}: "
            "which of the two values is left is not sure",
            remedy="store every element once: join the values with tl.where, or use an output for each",
        )


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


def _may_precede(write: Place, load: Place) -> bool:
    """Whether a write may run before a load in one program: it stands before it, or in a loop around both."""
    if _exclusive(write, load):
        return False
    shared = [
        op for op, other in zip(write.parents, load.parents, strict=False) if op is other and op.code is not Code.IF
    ]
    return write.position < load.position or bool(shared)


def _gives(store: Place, load: Place) -> bool:
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


def _line(op: Op) -> str:
    line = op.offset.source_line if op.offset.source_line is not None else None
    return f" (line {line})" if line else ""
