"""What a candidate child says, validated: every message comes from a process that ran untrusted code."""

from __future__ import annotations

import enum

from pydantic import BaseModel, ConfigDict, Field


class Said(BaseModel):
    """Base of records that a child sends: frozen, strict, bounded."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Stage(str, enum.Enum):
    """What a message is about."""

    IMPORT = "import"
    FORWARD = "forward"
    BACKWARD = "backward"


class FailureKind(str, enum.Enum):
    """What kind of exception ended a stage."""

    COMPILE = "compile"
    UNSUPPORTED = "unsupported"
    LAUNCH = "launch"
    PYTHON = "python"
    FORM = "form"
    UNEXPLAINED = "unexplained"


class Frame(Said):
    """A line of the candidate's own source on the way to an error."""

    line: int
    function: str = Field(max_length=500)


class Failure(Said):
    """An exception in the candidate's code."""

    kind: FailureKind
    type: str = Field(max_length=500)
    message: str = Field(max_length=20_000)
    line: int | None = None
    column: int | None = Field(default=None, description="place in that line, from 0, of what Triton refuses")
    frames: tuple[Frame, ...] = Field(default=(), max_length=200)


class Called(Said):
    """A torch function called outside kernels."""

    name: str = Field(max_length=500)
    kind: str = Field(max_length=50)


class Found(Said):
    """A finding of the sanitizer."""

    kind: str = Field(max_length=50)
    message: str = Field(max_length=5000)
    line: int | None = None


class Returned(Said):
    """One returned value: a tensor that travels beside the record, None, or something else."""

    type: str = Field(max_length=500, description="`tensor`, `None`, or the name of a type")
    dtype: str = Field(default="", max_length=50)
    value: str = Field(default="", max_length=5000, description="`plain_form` of what is no tensor")
    strides: tuple[int, ...] = Field(default=(), max_length=64, description="of a tensor, in elements")
    on_host: bool = Field(default=False, description="a tensor that was made in the memory of the host")
    handed_back: bool = Field(default=False, description="see `layout.is_handed_back`")
    of_argument: bool = Field(default=False, description="a tensor that has elements in the memory of an argument")
    meets: tuple[int, ...] = Field(default=(), max_length=64, description="positions of others; see `layout.meets`")


class ByChance(Said):
    """A place where several programs change one float element in no fixed order; see `ir.Unordered`."""

    kernel: str = Field(max_length=500)
    line: int | None = None
    buffer: str = Field(max_length=500)
    programs: int
    how: str = Field(max_length=100)


class Answer(Said):
    """One message of the candidate child."""

    stage: Stage
    number: int = Field(default=0, description="index of the forward's point, or of the case")
    failure: Failure | None = None
    returned: tuple[Returned, ...] = Field(default=(), max_length=1000)
    launches: int = 0
    calls: tuple[Called, ...] = Field(default=(), max_length=2000)
    findings: tuple[Found, ...] = Field(default=(), max_length=2000)
    mutated: tuple[str, ...] = Field(default=(), max_length=1000)
    unordered: tuple[ByChance, ...] = Field(default=(), max_length=1000)
    tuned: tuple[str, ...] = Field(default=(), max_length=100, description="autotuned kernels: `f with BLOCK: 64`")
    choices: int = Field(default=0, description="most configurations that compute differently of a kernel among them")
    extra_saved_bytes: int = 0
    replaced: tuple[str, ...] = Field(
        default=(), max_length=20, description="see `foreign_attributes`; with the last case"
    )
    changed: tuple[str, ...] = Field(default=(), max_length=20, description="see `lasting_state`; with the last case")
    lowered: dict[str, str] = Field(
        default_factory=dict, description="IR that this process lowered, see `ir.lower.know`; with the last case"
    )
    program: str = Field(default="", max_length=8 << 20, description="the steps of the call, see `ir.recorded.program`")
