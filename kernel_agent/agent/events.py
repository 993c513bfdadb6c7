"""Everything that can happen in a run, as typed records. The ledger stores them; the state of a run is their fold.

An event holds what was decided or received, never what can be computed from earlier events. Texts a model was shown
or answered are in the events themselves: a ledger can be read and resumed with no other file but the snapshots.
"""

from __future__ import annotations

import enum
from typing import Annotated, Literal

from pydantic import Field

from kernel_agent.config import Backend, RunConfig
from kernel_agent.deliver.certificate import Versions
from kernel_agent.gate.verdict import Verdict
from kernel_agent.models.protocol import Reply, Turn
from kernel_agent.pairs.spec import KernelSpec
from kernel_agent.record import Record


class PhaseName(str, enum.Enum):
    """The phases of a run, in order."""

    REFERENCE = "reference"
    BACKWARD = "backward"
    OPTIMIZE = "optimize"


class PromptName(str, enum.Enum):
    """The templates in `agent/prompts`, by file stem."""

    DRAFT = "draft"
    REPAIR = "repair"
    NO_CODE = "no_code"
    OPTIMIZE = "optimize"


class Outcome(str, enum.Enum):
    """How a run ended."""

    DELIVERED = "delivered"
    NO_GREEN_VERDICT = "no green verdict"


class RunStarted(Record):
    """First event of every ledger."""

    event: Literal["run_started"] = "run_started"
    run_id: str
    config: RunConfig = Field(
        description="as given, with the source of backwards resolved and paths relative to the run folder"
    )
    backend: Backend
    backend_why: str = Field(description="one line: why this source of backwards was chosen")
    model: str = Field(description="name of the model that is asked")
    versions: Versions
    stem: str = Field(description="name of the user's file without suffix")
    hash8: str = Field(description="first 8 hex digits of the SHA-256 of the user's file")


class PhaseStarted(Record):
    """A phase begins."""

    event: Literal["phase_started"] = "phase_started"
    phase: PhaseName
    line: str = Field(description="what the phase is for")


class PhaseEnded(Record):
    """A phase is over."""

    event: Literal["phase_ended"] = "phase_ended"
    phase: PhaseName
    line: str = Field(description="what came of it")


class PhaseSkipped(Record):
    """A phase did not run."""

    event: Literal["phase_skipped"] = "phase_skipped"
    phase: PhaseName
    line: str = Field(description="why not")


class SpecDescribed(Record):
    """The user's file was read and its stub run once."""

    event: Literal["spec_described"] = "spec_described"
    spec: KernelSpec = Field(description="with `facts.path` reduced to the file's name")


class TruthCrossChecked(Record):
    """The exact gradients were compared with a central difference of the forward."""

    event: Literal["truth_cross_checked"] = "truth_cross_checked"
    passed: bool
    line: str = Field(description="the result in one sentence")
    worst: float = Field(description="largest relative disagreement of any directional derivative")
    seconds: float = 0.0


class RetrievedPair(Record):
    """One pair the search came up with, chosen or not."""

    slug: str
    family: str
    path: str = Field(description="relative to the root of the pairs")
    score: float = Field(description="fused score; orders the list")
    similarity: float | None = Field(default=None, description="descriptor cosine; None when searched by words alone")
    chosen: bool
    reason: str = Field(description="why it was chosen or left out")
    forward: str = Field(default="", description="text of the forward section; only of chosen pairs")
    backward: str = Field(default="", description="text of the backward section; only of chosen pairs")


class PairsRetrieved(Record):
    """The search for similar pairs is done."""

    event: Literal["pairs_retrieved"] = "pairs_retrieved"
    pairs: tuple[RetrievedPair, ...] = Field(description="the ten nearest with their scores, best first")
    unmatched_excludes: tuple[str, ...] = Field(default=(), description="terms of --rag-exclude that match no pair")
    notice: str = Field(default="", description="one line for the reader, such as that nothing similar was found")
    seconds: float = 0.0


class Asked(Record):
    """A prompt was made and is about to be sent."""

    event: Literal["asked"] = "asked"
    number: int = Field(description="counts the asks of a run from 1")
    phase: PhaseName
    prompt: PromptName
    system: str | None = Field(default=None, description="the system text; None when it is that of the ask before")
    opening: str | None = Field(default=None, description="the first user turn; None when it is that of the ask before")
    turns: tuple[Turn, ...] = Field(default=(), description="the turns after the first")
    digest: str = Field(description="SHA-256 over the whole conversation")
    estimated_input: int = Field(description="tokens of the conversation, estimated before asking")


class Replied(Record):
    """A model answered."""

    event: Literal["replied"] = "replied"
    number: int
    reply: Reply


class CandidateExtracted(Record):
    """A reply held code; the candidate lies in the snapshots."""

    event: Literal["candidate_extracted"] = "candidate_extracted"
    number: int
    digest: str
    has_forward: bool = Field(description="it brings its own forward section")
    notes: tuple[str, ...] = Field(default=(), description="what of the reply was left out")


class Judged(Record):
    """The verdict over the candidate of an ask, or over a reply without one."""

    event: Literal["judged"] = "judged"
    number: int
    digest: str | None = Field(description="the candidate; None when the reply held none")
    verdict: Verdict
    same_as: int | None = Field(
        default=None, description="the earlier ask whose candidate this repeats; its verdict was reused"
    )


class Measurement(Record):
    """Time of a candidate on the device."""

    median_us: float = Field(
        description="median time of one backward in microseconds, over the required shapes (geometric mean)"
    )
    facts: tuple[str, ...] = Field(default=(), description="measured facts in words, for the model and the reader")


class Measured(Record):
    """A green candidate was timed."""

    event: Literal["measured"] = "measured"
    digest: str
    measurement: Measurement


class SnapshotKept(Record):
    """A candidate is the best so far."""

    event: Literal["snapshot_kept"] = "snapshot_kept"
    number: int
    digest: str
    line: str = Field(description="in what it is better")


class SetAside(Record):
    """A reply brought no progress over the best candidate."""

    event: Literal["set_aside"] = "set_aside"
    number: int
    digest: str | None
    line: str = Field(description="in what it is not better")


class RolledBack(Record):
    """Work goes on from the best candidate, not from the last."""

    event: Literal["rolled_back"] = "rolled_back"
    digest: str = Field(description="the snapshot picked")
    asks_without_progress: int


class BudgetExhausted(Record):
    """The next ask would exceed a limit and is not sent."""

    event: Literal["budget_exhausted"] = "budget_exhausted"
    line: str


class Delivered(Record):
    """The finished operator was written."""

    event: Literal["delivered"] = "delivered"
    files: tuple[str, ...] = Field(description="paths relative to the folder that holds `runs`")
    line: str = ""


class Interrupted(Record):
    """The run stopped before its end and can be resumed."""

    event: Literal["interrupted"] = "interrupted"
    line: str


class Resumed(Record):
    """The run goes on."""

    event: Literal["resumed"] = "resumed"
    config: RunConfig = Field(description="the configuration from here on")
    dropped: str = Field(default="", description="what a damaged last line of the ledger held")


class Finished(Record):
    """Last event of a run that came to its end."""

    event: Literal["finished"] = "finished"
    outcome: Outcome
    digest: str | None = Field(description="the candidate the run ends with; None when no reply held code")
    line: str


Event = Annotated[
    RunStarted
    | PhaseStarted
    | PhaseEnded
    | PhaseSkipped
    | SpecDescribed
    | TruthCrossChecked
    | PairsRetrieved
    | Asked
    | Replied
    | CandidateExtracted
    | Judged
    | Measured
    | SnapshotKept
    | SetAside
    | RolledBack
    | BudgetExhausted
    | Delivered
    | Interrupted
    | Resumed
    | Finished,
    Field(discriminator="event"),
]


class Entry(Record):
    """One line of a ledger: an event with its place and time."""

    number: int = Field(description="counts the lines of a ledger from 1")
    at: str = Field(description="UTC time in ISO 8601 with milliseconds")
    event: Event
