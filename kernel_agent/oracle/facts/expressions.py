"""Whole numbers of a kernel as its author would write them: `min((program 0 + 1) * BLOCK_M, T)`."""

from __future__ import annotations

import re
from collections.abc import Mapping

from kernel_agent.ir.attributes import Dense
from kernel_agent.ir.program import Op, Value
from kernel_agent.oracle.facts.sources import Sources

_BINARY = {
    "arith.addi": "+",
    "arith.subi": "-",
    "arith.muli": "*",
    "arith.divsi": "//",
    "arith.divui": "//",
    "arith.remsi": "%",
    "arith.remui": "%",
}
_CALLS = {
    "arith.minsi": "min",
    "arith.minui": "min",
    "arith.maxsi": "max",
    "arith.maxui": "max",
    "arith.ceildivsi": "cdiv",
}
_SAME = frozenset(
    {
        *("arith.extsi", "arith.extui", "arith.trunci", "arith.index_cast", "arith.bitcast", "tt.splat", "tt.unsplat"),
        *("tt.broadcast", "tt.expand_dims", "tt.addptr", "arith.sitofp"),
    }
)
_ATOM = re.compile(r"[\w.]+|program \d|programs of axis \d|(?:min|max|cdiv)\([^()]*\)")
"""Texts that need no brackets."""
_LONGEST = 60
"""Characters beyond which a value goes by the name of its variable."""


def expression(value: Value, sources: Sources, constants: Mapping[str, int], depth: int = 0) -> str:
    """A number in terms of parameters, programs and constants; its variable's name where that would be too long."""
    op = sources.producer.get(value.id)
    if op is None:
        return value.variable or "?"
    text = _of(op, sources, constants, depth) if depth < 12 else ""
    if not text or len(text) > _LONGEST:
        return value.variable or "?"
    return text


def _of(op: Op, sources: Sources, constants: Mapping[str, int], depth: int) -> str:
    def part(place: int) -> str:
        text = expression(op.operands[place], sources, constants, depth + 1)
        return text if _ATOM.fullmatch(text) else f"({text})"

    if op.name == "arith.constant":
        return constant(op.attributes.get("value"), constants)
    if op.name == "tt.get_program_id":
        return f"program {int(op.attributes.get('axis', 0))}"
    if op.name == "tt.get_num_programs":
        return f"programs of axis {int(op.attributes.get('axis', 0))}"
    if op.name in _BINARY:
        return _rounded_up(op, sources, constants, depth) or f"{part(0)} {_BINARY[op.name]} {part(1)}"
    if op.name in _CALLS:
        inner = [expression(value, sources, constants, depth + 1) for value in op.operands]
        return f"{_CALLS[op.name]}({', '.join(inner)})"
    if op.name == "arith.select":
        return f"{part(1)} or {part(2)}"
    if op.name in ("tt.load", "tt.descriptor_load"):
        names = [value.variable for value in sources.roots(op.operands[0])]
        return f"a value of {names[0]}" if names and names[0] else ""
    if op.name in _SAME:
        return expression(op.operands[0], sources, constants, depth + 1)
    return ""


def _rounded_up(op: Op, sources: Sources, constants: Mapping[str, int], depth: int) -> str:
    """`(n + (b - 1)) // b` is how `tl.cdiv` is lowered."""
    if op.name not in ("arith.divsi", "arith.divui"):
        return ""
    total, divisor = (sources.producer.get(value.id) for value in op.operands)
    block = _number(divisor)
    if total is None or total.name != "arith.addi" or block is None:
        return ""
    if _number(sources.producer.get(total.operands[1].id)) != block - 1:
        return ""
    return f"cdiv({expression(total.operands[0], sources, constants, depth + 1)}, {named(block, constants)})"


def _number(op: Op | None) -> int | None:
    value = op.attributes.get("value") if op is not None and op.name == "arith.constant" else None
    return value if type(value) is int else None


def constant(value: object, constants: Mapping[str, int]) -> str:
    """A constant of the IR, by the name of the only constexpr that has its value."""
    if isinstance(value, Dense):
        value = value.data
    if isinstance(value, bool) or not isinstance(value, int):
        return str(value)
    return named(value, constants)


def named(value: int, constants: Mapping[str, int]) -> str:
    """A number above one by the name of the constexpr that has it, when a single one does."""
    names = [name for name, known in constants.items() if known == value]
    return names[0] if value > 1 and len(names) == 1 else str(value)
