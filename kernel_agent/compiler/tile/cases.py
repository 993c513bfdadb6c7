"""Cases on which a pair of tile functions is compared: sizes, random inputs and cotangents."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kernel_agent.compiler.tile.signature import Constant, Signature, Tile
from kernel_agent.compiler.tile.wrapper import default_sizes, other_sizes

Inputs = Mapping[str, Callable[[Tensor], Tensor]]
"""By parameter: what is made of its random numbers."""
INTEGERS = {"i1": torch.int8, "i8": torch.int8, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64}
"""Element -> what holds it in memory."""


@dataclass(frozen=True)
class Cotangents:
    """One cotangent for each result that is a float."""

    label: str
    tensors: tuple[Tensor, ...]
    """Float64."""


def concrete(function: Any, signature: Signature) -> list[Signature]:
    """The signature of a function with numbers for named extents: two ways, so that no two are always equal."""
    sizes = default_sizes(signature)
    if not sizes:
        return [signature]
    own = [parameter.name for parameter in function.params]
    return [_at(signature, own, numbers) for numbers in (sizes, other_sizes(signature))]


def _at(signature: Signature, own: Sequence[str], sizes: Mapping[str, int]) -> Signature:
    found: dict[str, Tile | Constant] = {}
    for name in own:
        given = signature.parameters.get(name, Constant(sizes.get(name)))
        found[name] = replace(given, extents=given.shape(sizes)) if isinstance(given, Tile) else given
    return Signature(found)


def inputs_of(signature: Signature, seed: int, made: Inputs, *, positive: bool) -> dict[str, Tensor]:
    """Tiles and scalars by name, floats in float64: tiles normal, or with `positive` from 0.5 to 1.5 as scalars are;
    integers from zero up to the least extent of any tile."""
    generator = torch.Generator().manual_seed(seed)
    below = min((n for tile in signature.tiles.values() for n in tile.extents if isinstance(n, int)), default=2)
    found = {}
    for name, tile in signature.tiles.items():
        shape = tile.shape({})
        if not tile.is_float:
            value = torch.randint(0, 2 if tile.element == "i1" else max(below, 2), shape, generator=generator).to(
                INTEGERS[tile.element]
            )
        elif positive or not shape:
            value = 0.5 + torch.rand(shape, generator=generator, dtype=torch.float64)
        else:
            value = torch.randn(shape, generator=generator, dtype=torch.float64)
        found[name] = made[name](value) if name in made else value
    return found


def cotangents_of(shapes: Sequence[tuple[int, ...]], seed: int) -> Iterator[Cotangents]:
    """Cotangents for results of some shapes: random, at one element alone, and of one result alone."""
    generator = torch.Generator().manual_seed(seed + 1000)
    normal = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    yield Cotangents("random cotangents", tuple(normal))
    for place, whole in enumerate(normal):
        zeros = [torch.zeros_like(other) for other in normal]
        if len(normal) > 1:
            yield Cotangents(
                f"a random cotangent of result {place} alone", (*zeros[:place], whole, *zeros[place + 1 :])
            )
        at = int(torch.randint(0, whole.numel(), (), generator=generator))
        zeros[place].view(-1)[at] = 1.0
        where = list(map(int, torch.unravel_index(torch.tensor(at), whole.shape))) if whole.dim() else []
        yield Cotangents(f"a cotangent at {where} of result {place} alone", tuple(zeros))
