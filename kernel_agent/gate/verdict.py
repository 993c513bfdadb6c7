"""What the gate says of a candidate. Shown to the model, stored in the ledger, rendered in the terminal."""

from __future__ import annotations

import enum
from typing import Annotated

from pydantic import AfterValidator, Field

from kernel_agent.gate.diagnosis.records import Diagnosis
from kernel_agent.machine import Machine
from kernel_agent.pairs.values import Values
from kernel_agent.record import Record


def visible(text: str) -> str:
    """The text with everything in it that a terminal or a reader does not see as it is written out: `\\x1b`.

    Verdicts quote what a candidate says and is; an escape sequence in it would clear the screen and write another
    verdict.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


Visible = Annotated[str, AfterValidator(visible)]


class Status(str, enum.Enum):
    """The outcome of a check. Everything but GREEN is red."""

    GREEN = "GREEN"
    NO_CODE = "NO_CODE"
    BAD_FORMAT = "BAD_FORMAT"
    COMPILE_ERROR = "COMPILE_ERROR"
    CRASHED = "CRASHED"
    TIMED_OUT = "TIMED_OUT"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    TOO_MANY_PROCESSES = "TOO_MANY_PROCESSES"
    UNSUPPORTED_OP = "UNSUPPORTED_OP"
    NO_CASE = "NO_CASE"
    NO_TRITON_LAUNCH = "NO_TRITON_LAUNCH"
    TORCH_FALLBACK = "TORCH_FALLBACK"
    UNEXPLAINED = "UNEXPLAINED"
    """What the backward did cannot be carried out again without its code, or may be something else elsewhere."""
    TAMPERED = "TAMPERED"
    """It changes what is not its own: functions of other modules, or it leaves processes behind."""
    OUT_OF_BOUNDS = "OUT_OF_BOUNDS"
    RACE = "RACE"
    UNINITIALIZED_READ = "UNINITIALIZED_READ"
    FALSE_PROMISE = "FALSE_PROMISE"
    """What a kernel promises the compiler is not so, and a device may do anything."""
    INPUT_MUTATED = "INPUT_MUTATED"
    WRONG_FORWARD = "WRONG_FORWARD"
    WRONG_COUNT = "WRONG_COUNT"
    WRONG_SHAPE = "WRONG_SHAPE"
    WRONG_DTYPE = "WRONG_DTYPE"
    WRONG_DEVICE = "WRONG_DEVICE"
    WRONG_STRIDES = "WRONG_STRIDES"
    """Several indices of a gradient share one element of memory."""
    NOT_FINITE = "NOT_FINITE"
    WRONG_GRADIENT = "WRONG_GRADIENT"
    PRECISION_DOWNGRADE = "PRECISION_DOWNGRADE"
    NONDETERMINISTIC = "NONDETERMINISTIC"
    """Right, and not the same bits in every call; red only where that was asked for."""


class Stage(enum.IntEnum):
    """How far a candidate came before its first failure; later is better."""

    TEXT = 0
    IMPORT = 1
    LAUNCH = 2
    MEMORY = 3
    FORWARD = 4
    FORM = 5
    VALUES = 6
    ACCEPTED = 7


STAGE_OF = {
    Status.NO_CODE: Stage.TEXT,
    Status.BAD_FORMAT: Stage.TEXT,
    Status.COMPILE_ERROR: Stage.IMPORT,
    Status.CRASHED: Stage.IMPORT,
    Status.TIMED_OUT: Stage.IMPORT,
    Status.OUT_OF_MEMORY: Stage.IMPORT,
    Status.TOO_MANY_PROCESSES: Stage.IMPORT,
    Status.UNSUPPORTED_OP: Stage.LAUNCH,
    Status.NO_CASE: Stage.IMPORT,
    Status.NO_TRITON_LAUNCH: Stage.LAUNCH,
    Status.TORCH_FALLBACK: Stage.LAUNCH,
    Status.UNEXPLAINED: Stage.LAUNCH,
    Status.TAMPERED: Stage.LAUNCH,
    Status.OUT_OF_BOUNDS: Stage.MEMORY,
    Status.RACE: Stage.MEMORY,
    Status.UNINITIALIZED_READ: Stage.MEMORY,
    Status.FALSE_PROMISE: Stage.MEMORY,
    Status.INPUT_MUTATED: Stage.MEMORY,
    Status.WRONG_FORWARD: Stage.FORWARD,
    Status.WRONG_COUNT: Stage.FORM,
    Status.WRONG_SHAPE: Stage.FORM,
    Status.WRONG_DTYPE: Stage.FORM,
    Status.WRONG_DEVICE: Stage.FORM,
    Status.WRONG_STRIDES: Stage.FORM,
    Status.NOT_FINITE: Stage.VALUES,
    Status.WRONG_GRADIENT: Stage.VALUES,
    Status.PRECISION_DOWNGRADE: Stage.VALUES,
    Status.NONDETERMINISTIC: Stage.VALUES,
    Status.GREEN: Stage.ACCEPTED,
}


class Tier(str, enum.Enum):
    """By what a case was judged."""

    EXACT = "exact"
    """Executed from IR in float64, on a CPU."""
    NATIVE = "native"
    """Real kernels on a GPU."""


class GradientScore(Record):
    """How one gradient of one case compares with the truth."""

    grad: str = Field(description="name of the input the gradient belongs to")
    passed: bool
    ratio: float = Field(
        description="worst block error divided by the allowed error; at most 1 passes, inf when not comparable"
    )
    tile: tuple[int, ...] = Field(default=(), description="block index of the worst block, one entry per dimension")
    relative_error: float = Field(
        default=0.0, description="norm of the error of the whole gradient divided by the norm of the truth"
    )
    spread: float = Field(
        default=0.0,
        description="native tier: how far calls with the same arguments lie apart in one element at most, divided by "
        "the largest error that is allowed",
    )
    differing: int = Field(default=0, description="native tier: elements that are not the same in all these calls")


class Suite(Record):
    """What a check asks, so that another one can ask the same. The shapes are those of `SWEEP`, in the file."""

    rule: int = Field(description="`gate.rule.VERSION`: another one may judge and ask otherwise")
    seeds: tuple[int, ...] = Field(description="of `make_args` and of the cotangents")
    drawn: tuple[int, ...] = Field(description="seeds that were drawn for the occasion, which no candidate can foresee")
    values: tuple[Values, ...] = Field(description="distributions of the inputs on the drawn seeds")
    odd_sizes: int = Field(description="derived odd shapes, at most")
    max_cases: int
    max_elements: int = Field(description="elements of all tensor arguments together; larger entries were shrunk")
    max_volume: int = Field(description="product of an entry's whole-number dims, likewise")
    deterministic: bool = Field(default=False, description="whether gradients had to be the same bits in every call")


class CaseResult(Record):
    """One case of the suite: a shape, a seed and a kind of cotangent."""

    case: str = Field(description="readable name, such as 'M=17 N=100 seed=0 cotangent=strided'")
    required: bool
    status: Status
    grads: tuple[GradientScore, ...] = ()
    message: Visible = ""
    values: Values = Field(default=Values.AS_MADE, description="distribution of the inputs")
    tier: Tier = Tier.EXACT


class ForwardChange(Record):
    """What a candidate's own forward differs in from the user's stub."""

    extra_saved_bytes: int = Field(
        description="bytes of saved tensors that are neither inputs nor outputs, at the largest case run"
    )
    lines_changed: int


class Verdict(Record):
    """The judgement over one candidate."""

    status: Status
    message: Visible = Field(
        default="", description="one sentence: what is wrong, in the words of the candidate's own code"
    )
    case: str | None = Field(default=None, description="the first failing case")
    grad: str | None = Field(default=None, description="the first wrong gradient of that case")
    tile: tuple[int, ...] | None = None
    ratio: float | None = None
    line: int | None = Field(default=None, description="line of the candidate's source the finding points at")
    details: Visible = Field(
        default="", description="filtered traceback or sanitizer findings, for the model and the reader"
    )
    diagnosis: Diagnosis | None = Field(default=None, description="what could be told of a wrong gradient")
    cases: tuple[CaseResult, ...] = ()
    cases_planned: int = 0
    notes: tuple[Visible, ...] = Field(default=(), description="what was shrunk or left out, said to the reader")
    faults: tuple[Visible, ...] = Field(
        default=(), description="those of the notes that say what is wrong with the user's own kernels"
    )
    unordered: tuple[str, ...] = Field(
        default=(), description="why gradients need not be the same bits in every call; empty where nothing says so"
    )
    forward: ForwardChange | None = None
    tier: str = Field(default="exact", description="`exact`: executed from IR; `native`: real kernels on a GPU")
    suite: Suite | None = Field(default=None, description="what was asked; None where nothing was run")
    machine: Machine | None = Field(default=None, description="what it was made with; its GPU where real kernels ran")
    seconds: float = 0.0

    @property
    def green(self) -> bool:
        """True only for an accepted candidate; zero cases run is never green."""
        return self.status is Status.GREEN and bool(self.cases)

    @property
    def rank(self) -> tuple[int, int, int]:
        """Orders verdicts: stage reached, gradients right, required cases passed. Larger is better."""
        right = sum(score.passed for case in self.cases for score in case.grads)
        passed = sum(case.status is Status.GREEN for case in self.cases if case.required)
        return (int(STAGE_OF[self.status]), right, passed)
