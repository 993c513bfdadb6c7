"""`GateOptions`: how thorough a check is. Nothing here loosens the rule."""

from __future__ import annotations

from dataclasses import dataclass, field

from kernel_agent.pairs.values import Values
from kernel_agent.sandbox import Limits


@dataclass(frozen=True)
class GateOptions:
    """What a check runs. The plan depends on these, the spec and one drawn seed, never on the speed of the machine."""

    seeds: tuple[int, ...] = (0, 1)
    """Seeds of make_args and of the cotangents."""
    max_elements: int = 1 << 19
    """Elements of all tensor arguments together; larger entries are shrunk (required) or left out (not required)."""
    max_volume: int = 1 << 23
    """Product of an entry's whole-number dims, a bound of the work."""
    values: tuple[Values, ...] = tuple(Values)
    """Distributions of inputs at the cheapest shape, each with a seed that is drawn for the occasion."""
    drawn: tuple[int, ...] = ()
    """Seeds that earlier verdicts drew, asked beside the one that is drawn now."""
    odd_sizes: int = 4
    """Derived odd shapes to run, of those that the forward accepts."""
    max_cases: int = 64
    """Cases to run at most; each required entry gets at least one whatever this says."""
    deterministic: bool = False
    """Reject a backward whose float additions come in no fixed order."""
    stop_at_red: bool = True
    """Leave out the shapes after the first one with a red case."""
    limits: Limits = field(default_factory=Limits)
    """Of each of the two processes that run the candidate: one for the cheapest shape, one for all others."""


STANDARD = GateOptions()
"""What every verdict of a run is made with."""


def lesser(options: GateOptions) -> tuple[str, ...]:
    """In what a check with these options asks less than the standard one, which a green verdict has to say."""
    counts = ("max_cases", "odd_sizes", "max_elements", "max_volume")
    said = [name for name in counts if getattr(options, name) < getattr(STANDARD, name)]
    if len(options.seeds) < len(STANDARD.seeds):
        said.append("seeds")
    if not set(STANDARD.values).issubset(options.values):
        said.append("values")
    return tuple(said)
