"""What became of one variant of a backward: times of its kernels at some entries, or why there are none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kernel_agent.pairs.spec import Candidate


@dataclass(frozen=True)
class KernelTrial:
    """The launches of one kernel in one backward."""

    name: str
    microseconds: float
    """Of all its launches together."""
    spills: int
    """Bytes of local memory per thread."""
    shared_bytes: int = 0
    registers: int = 0


@dataclass(frozen=True)
class Trial:
    """One variant."""

    entries: Mapping[str, tuple[KernelTrial, ...]] = field(default_factory=dict)
    """By label of the entry."""
    totals: Mapping[str, float] = field(default_factory=dict)
    """Microseconds of the whole backward by label."""
    problem: str = ""
    """Why it has no times at some entry."""

    def spills(self, kernels: frozenset[str]) -> int:
        """The most bytes per thread of some kernels."""
        return max((one.spills for seen in self.entries.values() for one in seen if one.name in kernels), default=0)


@dataclass(frozen=True)
class Tried:
    """What a batch of variants came to."""

    trials: Sequence[Trial]
    """One per variant, in order."""
    sizes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """By label of an entry: what the backward's whole numbers, and the bytes of elements of its tensors, are there."""


Judge = Callable[[Sequence[Candidate]], Tried]
"""Times a batch of variants, the first of which is the backward as it is when no batch was tried before."""
