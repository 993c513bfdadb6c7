"""What became of mutants, as records that a command prints and a benchmark keeps."""

from __future__ import annotations

import enum
from collections import Counter

from pydantic import Field

from kernel_agent.gate.verdict import Status
from kernel_agent.record import Record


class Kind(str, enum.Enum):
    """What a mutant is made on."""

    GRADIENT = "gradient"
    SOURCE = "source"
    IR = "IR"


class Outcome(str, enum.Enum):
    """What the gate says of a mutant."""

    KILLED = "killed"
    """Red."""
    SURVIVED = "survived"
    """Green, and its gradients are not those of the honest backward somewhere: in the suite, or in a wider one."""
    EQUIVALENT = "equivalent"
    """Green, and every gradient of every case of the suite and of a wider one equals the honest one to 1e-12."""
    ROUNDING = "rounding"
    """It rounds otherwise, and no more coarsely than the rule of the native tier allows."""
    INVALID = "invalid"
    """Nothing was computed that could be judged: it does not compile, or fails at every call."""


class MutantResult(Record):
    """One mutant, judged."""

    kind: Kind = Kind.SOURCE
    mutator: str = Field(description="class of the mistake")
    mutant: str = Field(description="what was changed, such as `line 41: a - b -> a`")
    line: int | None = Field(default=None, description="line of the pair file; None for mutants made on gradients")
    outcome: Outcome
    status: Status = Field(description="of the first red case; GREEN without one")
    case: str | None = Field(default=None, description="first red case, or the case at which a survivor differs")
    message: str = ""
    reason: str = Field(default="", description="what an equivalent mutant, or one that only rounds, was compared on")
    diff: str = Field(default="", description="of a survivor, against the honest file")
    seconds: float = 0.0


class MutationTally(Record):
    """What became of mutants, as numbers beside a verdict."""

    killed: int
    survived: int
    equivalent: int
    rounding: int = Field(description="that only compute coarser, which the exact tier does not judge")
    invalid: int = Field(description="that computed nothing")
    unjudged: int = Field(default=0, description="mutants that there was no time for")
    survivors: tuple[MutantResult, ...] = ()
    seconds: float = 0.0

    def __add__(self, other: MutationTally) -> MutationTally:
        """Both together."""
        return MutationTally(**{name: mine + getattr(other, name) for name, mine in self})

    @property
    def words(self) -> str:
        """`34 of 34 killed; not counted: 2 equivalent; 12 s`."""
        judged = self.killed + self.survived
        score = f"{self.killed} of {judged} killed" if judged else "no mutant could be judged"
        rest = ("equivalent", "rounding", "invalid", "unjudged")
        aside = ", ".join(f"{getattr(self, name)} {name}" for name in rest if getattr(self, name))
        return score + (f"; not counted: {aside}" if aside else "") + f"; {self.seconds:.0f} s"


class MutationReport(Record):
    """All mutants of one pair."""

    pair: str
    results: tuple[MutantResult, ...]
    unjudged: int = Field(default=0, description="mutants that there was no time for")
    notes: tuple[str, ...] = Field(default=(), description="where the honest backward itself could not be judged by")
    seconds: float = 0.0

    @property
    def tally(self) -> MutationTally:
        """The numbers, and the survivors."""
        counts = {outcome.value: self.counts[outcome] for outcome in Outcome}
        return MutationTally(**counts, unjudged=self.unjudged, survivors=self.survivors, seconds=self.seconds)

    @property
    def counts(self) -> Counter[Outcome]:
        """Mutants by outcome."""
        return Counter(result.outcome for result in self.results)

    @property
    def survivors(self) -> tuple[MutantResult, ...]:
        """Those that show a hole in the suite."""
        return self.of(Outcome.SURVIVED)

    def of(self, outcome: Outcome) -> tuple[MutantResult, ...]:
        """Mutants with one outcome."""
        return tuple(result for result in self.results if result.outcome is outcome)

    @property
    def score(self) -> float | None:
        """Killed of killed and survived; None where there are neither."""
        counts = self.counts
        judged = counts[Outcome.KILLED] + counts[Outcome.SURVIVED]
        return counts[Outcome.KILLED] / judged if judged else None
