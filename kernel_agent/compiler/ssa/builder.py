"""`Builder`: the one way to make operations. It folds, shares what is equal and moves it out of loops as it goes.

Every pass rebuilds a kernel through a builder, so that what one pass leaves behind (a sum with zero, a value computed
twice, an address that does not depend on the loop) is gone after the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kernel_agent.compiler.ssa import fold
from kernel_agent.compiler.ssa.calculus import Calculus
from kernel_agent.compiler.ssa.code import BY_DESCRIPTOR, BY_POINTER, MEMORY, PURE, Code
from kernel_agent.compiler.ssa.scopes import Scope, known, outermost
from kernel_agent.compiler.ssa.value import Block, Kernel, Op, Value, broadcast_shape, surely_runs


@dataclass(frozen=True)
class Bounds:
    """Along which axes of its tile a block pointer asks what lies outside."""

    checked: tuple[int, ...]
    spared: tuple[int, ...] = ()
    """Those that need not be asked where `spares` is true."""
    spares: Value | None = None

    @property
    def operands(self) -> tuple[Value, ...]:
        """Of an access, behind the pointer."""
        return () if self.spares is None else (self.spares,)

    @property
    def attributes(self) -> dict[str, Any]:
        """Of an access."""
        return {"checked": self.checked, "spared": self.spared}


class Builder(Calculus):
    """Adds operations to a kernel."""

    def __init__(self, kernel: Kernel, written: frozenset[Value] = frozenset()) -> None:
        """`written`: pointer arguments the kernel writes to; loads from them stay in place and are never shared. Those
        that may point to the same memory must be among them. What is never loaded need not be."""
        self.kernel = kernel
        self.written = written
        self.spoiled: set[Value] = set()
        """Arguments written to although loads from them may have been moved: they should have been in `written`."""
        self._loaded: set[Value] = set()
        self.scopes = [Scope(kernel.body)]
        self.hint = ""
        """Name for the next results that have none."""
        self.line: int | None = None
        """Source line for the next results."""

    # --- blocks

    @contextmanager
    def inside(self, block: Block, *, guarded: bool = False, certain: bool = True) -> Iterator[Block]:
        """Build in a block: the body of a loop, or with `guarded` a branch."""
        scope = Scope(block, guarded, certain and not guarded)
        self.scopes.append(scope)
        for value in block.arguments:
            value.depth = self.depth
        try:
            yield block
        finally:
            self.scopes.pop()

    @property
    def depth(self) -> int:
        """Of the block under construction; 0 is the kernel's body."""
        return len(self.scopes) - 1

    def add_op(self, op: Op, depth: int | None = None) -> Op:
        """Append an operation to the block at `depth`, the present one by default, as it is."""
        place = self.depth if depth is None else depth
        if op.code in MEMORY and op.base not in self.written:
            if op.code is Code.LOAD:
                self._loaded.add(op.base)
            elif op.base in self._loaded:
                self.spoiled.add(op.base)
        for result in op.results:
            result.depth = place
            result.name = result.name or self.hint
            result.source_line = result.source_line or self.line
        self.scopes[place].block.ops.append(op)
        return op

    def pure(
        self,
        code: Code,
        operands: Sequence[Value],
        element: str,
        shape: Sequence[int],
        attributes: Mapping[str, Any] | None = None,
        name: str = "",
    ) -> Value:
        """The value of an operation without effect: an equal one in sight, else a new one, as far out as can be."""
        assert code in PURE, code
        attributes, shape = dict(attributes or {}), tuple(shape)
        key = (code, tuple([v.id for v in operands]), tuple(sorted(attributes.items())), element, shape)
        found = known(self.scopes, key)
        if found is not None:
            return found
        depth = outermost(self.scopes, code, operands, shape)
        value = Value(element, shape, name)
        self.add_op(Op(code, operands, [value], attributes), depth)
        if code is Code.CONST:
            value.name = ""
        self.scopes[depth].known[key] = value
        return value

    # --- memory

    def load(
        self,
        base: Value,
        offset: Value,
        mask: Value | None = None,
        other: Value | None = None,
        name: str = "",
        **hints: Any,
    ) -> Value:
        """A tile from memory. Unless the kernel writes there it is shared, and moved out of loops that are sure to run.

        `hints`: attributes that do not change what is loaded, `once` (see `one_trip`), `saved`, and `again`.
        """
        operands = [offset, *([] if mask is None else [mask]), *([] if other is None else [other])]
        shape = broadcast_shape([value.shape for value in operands[:2]])
        if mask is None and other is not None:
            raise ValueError("a load without a mask has no other")
        operands[0] = offset if offset.shape == shape else self._spread(offset, shape)
        attributes = {"base": base, "masked": mask is not None, "padded": other is not None, **hints}
        value = Value(base.pointee, shape, name or self.hint)
        if hints.get("again") or (base in self.written and not hints.get("saved")):
            self.add_op(Op(Code.LOAD, operands, [value], attributes))
            return value
        key = (Code.LOAD, base.id, tuple(operand.id for operand in operands))
        found = known(self.scopes, key)
        if found is not None:
            return found
        depth = outermost(self.scopes, Code.LOAD, operands, shape)
        self.add_op(Op(Code.LOAD, operands, [value], attributes), depth)
        self.scopes[depth].known[key] = value
        return value

    def descriptor(
        self,
        base: Value,
        start: Value,
        extents: Sequence[Value],
        strides: Sequence[Value],
        block: Sequence[int],
        name: str = "",
    ) -> Value:
        """A matrix of two `extents` at `base` + start, rows `strides[0]` apart, to load tiles of `block` from; or a
        strip of one."""
        attributes = {"base": base, "block": tuple(block)}
        return self.pure(Code.DESCRIPTOR, (start, *extents, *strides), BY_DESCRIPTOR, (), attributes, name)

    def load_block(self, descriptor: Value, corner: Sequence[Value], name: str = "") -> Value:
        """A tile of a matrix from a row and a column on, or a part of a strip."""
        made = descriptor.producer
        assert made is not None, descriptor
        return self.pure(
            Code.LOAD_BLOCK,
            (descriptor, *corner),
            made.base.pointee,
            made.attributes["block"],
            {"base": made.base},
            name,
        )

    def block_pointer(self, base: Value, operands: Sequence[Value], block: Sequence[int], name: str = "") -> Value:
        """The tile of `block` of a matrix at `base` + start, or of numbers; `operands`: start, then for each axis
        extents, strides, corner."""
        attributes = {"base": base, "block": tuple(block)}
        return self.pure(Code.BLOCK_POINTER, operands, BY_POINTER, (), attributes, name)

    def load_pointed(self, pointer: Value, bounds: Bounds, name: str = "", **hints: Any) -> Value:
        """The tile of a block pointer, zero where a checked axis has no element."""
        made = pointer.producer
        assert made is not None, pointer
        attributes = {"base": made.base, **bounds.attributes, **hints}
        element, block = made.base.pointee, made.attributes["block"]
        return self.pure(Code.LOAD_BLOCK, (pointer, *bounds.operands), element, block, attributes, name)

    def store_pointed(self, pointer: Value, value: Value, bounds: Bounds) -> Op:
        """The tile of a block pointer becomes the value, where checked axes have elements."""
        made = pointer.producer
        assert made is not None, pointer
        tile = self.whole(value, made.attributes["block"])
        attributes = {"base": made.base, **bounds.attributes}
        return self.add_op(Op(Code.STORE_BLOCK, [pointer, tile, *bounds.operands], (), attributes))

    def store_block(self, descriptor: Value, value: Value, corner: Sequence[Value]) -> Op:
        """A tile of a matrix from a row and a column on becomes the value."""
        made = descriptor.producer
        assert made is not None, descriptor
        tile = self.whole(value, made.attributes["block"])
        return self.add_op(Op(Code.STORE_BLOCK, [descriptor, tile, *corner], (), {"base": made.base}))

    def store(
        self,
        base: Value,
        offset: Value,
        value: Value,
        mask: Value | None = None,
        code: Code = Code.STORE,
        **hints: Any,
    ) -> Op:
        """STORE, or ATOMIC_ADD by `code`. `hints`: attributes that do not change what is stored."""
        assert code in MEMORY, code
        operands = [offset, value, *([] if mask is None else [mask])]
        shape = broadcast_shape([operand.shape for operand in operands])
        operands[0] = offset if offset.shape == shape else self._spread(offset, shape)
        return self.add_op(Op(code, operands, (), {"base": base, "masked": mask is not None, **hints}))

    def _spread(self, offset: Value, shape: tuple[int, ...]) -> Value:
        """Offsets must have all extents of what is accessed; a scalar one may stand for a tile only if made one."""
        return self.whole(offset, shape)

    # --- control

    def loop(
        self,
        bounds: tuple[Value, Value, Value],
        carries: Sequence[Value],
        body: Callable[[Value, list[Value]], Sequence[Value]],
        *,
        index_name: str = "",
        names: Sequence[str] = (),
        certain: bool = False,
        **attributes: Any,
    ) -> tuple[Value, ...]:
        """A FOR. `body` gets the index and the carries and returns the next carries; shapes are those of `carries`.

        `certain`: loads that do not depend on the trip may leave the loop, since it runs at least once or they are in
        bounds even if it does not. Constant bounds that make a trip are certain without it.
        """
        start, stop, step = bounds
        index = Value(start.element, (), index_name)
        inner = [Value(c.element, c.shape, names[n] if n < len(names) else c.name) for n, c in enumerate(carries)]
        block = Block([index, *inner])
        with self.inside(block, certain=certain or surely_runs(start, stop, step)):
            found = body(index, inner)
            block.yields = [self.whole(value, like.shape) for value, like in zip(found, inner, strict=True)]
        results = [Value(value.element, value.shape, value.name) for value in inner]
        op = Op(
            Code.FOR, (start, stop, step, *carries), results, {"reverse": False, "tape": None, **attributes}, [block]
        )
        self.add_op(op)
        return op.results

    def repeat(
        self,
        carries: Sequence[Value],
        test: Callable[[list[Value]], Sequence[Value]],
        body: Callable[[list[Value]], Sequence[Value]],
        **attributes: Any,
    ) -> tuple[Value, ...]:
        """A WHILE. `test` gets the carries and returns the condition and what goes on, `body` gets those and returns
        carries; results are what went on last. Shapes are those of `carries` and of what `test` returns."""
        before = Block([Value(c.element, c.shape, c.name) for c in carries])
        with self.inside(before):
            before.yields = list(test(before.arguments))
        after = Block([Value(v.element, v.shape, v.name) for v in before.yields[1:]])
        with self.inside(after, certain=False):
            found = body(after.arguments)
            after.yields = [self.whole(value, like.shape) for value, like in zip(found, carries, strict=True)]
        results = [Value(v.element, v.shape, v.name) for v in after.arguments]
        return self.add_op(Op(Code.WHILE, carries, results, attributes, (before, after))).results

    def branch(
        self, condition: Value, then: Callable[[], Sequence[Value]], other: Callable[[], Sequence[Value]]
    ) -> tuple[Value, ...]:
        """An IF. Both sides return as many values; shapes are the larger of the two."""
        blocks, found = [], []
        for side in (then, other):
            block = Block()
            with self.inside(block, guarded=True):
                found.append(list(side()))
            blocks.append(block)
        shapes = [broadcast_shape([a.shape, b.shape]) for a, b in zip(*found, strict=True)]
        for block, values in zip(blocks, found, strict=True):
            with self._again(block):
                block.yields = [self.whole(value, shape) for value, shape in zip(values, shapes, strict=True)]
        results = [Value(a.element, shape, a.name) for a, shape in zip(found[0], shapes, strict=True)]
        return self.add_op(Op(Code.IF, (condition,), results, {}, blocks)).results

    @contextmanager
    def _again(self, block: Block) -> Iterator[None]:
        """Go on in a branch that was left."""
        self.scopes.append(Scope(block, guarded=True, certain=False))
        try:
            yield
        finally:
            self.scopes.pop()

    # --- copies

    def again(self, op: Op, operands: Sequence[Value], blocks: Sequence[Block] = ()) -> Value | tuple[Value, ...]:
        """The same operation or load on other operands, folded anew. Control and effects are the caller's.

        `blocks`: of a REDUCE or SCAN, the combine, made for this operation.
        """
        return fold.again(self, op, operands, blocks)
