"""What a refused gradient is given before the verdict stands: kinks of the forward are left out, and honest arithmetic
is drawn more often.

Both cost executions of the forward, so that a green gradient is spared them. Neither sees the candidate: kinks and
draws are the forward's, and which gradient asks for them changes nothing of what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from torch import Tensor

from kernel_agent.bench.honest import DRAWS
from kernel_agent.bench.native_truth import NativeTruth
from kernel_agent.gate.judge import Judged
from kernel_agent.gate.verdict import Status

DOUBTFUL = (Status.WRONG_GRADIENT, Status.PRECISION_DOWNGRADE, Status.NOT_FINITE)
"""What a right gradient may be called that takes another side at a kink of the forward, or that is unlucky."""
LUCK = 16.0
"""Beyond so many times what is allowed nothing is luck, and no more draws are made."""
ROUNDS = (4, 8, 16)
"""Further draws, round by round, for as long as a gradient is refused."""


class Looks(Protocol):
    """Who computes what a second look needs."""

    def kinks(self) -> Mapping[str, Tensor]:
        """Elements at kinks, by gradient."""
        ...

    def with_draws(self, truth: NativeTruth, draws: range) -> NativeTruth:
        """The same truth with the honest errors of further draws of these numbers joined to its own."""
        ...


Judge = Callable[[NativeTruth, Mapping[str, Tensor]], Judged]


@dataclass(frozen=True)
class Looked:
    """The judgement that stands, and by what."""

    judged: Judged
    kinks: Mapping[str, Tensor]
    """Elements that were left out."""


def look(judge: Judge, truth: NativeTruth, looks: Looks) -> Looked:
    """Judge, and where the gradients are refused judge again, as often as there is something new to judge by."""
    kinks: Mapping[str, Tensor] = MappingProxyType({})
    found = judge(truth, kinks)
    if _doubtful(found):
        kinks = looks.kinks()
        found = judge(truth, kinks) if kinks else found
    drawn = DRAWS
    for count in ROUNDS:
        if not _doubtful(found) or found.problem is None or (found.problem.ratio or 0.0) > LUCK:
            break
        truth = looks.with_draws(truth, range(drawn, drawn + count))
        drawn += count
        found = judge(truth, kinks)
    return Looked(found, kinks)


def _doubtful(found: Judged) -> bool:
    return found.problem is not None and found.problem.status in DOUBTFUL
