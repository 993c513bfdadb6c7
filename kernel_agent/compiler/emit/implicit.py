"""`implicit`: a kernel without the conversions that Triton makes by itself, which nobody would write."""

from __future__ import annotations

from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.rebuild import Copier
from kernel_agent.compiler.ssa.value import Kernel, Op, Value, constant

_HALF_A_BIT = 2.0**-24
"""Of a float32 near 1."""
_PROMOTING = frozenset((Code.ADD, Code.SUB, Code.MUL, Code.DIV, Code.FLOORDIV, Code.REM, Code.CMP))


def implicit(kernel: Kernel) -> Kernel:
    """A copy in which operations may meet operands of several elements; their results keep theirs."""
    return _Implicit(kernel).copy()


class _Implicit(Copier):
    def pure(self, op: Op) -> None:
        """An operation of two operands, one of which Triton would convert to the type of the other; a product with what
        undoes an earlier factor."""
        if op.code is Code.MUL and self._undone(op):
            return
        if op.code not in _PROMOTING or op.attributes.get("unsigned"):
            super().pure(op)
            return
        left, right = self.all(op.operands)
        for value, other in sorted(((left, right), (right, left)), key=_rank):
            inner = _converted(value, other)
            if inner is not None:
                operands = (inner, right) if value is left else (left, inner)
                self[op.result] = self.b.elementwise(
                    op.code, operands, op.result.element, op.attributes, op.result.name
                )
                return
        super().pure(op)

    def _undone(self, op: Op) -> bool:
        """`x * a` for `x * (a * 1.442695) * 0.6931472`: factors of scores in bits and of their derivatives."""
        factor = constant(op.operands[1])
        inner = op.operands[0].producer
        if factor is None or inner is None or inner.code is not Code.MUL or op.result.element != "f32":
            return False
        for scaled, scale in (inner.operands, inner.operands[::-1]):
            made = scale.producer if scale.shape == () else None
            other = constant(made.operands[1]) if made is not None and made.code is Code.MUL else None
            if made is not None and other is not None and abs(other * factor - 1.0) < _HALF_A_BIT:
                self[op.result] = self.b.mul(self[scaled], self[made.operands[0]])
                return True
        return False

    def effect(self, op: Op) -> None:
        """A store, which converts floats to what its pointer points to; a descriptor's, too."""
        if op.code is Code.STORE_BLOCK and "checked" not in op.attributes and not self.slicing:
            inner = _source(self[op.stored])
            if inner is not None and inner.is_float and op.stored.is_float and op.stored.element == op.base.pointee:
                self.b.store_block(self[op.operands[0]], inner, self.all(op.operands[2:]))
                return
        if op.code in (Code.STORE, Code.ATOMIC_ADD) and not self.slicing:
            inner = _source(self[op.stored])
            if inner is not None and inner.is_float and op.stored.is_float and op.stored.element == op.base.pointee:
                mask = None if op.mask is None else self[op.mask]
                hints = {key: value for key, value in op.attributes.items() if key not in ("base", "masked")}
                self.b.store(self[op.base], self.whole(op.offset), inner, mask, op.code, **hints)
                return
        super().effect(op)


def _rank(pair: tuple[Value, Value]) -> tuple[int, bool]:
    """Arguments before other scalars, those before tiles."""
    inner = _source(pair[0])
    return len(pair[0].shape), inner is None or inner.producer is not None or inner.depth > 0


def _source(value: Value) -> Value | None:
    """What a plain conversion converts."""
    op = value.producer
    return op.operands[0] if op is not None and op.code is Code.CAST and not op.attributes else None


def _converted(value: Value, other: Value) -> Value | None:
    """What Triton would make `value` of by itself where it meets `other`."""
    inner = _source(value)
    if inner is None or value is other or constant(other) is not None or other.element != value.element:
        return None
    if inner.is_float or inner.element == "i1":
        return None
    if value.is_float:
        return inner if inner.shape == () else None
    return inner if int(inner.element[1:]) < int(value.element[1:]) else None
