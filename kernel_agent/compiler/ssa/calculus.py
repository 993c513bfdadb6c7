"""`Calculus`: what a builder makes of values without effects, memory or control: numbers, elementwise results, shapes,
reductions, products. It folds what can be told without a launch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from kernel_agent.compiler.ssa import fold
from kernel_agent.compiler.ssa.code import ELEMENTWISE, Code
from kernel_agent.compiler.ssa.value import Kernel, Value, broadcast_shape


class Calculus(ABC):
    """Operations on the values of `kernel`."""

    kernel: Kernel

    @abstractmethod
    def pure(
        self,
        code: Code,
        operands: Sequence[Value],
        element: str,
        shape: Sequence[int],
        attributes: Mapping[str, Any] | None = None,
        name: str = "",
    ) -> Value:
        """The value of an operation without effect."""

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
        return fold.unary(self, code, a, attributes)

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
