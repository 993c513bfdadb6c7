"""`Copier`: a kernel, a block, or the slice that a value depends on, made anew by a builder; the base of all passes.

A pass subclasses it and overrides `op`, `pure`, `load`, `effect`, `loop`, `branch` or `repeat` for what it changes, and
calls `super()` for the rest; or it sets `copier[old] = new` beforehand: whoever reads the old value then reads the new.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import EFFECTS, Code
from kernel_agent.compiler.ssa.scopes import Scope
from kernel_agent.compiler.ssa.uses import captured, written_to
from kernel_agent.compiler.ssa.value import Block, Kernel, Op, Value, constant, is_smaller
from kernel_agent.errors import InternalError


def emptied(kernel: Kernel, *, name: str = "", arguments: Sequence[Value] | None = None) -> Kernel:
    """A kernel without operations. Arguments are the same values, which kernels may have in common."""
    return Kernel(
        name or kernel.name,
        list(kernel.arguments if arguments is None else arguments),
        extents=dict(kernel.extents),
        constants=dict(kernel.constants),
        fixed=kernel.fixed,
    )


class Copier:
    """Copies operations of `source` through `b`.

    A copy is known in the block where it was made and in those within: what was copied in one branch or loop is copied
    again in the next.
    """

    def __init__(self, source: Kernel, b: Builder | None = None) -> None:
        """`b`: where to; by default a new kernel with the arguments of `source`."""
        self.source = source
        self.written = written_to(source.body)
        """Pointer arguments that the source writes to."""
        self.b = b or Builder(emptied(source), self.written)
        self._copies: dict[Scope, dict[Value, Value]] = {}
        self._slices = 0

    @property
    def slicing(self) -> bool:
        """Whether the present copies are made for a value that was asked for, out of the order of the source."""
        return self._slices > 0

    def copy(self) -> Kernel:
        """The whole kernel. Raises InternalError where a pass wrote to what it loaded and the builder did not know."""
        self.block(self.source.body)
        for base in self.b.spoiled:
            raise InternalError(f"a pass of {self.source.name} writes to {base.name}, from which loads were moved")
        return self.b.kernel

    # --- values

    def __setitem__(self, old: Value, new: Value) -> None:
        """From here to the end of the present block, `new` is the copy of `old`."""
        self._copies.setdefault(self.b.scopes[-1], {})[old] = new

    def enter(self, old: Iterable[Value], new: Iterable[Value]) -> None:
        """The same of what a block is given: its arguments keep the lines of their sources."""
        for one, other in zip(old, new, strict=True):
            self[one] = other
            other.source_line = one.source_line

    def __contains__(self, old: Value) -> bool:
        return self.find(old) is not None

    def find(self, old: Value) -> Value | None:
        """The copy of a value where it is in sight; arguments of a kernel are their own copies."""
        copies = self._copies
        for scope in reversed(self.b.scopes):
            known = copies.get(scope)
            if known is not None and old in known:
                return known[old]
        return old if old.producer is None and old in self.b.kernel.arguments else None

    def __getitem__(self, old: Value) -> Value:
        """The copy of a value, for which all that it depends on and that is not in sight is copied here.

        Loops and branches among that are copied whole, but for their effects.

        Raises CannotDerive where it depends on an index or a carry of a loop that is not being copied, on memory that
        the source changes, or on a tape.
        """
        found = self.find(old)
        if found is not None:
            return found
        self._slices += 1
        try:
            for op in self._missing(old):
                if any(result not in self for result in op.results):
                    self.op(op)
        finally:
            self._slices -= 1
        found = self.find(old)
        if found is None:
            raise InternalError(f"{old!r} is read, but a pass dropped the operation that makes it")
        return found

    def all(self, olds: Iterable[Value]) -> list[Value]:
        """The copies of several values."""
        return [self[old] for old in olds]

    def _missing(self, wanted: Value) -> list[Op]:
        """The operations that a value needs and that have no copy in sight, in an order in which they can be made."""
        order: list[Op] = []
        done: set[Op] = set()
        stack: list[tuple[Value, Op | None]] = [(wanted, None)]
        while stack:
            value, ready = stack.pop()
            if ready is not None:
                order.append(ready)
                continue
            op = value.producer
            if value in self or (op is not None and op in done):
                continue
            if op is None:
                raise self._refusal(value)
            done.add(op)
            stack.append((value, op))
            stack.extend((needed, None) for needed in reversed((*op.operands, *captured(op.blocks))))
        return order

    def _refusal(self, value: Value) -> CannotDerive:
        if value in self.source.arguments:
            return CannotDerive(f"{value.name} is not an argument of {self.b.kernel.name}")
        what = f"`{value.name}`" if value.name else "a value"
        return CannotDerive(
            f"{what}{value.where} changes from trip to trip of a loop and cannot be computed outside of it",
            remedy="store it, or compute it from the loop's index alone",
        )

    def aside(self) -> Copier:
        """A copier that knows what this one does, and whose copies this one does not see."""
        found = Copier(self.source, self.b)
        found.learn(self)
        return found

    def learn(self, other: Copier) -> None:
        """Know what another copier of the same kernel does."""
        for scope in self.b.scopes:
            known = other._copies.get(scope)
            if known:
                self._copies[scope] = dict(known)

    # --- operations

    def block(self, block: Block, kept: Iterable[int] | None = None) -> list[Value]:
        """Copy the operations of a block into the present one. Returns copies of its yields, or of the `kept` ones."""
        for op in block.ops:
            self.op(op)
        return self.all(block.yields if kept is None else [block.yields[place] for place in kept])

    def kept(self, op: Op) -> Sequence[int]:
        """Which results a FOR or an IF keeps, with their carries: all, unless a pass says otherwise."""
        return range(len(op.results))

    def attributes(self, op: Op) -> dict[str, Any]:
        """Those of the copy of a FOR: the same, unless a pass says otherwise."""
        return op.attributes

    def op(self, op: Op) -> None:
        """Copy one operation; its results must be set, unless nobody reads them. An override may do otherwise."""
        b = self.b
        hint, line = b.hint, b.line
        if op.results:
            several = op.code is Code.IF and len(op.results) > 1
            b.hint, b.line = "" if several else op.results[0].name, op.results[0].source_line or b.line
        try:
            if op.code in EFFECTS:
                self.effect(op)
            elif op.code is Code.LOAD:
                self.load(op)
            elif op.code is Code.FOR:
                self.loop(op)
            elif op.code is Code.WHILE:
                self.repeat(op)
            elif op.code is Code.IF:
                self.branch(op)
            else:
                self.pure(op)
        finally:
            b.hint, b.line = hint, line

    def results(self, op: Op, new: Sequence[Value]) -> None:
        """Set the copies of all results of an operation."""
        for old, value in zip(op.results, new, strict=True):
            self[old] = value

    def pure(self, op: Op) -> None:
        """An operation without effect; a TAPE_LOAD, a REDUCE and a SCAN too."""
        if op.code is Code.TAPE_LOAD and self.slicing:
            raise CannotDerive(
                f"a value was kept from an earlier loop of {self.source.name} and cannot be computed apart from it"
            )
        blocks = [self._combine(block) for block in op.blocks]
        new = self.b.again(op, self.all(op.operands), blocks)
        self.results(op, new if isinstance(new, tuple) else (new,))

    def _combine(self, block: Block) -> Block:
        copy = Block([Value(value.element, value.shape, value.name) for value in block.arguments])
        with self.b.inside(copy):
            for old, new in zip(block.arguments, copy.arguments, strict=True):
                self[old] = new
            copy.yields = self.block(block)
        return copy

    def load(self, op: Op) -> None:
        """A LOAD."""
        if self.slicing and op.base in self.written and not op.attributes.get("saved"):
            raise CannotDerive(
                f"{op.base.name} is read and written by {self.source.name}: what it held when it was read is gone",
                remedy="write the result to a tensor of its own",
            )
        mask, other = op.mask, op.other
        self[op.result] = self.b.load(
            self[op.base],
            self.whole(op.offset),
            None if mask is None else self[mask],
            None if other is None else self[other],
            op.result.name,
            **hints(op),
        )

    def effect(self, op: Op) -> None:
        """One of EFFECTS; dropped where a value is computed anew, and refused where that value is its result."""
        if self.slicing:
            if op.results:
                raise CannotDerive(f"a value comes from an atomic {op.attributes.get('operation', op.code.value)}")
            return
        operands = self.all(op.operands)
        if op.code in (Code.STORE, Code.ATOMIC_ADD):
            mask = operands[2] if op.mask is not None else None
            self.b.store(self[op.base], self.whole(op.offset), operands[1], mask, op.code, **hints(op))
            return
        attributes = dict(op.attributes)
        if "base" in attributes:
            attributes["base"] = self[op.base]
        if op.code in (Code.ATOMIC, Code.TAPE_STORE, Code.STORE_BLOCK):
            operands = [self.whole(old) for old in op.operands]
        new = [Value(result.element, result.shape, result.name) for result in op.results]
        self.results(op, self.b.add_op(Op(op.code, operands, new, attributes)).results)

    def whole(self, old: Value) -> Value:
        """The copy of a value, with all extents that the old one has, where folding took some."""
        new = self[old]
        return self.b.whole(new, old.shape) if is_smaller(new, old) else new

    # --- control

    def loop(self, op: Op) -> None:
        """A FOR."""
        (block,) = op.blocks
        kept = self.kept(op)
        inside = [block.arguments[1 + place] for place in kept]
        start, stop, step = self.bounds(op)
        carries = [self.whole(op.operands[3 + place]) for place in kept]

        def body(index: Value, inner: list[Value]) -> list[Value]:
            self.enter((block.arguments[0], *inside), (index, *inner))
            self.entered(op)
            return self.block(block, kept)

        names = [value.name for value in inside]
        found = self.b.loop(
            (start, stop, step), carries, body, index_name=block.arguments[0].name, names=names, **self.attributes(op)
        )
        for place, new in zip(kept, found, strict=True):
            self[op.results[place]] = new

    def bounds(self, op: Op) -> Sequence[Value]:
        """Start, stop and step of the copy of a FOR: the same, unless a pass says otherwise."""
        return self.all(op.operands[:3])

    def entered(self, op: Op) -> None:
        """In a trip of a FOR, before anything of it is copied: nothing, unless a pass does otherwise."""

    def repeat(self, op: Op) -> None:
        """A WHILE."""
        test, go_on = op.blocks
        carries = [self.whole(value) for value in op.operands]

        def copied(block: Block, arguments: list[Value]) -> list[Value]:
            for old, new in zip(block.arguments, arguments, strict=True):
                self[old] = new
                new.name, new.source_line = old.name, old.source_line
            self.block(block)
            return [self.whole(value) for value in block.yields]

        self.results(
            op,
            self.b.repeat(
                carries, lambda inner: copied(test, inner), lambda passed: copied(go_on, passed), **op.attributes
            ),
        )

    def branch(self, op: Op) -> None:
        """An IF; of a constant condition only the side that runs."""
        condition = self[op.operands[0]]
        then, other = op.blocks
        kept = self.kept(op)
        known = constant(condition)
        if known is not None:
            found = self.block(then if known else other, kept)
        else:
            found = list(self.b.branch(condition, lambda: self.block(then, kept), lambda: self.block(other, kept)))
        for place, new in zip(kept, found, strict=True):
            self[op.results[place]] = new


def hints(op: Op) -> dict[str, Any]:
    """Attributes of an access that say how, not what."""
    return {key: value for key, value in op.attributes.items() if key not in ("base", "masked", "padded")}
