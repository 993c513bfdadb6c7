"""Inline assembly. No assembler is simulated: a snippet means what a registered torch function says it means."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernel_agent.ir.operations.bits import to_bits, to_floats
from kernel_agent.ir.operations.ptx import SOFTPLUS, straight_line
from kernel_agent.ir.operations.registry import rule
from kernel_agent.ir.operations.safe import differentiable
from kernel_agent.ir.program import Op
from kernel_agent.ir.types import Kind, Type
from kernel_agent.ir.values import Active, Bits, RuntimeValue

if TYPE_CHECKING:
    from kernel_agent.ir.machine import Machine


@dataclass(frozen=True)
class Assembly:
    """One inline assembly operation of a kernel."""

    text: str
    """The assembly, with every run of white space as one space."""
    constraints: str
    """Registers in LLVM's notation, such as `=f,f`."""
    pack: int
    """Elements that one run of the assembly works on."""


Meaning = Callable[..., "Tensor | Sequence[Tensor]"]
"""(tensor per operand) -> tensor per result, lane by lane; floats are float64, integers have their declared width."""

_REGISTERED: list[tuple[Callable[[Assembly], bool], Meaning]] = []


def register_asm(snippet: str | Callable[[Assembly], bool], meaning: Meaning) -> None:
    """Say what an inline assembly snippet computes, in torch.

    `snippet` is the text of the assembly (white space does not matter), or a predicate on an `Assembly`. `meaning`
    takes one tensor per operand and gives one tensor per result (or a single tensor), each lane from the same lanes of
    the operands. It must be exact in float64, and differentiable if gradients are to pass. What is registered last is
    asked first.
    """
    if isinstance(snippet, str):
        wanted = _squeezed(snippet)
        _REGISTERED.insert(0, (lambda call: call.text == wanted, meaning))
    else:
        _REGISTERED.insert(0, (snippet, meaning))


def _squeezed(text: str) -> str:
    without_comments = re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.DOTALL)
    return re.sub(r"\s+", " ", without_comments).strip()


@rule("tt.elementwise_inline_asm")
def _run(machine: Machine, op: Op, operands: list[Any], active: Active) -> list[RuntimeValue]:
    text = _squeezed(str(op.attributes["asm_string"]))
    call = Assembly(text, str(op.attributes["constraints"]), int(op.attributes["packed_element"]))
    special = next((rule_ for mark, rule_ in _OF_TRITON.items() if mark in text), None)
    if special is not None:
        return special(machine, op, operands, active)
    meaning = next((meaning for matches, meaning in _REGISTERED if matches(call)), None)
    if meaning is None:
        meaning = straight_line(call.text, len(op.results), len(operands), call.pack)
    if meaning is None:
        raise machine.unsupported(
            op,
            f"the inline assembly {text[:60]!r} has no known meaning",
            remedy="Tell what it computes with kernel_agent.ir.register_asm(text, meaning), or write it in Triton.",
        )
    plain = [value.pattern if isinstance(value, Bits) else value for value in operands]
    if len(op.results) == 1:
        found: Sequence[Tensor] = [differentiable(machine, meaning, plain)]
    else:
        found = list(meaning(*plain))
    return [value.to(result.type.dtype) for value, result in zip(found, op.results, strict=True)]


for _text, _function in SOFTPLUS.items():
    register_asm(_text, _function)


# --- what Triton itself writes in assembly


def _wait(machine: Machine, op: Op, _: list[Any], __: Active) -> list[RuntimeValue]:
    """Launches run one after the other."""
    return [torch.zeros((1,), dtype=result.type.dtype, device=machine.device) for result in op.results]


_HALF = Type(Kind.FLOAT, "f16")
_LARGEST_HALF = 0x3F00


def _to_fp8e4b15(machine: Machine, op: Op, operands: list[Any], _: Active) -> list[RuntimeValue]:
    """float16 -> fp8 with a bias of 15. A cast does not round: the float is remembered with the pattern."""
    half = to_bits(machine, operands[0], _HALF, op)
    wide = half.pattern.to(torch.int32)
    size = 2 * (wide & 0x7FFF).clamp(max=_LARGEST_HALF) + 0x80
    return [Bits((((wide & 0x8000) | size) >> 8).to(torch.int8), half.element)]


def _from_fp8e4b15(machine: Machine, op: Op, operands: list[Any], _: Active) -> list[RuntimeValue]:
    """The reverse."""
    (value,) = operands
    byte = (value.pattern if isinstance(value, Bits) else value).to(torch.int32)
    pattern = (((byte & 0x80) << 8) | ((byte & 0x7F) << 7)).to(torch.int16)
    plain = to_floats(machine, pattern, _HALF, op)
    if not isinstance(value, Bits) or machine.faithful:
        return [plain]
    known = machine.remembered()[(value.element - 1).clamp(min=0)]
    return [torch.where(value.element > 0, known, plain)]


_OF_TRITON: dict[str, Callable[[Machine, Op, list[Any], Active], list[RuntimeValue]]] = {
    "griddepcontrol.": _wait,
    "prmt.b32 a0, 0, $2, 0x5746;": _from_fp8e4b15,
    "mad.lo.u32 a1, a1, 2, 0x00800080; lop3.b32 b0, $1, 0x80008000, a0, 0xea;": _to_fp8e4b15,
}
"""Rules of snippets of Triton's library, by a part of their text."""
