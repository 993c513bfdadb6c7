"""What the builder simplifies while it builds. Floats are only simplified where no bit of a finite result changes."""

from __future__ import annotations

import ctypes
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kernel_agent.compiler.ssa.code import PURE, Code
from kernel_agent.compiler.ssa.shapes import WHOLE, result_shape
from kernel_agent.compiler.ssa.value import FLOATS, Block, Op, Value, constant, is_constant, is_smaller, unspread

if TYPE_CHECKING:
    from kernel_agent.compiler.ssa.builder import Builder
    from kernel_agent.compiler.ssa.calculus import Calculus

_SYMBOLS = {Code.ADD: "+", Code.SUB: "-", Code.MUL: "*"}
_PYTHON: dict[Code, Callable[[Any, Any], Any]] = {
    Code.ADD: operator.add,
    Code.SUB: operator.sub,
    Code.MUL: operator.mul,
}
_LOGARITHMS, _POWERS = (Code.LOG, Code.LOG2), (Code.EXP, Code.EXP2)
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip


def add(b: Calculus, x: Value, y: Value) -> Value:
    """x + y."""
    if _is(x, 0):
        return y
    if _is(y, 0):
        return x
    known = _integers(b, Code.ADD, x, y)
    if known is not None:
        return known
    if not x.is_float:
        for one, other in ((x, y), (y, x)):
            op = other.producer
            if op is not None and op.code is Code.SUB and op.operands[1] is one and op.operands[0].shape == other.shape:
                return op.operands[0]  # x + (z - x), which wraps back
    if constant(x) is not None and constant(y) is None:
        x, y = y, x
    if x.is_float and (inner := _operand_of(Code.NEG, y)) is not None:
        return sub(b, x, inner)
    if x.is_float and (inner := _operand_of(Code.NEG, x)) is not None:
        return sub(b, y, inner)
    return b.elementwise(Code.ADD, (x, y), _wider(x, y))


def sub(b: Calculus, x: Value, y: Value) -> Value:
    """x - y."""
    if _is(y, 0):
        return x
    if _is(x, 0):
        return neg(b, y)
    known = _integers(b, Code.SUB, x, y)
    if known is not None:
        return known
    if x is y and not x.is_float:
        return b.zero(x)
    if x.is_float and (inner := _operand_of(Code.NEG, y)) is not None:
        return add(b, x, inner)
    return b.elementwise(Code.SUB, (x, y), _wider(x, y))


def mul(b: Calculus, x: Value, y: Value) -> Value:
    """x * y. A product with the constant zero is zero: adjoints of what is constant vanish, infinite or not."""
    if _is(x, 1):
        return y
    if _is(y, 1):
        return x
    if _is(x, 0) or _is(y, 0):
        return b.const(0.0 if x.is_float else 0, _wider(x, y))
    known = _integers(b, Code.MUL, x, y)
    if known is not None:
        return known
    if x.is_float:
        if (inner := _operand_of(Code.NEG, x)) is not None:
            return neg(b, mul(b, inner, y))
        if (inner := _operand_of(Code.NEG, y)) is not None:
            return neg(b, mul(b, x, inner))
        if _is(x, -1):
            return neg(b, y)
        if _is(y, -1):
            return neg(b, x)
    if constant(x) is not None and constant(y) is None:
        x, y = y, x
    return b.elementwise(Code.MUL, (x, y), _wider(x, y))


def div(b: Calculus, x: Value, y: Value) -> Value:
    """x / y of floats. Zero divided is zero, as with products; by a reciprocal is to multiply."""
    if _is(y, 1):
        return x
    if y.producer is not None and y.producer.code is Code.DIV and _is(unspread(y.producer.operands[0]), 1):
        return mul(b, x, y.producer.operands[1])
    if _is(x, 0):
        return b.const(0.0, _wider(x, y))
    if (inner := _operand_of(Code.NEG, x)) is not None:
        return neg(b, div(b, inner, y))
    return b.elementwise(Code.DIV, (x, y), _wider(x, y))


def unary(b: Calculus, code: Code, x: Value, attributes: Mapping[str, Any]) -> Value:
    """A function of one number. The logarithm of one is zero: so it is of a sum that a log-sum-exp has already."""
    for codes, number, found in ((_LOGARITHMS, 1.0, 0.0), (_POWERS, 0.0, 1.0)):
        if code in codes and x.is_float and constant(unspread(x)) == number:
            return b.const(found, x.element)
    return b.elementwise(code, (x,), attributes=attributes)


def neg(b: Calculus, x: Value) -> Value:
    """-x."""
    value = constant(x)
    if value is not None and not isinstance(value, bool):
        symbol = _symbol(x)
        return b.const(_wrapped(-value, x.element), x.element, f"(-{symbol})" if symbol else None)
    if (inner := _operand_of(Code.NEG, x)) is not None:
        return inner
    op = x.producer
    if op is not None and op.code is Code.SUB and x.is_float:
        return sub(b, op.operands[1], op.operands[0])
    return b.elementwise(Code.NEG, (x,))


def cast(b: Calculus, x: Value, element: str, attributes: dict[str, Any]) -> Value:
    """Value conversion; constants are converted here, and what only became wider becomes what it was."""
    if x.element == element:
        return x
    value = constant(x)
    if value is not None and not attributes.get("unsigned"):
        known = _converted(value, x.element, element)
        if known is not None and (element != "i1" or _symbol(x) is None):
            return b.const(known, element, _symbol(x))
    op = x.producer
    if op is not None and op.code is Code.CAST and op.operands[0].element == element and _only_widens(op):
        return op.operands[0]
    return b.elementwise(Code.CAST, (x,), element, {k: v for k, v in attributes.items() if v}, x.name)


def _converted(value: bool | int | float, source: str, element: str) -> bool | int | float | None:
    """A constant as another element; None for narrow floats, and where devices may differ."""
    if element == "i1":
        return bool(value)
    if element[0] == "i":
        if not math.isfinite(value):
            return None
        whole = int(value)
        return whole if whole == _wrapped(whole, element) else None
    if element in ("f32", "f64") and (isinstance(value, int) or source in FLOATS):
        return float(value) if element == "f64" else ctypes.c_float(value).value
    return None


_FLOAT_ORDER = {"f16": 0, "bf16": 0, "f32": 1, "f64": 2}


def _only_widens(op: Op) -> bool:
    """Whether a CAST loses nothing, so that the way back undoes it."""
    source, target = op.operands[0].element, op.result.element
    if source in _FLOAT_ORDER and target in _FLOAT_ORDER:
        return _FLOAT_ORDER[source] < _FLOAT_ORDER[target]
    return source[0] == target[0] == "i" and source != "i1" and int(source[1:]) <= int(target[1:])


def compare(b: Calculus, predicate: str, x: Value, y: Value, unsigned: bool) -> Value:
    """i1."""
    left, right = constant(x), constant(y)
    if left is not None and right is not None and not unsigned and not (_symbol(x) or _symbol(y)):
        return b.const(_COMPARE[predicate](left, right), "i1")
    if x is y and not x.is_float:
        return b.const(predicate in ("eq", "le", "ge"), "i1")
    extra = {"unsigned": True} if unsigned else {}
    return b.elementwise(Code.CMP, (x, y), "i1", {"predicate": predicate, **extra})


def select(b: Calculus, condition: Value, x: Value, y: Value) -> Value:
    """x where the condition holds, else y; of a choice within by the same condition, what it can be here."""
    known = constant(condition)
    x, y = _chosen(condition, x, 1), _chosen(condition, y, 2)
    if x is y or known is True or _is_left_out(x, condition, y):
        return x
    if known is False:
        return y
    return b.elementwise(Code.SELECT, (condition, x, y), x.element)


def _chosen(condition: Value, value: Value, side: int) -> Value:
    op = value.producer
    return op.operands[side] if op is not None and op.code is Code.SELECT and op.operands[0] is condition else value


def _is_left_out(loaded: Value, condition: Value, y: Value) -> bool:
    """Whether a load gives `y` in all lanes where a condition does not hold."""
    op = loaded.producer
    return op is not None and op.code is Code.LOAD and op.mask is condition and op.other is y


def logical_and(b: Calculus, x: Value, y: Value) -> Value:
    """Bitwise and; of conditions, true gives way."""
    for one, other in ((x, y), (y, x)):
        if constant(one) is True or one is other:
            return other
        if constant(one) is False:
            return one
    return b.elementwise(Code.AND, (x, y))


def trans(b: Calculus, x: Value, order: tuple[int, ...]) -> Value:
    """Permuted axes; two permutations are one, none is none."""
    if x.shape == ():
        return x
    op = x.producer
    if op is not None and op.code is Code.TRANS:
        inner = op.attributes["order"]
        return trans(b, op.operands[0], tuple(inner[axis] for axis in order))
    if order == tuple(range(len(order))):
        return x
    return b.pure(Code.TRANS, (x,), x.element, [x.shape[axis] for axis in order], {"order": order}, x.name)


def total(b: Calculus, x: Value, axis: int) -> Value:
    """Sum over an axis; of an extent 1 it is the element itself."""
    op = x.producer
    if op is not None and op.code is Code.EXPAND and op.attributes["axis"] == axis:
        return op.operands[0]
    shape = (*x.shape[:axis], *x.shape[axis + 1 :])
    if op is not None and op.code is Code.FULL and is_constant(op.operands[0], 0):
        return op.operands[0]
    if op is not None and op.code is Code.NEG:
        return neg(b, total(b, op.operands[0], axis))
    if x.shape[axis] == 1:
        return b.reshape(x, shape)
    return b.pure(Code.SUM, (x,), x.element, shape, {"axis": axis})


def again(b: Builder, op: Op, operands: Sequence[Value], blocks: Sequence[Block] = ()) -> Value | tuple[Value, ...]:
    """The same operation on other operands; where folding took extents that it needs, they get them back."""
    if op.code in WHOLE:
        operands = [
            b.whole(new, old.shape) if is_smaller(new, old) else new
            for new, old in zip(operands, op.operands, strict=True)
        ]
    attributes = op.attributes
    if op.code in _OF_TWO and (op.code is not Code.AND or op.result.element == "i1"):
        return _OF_TWO[op.code](b, *operands)
    if op.code is Code.NEG:
        return neg(b, *operands)
    if op.code in (*_LOGARITHMS, *_POWERS):
        return unary(b, op.code, operands[0], attributes)
    if op.code is Code.SELECT:
        return select(b, *operands)
    if op.code is Code.CAST:
        return cast(b, operands[0], op.result.element, dict(attributes))
    if op.code is Code.CMP:
        return compare(b, attributes["predicate"], operands[0], operands[1], attributes.get("unsigned", False))
    if op.code is Code.EXPAND:
        return b.expand(operands[0], attributes["axis"])
    if op.code is Code.TRANS:
        return trans(b, operands[0], attributes["order"])
    if op.code is Code.SUM:
        return total(b, operands[0], attributes["axis"])
    if op.code in (Code.FULL, Code.BROADCAST):
        return b.whole(operands[0], op.result.shape)
    if op.code is Code.LOAD:
        rest = list(operands[1:])
        mask = rest.pop(0) if attributes["masked"] else None
        other = rest.pop(0) if attributes["padded"] else None
        hints = {key: value for key, value in attributes.items() if key not in ("base", "masked", "padded")}
        return b.load(op.base, operands[0], mask, other, op.result.name, **hints)
    shapes = [value.shape for value in operands]
    shape = result_shape(op.code, shapes, attributes, op.results[0].shape)
    if op.code not in PURE or len(op.results) > 1:
        results = [Value(value.element, shape, value.name) for value in op.results]
        return b.add_op(Op(op.code, operands, results, dict(attributes), blocks)).results
    if op.code is Code.RESHAPE:
        return b.reshape(operands[0], shape)
    return b.pure(op.code, operands, op.result.element, shape, attributes, op.result.name)


_OF_TWO: dict[Code, Callable[[Builder, Value, Value], Value]] = {
    Code.ADD: add, Code.SUB: sub, Code.MUL: mul, Code.DIV: div, Code.AND: logical_and,
}  # fmt: skip


def _integers(b: Calculus, code: Code, x: Value, y: Value) -> Value | None:
    """The constant that two integer constants make, with the expression of its symbols; None for anything else."""
    left, right = constant(x), constant(y)
    if left is None or right is None or x.is_float or x.element == "i1":
        return None
    symbol = None
    if _symbol(x) or _symbol(y):
        symbol = f"({_symbol(x) or left} {_SYMBOLS[code]} {_symbol(y) or right})"
    found = _PYTHON[code](left, right)
    wrapped = _wrapped(found, x.element)
    return b.const(wrapped, x.element, symbol if found == wrapped else None)


def _wrapped(value: Any, element: str) -> Any:
    """An integer as its element holds it; floats as they are."""
    if element[0] != "i":
        return value
    half = 1 << (int(element[1:]) - 1)
    return (value + half) % (2 * half) - half


def _is(value: Value, number: float) -> bool:
    """Whether a value is a number whatever the constexprs are, not one that a constexpr happens to be."""
    op = value.producer
    return op is not None and op.code is Code.CONST and is_constant(value, number) and _symbol(value) is None


def _symbol(value: Value) -> str | None:
    op = value.producer
    found: str | None = op.attributes.get("symbol") if op is not None and op.code is Code.CONST else None
    return found


def _operand_of(code: Code, value: Value) -> Value | None:
    """The only operand of an operation of one kind."""
    op = value.producer
    return op.operands[0] if op is not None and op.code is code else None


def _wider(x: Value, y: Value) -> str:
    """The element of a sum or product: adjoints in float32 meet primals in 16 bits, and constants follow the other."""
    if x.element == y.element or not (x.is_float and y.is_float):
        return x.element if constant(x) is None else y.element
    if constant(x) is not None:
        return y.element
    if constant(y) is not None:
        return x.element
    rank = {"f64": 3, "f32": 2}
    return max(x.element, y.element, key=lambda element: rank.get(element, 1))
