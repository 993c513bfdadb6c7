"""Expressions of single operations, with the meaning that Triton gives to what is printed."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from kernel_agent.compiler.emit import expression as ex
from kernel_agent.compiler.emit.dtypes import (
    as_tensor,
    bits,
    cast,
    dtype,
    is_float,
    natural,
    of_type,
    promoted,
    promoted_types,
    signed,
    unsigned,
)  # fmt: skip
from kernel_agent.compiler.emit.expression import Expression, Level
from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Op, Value, constant

_OPERATORS = {
    Code.ADD: "+", Code.SUB: "-", Code.MUL: "*", Code.DIV: "/", Code.FLOORDIV: "//", Code.REM: "%",
    Code.AND: "&", Code.OR: "|", Code.XOR: "^", Code.SHL: "<<", Code.SHR: ">>",
}  # fmt: skip
_PREDICATES = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_MATH = {
    Code.EXP: "tl.exp", Code.EXP2: "tl.exp2", Code.LOG: "tl.log", Code.LOG2: "tl.log2", Code.SQRT: "tl.sqrt",
    Code.RSQRT: "tl.rsqrt", Code.SIN: "tl.sin", Code.COS: "tl.cos", Code.ERF: "tl.erf", Code.SIGMOID: "tl.sigmoid",
    Code.FLOOR: "tl.floor", Code.CEIL: "tl.ceil", Code.TANH: "libdevice.tanh",
}  # fmt: skip
"""Of float32 and float64 only."""
_TOWARDS_ZERO = frozenset(("rtz", "zero", "towards_zero"))

At = Callable[[Value], Expression]
"""What a value is printed as."""


class Operations:
    """Source of operations within one kernel."""

    def __init__(self, extents: dict[int, str], at: At) -> None:
        self.extents = extents
        self.at = at

    def of(self, op: Op) -> Expression:
        """Source of an operation with one result, of the result's type. Raises `CannotDerive`."""
        found = self._untyped(op)
        element = op.result.element
        return found if found.weak else of_type(found, element)

    def _untyped(self, op: Op) -> Expression:
        code, attributes = op.code, op.attributes
        if code in _OPERATORS:
            return self._binary(op)
        if code in _MATH:
            return self._math(op)
        simple: dict[Code, Callable[[Op], Expression]] = {
            Code.CONST: self._const, Code.FULL: self._full, Code.NEG: self._neg, Code.MAX: self._extreme,
            Code.MIN: self._extreme, Code.FMA: self._fma, Code.MULHI: self._mulhi, Code.CMP: self._compare,
            Code.SELECT: self._select, Code.CAST: self._cast, Code.CALL: self._call, Code.EXPAND: self._expand,
            Code.RESHAPE: self._reshape, Code.SUM: self._reduction, Code.REDUCE_MAX: self._reduction,
            Code.REDUCE_MIN: self._reduction, Code.CUMSUM: self._cumsum, Code.ARANGE: self._arange,
        }  # fmt: skip
        if code in simple:
            return simple[code](op)
        element = op.result.element
        operands = [self.at(value) for value in op.operands]
        if code is Code.PROGRAM_ID:
            return ex.call("tl.program_id", [str(attributes["axis"])], "i32")
        if code is Code.NUM_PROGRAMS:
            return ex.call("tl.num_programs", [str(attributes["axis"])], "i32")
        if code is Code.ABS:
            return ex.call("tl.abs", operands, natural(operands[0].element))
        if code is Code.KNOWN:
            return operands[1]
        if code is Code.BITCAST:
            return cast(operands[0], element, bitcast="True")
        if code is Code.BROADCAST:
            return ex.call("tl.broadcast_to", [operands[0], self.dims(op.result.shape)], operands[0].element)
        if code is Code.TRANS:
            if attributes["order"] == (1, 0):
                return ex.call("tl.trans", operands, operands[0].element)
            order = ", ".join(map(str, attributes["order"]))
            return ex.call("tl.permute", [operands[0], f"({order})"], operands[0].element)
        if code is Code.JOIN:
            return ex.call("tl.join", [self.whole(v, op.result.shape[:-1]) for v in op.operands], element)
        if code is Code.FLIP:
            return ex.call("tl.flip", operands, operands[0].element, dim=str(attributes["axis"]))
        if code is Code.GATHER:
            return ex.call("tl.gather", operands, operands[0].element, axis=str(attributes["axis"]))
        if code in (Code.ARG_MAX, Code.ARG_MIN):
            function = "tl.argmax" if code is Code.ARG_MAX else "tl.argmin"
            return ex.call(function, operands, "i32", axis=str(attributes["axis"]))
        if code is Code.DOT:
            return self.dot(op)
        raise CannotDerive(
            f"there is no Triton source for the operation {code.value}",
            remedy="Write this part of the forward with other operations.",
        )

    # --- shapes and constants

    def dims(self, shape: tuple[int, ...]) -> str:
        """`[BLOCK_M, 64]`."""
        return f"[{', '.join(self.extents.get(extent, str(extent)) for extent in shape)}]"

    def dims_of(self, shape: tuple[int, ...]) -> Expression:
        """The same, with the names that it reads."""
        return self._sized(Expression(self.dims(shape), Level.PRIMARY, ""), shape)

    def symbol(self, text: str, element: str) -> Expression:
        """An expression over constexprs, without needless parentheses."""
        tree = ast.parse(text, mode="eval").body
        reads = frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
        levels: dict[type, Level] = {
            ast.Add: Level.SUM, ast.Sub: Level.SUM, ast.Mult: Level.PRODUCT, ast.FloorDiv: Level.PRODUCT,
            ast.Div: Level.PRODUCT, ast.Mod: Level.PRODUCT,
        }  # fmt: skip
        level = Level.PRIMARY if isinstance(tree, (ast.Name, ast.Call)) else Level.COMPARISON
        if isinstance(tree, ast.BinOp):
            level = levels.get(type(tree.op), Level.COMPARISON)
        return Expression(ast.unparse(tree), level, element, reads, static=True)

    def _const(self, op: Op) -> Expression:
        value, symbol = op.attributes["value"], op.attributes.get("symbol")
        weak = "bool" if op.result.element == "i1" else "float" if op.result.is_float else "int"
        if symbol:
            return self.symbol(symbol, weak)
        return number(value, op.result.element)

    def _full(self, op: Op) -> Expression:
        element, shape = op.result.element, self.dims(op.result.shape)
        value = self.at(op.operands[0])
        if constant(op.operands[0]) in (0, False) and value.text in ("0", "0.0", "False"):
            return self._sized(ex.call("tl.zeros", [shape], element, dtype=dtype(element)), op.result.shape)
        made = ex.call("tl.full", [shape, value], element, dtype=dtype(element))
        return self._sized(made, op.result.shape)

    def _sized(self, value: Expression, shape: tuple[int, ...]) -> Expression:
        """The names of extents are read too."""
        names = [self.symbol(self.extents[extent], "int").reads for extent in shape if extent in self.extents]
        return replace(value, reads=value.reads.union(*names))

    def _arange(self, op: Op) -> Expression:
        start, end, symbol = op.attributes["start"], op.attributes["end"], op.attributes.get("symbol")
        stop = symbol or self.extents.get(end - start)
        if stop is None or start != 0:
            return ex.call("tl.arange", [str(start), str(end)], "i32")
        return ex.call("tl.arange", [str(start), self.symbol(stop, "int")], "i32")

    def whole(self, value: Value, shape: tuple[int, ...]) -> Expression:
        """A value as a tile of exactly a shape."""
        if value.shape == shape:
            return self.at(value)
        if value.shape == ():
            return ex.call("tl.full", [self.dims(shape), self.at(value)], value.element, dtype=dtype(value.element))
        return ex.call("tl.broadcast_to", [self.at(value), self.dims(shape)], value.element)

    # --- arithmetic

    def _binary(self, op: Op) -> Expression:
        left, right = (self.at(value) for value in op.operands)
        start, product = (value.producer for value in op.operands)
        spread = op.code is Code.ADD and left.element == "f32" and start is not None and start.code is Code.BROADCAST
        if spread and product is not None and product.code is Code.DOT and right.text == self.dot(product).text:
            return self.dot(product, left)
        symbol, element = _OPERATORS[op.code], op.result.element
        if op.attributes.get("unsigned"):
            width = op.result.element
            left, right = unsigned(left, width), unsigned(right, width)
            return signed(ex.binary(left, symbol, right, promoted(left, right)))
        if op.code is Code.XOR and constant(op.operands[1]) is (True if element == "i1" else -1):
            return ex.unary("~", left, left.element)
        element = promoted(left, right, division=op.code in (Code.DIV, Code.REM, Code.FLOORDIV))
        if op.code is Code.FLOORDIV and (counted := self._counted(op, left, right)) is not None:
            return replace(ex.call("tl.cdiv", [counted, right], element), static=left.static and right.static)
        return ex.binary(left, symbol, right, element)

    def _counted(self, op: Op, left: Expression, right: Expression) -> Expression | None:
        """What is counted in parts of which the last may be broken: x, where `(x + (part - 1)) // part` is printed."""
        added, part = op.operands[0].producer, constant(op.operands[1])
        if added is None or added.code is not Code.ADD or right.level is not Level.PRIMARY:
            return None
        whole = self.at(added.operands[0])
        rest = f"({right.text} - 1)"
        if isinstance(part, int) and right.text == str(part):
            rest = str(part - 1)
        return whole if left.text == f"{whole.within(Level.SUM)} + {rest}" else None

    def _neg(self, op: Op) -> Expression:
        inner = self.at(op.operands[0])
        return ex.unary("-", inner, inner.element)

    def _compare(self, op: Op) -> Expression:
        left, right = (self.at(value) for value in op.operands)
        if op.attributes.get("unsigned"):
            width = next(v.element for v in op.operands)
            left, right = unsigned(left, width), unsigned(right, width)
        return ex.comparison(left, _PREDICATES[op.attributes["predicate"]], right)

    def _extreme(self, op: Op) -> Expression:
        operands = [self.at(value) for value in op.operands]
        if op.attributes.get("unsigned"):
            operands = [cast(value, f"u{bits(op.result.element)}") for value in operands]
        kinds = [as_tensor(value) for value in operands]
        element = promoted_types(kinds[0].element, kinds[1].element)
        function = "tl.maximum" if op.code is Code.MAX else "tl.minimum"
        options = {}
        if op.attributes.get("nan") and op.result.is_float:
            options["propagate_nan"] = "tl.PropagateNan.ALL"
        found = ex.call(function, operands, element, **options)
        return signed(found) if element[0] == "u" else found

    def _fma(self, op: Op) -> Expression:
        operands = [of_type(self.at(value), op.result.element) for value in op.operands]
        return ex.call("tl.fma", operands, op.result.element)

    def _mulhi(self, op: Op) -> Expression:
        operands = [cast(self.at(value), f"u{bits(op.result.element)}") for value in op.operands]
        return signed(ex.call("tl.umulhi", operands, f"u{bits(op.result.element)}"))

    def _math(self, op: Op) -> Expression:
        inner = self.at(op.operands[0])
        if natural(inner.element) not in ("f32", "f64"):
            inner = cast(inner, "f32")
        found = ex.call(_MATH[op.code], [inner], natural(inner.element))
        return replace(found, needs=found.needs | {"libdevice"}) if op.code is Code.TANH else found

    def _select(self, op: Op) -> Expression:
        condition, then, other = (self.at(value) for value in op.operands)
        return ex.call("tl.where", [condition, then, other], natural(promoted(then, other)))

    def _call(self, op: Op) -> Expression:
        function, element = str(op.attributes["function"]), op.result.element
        operands = [self.at(value) for value in op.operands]
        if function.startswith("tl."):
            return ex.call(function, operands, element)
        if op.result.is_float and element not in ("f32", "f64"):  # which the libraries have no functions of
            operands = [cast(value, "f32") if value.element == element else value for value in operands]
            element = "f32"
        found = ex.call(function, operands, element)
        return replace(found, needs=found.needs | {function.split(".")[0]})

    def _cast(self, op: Op) -> Expression:
        inner, element = self.at(op.operands[0]), op.result.element
        options: dict[str, str] = {}
        if toward := op.attributes.get("toward"):
            if toward not in _TOWARDS_ZERO:
                raise CannotDerive(f"Triton's language has no conversion that rounds {toward}")
            options["fp_downcast_rounding"] = '"rtz"'
        if op.attributes.get("unsigned") and op.operands[0].element != "i1":
            if op.operands[0].is_float:
                return signed(cast(inner, f"u{bits(element)}"))
            inner = cast(inner, f"u{bits(op.operands[0].element)}")
        if element == "i1":
            return ex.comparison(inner, "!=", number(0.0 if op.operands[0].is_float else 0, op.operands[0].element))
        return cast(inner, element, **options)

    # --- shape and reductions

    def _expand(self, op: Op) -> Expression:
        producer: Op | None = op
        index, value = [":"] * len(op.result.shape), op.result
        axes = list(range(len(index)))  # of the value at hand, in the result
        while producer is not None and producer.code is Code.EXPAND:
            index[axes.pop(producer.attributes["axis"])] = "None"
            value = producer.operands[0]
            producer = value.producer
        return ex.subscript(self.at(value), ", ".join(index))

    def _reshape(self, op: Op) -> Expression:
        inner = self.at(op.operands[0])
        if op.result.shape == ():
            return ex.call("tl.sum", [inner], inner.element)
        if op.operands[0].shape == ():
            return ex.call("tl.full", [self.dims(op.result.shape), inner], inner.element, dtype=dtype(inner.element))
        return self._sized(ex.call("tl.reshape", [inner, self.dims(op.result.shape)], inner.element), op.result.shape)

    def _reduction(self, op: Op) -> Expression:
        inner, axis = self.at(op.operands[0]), str(op.attributes["axis"])
        element = natural(inner.element)
        if op.code is Code.SUM:
            if not is_float(element) and bits(element) < 32:
                element = "i32"
            return ex.call("tl.sum", [inner], element, axis=axis)
        if op.attributes.get("nan"):
            helper = "nan_maximum" if op.code is Code.REDUCE_MAX else "nan_minimum"
            found = ex.call("tl.reduce", [inner, axis, helper], element)
            return replace(found, needs=found.needs | {helper})
        if is_float(element):
            element = element if element in ("f32", "f64") else "f32"
        elif bits(element) < 32:
            element = "i32"
        return ex.call("tl.max" if op.code is Code.REDUCE_MAX else "tl.min", [inner], element, axis=axis)

    def _cumsum(self, op: Op) -> Expression:
        inner = as_tensor(self.at(op.operands[0]))
        element = inner.element
        if not is_float(element) and bits(element) < 32:
            element = "i32"
        options = {"axis": str(op.attributes["axis"])}
        if op.attributes.get("reverse"):
            options["reverse"] = "True"
        return ex.call("tl.cumsum", [inner], element, **options)

    def dot(self, op: Op, onto: Expression | None = None) -> Expression:
        """A product of matrices, added to `onto`."""
        operands = [self.at(value) for value in op.operands]
        element, options = op.result.element, {}
        precision = op.attributes.get("precision")
        if operands[0].element in ("f32", "f64") and precision not in (None, "tf32"):
            options["input_precision"] = f'"{precision}"'
        if element == "f16" or (onto is not None and element != "f32"):
            options["out_dtype"] = dtype(element)
        return ex.call("tl.dot", [*operands, *([] if onto is None else [onto])], element, **options)


def number(value: Any, element: str) -> Expression:
    """A Python number. Floats in the fewest digits that give the same number of their type."""
    if isinstance(value, bool) or element == "i1":
        return Expression(str(bool(value)), Level.PRIMARY, "bool", static=True)
    if not is_float(element):
        text = str(int(value))
        return Expression(text, Level.UNARY if text[0] == "-" else Level.PRIMARY, "int", static=True)
    if math.isinf(value) or math.isnan(value):
        return Expression(f'float("{float(value)}")', Level.PRIMARY, "float", static=True)
    text = repr(float(value))
    if element != "f64" and abs(value) < 1e38:
        short = str(np.float32(value))
        text = short if np.float32(short) == np.float32(value) else text
    text = text.replace("e+", "e")
    return Expression(text, Level.UNARY if text[0] == "-" else Level.PRIMARY, "float", static=True)
