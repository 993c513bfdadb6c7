"""`Adjoint`: what differentiation of a kernel gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kernel_agent.compiler.ssa.value import Kernel, Op


@dataclass(frozen=True)
class Tape:
    """Values that the recomputed forward leaves for the way back: one for every program and trip."""

    name: str
    element: str
    shape: tuple[int, ...]
    """Of the tile of one trip; empty for a scalar."""
    trips: tuple[Op, ...]
    """The loops around the place that stores it, the outermost first; one that is a WHILE has no bounds."""


@dataclass(frozen=True)
class Adjoint:
    """A kernel that runs on the forward's grid and adds every program's part to the gradients."""

    kernel: Kernel
    """Arguments: those of the forward, then cotangents, then gradients."""
    cotangents: dict[str, str]
    """Pointer argument the forward wrote -> argument with its cotangent, of the same element and addresses."""
    gradients: dict[str, str]
    """Pointer argument the forward read -> argument of f32 (f64 for f64) that its gradient is added to, at the same
    addresses; float scalar argument -> the same with one element. They must hold zeros before."""
    tapes: tuple[Tape, ...]
    recurrences: Mapping[str, Op] = field(default_factory=dict)
    """Tape -> the loop of the forward whose carry it keeps."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Constexprs that the forward did not have, as in a plan."""
    consumed: tuple[str, ...] = ()
    """Cotangent arguments that the kernel overwrites, since stores of the forward may meet; it needs copies of them,
    and its effects stay in their order."""
    facts: tuple[str, ...] = ()
    """Python over names of the launch: what has to hold for stores of the forward not to meet."""
    remarks: tuple[str, ...] = ()
    """What a reader should know."""
