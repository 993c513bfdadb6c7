"""`Builder`: the one way to make operations. It folds, shares what is equal and moves it out of loops as it goes.

Every pass rebuilds a kernel through a builder, so that what one pass leaves behind (a sum with zero, a value computed
twice, an address that does not depend on the loop) is gone after the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from kernel_agent.compiler.ssa import fold
from kernel_agent.compiler.ssa.code import ELEMENTWISE, MEMORY, PURE, Code
from kernel_agent.compiler.ssa.scopes import Scope, known, outermost
from kernel_agent.compiler.ssa.value import Block, Kernel, Op, Value, broadcast_shape, surely_runs


class Builder:
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
        attributes = dict(attributes or {})
        key = (code, tuple(v.id for v in operands), tuple(sorted(attributes.items())), element, tuple(shape))
        found = known(self.scopes, key)
        if found is not None:
            return found
        depth = outermost(self.scopes, code, operands, tuple(shape))
        value = Value(element, shape, name)
        self.add_op(Op(code, operands, [value], attributes), depth)
        if code is Code.CONST:
            value.name = ""
        self.scopes[depth].known[key] = value
        return value

    # --- constants and sources

    def const(self, value: bool | int | float, element: str = "i32", symbol: str | None = None) -> Value:
        """A scalar constant. `symbol`: what the source calls it."""
        if isinstance(value, float) and value == 0.0:
            value = 0.0  # zeros of both signs are one
        return self.pure(Code.CONST, (), element, (), {"value": value, "symbol": symbol})

    def setting(self, name: str, value: bool | int = True) -> Value:
        """A constexpr of the kernel, i1 or a positive i32, that every launch sets as it likes: code for all values
        stays. `value`: what it is where the kernel is evaluated."""
        element = "i1" if isinstance(value, bool) else "i32"
        return self.pure(Code.CONST, (), element, (), {"value": value, "symbol": name, "open": True})

    def extent(self, size: int) -> Value:
        """An extent of a tile as a number, i32, by the name that the source has for it."""
        return self.const(size, symbol=self.kernel.extents.get(size))

    def zero(self, like: Value) -> Value:
        """The scalar zero of a value's element."""
        return self.const(0.0 if like.is_float else False if like.element == "i1" else 0, like.element)

    def number(self, value: float, like: Value) -> Value:
        """A scalar of a value's element."""
        return self.const(float(value) if like.is_float else int(value), like.element)

    def program_id(self, axis: int, name: str = "") -> Value:
        """Number of this program along an axis of the grid, i32."""
        return self.pure(Code.PROGRAM_ID, (), "i32", (), {"axis": axis}, name)

    def num_programs(self, axis: int) -> Value:
        """Programs along an axis of the grid, i32."""
        return self.pure(Code.NUM_PROGRAMS, (), "i32", (), {"axis": axis})

    def arange(self, start: int, end: int, symbol: str | None = None, name: str = "") -> Value:
        """(end - start,) i32."""
        return self.pure(Code.ARANGE, (), "i32", (end - start,), {"start": start, "end": end, "symbol": symbol}, name)

    def whole(self, value: Value, shape: Sequence[int]) -> Value:
        """A value as a tile of exactly `shape`, which carries and yields need."""
        shape = tuple(shape)
        if value.shape == shape:
            return value
        if value.shape == ():
            return self.pure(Code.FULL, (value,), value.element, shape, name=value.name)
        return self.pure(Code.BROADCAST, (value,), value.element, shape, name=value.name)

    # --- elementwise

    def elementwise(
        self,
        code: Code,
        operands: Sequence[Value],
        element: str | None = None,
        attributes: Mapping[str, Any] | None = None,
        name: str = "",
    ) -> Value:
        """One operation on broadcast operands. `element`: of the result; that of the last operand by default."""
        assert code in ELEMENTWISE, code
        shape = broadcast_shape([value.shape for value in operands])
        return self.pure(code, operands, element or operands[-1].element, shape, attributes, name)

    def add(self, a: Value, b: Value) -> Value:
        """a + b."""
        return fold.add(self, a, b)

    def sub(self, a: Value, b: Value) -> Value:
        """a - b."""
        return fold.sub(self, a, b)

    def mul(self, a: Value, b: Value) -> Value:
        """a * b."""
        return fold.mul(self, a, b)

    def div(self, a: Value, b: Value) -> Value:
        """a / b of floats."""
        return fold.div(self, a, b)

    def neg(self, a: Value) -> Value:
        """-a."""
        return fold.neg(self, a)

    def unary(self, code: Code, a: Value, **attributes: Any) -> Value:
        """EXP, LOG and the like: the element stays."""
        return self.elementwise(code, (a,), attributes=attributes)

    def cast(self, a: Value, element: str, **attributes: Any) -> Value:
        """Value conversion."""
        return fold.cast(self, a, element, attributes)

    def compare(self, predicate: str, a: Value, b: Value, *, unsigned: bool = False) -> Value:
        """i1. `predicate`: eq ne lt le gt ge."""
        return fold.compare(self, predicate, a, b, unsigned)

    def select(self, condition: Value, a: Value, b: Value) -> Value:
        """a where the condition holds, else b."""
        return fold.select(self, condition, a, b)

    def known(self, value: Value, number: Value) -> Value:
        """The number, with the value's derivative; a constant for a value has none. `value` may be smaller."""
        return self.elementwise(Code.KNOWN, (value, number), number.element, name=value.name or number.name)

    def logical_and(self, a: Value, b: Value) -> Value:
        """Bitwise and."""
        return fold.logical_and(self, a, b)

    # --- shape, reductions, products

    def expand(self, a: Value, axis: int) -> Value:
        """Insert an extent of 1; a scalar stays one, since it broadcasts."""
        if a.shape == ():
            return a
        if a.producer is not None and a.producer.code is Code.NEG and a.is_float:
            return fold.neg(self, self.expand(a.producer.operands[0], axis))
        shape = (*a.shape[:axis], 1, *a.shape[axis:])
        return self.pure(Code.EXPAND, (a,), a.element, shape, {"axis": axis}, a.name)

    def trans(self, a: Value, order: Sequence[int]) -> Value:
        """Permute axes."""
        return fold.trans(self, a, tuple(order))

    def reshape(self, a: Value, shape: Sequence[int]) -> Value:
        """Same elements in row-major order."""
        if a.shape == tuple(shape):
            return a
        return self.pure(Code.RESHAPE, (a,), a.element, shape, name=a.name)

    def sum(self, a: Value, axis: int) -> Value:
        """Over an axis, which goes."""
        return fold.total(self, a, axis)

    def reduce(self, code: Code, a: Value, axis: int, element: str | None = None, **attributes: Any) -> Value:
        """REDUCE_MAX and the like: over an axis, which goes."""
        shape = (*a.shape[:axis], *a.shape[axis + 1 :])
        return self.pure(code, (a,), element or a.element, shape, {"axis": axis, **attributes})

    def dot(self, a: Value, b: Value, precision: str | None = None, element: str = "f32") -> Value:
        """Matrix product; to accumulate, add."""
        shape = (*a.shape[:-1], b.shape[-1])
        return self.pure(Code.DOT, (a, b), element, shape, {"precision": precision})

    def sum_to(self, a: Value, shape: Sequence[int]) -> Value:
        """The adjoint of broadcasting `shape` to that of `a`: extents that were 1, or missing, are summed.

        A value smaller than `shape` stays: it broadcasts.
        """
        shape = tuple(shape)
        if a.shape == shape or a.shape == ():
            return a
        if shape == ():
            while a.shape:
                a = self.sum(a, len(a.shape) - 1)
            return a
        for axis, (mine, wanted) in enumerate(zip(a.shape, shape, strict=True)):
            if mine != 1 and wanted == 1:
                a = self.expand(self.sum(a, axis), axis)
        return a

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

        `hints`: attributes that do not change what is loaded, `saved`, and `again`.
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
        self, base: Value, start: Value, extents: Sequence[Value], strides: Sequence[Value], block: Sequence[int]
    ) -> Value:
        """A matrix of two `extents` at `base` + start, rows `strides[0]` apart, to load tiles of `block` from; or a
        strip of one."""
        attributes = {"base": base, "block": tuple(block)}
        return self.pure(Code.DESCRIPTOR, (start, *extents, *strides), "descriptor", (), attributes)

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
