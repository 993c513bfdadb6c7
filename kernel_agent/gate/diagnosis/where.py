"""Where a gradient is wrong: rows, columns, tails, blocks, bands. Places are told, never values.

An element is wrong when its error exceeds what the rule of the exact tier allows for an element of its tile.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernel_agent.gate.diagnosis.evidence import Evidence
from kernel_agent.gate.diagnosis.records import Region
from kernel_agent.gate.rule import RELATIVE, SCALED, compare, tile_extent
from kernel_agent.oracle.cotangents import rms

_LISTED = 6
"""Indices that are listed one by one."""
_STEPS = (2, 3, 4, 5, 6, 7, 8, 16, 32, 64)
"""Moduli that a regular pattern of indices is looked for with."""


@dataclass(frozen=True)
class Axis:
    """One dimension of a gradient, in words."""

    one: str
    """`row`, `column`, `element` or `index`."""
    many: str
    of: str
    """What follows the numbers: ` along N`, ` of dimension 0 (B)`, or nothing."""
    size: int


def regions(evidence: Evidence) -> tuple[Region, ...]:
    """Where each wrong gradient is wrong, in the first case that shows it."""
    found = []
    for name in evidence.red.question.truth.grads:
        outcome = next((o for o in evidence.here if name in evidence.wrong(o)), None)
        truth = None if outcome is None else outcome.question.truth.grads[name]
        if outcome is None or truth is None or outcome.given[name].shape != truth.shape:
            continue
        asked = outcome.question
        sizes = tuple(0 if form is None else math.prod(form.shape) for form in asked.forward.forms)
        scale = asked.truth.scale(name, tuple(rms(c) for c in asked.cotangents), sizes)
        dims = {k: v for k, v in asked.case.point.entry.dims.items() if type(v) is int}
        blocks = block_sizes(evidence.text.shown)
        seen = region(name, outcome.given[name].to(torch.float64), truth, scale, dims=dims, blocks=blocks)
        found += [] if seen is None else [seen]
    return tuple(found)


def block_sizes(source: str) -> tuple[int, ...]:
    """Powers of two that a candidate's file passes to its launches as keywords, such as `BLOCK_M=64`."""
    keywords = (k for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Call) for k in n.keywords if k.arg)
    sizes = {
        keyword.value.value
        for keyword in keywords
        if keyword.arg
        and keyword.arg.isupper()
        and isinstance(keyword.value, ast.Constant)
        and type(keyword.value.value) is int
    }
    return tuple(sorted(size for size in sizes if size >= 4 and size & (size - 1) == 0))


def region(
    grad: str,
    given: Tensor,
    truth: Tensor,
    scale: float,
    *,
    dims: Mapping[str, int] | None = None,
    blocks: Sequence[int] = (),
) -> Region | None:
    """Where `given` differs from `truth`, both of one shape; `scale` is the S term per element of the rule.

    `dims` are the named sizes of the case (a dimension of a unique size is called by its name), `blocks` the tile sizes
    that the candidate's launches are known to use, in elements. None when every element is right.
    """
    wrong = wrong_elements(given, truth, scale)
    if not bool(wrong.any()):
        return None
    seen = compare(given, truth, scale)
    tiles = seen.wrong_tiles
    if seen.strange:
        extent = tile_extent(tuple(truth.shape))
        places = torch.stack([i // e for i, e in zip(wrong.nonzero().T, extent, strict=True)]) if extent else None
        tiles = 1 if places is None else int(places.unique(dim=1).size(1))
    return Region(
        grad=grad,
        statement=in_words(wrong, axes_of(tuple(truth.shape), dims or {}), blocks),
        wrong_tiles=tiles,
        tiles=seen.tiles,
    )


def wrong_elements(given: Tensor, truth: Tensor, scale: float) -> Tensor:
    """The elements that are off by more than the rule allows an element of their tile; bool, shape of `truth`."""
    given, truth = given.to(torch.float64), truth.to(torch.float64)
    same = (given == truth) | (given.isnan() & truth.isnan())
    clean = torch.where(truth.isfinite(), truth, 0.0)
    allowed = RELATIVE * torch.maximum(_tile_rms(clean), clean.abs()) + SCALED * scale
    return ~same & ~((given - truth).abs() <= allowed)


def axes_of(shape: tuple[int, ...], dims: Mapping[str, int]) -> tuple[Axis, ...]:
    """Words for every dimension: rows and columns for the last two, and the name of a size that no other dim has."""
    nouns = {1: ("element",), 2: ("row", "column")}.get(len(shape))
    axes = []
    for d, size in enumerate(shape):
        named = [name for name, value in dims.items() if value == size and type(value) is int]
        unique = len(named) == 1 and shape.count(size) == 1 and size > 1
        if nouns is not None:
            axes.append(Axis(nouns[d], f"{nouns[d]}s", f" along {named[0]}" if unique else "", size))
        else:
            name = f" ({named[0]})" if unique else ""
            axes.append(Axis("index", "indices", f" of dimension {d}{name}", size))
    return tuple(axes)


def in_words(wrong: Tensor, axes: Sequence[Axis], blocks: Sequence[int] = ()) -> str:
    """The statement of a `Region` for a mask with at least one wrong element."""
    count, total = int(wrong.sum()), wrong.numel()
    if count == total:
        return "everywhere" if total > 1 else "in its only element"
    parts, box = [], torch.ones_like(wrong)
    for d, axis in enumerate(axes):
        along = wrong.any(dim=[other for other in range(wrong.dim()) if other != d]) if wrong.dim() > 1 else wrong
        if bool(along.all()):
            continue
        parts.append(_along(along.nonzero().flatten().tolist(), axis, blocks))
        box &= along.view([-1 if other == d else 1 for other in range(wrong.dim())])
    inside = int(box.sum())
    if parts and count == inside:
        return f"only in {' and '.join(parts)}"
    exact = _related(wrong) or _in_memory(wrong, blocks)
    if exact or not parts:
        return exact or _share(count, total)
    return f"only in {' and '.join(parts)}; {count} of the {inside} elements there are wrong"


def _share(count: int, total: int) -> str:
    if count >= 0.9 * total:
        return f"almost everywhere ({count} of {total} elements)"
    return f"in {count} of {total} elements, in every row and column"


def _along(indices: list[int], axis: Axis, blocks: Sequence[int]) -> str:
    """A proper, non-empty set of indices of one dimension."""
    n, first, last = axis.size, indices[0], indices[-1]
    right = sorted(set(range(n)) - set(indices))
    if len(indices) == 1:
        return f"{axis.one} {first}{axis.of}{_end(first, n)}"
    if len(right) == 1 and n > 3:
        return f"all {axis.many}{axis.of} but {right[0]}{_end(right[0], n)}"
    if len(indices) == last - first + 1:
        return _range(first, last, axis, blocks)
    if len(right) == right[-1] - right[0] + 1:
        return f"all {axis.many} but {right[0]} to {right[-1]}{axis.of}{_block(right[0], right[-1], n, blocks)}"
    for step in _STEPS:
        if 3 * step <= n + step and first < step and indices == list(range(first, n, step)):
            return f"every {axis.one} that is {first} modulo {step}{axis.of}"
    for size in (*sorted(set(blocks), reverse=True), *_powers(n)):
        numbers = sorted({i // size for i in indices})
        if size > 1 and len(numbers) < -(-n // size) and indices == [i for i in range(n) if i // size in numbers]:
            return f"blocks {_some(numbers)} of {size} {axis.many} each{axis.of}"
    if len(indices) <= _LISTED:
        return f"{axis.many} {_some(indices)}{axis.of}"
    if len(right) <= _LISTED:
        return f"all {axis.many}{axis.of} but {_some(right)}"
    return f"{len(indices)} of {n} {axis.many}{axis.of}"


def _end(index: int, n: int) -> str:
    return " (the first)" if index == 0 else " (the last)" if index == n - 1 else ""


def _range(first: int, last: int, axis: Axis, blocks: Sequence[int]) -> str:
    """A run of indices that is not the whole dimension."""
    return f"{axis.many} {first} to {last}{axis.of}{_block(first, last, axis.size, blocks)}"


def _block(first: int, last: int, n: int, blocks: Sequence[int]) -> str:
    """Which block of the candidate's a run of indices is, or what multiple of a power of two a tail begins at."""
    for size in sorted(set(blocks), reverse=True):
        if 1 < size < n and first % size == 0 and last == min(first + size, n) - 1:
            if last == n - 1:
                return f" (the {'part block at the end' if n % size else 'last block'}, blocks of {size})"
            return f" (block {first // size}, blocks of {size})"
    if last == n - 1:
        power = first & -first
        multiple = f", a multiple of {power}" if power >= 4 and power != first else ""
        return f" (the last {last - first + 1} of {n}, from {first} on{multiple})"
    return f" (the first {last + 1} of {n})" if first == 0 else ""


def _related(wrong: Tensor) -> str:
    """A relation of the last two indices that holds exactly where elements are wrong, in every matrix."""
    if wrong.dim() < 2 or min(wrong.shape[-2:]) < 3:
        return ""
    rows, columns = wrong.shape[-2:]
    matrix = wrong.reshape(-1, rows, columns).any(dim=0)
    distance = torch.arange(rows)[:, None] - torch.arange(columns)[None, :]
    relations: list[tuple[str, Tensor]] = [
        ("only on the diagonal (row = column)", distance == 0),
        ("only above the diagonal (column > row)", distance < 0),
        ("only on and above the diagonal (column >= row)", distance <= 0),
        ("only below the diagonal (column < row)", distance > 0),
        ("only on and below the diagonal (column <= row)", distance >= 0),
        ("everywhere but on the diagonal", distance != 0),
    ]
    for size in _powers(min(rows, columns)):
        same = torch.arange(rows)[:, None] // size == torch.arange(columns)[None, :] // size
        relations.append((f"only in the diagonal blocks of {size} x {size}", same))
    for words, mask in relations:
        if bool((matrix == mask).all()):
            return words
    widest = int(distance[matrix].abs().max())
    return f"only within {widest} of the diagonal" if 4 * widest <= min(rows, columns) else ""


def _in_memory(wrong: Tensor, blocks: Sequence[int]) -> str:
    """A run of elements in memory order: kernels that go over a tensor as one flat range leave such ones."""
    flat = wrong.flatten().nonzero().flatten().tolist()
    if wrong.dim() < 2 or len(flat) != flat[-1] - flat[0] + 1:
        return ""
    axis = Axis("element", "elements", "", wrong.numel())
    return f"only in {_range(flat[0], flat[-1], axis, blocks)}, counted in memory order"


def _some(indices: Sequence[int]) -> str:
    shown = [str(i) for i in indices[:_LISTED]]
    if len(indices) > _LISTED:
        return f"{', '.join(shown)}, ..."
    return " and ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else shown[0]


def _powers(n: int) -> Iterator[int]:
    """Powers of two below n, largest first, down to 4."""
    for exponent in range(max(n - 1, 1).bit_length(), 1, -1):
        if 1 << exponent < n:
            yield 1 << exponent


def _tile_rms(t: Tensor) -> Tensor:
    """RMS of the rule's tile that every element lies in, same shape."""
    extent = tile_extent(tuple(t.shape))
    if not extent:
        return t.abs()
    grouped = [d for d, e in enumerate(extent) if e > 1]
    padding: list[int] = []
    for d in range(t.dim() - 1, -1, -1):
        padding += [0, -t.shape[d] % extent[d]]
    sums, counts = (torch.nn.functional.pad(p, padding) for p in (t.square(), torch.ones_like(t)))
    for d in grouped:
        parts = [part.unflatten(d, (-1, extent[d])).sum(d + 1) for part in (sums, counts)]
        sums, counts = parts
    rms = (sums / counts).sqrt()
    for d in grouped:
        rms = rms.repeat_interleave(extent[d], d)
    return rms[tuple(slice(0, n) for n in t.shape)]
