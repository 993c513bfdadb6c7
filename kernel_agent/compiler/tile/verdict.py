"""`TileVerdict`: what the comparison of a pair of tile functions came to."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernel_agent.gate.rule import compare


@dataclass(frozen=True)
class TileProblem:
    """What is wrong, in the first case that shows it."""

    name: str
    """The parameter whose adjoint is wrong, or the result that is."""
    message: str
    """One sentence that names it, with the worst element."""
    case: str
    """Extents, seed and cotangents."""

    def __str__(self) -> str:
        return f"{self.message} ({self.case})"


@dataclass(frozen=True)
class TileVerdict:
    """Whether a function and its adjoint are those of the truth."""

    problems: tuple[TileProblem, ...]
    """One at most for each parameter and each result."""
    cases: int
    """Cotangents that were pulled back, at all sizes and seeds."""
    against: str
    """What they were compared with."""

    @property
    def green(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def __bool__(self) -> bool:
        return self.green

    def __str__(self) -> str:
        if self.green:
            return f"green: {self.cases} cases agree with {self.against}"
        return "\n".join(f"red: {problem}" for problem in self.problems)


def difference(what: str, given: Tensor, truth: Tensor, scale: float) -> str | None:
    """What is wrong with a tile; None where it is right. `scale`: see `kernel_agent.gate.rule`."""
    seen = compare(given, truth, scale)
    if seen.passed:
        return None
    apart = torch.where((given == truth) | (given.isnan() & truth.isnan()), 0.0, (given - truth).abs())
    worst = int(apart.nan_to_num(nan=math.inf).argmax())
    where = list(map(int, torch.unravel_index(torch.tensor(worst), truth.shape))) if truth.dim() else []
    numbers = f"{float(given.flatten()[worst]):.6g} instead of {float(truth.flatten()[worst]):.6g}"
    factor = f"; it is {seen.factor:.6g} times the truth everywhere" if seen.is_multiple and truth.any() else ""
    return f"{what} is wrong, worst at {where}: {numbers}{factor}"


def other_shape(name: str, given: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    """What is wrong with an adjoint that has not the extents of its parameter."""
    remedy = ""
    if math.prod(given) > math.prod(wanted):
        remedy = ": it must be summed over the axes along which it was broadcast"
    return f"the adjoint of `{name}` is {list(given)}, but `{name}` is {list(wanted)}{remedy}"
