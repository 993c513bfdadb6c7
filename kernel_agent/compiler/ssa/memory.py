"""`Memory`: the tensors a kernel is evaluated on, bounds-checked, and how often each element was accessed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernel_agent.compiler.errors import CannotDerive, OutOfBounds
from kernel_agent.compiler.ssa.arithmetic import held_as
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Op, Value


@dataclass(frozen=True)
class TileOfMatrix:
    """A tile that a block access moves."""

    shape: tuple[int, ...]
    start: int
    """Of the matrix."""
    extents: Sequence[int]
    strides: Sequence[int]
    corner: Sequence[int]
    checked: Collection[int]
    """Axes along which elements outside of the matrix are no part of the tile."""

    def places(self) -> tuple[Tensor, Tensor]:
        """Offsets of the tile's elements, and which of them are parts of it."""
        places, inside = torch.tensor(self.start), torch.tensor(True)
        for axis, (extent, step) in enumerate(zip(self.extents, self.strides, strict=True)):
            shape = [-1 if axis == n else 1 for n in range(len(self.shape))]
            lanes = (self.corner[axis] + torch.arange(self.shape[axis])).view(shape)
            if axis in self.checked:
                inside = inside & (lanes >= 0) & (lanes < extent)
            places = places + lanes * step
        return places, inside.expand(self.shape)


@dataclass(frozen=True)
class Evaluation:
    """How often the programs of a grid accessed each element of each tensor argument, by the argument's name.

    Counts have the shape of the tensor: int64.
    """

    stored: dict[str, Tensor] = field(default_factory=dict)
    """By STORE, and by an ATOMIC."""
    added: dict[str, Tensor] = field(default_factory=dict)
    """By ATOMIC_ADD."""
    loaded: dict[str, Tensor] = field(default_factory=dict)

    def owned(self, name: str) -> bool:
        """Whether no element of an argument was written more than once."""
        return bool(((self.stored[name] + self.added[name]) <= 1).all())

    def covered(self, name: str) -> bool:
        """Whether every element of an argument was stored to or added to."""
        return bool(((self.stored[name] + self.added[name]) >= 1).all())


class Memory:
    """What pointer arguments point to."""

    def __init__(self, tensors: Mapping[Value, Tensor], open_lanes: float = 0.0) -> None:
        """`tensors`: by argument, each on the CPU; elements a view leaves out lie within bounds.

        `open_lanes`: what masked lanes get of loads that do not say.
        """
        self.evaluation = Evaluation()
        self._open_lanes = open_lanes
        self._flat: dict[Value, Tensor] = {}
        self._counts: dict[tuple[Value, str], Tensor] = {}
        for argument, tensor in tensors.items():
            span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
            span = span if tensor.numel() else 0
            self._flat[argument] = tensor.as_strided((span,), (1,), tensor.storage_offset())
            for kind in ("stored", "added", "loaded"):
                count = torch.zeros(span, dtype=torch.int64)
                self._counts[argument, kind] = count
                getattr(self.evaluation, kind)[argument.name] = count.as_strided(tensor.shape, tensor.stride())

    def load(self, op: Op, program: tuple[int, ...], values: list[Tensor]) -> Tensor:
        """A LOAD. Raises OutOfBounds."""
        offset, mask = values[0], values[1] if op.mask is not None else None
        wanted = held_as(op.result.element)
        places, lanes = self._places(op, program, offset, mask)
        found = self._flat[op.base][places].to(wanted)
        self._counts[op.base, "loaded"].index_add_(0, places, torch.ones_like(places))
        if lanes is None:
            return found.view(offset.shape)
        missing = values[2].to(wanted) if op.other is not None else self._open(wanted)
        result = missing.expand(lanes.shape).clone()
        result[lanes] = found
        return result

    def load_block(self, op: Op, program: tuple[int, ...], tile: TileOfMatrix) -> Tensor:
        """A LOAD_BLOCK. Raises OutOfBounds."""
        places, held = self._places(op, program, *tile.places())
        result = torch.zeros(tile.shape, dtype=held_as(op.result.element))
        result[held] = self._flat[op.base][places].to(result.dtype)
        self._counts[op.base, "loaded"].index_add_(0, places, torch.ones_like(places))
        return result

    def store_block(self, op: Op, program: tuple[int, ...], tile: TileOfMatrix, value: Tensor) -> None:
        """A STORE_BLOCK. Raises OutOfBounds."""
        places, held = self._places(op, program, *tile.places())
        memory = self._flat[op.base]
        memory[places] = value.broadcast_to(op.stored.shape)[held].to(memory.dtype)
        self._counts[op.base, "stored"].index_add_(0, places, torch.ones_like(places))

    def _open(self, wanted: torch.dtype) -> Tensor:
        return torch.tensor(self._open_lanes if wanted is torch.float64 else 0, dtype=wanted)

    def write(self, op: Op, program: tuple[int, ...], values: list[Tensor]) -> Tensor:
        """A STORE, ATOMIC_ADD or ATOMIC. Returns what was there before, zero in masked lanes. Raises OutOfBounds."""
        offset, value, mask = values[0], values[1], values[2] if op.mask is not None else None
        places, lanes = self._places(op, program, offset, mask)
        if lanes is None:
            lanes = torch.ones(offset.shape, dtype=torch.bool)
        memory = self._flat[op.base]
        written = value.broadcast_to(lanes.shape)[lanes].to(memory.dtype)
        before = torch.zeros(lanes.shape, dtype=memory.dtype)
        before[lanes] = memory[places]
        kind = "added" if op.code is Code.ATOMIC_ADD else "stored"
        self._counts[op.base, kind].index_add_(0, places, torch.ones_like(places))
        if op.code is Code.STORE:
            memory[places] = written
        elif op.code is Code.ATOMIC_ADD:
            memory.index_add_(0, places, written)
        else:
            self._atomic(op, memory, places, written)
        return before

    def _atomic(self, op: Op, memory: Tensor, places: Tensor, value: Tensor) -> None:
        reduction = _REDUCTIONS.get(op.attributes["operation"])
        if reduction is not None:
            memory.scatter_reduce_(0, places, value, reduction)
        elif op.attributes["operation"] == "add":
            memory.index_add_(0, places, value)
        elif op.attributes["operation"] in ("xchg", "exch"):
            memory[places] = value
        else:
            raise CannotDerive(f"an atomic {op.attributes['operation']} cannot be evaluated")

    def _places(
        self, op: Op, program: tuple[int, ...], offset: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Offsets of the lanes that take part, in one row, and which lanes those are; None for all."""
        lanes = None
        if mask is None:
            places = offset.reshape(-1).long()
        else:
            offset, lanes = torch.broadcast_tensors(offset, mask)
            places = offset[lanes].long()
        extent = len(self._flat[op.base])
        if places.numel() and (int(places.min()) < 0 or int(places.max()) >= extent):
            wrong = places[(places < 0) | (places >= extent)][0]
            raise OutOfBounds(
                f"program {program} {_VERBS[op.code]} element {int(wrong)} of {op.base.name}, which has {extent}"
            )
        return places, lanes


_VERBS = {
    Code.LOAD: "loads",
    Code.LOAD_BLOCK: "loads",
    Code.STORE: "stores to",
    Code.STORE_BLOCK: "stores to",
    Code.ATOMIC_ADD: "adds to",
    Code.ATOMIC: "changes",
}
_REDUCTIONS = {"max": "amax", "min": "amin"}
