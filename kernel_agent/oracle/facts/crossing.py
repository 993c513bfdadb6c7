"""Whether the gradient of an input sums over programs, and over which: counted element by element, not guessed.

A program that reads an element adds a term to its gradient. Elements that several programs read therefore need a sum
across programs in the backward: by another split of the work, by partial sums, or by atomics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernel_agent.ir.cost.meter import Access
from kernel_agent.ir.memory import Buffer
from kernel_agent.ir.sanitizer.views import Geometry
from kernel_agent.ir.values import common_shape
from kernel_agent.oracle.facts.launches import LaunchWords
from kernel_agent.oracle.facts.walks import FAR, DimWalk, Walk


@dataclass(frozen=True)
class Readers:
    """Who reads the elements of a buffer in one launch."""

    programs: Tensor
    """Of each pair of a reader and an element it reads, shape (n,), sorted by element."""
    place: Tensor
    """Which element of those that are read, counted from 0, shape (n,)."""
    counts: Tensor
    """Readers of each element that is read, shape (e,)."""
    lanes: int
    """Reads, each as often as it happened."""

    @property
    def pairs(self) -> int:
        """Different pairs of program and element."""
        return int(self.programs.numel())

    def differ_in(self, value: Tensor) -> bool:
        """Whether the readers of some element differ in a number that each program has, shape (P,)."""
        of = value[self.programs]
        low = torch.full_like(self.counts, FAR).scatter_reduce_(0, self.place, of, "amin")
        high = torch.full_like(self.counts, -FAR).scatter_reduce_(0, self.place, of, "amax")
        return bool((low != high).any())


def readers(words: LaunchWords, buffer: Buffer, part: Geometry | None = None) -> Readers | None:
    """Readers of a buffer, or of one tensor in it; None where no program reads it."""
    keys, lanes = [], 0
    inside = None
    if part is not None and part.elements < buffer.size:
        inside = torch.zeros(buffer.size, dtype=torch.bool)
        inside.as_strided(part.size, part.stride, part.offset).fill_(True)
    for site in words.seen.sites:
        if site.buffer is not buffer or site.kind is Access.WRITE:
            continue
        for visit in site.visits:
            programs = visit.programs.view(-1, *[1] * (visit.offset.dim() - 1))
            key = visit.offset * words.seen.programs + programs
            if visit.valid is not None:
                shape = common_shape(key.shape, visit.valid.shape)
                key = key.expand(shape)[visit.valid.expand(shape)]
            if inside is not None:
                key = key[inside[torch.div(key, words.seen.programs, rounding_mode="floor")]]
            lanes += key.numel()
            keys.append(key.flatten().unique())
    if not lanes:
        return None
    pairs = torch.cat(keys).unique()
    _, place, counts = torch.unique_consecutive(
        torch.div(pairs, words.seen.programs, rounding_mode="floor"), return_inverse=True, return_counts=True
    )
    return Readers(pairs % words.seen.programs, place, counts, lanes)


@dataclass(frozen=True)
class Crossing:
    """What the gradient of one tensor needs of the programs of one launch that reads it."""

    tensor: str
    kernel: str
    crosses: bool
    """Several programs read the same element."""
    text: str


def crossing(name: str, buffer: Buffer, words: LaunchWords, tensor: Geometry) -> Crossing | None:
    """What one launch means for one tensor; None where it does not read it."""
    found = readers(words, buffer, tensor)
    if found is None:
        return None
    programs = words.seen.programs
    most, least = int(found.counts.max()), int(found.counts.min())
    deciders = ", ".join(words.deciders(buffer)) if programs > 1 else ""
    if programs == 1:
        sentence = "one program reads all of it: no sum across programs at this size"
    elif most == 1 and deciders:
        sentence = (
            f"no sum across programs with these data: each element is read by one program only; {deciders} decides "
            "which programs read an element, and other data may let several read the same"
        )
    elif most == 1:
        sentence = "no sum across programs: each element is read by one program only"
    else:
        who = f"all {programs}" if least == programs else f"{_count(least, most)} of {programs}"
        sentence = f"d{name} sums {_over(found, words)}across programs: {who} read the same element"
        shared = float((found.counts > 1).double().mean())
        sentence += f" ({shared:.1%} of the elements: tiles overlap)" if shared < 0.3 else ""
        sentence += f"; {deciders} decides which programs" if deciders else ""
    unread = tensor.elements - int(found.counts.numel())
    if unread > 0:
        sentence += f"; {unread} of {tensor.elements} elements are not read here, their gradient is zero"
    return Crossing(name, words.seen.launch.kernel, most > 1, f"{sentence}{_again(found, words, buffer)}")


def _count(least: int, most: int) -> str:
    return f"{most}" if least == most else f"{least} to {most}"


def _over(found: Readers, words: LaunchWords) -> str:
    """`over M (axis 0) `: what the readers of one element differ in, by what they store."""
    grid = words.seen.launch.grid
    ids = torch.arange(words.seen.programs)
    along = {0: ids % grid[0], 1: torch.div(ids, grid[0], rounding_mode="floor") % grid[1]}
    along[2] = torch.div(ids, grid[0] * grid[1], rounding_mode="floor")
    axes = [axis for axis in range(3) if grid[axis] > 1 and found.differ_in(along[axis])]
    names: dict[str, None] = {}
    for walk in words.stores:
        names.update(dict.fromkeys(dim.name for dim in _differing(walk, found)))
    simple = [name for name in names if "*" not in name or not any(part in names for part in name.split("*"))]
    told = "axis " + " and ".join(str(axis) for axis in axes) if axes else ""
    if simple:
        return f"over {', '.join(simple)} ({told}) "
    return f"over {told} " if told else ""


def _differing(walk: Walk, found: Readers) -> Sequence[DimWalk]:
    """Dims of what is stored whose place differs between readers of one element."""
    return [dim for dim in walk.dims if dim.axes and found.differ_in(dim.low)]


def _again(found: Readers, words: LaunchWords, buffer: Buffer) -> str:
    """How often one program comes back to an element."""
    if found.lanes <= found.pairs:
        return ""
    times = found.lanes / found.pairs
    lines = sorted(
        {
            line
            for site in words.seen.sites
            if site.buffer is buffer and site.kind is not Access.WRITE and (line := words.line(site.op))
        }
    )
    where = f" (line{'s' if len(lines) > 1 else ''} {', '.join(str(line) for line in lines)})" if lines else ""
    if times < 1.05:
        return f"; a few elements are read twice by a program{where}"
    many = f"{times:.0f} times" if abs(times - round(times)) < 1e-9 else f"{times:.1f} times on average"
    return f"; each program reads an element {many}{where}"
