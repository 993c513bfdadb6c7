"""What is known of the speed of one candidate. The ledger keeps these; the keep rule and the prompts read them."""

from __future__ import annotations

import enum
import math

from pydantic import Field

from kernel_agent.record import Record


class Basis(str, enum.Enum):
    """Where times come from."""

    MEASURED = "measured"
    MODELLED = "modelled, not measured"


class ShapeTime(Record):
    """One required entry of SWEEP. Times are microseconds of one backward alone."""

    label: str = Field(description="`M=17 N=100`")
    median_us: float
    spread: float = Field(default=0.0, description="interquartile range over the median; 0 for modelled times")
    bound_us: float | None = Field(default=None, description="what no implementation can beat, by the cost counter")
    eager_us: float | None = Field(default=None, description="eager autograd of the reference, backward alone")
    compiled_us: float | None = Field(default=None, description="torch.compile of the reference, backward alone")
    own_us: float | None = Field(default=None, description="the user's own hand-written backward")


class KernelTime(Record):
    """One kernel of the backward at the entry that takes longest."""

    name: str
    microseconds: float
    bound_by: str = Field(default="", description="the resource it keeps busy longest, by the cost counter")
    bound_us: float | None = None
    atomics: int = 0
    registers: int | None = Field(default=None, description="per thread")
    spills: int | None = Field(default=None, description="bytes of local memory per thread")
    shared_bytes: int | None = None


class Measurement(Record):
    """The time of a candidate over the required entries."""

    basis: Basis
    device: str = Field(description="name of the GPU, or of the modelled one")
    shapes: tuple[ShapeTime, ...]
    kernels: tuple[KernelTime, ...] = ()
    facts: tuple[str, ...] = Field(default=(), description="further facts in words, for the model and the reader")
    versions: tuple[str, ...] = Field(default=(), description="such as 'torch 2.11.0'; of what was measured with")

    @property
    def geomean_us(self) -> float:
        """Geometric mean of the medians."""
        return math.exp(sum(math.log(shape.median_us) for shape in self.shapes) / len(self.shapes))


class Tuned(Record):
    """What a bounded sweep over launch parameters and constexprs found, before a model is asked."""

    tried: int
    best: str | None = Field(description="digest of the snapshot of the best variant; None when the start is best")
    line: str = Field(description="one sentence: what was changed and what it brought")
    measurement: Measurement | None = Field(default=None, description="of the best variant")


class Decision(Record):
    """Whether a candidate is kept for its speed."""

    kept: bool
    gain: float = Field(description="relative time saved in the geometric mean; negative when slower")
    worst: float = Field(description="largest relative slow-down of a shape; negative when all are faster")
    line: str


SLOWER_ALLOWED = 0.05
"""A kept candidate is at no shape slower by more than this."""


def decide(before: Measurement, after: Measurement, min_rel_impr: float) -> Decision:
    """Keep `after` when it is faster by `min_rel_impr` in the geometric mean and no shape is 5 % slower.

    A difference at a shape that is within the spread of either time counts as none: the same kernel, timed again, shows
    as much. Both must be measured on the same basis at the same shapes. Raises `ValueError` otherwise.
    """
    old = {shape.label: shape for shape in before.shapes}
    new = {shape.label: shape for shape in after.shapes}
    if before.basis is not after.basis or before.device != after.device or old.keys() != new.keys():
        raise ValueError("these measurements cannot be compared: another device, basis or other shapes")
    ratios = {label: _ratio(old[label], new[label]) for label in new}
    gain = 1.0 - math.exp(sum(map(math.log, ratios.values())) / len(ratios))
    label = max(ratios, key=lambda name: ratios[name])
    worst = ratios[label] - 1.0
    said = (
        f"{gain:.1%} less time in the geometric mean" if gain >= 0 else f"{-gain:.1%} more time in the geometric mean"
    )
    if worst > SLOWER_ALLOWED:
        return Decision(kept=False, gain=gain, worst=worst, line=f"{said}, but {worst:.0%} slower at {label}")
    kept = gain > 0 and gain >= min_rel_impr
    return Decision(
        kept=kept, gain=gain, worst=worst, line=said if kept else f"{said}, {min_rel_impr:.0%} is asked for"
    )


def _ratio(before: ShapeTime, after: ShapeTime) -> float:
    """Time after over time before; 1 where the difference is within the spread."""
    ratio = after.median_us / before.median_us
    return 1.0 if abs(ratio - 1.0) <= max(before.spread, after.spread) else ratio
