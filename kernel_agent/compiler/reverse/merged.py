"""`merged`: whether a combine merges the moments of samples, and the adjoint of a REDUCE by such a one in closed form.

Two samples of n and k numbers with means m and p and sums of squared deviations s and t are one of N = n + k, of mean
M = m + (p - m) k / N, and of S = s + t + (p - m)^2 n k / N (Chan, Golub and LeVeque, "Updating formulae and a pairwise
algorithm for computing sample variances", 1979). Of many samples S = sum(s + n (m - M)^2), which M minimises, so that

    dm = n / N dM + 2 n (m - M) dS,    ds = dS,    dn = dN + (m - M) / N dM + (m - M)^2 dS

with what the forward ended in. The rule for any combine takes two scans instead, each of which rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from kernel_agent.compiler.reverse.elements import adjoint_element
from kernel_agent.compiler.ssa import arithmetic
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import ELEMENTWISE, Code
from kernel_agent.compiler.ssa.uses import made_in
from kernel_agent.compiler.ssa.value import Block, Value, constant

SAMPLES = 64
"""At which formulas are compared: two rational functions that agree there are one."""
_TOLERANCE = 1e-9
"""Of numbers in float64 around 1."""
_PURE = (ELEMENTWISE - {Code.CALL}) | {Code.CONST}


@dataclass(frozen=True)
class Merged:
    """What a combine merges, by places among its values. All others are sums."""

    count: int
    mean: int
    squares: int | None
    """Deviations from the mean, squared and summed; None where nobody asks for them."""


def merged(block: Block) -> Merged | None:
    """What a combine of two samples merges; None for any other one.

    Formulas are compared by their values at random places, and at samples of no numbers.
    """
    half = len(block.arguments) // 2
    inside = made_in(block)
    read = [value for op in block.ops for value in op.operands if value not in inside]
    if half < 2 or any(op.code not in _PURE for op in block.ops) or any(constant(value) is None for value in read):
        return None
    one, other = _samples(block.arguments[:half], 0), _samples(block.arguments[half:], 1)
    found = _values(block, [*one, *other])
    sums = [place for place in range(half) if _agree(found[place], one[place] + other[place])]
    left = [place for place in range(half) if place not in sums]
    for count in sums:
        for mean, *squares in (left, left[::-1]) if 1 <= len(left) <= 2 else ():
            form = Merged(count, mean, squares[0] if squares else None)
            if _is_merged(block, form, one, other) and all(
                _is_merged(block, form, *_one_empty(form, one, other, which)) for which in (0, 1)
            ):
                return form
    return None


def reduced(
    b: Builder, form: Merged, xs: Sequence[Value], ends: Sequence[Value], incoming: Sequence[Value | None]
) -> list[Value | None]:
    """Cotangents of the tiles `xs` that a REDUCE merges. `ends`, `incoming`: what they end in and its cotangents, with
    an axis of one element where the tiles are reduced."""
    element = adjoint_element(xs[form.mean].element)
    n, m, total, mean = (b.cast(values[place], element) for values in (xs, ends) for place in (form.count, form.mean))
    parts = list(incoming)
    d_mean, d_squares = incoming[form.mean], None if form.squares is None else incoming[form.squares]
    gap = b.sub(m, mean)
    slopes: list[Value] = []
    by_count = [g for g in [incoming[form.count]] if g is not None]
    if d_mean is not None:
        there = b.select(b.compare("gt", total, b.zero(total)), total, b.number(1.0, total))
        slopes.append(b.div(d_mean, there))
        by_count.append(b.mul(gap, slopes[0]))
    if d_squares is not None:
        slopes.append(b.mul(b.mul(gap, b.number(2.0, gap)), d_squares))
        by_count.append(b.mul(b.mul(gap, gap), d_squares))
    parts[form.mean] = b.mul(n, reduce(b.add, slopes)) if slopes else None
    parts[form.count] = reduce(b.add, by_count) if by_count and xs[form.count].is_float else None
    return parts


def _samples(values: Sequence[Value], seed: int) -> list[Tensor]:
    """Numbers for the arguments of one side, as many of each as are compared."""
    random = torch.Generator().manual_seed(seed)
    found = []
    for value in values:
        dtype = arithmetic.held_as(value.element)
        numbers = 0.5 + torch.rand(SAMPLES, generator=random, dtype=torch.float64)
        found.append(numbers if dtype is torch.float64 else torch.round(8 * numbers).to(dtype))
    return found


def _values(block: Block, given: Sequence[Tensor]) -> list[Tensor]:
    """What a combine gives for many arguments at once."""
    values = dict(zip(block.arguments, given, strict=True))

    def value_of(value: Value) -> Tensor:
        known = constant(value)
        return values[value] if known is None else torch.tensor(known, dtype=arithmetic.held_as(value.element))

    for op in block.ops:
        if op.code is not Code.CONST:
            values[op.result] = arithmetic.compute(op, list(map(value_of, op.operands)))
    return [value_of(value).expand(SAMPLES) for value in block.yields]


def _is_merged(block: Block, form: Merged, one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Whether a combine gives what the formulas say, of two samples."""
    found = _values(block, [*one, *other])
    n, k = (side[form.count].double() for side in (one, other))
    gap = other[form.mean] - one[form.mean]
    wanted = [mine + its for mine, its in zip(one, other, strict=True)]
    wanted[form.mean] = one[form.mean] + gap * k / (n + k)
    if form.squares is not None:
        wanted[form.squares] = wanted[form.squares] + gap * gap * n * k / (n + k)
    return all(map(_agree, found, wanted))


def _one_empty(
    form: Merged, one: Sequence[Tensor], other: Sequence[Tensor], which: int
) -> tuple[list[Tensor], list[Tensor]]:
    """The two samples, one of no numbers."""
    sides = list(one), list(other)
    sides[which][form.count] = torch.zeros_like(sides[which][form.count])
    return sides


def _agree(found: Tensor, wanted: Tensor) -> bool:
    return bool((found.double() - wanted.double()).abs().max() < _TOLERANCE)
