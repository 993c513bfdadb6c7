"""Arithmetic, comparisons and conversions."""

from __future__ import annotations

from kernel_agent.compiler.front import library
from kernel_agent.compiler.front.items import Item, Pointer, alike, all_with_parts, parts
from kernel_agent.compiler.front.reader import Reader, element_of, reads
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Value, constant, is_constant
from kernel_agent.ir.attributes import Dense
from kernel_agent.ir.program import Op

_BITS = {"arith.addi": Code.XOR, "arith.subi": Code.XOR, "arith.muli": Code.AND, "arith.maxsi": Code.AND,
         "arith.minsi": Code.OR, "arith.maxui": Code.OR, "arith.minui": Code.AND}  # fmt: skip
"""What operations on integers are on conditions, where true is -1."""


@reads("arith.constant")
def _constant(reader: Reader, op: Op, _: list[Item]) -> Value:
    value = op.attributes["value"]
    data = value.data if isinstance(value, Dense) else value
    element = element_of(op.results[0].type)
    if isinstance(data, tuple):
        raise reader.refuse(op, "a tile of different constants is not supported", "Load it, or compute it.")
    if element == "i1":
        data = bool(data)
    return reader.builder.const(data, element)


@reads("ub.poison")
def _poison(reader: Reader, op: Op, _: list[Item]) -> Value:
    element = element_of(op.results[0].type)
    if element.startswith("*"):
        raise reader.refuse(op, "a pointer has no value on one path", "Set it on all paths.")
    return reader.builder.const(
        False if element == "i1" else 0.0 if op.results[0].type.dtype.is_floating_point else 0, element
    )


@reads("arith.addf", "arith.addi", "arith.subf", "arith.subi", "arith.mulf", "arith.muli")
def _ring(reader: Reader, op: Op, operands: list[Value]) -> Value:
    a, b = operands
    if a.element == "i1":
        return reader.builder.elementwise(_BITS[op.name], (a, b))
    builder = reader.builder
    return {"add": builder.add, "sub": builder.sub, "mul": builder.mul}[op.name[6:9]](a, b)


@reads("arith.divf", "tt.precise_divf", "tt.approx_divf")
def _div(reader: Reader, _: Op, operands: list[Value]) -> Value:
    return library.sigmoid(reader.builder, *operands) or reader.builder.div(*operands)


@reads("arith.negf")
def _neg(reader: Reader, _: Op, operands: list[Value]) -> Value:
    return reader.builder.neg(operands[0])


@reads("arith.divsi", "arith.divui", "arith.remsi", "arith.remui", "arith.remf")
def _quotient(reader: Reader, op: Op, operands: list[Value]) -> Value:
    a, b = operands
    code = Code.FLOORDIV if "div" in op.name else Code.REM
    if is_constant(b, 1) and not a.is_float:
        return a if code is Code.FLOORDIV else reader.builder.zero(a)
    return reader.builder.elementwise(code, (a, b), attributes={"unsigned": True} if op.name.endswith("ui") else {})


_EXTREMES = {
    "arith.maxnumf": (Code.MAX, {"nan": False}), "arith.maximumf": (Code.MAX, {"nan": True}),
    "arith.minnumf": (Code.MIN, {"nan": False}), "arith.minimumf": (Code.MIN, {"nan": True}),
    "arith.maxsi": (Code.MAX, {}), "arith.minsi": (Code.MIN, {}),
    "arith.maxui": (Code.MAX, {"unsigned": True}), "arith.minui": (Code.MIN, {"unsigned": True}),
}  # fmt: skip


@reads(*_EXTREMES)
def _extreme(reader: Reader, op: Op, operands: list[Value]) -> Value:
    if operands[0].element == "i1":
        return reader.builder.elementwise(_BITS[op.name], operands)
    code, attributes = _EXTREMES[op.name]
    return reader.builder.elementwise(code, operands, attributes=attributes)


@reads("tt.clampf")
def _clamp(reader: Reader, op: Op, operands: list[Value]) -> Value:
    value, low, high = operands
    nan = {"nan": op.attributes["propagateNan"] == 0xFFFF, "first": True}
    above = reader.builder.elementwise(Code.MAX, (value, low), attributes=nan)
    return reader.builder.elementwise(Code.MIN, (above, high), attributes=nan)


_PLAIN = {
    "arith.andi": Code.AND, "arith.ori": Code.OR, "arith.xori": Code.XOR, "arith.shli": Code.SHL,
    "arith.shrsi": Code.SHR, "tt.mulhiui": Code.MULHI, "math.fma": Code.FMA, "math.absf": Code.ABS,
    "math.absi": Code.ABS, "math.exp": Code.EXP, "math.exp2": Code.EXP2, "math.log": Code.LOG, "math.log2": Code.LOG2,
    "math.sqrt": Code.SQRT, "tt.precise_sqrt": Code.SQRT, "math.rsqrt": Code.RSQRT, "math.sin": Code.SIN,
    "math.cos": Code.COS, "math.tanh": Code.TANH, "math.erf": Code.ERF, "math.floor": Code.FLOOR,
    "math.ceil": Code.CEIL,
}  # fmt: skip


@reads(*_PLAIN)
def _plain(reader: Reader, op: Op, operands: list[Value]) -> Value:
    builder, code = reader.builder, _PLAIN[op.name]
    if code is Code.AND and operands[0].element == "i1":
        return builder.logical_and(*operands)
    return builder.elementwise(code, operands)


@reads("arith.shrui")
def _shift(reader: Reader, _: Op, operands: list[Value]) -> Value:
    return reader.builder.elementwise(Code.SHR, operands, attributes={"unsigned": True})


_CALLS = {
    "math.expm1": "expm1", "math.log10": "log10", "math.log1p": "log1p", "math.tan": "tan", "math.trunc": "trunc",
    "math.round": "round", "math.roundeven": "rint", "math.powf": "pow", "math.copysign": "copysign",
    "math.ctpop": "popc", "math.ctlz": "clz",
}  # fmt: skip


@reads(*_CALLS)
def _call(reader: Reader, op: Op, operands: list[Value]) -> Value:
    return library.call(reader, op, operands, "libdevice." + _CALLS[op.name])


# --- comparisons

_INTEGER_PREDICATES = ("eq", "ne", "lt", "le", "gt", "ge", "lt", "le", "gt", "ge")
_ORDERED = {1: "eq", 2: "gt", 3: "ge", 4: "lt", 5: "le"}
_NEGATED = {8: ("lt", "gt"), 9: ("le",), 10: ("lt",), 11: ("ge",), 12: ("gt",)}
"""Predicates that hold on NaN -> those of which none holds where they do."""


@reads("arith.cmpi")
def _compare(reader: Reader, op: Op, operands: list[Item]) -> Value:
    a, b = operands
    predicate = int(op.attributes["predicate"])
    if not isinstance(a, Value) or not isinstance(b, Value):
        raise reader.refuse(op, "pointers are compared", "Compare sizes, or pass a flag.")
    if a.element == "i1" and predicate == 1 and constant(b) is False:
        return a
    if predicate == 1 and is_constant(b, 0) and (inner := _widened_condition(a)) is not None:
        return inner
    return reader.builder.compare(_INTEGER_PREDICATES[predicate], a, b, unsigned=predicate > 5)


def _widened_condition(value: Value) -> Value | None:
    """The condition that was made an integer."""
    op = value.producer
    return op.operands[0] if op is not None and op.code is Code.CAST and op.operands[0].element == "i1" else None


@reads("arith.cmpf")
def _compare_floats(reader: Reader, op: Op, operands: list[Value]) -> Value:
    a, b = operands
    builder, predicate = reader.builder, int(op.attributes["predicate"])
    if predicate in (0, 15):
        return builder.const(predicate == 15, "i1")
    if predicate in _ORDERED:
        return builder.compare(_ORDERED[predicate], a, b)
    if predicate == 13:
        return builder.compare("ne", a, b)
    if predicate == 6:
        return builder.elementwise(Code.OR, (builder.compare("lt", a, b), builder.compare("gt", a, b)))
    if predicate == 7:
        return builder.logical_and(builder.compare("eq", a, a), builder.compare("eq", b, b))
    if predicate == 14:
        return _either(reader, [builder.compare("ne", a, a), builder.compare("ne", b, b)])
    some = _either(reader, [builder.compare(name, a, b) for name in _NEGATED[predicate]])
    return builder.elementwise(Code.XOR, (some, builder.const(True, "i1")), "i1")


def _either(reader: Reader, conditions: list[Value]) -> Value:
    first, *rest = conditions
    for condition in rest:
        first = first if first is condition else reader.builder.elementwise(Code.OR, (first, condition))
    return first


@reads("arith.select")
def _select(reader: Reader, op: Op, operands: list[Item]) -> Item:
    condition, then, other = operands
    assert isinstance(condition, Value)
    if not alike(then, other):
        raise reader.refuse(
            op, "a pointer may point into one of several arguments", "Load from each, and choose between the values."
        )
    chosen = [_choose(reader, condition, a, b) for a, b in zip(parts(then), parts(other), strict=True)]
    return all_with_parts([then], chosen)[0]


def _choose(reader: Reader, condition: Value, a: Value, b: Value) -> Value:
    if a.element == "i1" and constant(a) is True and constant(b) is False:
        return condition
    if a.element != b.element and not a.is_float:  # offsets
        a, b = reader.builder.cast(a, "i64"), reader.builder.cast(b, "i64")
    return reader.builder.select(condition, a, b)


# --- conversions


@reads("arith.extf", "arith.truncf", "tt.fp_to_fp", "arith.sitofp", "arith.extsi", "arith.fptosi", "arith.index_cast")
def _cast(reader: Reader, op: Op, operands: list[Value]) -> Value:
    (value,) = operands
    element = element_of(op.results[0].type)
    if op.attributes.get("rounding") == 0:
        return reader.builder.cast(value, element, toward="zero")
    found = reader.builder.cast(value, element)
    return reader.builder.neg(found) if value.element == "i1" else found


@reads("arith.extui", "arith.uitofp", "arith.fptoui", "arith.index_castui")
def _cast_unsigned(reader: Reader, op: Op, operands: list[Value]) -> Value:
    (value,) = operands
    known = constant(value)
    plain = value.element == "i1" or (known is not None and not value.is_float and known >= 0)
    return reader.builder.cast(value, element_of(op.results[0].type), unsigned=not plain)


@reads("arith.trunci")
def _truncate(reader: Reader, op: Op, operands: list[Value]) -> Value:
    (value,) = operands
    builder, element = reader.builder, element_of(op.results[0].type)
    if element != "i1":
        return builder.cast(value, element)
    inner = _widened_condition(value)
    if inner is not None:
        return inner
    low = builder.elementwise(Code.AND, (value, builder.number(1, value)))
    return builder.compare("ne", low, builder.zero(value))


@reads("arith.bitcast", "tt.bitcast")
def _bitcast(reader: Reader, op: Op, operands: list[Item]) -> Item:
    (item,) = operands
    element = element_of(op.results[0].type)
    if isinstance(item, Pointer):
        wide = op.operands[0].type.scalar.element
        narrow = op.results[0].type.scalar.element
        assert wide is not None
        assert narrow is not None
        bytes_ = [max(8, type_.bits) for type_ in (wide, narrow)]
        if bytes_[0] != bytes_[1]:
            raise reader.refuse(
                op, f"a pointer to {wide.name} is used as one to {narrow.name}", "View the tensor so before the launch."
            )
        return Pointer(item.base, item.offset, element[1:])
    assert isinstance(item, Value)
    return library.bitcast(reader.builder, item, element)
