"""The lanes of one access: which elements they touch, and to which programs they belong."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kernel_agent.ir.sanitizer.views import View
from kernel_agent.ir.values import Active, common_shape

NOBODY, MANY = -1, -2
"""Owners of an element that are no single program."""


@dataclass(frozen=True)
class Columns:
    """Some places along one dimension."""

    dim: int
    places: Tensor


@dataclass(eq=False)
class Lanes:
    """The lanes of one access that touch memory."""

    offset: Tensor
    """Elements, `[P or 1, *tile]`, tile dimensions lazily broadcast."""
    valid: Tensor | None
    """Which lanes take part; None for all."""
    active: Active
    view: View | None = None
    """The argument that the pointer came from, where that is known."""

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Common shape of offsets and mask."""
        if self.valid is None:
            return tuple(self.offset.shape)
        return common_shape(self.offset.shape, self.valid.shape)

    def broadcast(self, *values: Tensor) -> Lanes:
        """The same access with a lane for every element of the values stored."""
        shape = common_shape(self.shape, *[value.shape for value in values])
        valid = None if self.valid is None else self.valid.expand(shape)
        return Lanes(self.offset.expand(shape), valid, self.active, self.view)

    def select(self, value: Tensor) -> Tensor:
        """Elements of a value at these lanes, shape (n,)."""
        value = value.expand(self.shape)
        if self.valid is None:
            return value.reshape(-1)
        if self._columns is None:
            return value.masked_select(self.valid)
        return value.index_select(self._columns.dim, self._columns.places).reshape(-1)

    @cached_property
    def _columns(self) -> Columns | None:
        """What a mask over a single dimension lets through; None for any other mask."""
        if self.valid is None or self.valid.device.type != "cpu":
            return None
        sizes = zip(self.valid.shape, self.valid.stride(), strict=True)
        moving = [dim for dim, (n, step) in enumerate(sizes) if n > 1 and step]
        if len(moving) != 1:
            return None
        dim = moving[0] - self.valid.dim() + len(self.shape)
        first = self.valid[tuple(slice(None) if at == moving[0] else 0 for at in range(self.valid.dim()))]
        return Columns(dim, first.nonzero().flatten())

    def spread(self, values: Tensor) -> Tensor:
        """The inverse of `select`; zero where no lane takes part."""
        if self.valid is None:
            return values.view(self.shape)
        return values.new_zeros(self.shape).masked_scatter(self.valid.expand(self.shape), values)

    def readable(self) -> Tensor:
        """Elements to gather, of the shape of the access; lanes that do not take part gather any."""
        return self.offset if self.valid is None else torch.where(self.valid, self.offset, 0)

    def place(self, position: int) -> tuple[int, tuple[int, ...]]:
        """Row and lane of an entry of `index`."""
        if self.valid is None:
            flat = torch.tensor(position, device="cpu")
        else:
            flat = self.valid.expand(self.shape).reshape(-1).nonzero().flatten()[position]
        row, *lane = (int(part) for part in torch.unravel_index(flat.cpu(), self.shape))
        return row, tuple(lane)

    @cached_property
    def index(self) -> Tensor:
        """Elements touched, shape (n,), int64."""
        return self.select(self.offset)

    @cached_property
    def program(self) -> Tensor:
        """Program of each lane, shape (n,), int32; an access that does not vary over programs belongs to many."""
        rows = self.shape[0]
        ids = self.active.ids.to(torch.int32)
        if rows != self.active.size:
            ids = ids.new_full((1,), MANY)
        return self.select(ids.view(rows, *[1] * (len(self.shape) - 1)))
