"""All launches of one call of a stub in words, with what crosses programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernel_agent.ir.cost.meter import Access
from kernel_agent.ir.memory import Buffer
from kernel_agent.ir.sanitizer.views import Geometry
from kernel_agent.oracle.facts.crossing import Crossing, crossing
from kernel_agent.oracle.facts.dims import Dims
from kernel_agent.oracle.facts.launches import LaunchWords, Roles
from kernel_agent.oracle.facts.watch import Watched
from kernel_agent.pairs.forward_facts import LaunchFacts


@dataclass(frozen=True)
class Told:
    """What a call of the stub showed."""

    launches: tuple[LaunchFacts, ...]
    crossing: tuple[Crossing, ...]
    notes: tuple[str, ...]

    def sentences(self, others: Mapping[str, Told]) -> tuple[str, ...]:
        """What crosses programs, one line each; where the call at another entry shows a sum that this one does not,
        its line is added, with the entry's label."""
        several = len(self.launches) > 1
        mine = [_line(one, several) for one in self.crossing]
        crossing = {(one.tensor, one.kernel) for one in self.crossing if one.crosses}
        for label, other in others.items():
            for one in other.crossing:
                if one.crosses and (one.tensor, one.kernel) not in crossing:
                    crossing.add((one.tensor, one.kernel))
                    mine.append(f"{_line(one, several)} (seen at {label})")
        return tuple(dict.fromkeys(mine))


def _line(one: Crossing, several: bool) -> str:
    return f"{one.tensor} in {one.kernel}: {one.text}" if several else f"{one.tensor}: {one.text}"


def tell(watched: Watched, dims: Dims, grads: Sequence[str], outputs: Sequence[str]) -> Told:
    """Put a call into words. `grads` are the inputs that want gradients, `outputs` the names of all outputs."""
    roles = Roles(watched, tuple(outputs))
    words = [LaunchWords(place, seen, dims, roles) for place, seen in enumerate(watched.launches)]
    notes = [
        f"{seen.launch.kernel}: more accesses than can be written down; the last ones are not told"
        for seen in watched.launches
        if not seen.complete
    ]
    found: list[Crossing] = []
    for name in grads:
        mine = _of_input(name, watched, words)
        found += mine
        if not mine:
            notes.append(f"{name}: no kernel reads it itself; torch operations of the stub come between")
    found += _between(watched, words)
    return Told(_in_a_row([one.facts() for one in words]), tuple(found), tuple(notes))


def _in_a_row(launches: Sequence[LaunchFacts]) -> tuple[LaunchFacts, ...]:
    """Equal launches that follow each other as one."""
    found: list[LaunchFacts] = []
    for one in launches:
        if found and found[-1].model_copy(update={"times": 1}) == one:
            found[-1] = found[-1].model_copy(update={"times": found[-1].times + 1})
        else:
            found.append(one)
    return tuple(found)


def _of_input(name: str, watched: Watched, words: Sequence[LaunchWords]) -> list[Crossing]:
    """What every launch means for one input, or for a copy of it that torch made first."""
    image, buffer = watched.inputs.get(name), watched.buffers.get(name)
    if image is None or buffer is None:
        return []
    found = _in_all(name, buffer, words, Geometry.of(image))
    if found:
        return found
    return [
        replace(one, text=f"{one.text} (through a copy that torch makes first)")
        for copy in _read_first(words)
        if _is_copy(copy, image)
        for one in _in_all(name, copy, words, Geometry((copy.size,), (1,), 0))
    ]


def _in_all(name: str, buffer: Buffer, words: Sequence[LaunchWords], tensor: Geometry) -> list[Crossing]:
    return [found for one in words if (found := crossing(name, buffer, one, tensor)) is not None]


def _read_first(words: Sequence[LaunchWords]) -> list[Buffer]:
    """Float buffers that some launch reads and none writes before."""
    written: set[int] = set()
    found: dict[int, Buffer] = {}
    for one in words:
        for site in one.seen.sites:
            if site.kind is Access.READ and id(site.buffer) not in written and site.buffer.is_float:
                found[id(site.buffer)] = site.buffer
        written |= {id(site.buffer) for site in one.seen.sites if site.kind is not Access.READ}
    return list(found.values())


def _is_copy(buffer: Buffer, image: Tensor) -> bool:
    """Whether a buffer holds the values of an input, in whatever order."""
    with torch._C.DisableTorchFunction():
        if buffer.size != image.numel() or not image.is_floating_point():
            return False
        mine, theirs = buffer.root.detach().flatten().double(), image.detach().flatten().double()
        return bool(torch.equal(mine.sort().values, theirs.sort().values))


def _between(watched: Watched, words: Sequence[LaunchWords]) -> list[Crossing]:
    """The same of float buffers that one launch writes and a later one reads."""
    inputs = {id(buffer) for buffer in watched.buffers.values()}
    writers: dict[int, str] = {}
    found: list[Crossing] = []
    for one in words:
        read = {id(site.buffer): site.buffer for site in one.seen.sites if site.kind is Access.READ}
        for key, buffer in read.items():
            if key in writers and key not in inputs and buffer.is_float:
                told = crossing(buffer.name, buffer, one, Geometry((buffer.size,), (1,), 0))
                if told is not None:
                    found.append(replace(told, tensor=f"{buffer.name} (made by {writers[key]})"))
        for site in one.seen.sites:
            if site.kind is not Access.READ:
                writers.setdefault(id(site.buffer), one.seen.launch.kernel)
    return found
