"""What became of mutants, as records that a command prints and a benchmark keeps."""

from __future__ import annotations

import enum
from collections import Counter

from pydantic import Field

from kernel_agent.gate.verdict import Status
from kernel_agent.record import Record


class Outcome(str, enum.Enum):
    """What the exact tier says of a mutant."""

    KILLED = "killed"
    """Red."""
    SURVIVED = "survived"
    """Green, and its gradients are not those of the honest backward somewhere: in the suite, or in a wider one."""
    EQUIVALENT = "equivalent"
    """Green, and every gradient of every case of the suite and of a wider one equals the honest one to 1e-12."""
    ROUNDING = "rounding"
    """The same gradients, of a class that changes rounding alone, seen at one shape: the native tier's to judge."""
    INVALID = "invalid"
    """Nothing was computed that could be judged: it does not compile, or fails at every call."""


class MutantResult(Record):
    """One mutant, judged."""

    mutator: str = Field(description="class of the mistake")
    mutant: str = Field(description="what was changed, such as `line 41: a - b -> a`")
    line: int | None = Field(default=None, description="line of the pair file; None for mutants made on gradients")
    outcome: Outcome
    status: Status = Field(description="of the first red case; GREEN without one")
    case: str | None = Field(default=None, description="first red case, or the case at which a survivor differs")
    message: str = ""
    diff: str = Field(default="", description="of a survivor, against the honest file")
    seconds: float = 0.0


class MutationReport(Record):
    """All mutants of one pair."""

    pair: str
    results: tuple[MutantResult, ...]
    seconds: float = 0.0

    @property
    def counts(self) -> Counter[Outcome]:
        """Mutants by outcome."""
        return Counter(result.outcome for result in self.results)

    @property
    def survivors(self) -> tuple[MutantResult, ...]:
        """Those that show a hole in the suite."""
        return tuple(result for result in self.results if result.outcome is Outcome.SURVIVED)

    @property
    def score(self) -> float | None:
        """Killed of killed and survived; None where there are neither."""
        counts = self.counts
        judged = counts[Outcome.KILLED] + counts[Outcome.SURVIVED]
        return counts[Outcome.KILLED] / judged if judged else None
