"""Integer tiles kept as a sum of small broadcast terms, and masks as a conjunction of them.

`rows[:, None] * stride + columns[None, :]` has rows + columns different numbers, not rows x columns. Addresses of
kernels are almost always of this kind; left unadded, all programs of a large launch can be walked in seconds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernel_agent.ir.values import Deferred, RuntimeValue, join_rows


class Absent(Deferred):
    """A value that no address or branch depends on: it is not computed."""

    def map(self, change: Callable[[Tensor], Tensor]) -> Absent:  # noqa: ARG002
        """Nothing stays nothing."""
        return self

    @classmethod
    def join(cls, pieces: Sequence[tuple[Tensor, RuntimeValue]], size: int) -> RuntimeValue:  # noqa: ARG003
        """What is not computed in one branch is asked for in none."""
        return ABSENT


ABSENT = Absent()


class _Terms(Deferred):
    """A tile as several tensors of one rank, each broadcast to the tile when it is asked for."""

    def __init__(self, terms: Sequence[Tensor]) -> None:
        self.terms = tuple(terms)
        """Tensors `[P or 1, *tile]`, tile dimensions lazily broadcast."""

    @classmethod
    def join(cls, pieces: Sequence[tuple[Tensor, RuntimeValue]], size: int) -> RuntimeValue:
        """Branches meet as whole tiles."""
        if any(isinstance(value, Absent) for _, value in pieces):
            return ABSENT
        return join_rows([(rows, dense(value)) for rows, value in pieces], size)

    @property
    def nbytes(self) -> int:
        """Bytes that the terms take."""
        return sum(int(term.nbytes) for term in self.terms)

    def dense(self) -> Tensor:
        """The whole tile as one tensor."""
        raise NotImplementedError


class Sum(_Terms):
    """The sum of int64 terms, which is known to be in the range of `dtype`."""

    def __init__(self, terms: Sequence[Tensor], dtype: torch.dtype) -> None:
        super().__init__(terms)
        self.dtype = dtype

    def map(self, change: Callable[[Tensor], Tensor]) -> Sum:
        """The same change on every term; it must only move elements."""
        return Sum([change(term) for term in self.terms], self.dtype)

    def dense(self) -> Tensor:
        """See `_Terms.dense`."""
        return functools.reduce(torch.add, self.terms).to(self.dtype)


class All(_Terms):
    """The conjunction of bool terms."""

    def map(self, change: Callable[[Tensor], Tensor]) -> All:
        """See `Sum.map`."""
        return All([change(term) for term in self.terms])

    def dense(self) -> Tensor:
        """See `_Terms.dense`."""
        return functools.reduce(torch.logical_and, self.terms)


def dense(value: RuntimeValue) -> RuntimeValue:
    """A value as machines without lazy tiles hold it."""
    return value.dense() if isinstance(value, _Terms) else value


def terms_of(value: Tensor | Sum | All) -> tuple[Tensor, ...]:
    """The terms of a lazy tile, or the one tensor."""
    return value.terms if isinstance(value, _Terms) else (value,)


def bounds(value: Tensor | Sum) -> tuple[int, int]:
    """Smallest and largest number that the tile can hold over all programs; exact for one term."""
    extremes = [term.aminmax() for term in terms_of(value)]
    return sum(int(low) for low, _ in extremes), sum(int(high) for _, high in extremes)


def merged(terms: Sequence[Tensor], combine: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
    """Fewer terms: two are combined when that makes nothing larger than the larger of them."""
    found: list[Tensor] = []
    for term in sorted(terms, key=lambda term: -term.numel()):
        for place, other in enumerate(found):
            shape = torch.broadcast_shapes(term.shape, other.shape)
            if math.prod(shape) <= max(term.numel(), other.numel()):
                found[place] = combine(other, term)
                break
        else:
            found.append(term)
    return found


def lazy_sum(terms: Sequence[Tensor], dtype: torch.dtype) -> Sum | Tensor:
    """The sum of integer terms at the width of `dtype`; one tensor when it wraps or when nothing is gained."""
    short = merged([term.to(torch.int64) for term in terms], torch.add)
    if len(short) == 1:
        return short[0].to(dtype)
    total = Sum(short, dtype)
    if dtype != torch.int64:
        low, high = bounds(total)
        limits = torch.iinfo(dtype)
        if low < limits.min or high > limits.max:
            return total.dense()
    return total


def lazy_all(terms: Sequence[Tensor]) -> All | Tensor:
    """The conjunction of bool terms."""
    kept = [term for term in terms if term.numel() > 1 or not bool(term)]
    if not kept:
        return terms[0]
    short = merged(kept, torch.logical_and)
    return short[0] if len(short) == 1 else All(short)
