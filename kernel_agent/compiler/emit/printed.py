"""`Printed`: kernels that were printed, so that those which several schedules have in common are printed once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kernel_agent.compiler.emit.source import KernelSource, triton_source
from kernel_agent.compiler.ssa.value import Block, Kernel, Value


@dataclass(frozen=True)
class _Text:
    """All that the text of a kernel follows from; bodies and values are themselves alone."""

    body: Block
    name: str
    arguments: tuple[Value, ...]
    extents: str
    constants: str


class Printed:
    """Of one file."""

    def __init__(self) -> None:
        self._sources: dict[_Text, KernelSource] = {}

    def source(self, kernel: Kernel, *, comments: Mapping[int, str]) -> KernelSource:
        """As `triton_source` prints it. `comments`: the same in all calls. Raises `CannotDerive`."""
        extents, constants = repr(kernel.extents), repr(kernel.constants)
        text = _Text(kernel.body, kernel.name, tuple(kernel.arguments), extents, constants)
        if text not in self._sources:
            self._sources[text] = triton_source(kernel, comments=comments)
        return self._sources[text]
