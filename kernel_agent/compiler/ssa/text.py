"""`text`: a kernel as lines for people and for golden tests, one operation a line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kernel_agent.compiler.ssa.code import MEMORY, Code
from kernel_agent.compiler.ssa.value import Block, Kernel, Op, Value


def text(kernel: Kernel) -> str:
    """The same for kernels that are equal: values are called by their hints, or v, numbered where that is needed."""
    return _Writer().kernel(kernel)


class _Writer:
    def __init__(self) -> None:
        self.names: dict[Value, str] = {}
        self.taken: set[str] = set()
        self.lines: list[str] = []

    def kernel(self, kernel: Kernel) -> str:
        """The header, then the body."""
        arguments = ", ".join(f"{self.name(value)}: {value.element}" for value in kernel.arguments)
        constants = "".join(f", {name}={value!r}" for name, value in kernel.constants.items())
        self.lines.append(f"kernel {kernel.name}({arguments}{constants})")
        self.block(kernel.body, 1)
        return "\n".join(self.lines) + "\n"

    def name(self, value: Value) -> str:
        """What a value is called; constants are what they are."""
        op = value.producer
        if op is not None and op.code is Code.CONST:
            return str(op.attributes.get("symbol") or op.attributes["value"])
        if value not in self.names:
            hint = value.name or "v"
            name, number = hint, 0
            while name in self.taken:
                number += 1
                name = f"{hint}_{number}"
            self.taken.add(name)
            self.names[value] = name
        return self.names[value]

    def names_of(self, values: Sequence[Value]) -> str:
        """With commas."""
        return ", ".join(map(self.name, values))

    def block(self, block: Block, depth: int) -> None:
        """The operations of a block, indented."""
        for op in block.ops:
            if op.code is not Code.CONST:
                self.op(op, depth)

    def op(self, op: Op, depth: int) -> None:
        """One operation, and what is nested in it."""
        operands = self.names_of(op.operands)
        if op.code in MEMORY:
            operands = f"{self.name(op.base)}[{self.name(op.offset)}]" + "".join(
                f", {word}{self.name(value)}"
                for word, value in (
                    ("", op.operands[1] if op.code is not Code.LOAD else None),
                    ("mask=", op.mask),
                    ("other=", op.other),
                )
                if value is not None
            )
        attributes = [f"{key}={_shown(value)}" for key, value in op.attributes.items() if _says(key, value)]
        words = " ".join(word for word in (op.code.value, operands, *attributes) if word)
        self.line(depth, self.results(op.results) + words)
        for number, block in enumerate(op.blocks):
            label = "else" if op.code is Code.IF and number else "then" if op.code is Code.IF else "do"
            arguments = ", ".join(self.typed(value) for value in block.arguments)
            self.line(depth, f"{label} ({arguments})" if arguments else label)
            self.block(block, depth + 1)
            if block.yields:
                self.line(depth + 1, f"yield {self.names_of(block.yields)}")

    def results(self, values: Sequence[Value]) -> str:
        """With their types and an equals sign; nothing for none."""
        return ", ".join(map(self.typed, values)) + " = " if values else ""

    def typed(self, value: Value) -> str:
        """Name and type."""
        return f"{self.name(value)}: {'x'.join(map(str, (*value.shape, value.element)))}"

    def line(self, depth: int, words: str) -> None:
        """One line."""
        self.lines.append("  " * depth + words)


def _says(key: str, value: Any) -> bool:
    """Whether an attribute is worth showing."""
    return key not in ("base", "masked", "padded") and value is not None and value is not False


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)
