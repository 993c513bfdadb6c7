"""Everything that can happen in a run, as typed records. The ledger stores them; the state of a run is their fold.

An event holds what was decided or received, never what can be computed from earlier events. Texts a model was shown
or answered are in the events themselves: a ledger can be read and resumed with no other file but the snapshots.
"""

from __future__ import annotations

import enum
from typing import Annotated, Literal

from pydantic import Field

from kernel_agent.agent.derived import Derived as Derived
from kernel_agent.agent.gatetried import GateTried as GateTried
from kernel_agent.agent.plan import GradientPrice, Plan
from kernel_agent.bench.records import Measurement, Tuned
from kernel_agent.config import Backend, RunConfig
from kernel_agent.gate.verdict import Verdict
from kernel_agent.machine import Machine, Versions
from kernel_agent.models.protocol import Reply, Turn
from kernel_agent.pairs.forward_facts import ForwardFacts
from kernel_agent.pairs.spec import KernelSpec
from kernel_agent.record import Record


class PhaseName(str, enum.Enum):
    """The phases of a run, in order."""

    REFERENCE = "reference"
    BACKWARD = "backward"
    OPTIMIZE = "optimize"


class PromptName(str, enum.Enum):
    """The templates in `agent/prompts`, by file stem."""

    PLAN = "plan"
    DRAFT = "draft"
    REPAIR = "repair"
    NO_CODE = "no_code"
    EDIT_FAILED = "edit_failed"
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
    gpu: str = Field(default="", description="name of the GPU that is used; empty for none")
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


class ForwardAnalysed(Record):
    """What the forward does with memory was read off its kernels, and how its gradients flow."""

    event: Literal["forward_analysed"] = "forward_analysed"
    facts: ForwardFacts


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
    techniques: tuple[str, ...] = Field(default=(), description="tags of the closed list")
    speed: str = Field(default="", description="measured percent of the bound, in words; empty when unmeasured")
    standing: str = Field(default="", description="of a pair of the user's: proven or not, where from, licence")
    verified: bool = Field(default=True, description="the gate has passed it")


class PairsRetrieved(Record):
    """The search for similar pairs is done."""

    event: Literal["pairs_retrieved"] = "pairs_retrieved"
    pairs: tuple[RetrievedPair, ...] = Field(description="the ten nearest with their scores, best first")
    unmatched_excludes: tuple[str, ...] = Field(default=(), description="terms of --rag-exclude that match no pair")
    notice: str = Field(default="", description="one line for the reader, such as that nothing similar was found")
    seconds: float = 0.0


class Planned(Record):
    """The answer to the ask for a plan was read; it settles that ask."""

    event: Literal["planned"] = "planned"
    number: int = Field(description="the ask it answers")
    plan: Plan | None = Field(description="None when the answer holds no valid one")
    problem: str = Field(default="", description="what is wrong with the answer; empty for a valid plan")
    notes: tuple[str, ...] = Field(default=(), description="what is doubtful in the plan, or was put right")
    prices: tuple[GradientPrice, ...] = ()


class TechniqueHit(Record):
    """A pair whose backward computes a gradient in a technique that is wanted."""

    grad: str = Field(description="the gradient it was searched for")
    technique: str = Field(description="tag of the closed list")
    pair: RetrievedPair


class TechniquesRetrieved(Record):
    """The search for pairs by the techniques of single gradients is done."""

    event: Literal["techniques_retrieved"] = "techniques_retrieved"
    number: int = Field(description="the ask whose plan or whose red verdict names the gradients")
    grads: tuple[str, ...] = Field(default=(), description="the gradients that were searched for")
    hits: tuple[TechniqueHit, ...]


class DraftsPlanned(Record):
    """How many first drafts are asked for, decided before the first of them is sent."""

    event: Literal["drafts_planned"] = "drafts_planned"
    anchors: tuple[str | None, ...] = Field(description="one per draft: slug of the pair to write after, or None")
    line: str = Field(default="", description="why there are fewer than were asked for; empty otherwise")


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
    anchor: str | None = Field(default=None, description="slug of the pair that a draft is to be written after")
    free: bool = Field(default=False, description="a retry of the same intent, which does not count as an ask")
    base: str | None = Field(default=None, description="digest of the candidate that it shows; edits apply to it")


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
    edits: int = Field(default=0, description="edit blocks that it was made with; 0 for whole sections")
    fingerprint: str | None = Field(default=None, description="equal for candidates that compute by the same code")


class EditFailed(Record):
    """The edits of a reply do not apply to the candidate it was shown; it settles that ask."""

    event: Literal["edit_failed"] = "edit_failed"
    number: int
    line: str = Field(description="which edit does not apply, and why")


class Locked(Record):
    """Gradients that are right in every case; further asks are about the others alone."""

    event: Literal["locked"] = "locked"
    grads: tuple[str, ...]
    digest: str = Field(description="the candidate that computes them")


class Spliced(Record):
    """The gradients of two candidates were put together into one, which is judged next."""

    event: Literal["spliced"] = "spliced"
    number: int = Field(description="the ask that completed it")
    digest: str
    from_digests: tuple[str, str]
    grads: tuple[tuple[str, ...], tuple[str, ...]] = Field(description="which gradients come from which")


class Judged(Record):
    """The verdict over the candidate of an ask, or over a reply without one."""

    event: Literal["judged"] = "judged"
    number: int
    digest: str | None = Field(description="the candidate; None when the reply held none")
    verdict: Verdict
    same_as: int | None = Field(
        default=None,
        description="the earlier ask with the same text or the same compiled code; its verdict was reused",
    )


class Measured(Record):
    """A green candidate was timed, or its time modelled."""

    event: Literal["measured"] = "measured"
    digest: str
    measurement: Measurement


class TunedEvent(Record):
    """Launch parameters and constexprs of a green candidate were swept."""

    event: Literal["tuned"] = "tuned"
    digest: str = Field(description="the candidate it began with")
    tuned: Tuned
    verdict: Verdict | None = Field(default=None, description="of the best variant; None when the start is best")


class Confirmed(Record):
    """The best candidate, proven on another machine, was judged with its real kernels on the GPU of this one."""

    event: Literal["confirmed"] = "confirmed"
    digest: str
    verdict: Verdict = Field(description="of both tiers; red, and phase 2 is open again")


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
    machine: Machine | None = Field(default=None, description="where it goes on; None in older ledgers")


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
    | GateTried
    | ForwardAnalysed
    | PairsRetrieved
    | Derived
    | Planned
    | TechniquesRetrieved
    | DraftsPlanned
    | Asked
    | Replied
    | CandidateExtracted
    | EditFailed
    | Locked
    | Spliced
    | Judged
    | Measured
    | TunedEvent
    | Confirmed
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
