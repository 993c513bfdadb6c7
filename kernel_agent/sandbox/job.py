"""The records that go in and out of the sandbox: a `Job` in, `Message`s while it runs, a `Report` on how it ended."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from kernel_agent.errors import EnvironmentProblem
from kernel_agent.sandbox.left_files import LeftFiles

if TYPE_CHECKING:
    import torch


class SandboxError(EnvironmentProblem):
    """The sandbox itself does not work on this machine. Nothing a candidate does raises it."""


@dataclass(frozen=True)
class Limits:
    """What one job may use before it is ended."""

    wall_s: float = 120.0
    """Seconds from the start of the child to its end, on the wall clock."""
    memory_bytes: int = 6 << 30
    """Resident anonymous and shared memory of all its processes together. Polled: can be passed for milliseconds."""
    file_bytes: int = 512 << 20
    """Largest size of one file the child writes."""
    processes: int = 64
    """Processes of the job at one time. Polled."""
    threads: int = 1024
    """Threads of all its processes at one time. Polled."""
    output_bytes: int = 4 << 30
    """All tensors of all messages together, counted as contiguous ones: an expanded tensor is large once it is used."""
    record_bytes: int = 64 << 20
    """All JSON records of all messages together."""
    text_bytes: int = 64 << 10
    """Kept from the end of stdout, and as much from the end of stderr."""


@dataclass(frozen=True)
class Job:
    """One call in a fresh process."""

    entry: str
    """`package.module:function`; the function takes one `Call`."""
    payload: dict[str, Any] = field(default_factory=dict)
    """Plain JSON for the entry."""
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Handed over with dtype, shape and strides; devices are not kept: the entry receives CPU tensors."""
    limits: Limits = field(default_factory=Limits)
    label: str = ""
    """Names the job in messages."""
    own_files: tuple[str, ...] = ()
    """Names in the scratch folder of what the entry itself puts there: nothing that is left behind."""
    readable: tuple[Path, ...] = ()
    """Files and folders the child may read besides the system, the interpreter and this package."""


@dataclass(frozen=True)
class Message:
    """What an entry sent: a JSON record and tensors by name."""

    record: dict[str, Any]
    tensors: dict[str, torch.Tensor]


class Ending(str, enum.Enum):
    """How a job ended. Only FINISHED means that the entry returned."""

    FINISHED = "FINISHED"
    RAISED = "RAISED"
    EXITED = "EXITED"
    SIGNALLED = "SIGNALLED"
    TIMED_OUT = "TIMED_OUT"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    TOO_MANY_PROCESSES = "TOO_MANY_PROCESSES"
    PROTOCOL = "PROTOCOL"
    CANCELLED = "CANCELLED"


class TracebackLine(BaseModel):
    """One frame of a traceback, outermost first."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: str = Field(max_length=4096)
    line: int
    function: str = Field(max_length=1024)
    text: str = Field(max_length=4096)


class ChildError(BaseModel):
    """The exception that left the entry, as the child tells it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: str = Field(max_length=1024, description="qualified name of the class; builtins without a module")
    message: str = Field(max_length=65536)
    traceback: tuple[TracebackLine, ...] = Field(
        default=(), max_length=64, description="frames of the entry and below it"
    )


class Protection(BaseModel):
    """One wall between a child and the machine, and whether it stands."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(max_length=100)
    active: bool
    detail: str = Field(max_length=1000, description="what it does here, or why it is missing")
    stops: str = Field(default="", max_length=500, description="what it keeps a child from, wherever it stands")


@dataclass(frozen=True)
class Report:
    """How one job went. No process of it is alive any more, except `survivors`."""

    ending: Ending
    message: str
    """One sentence on the ending, for people."""
    messages: tuple[Message, ...] = ()
    """Everything the entry sent before the end, in order."""
    error: ChildError | None = None
    """Set for RAISED."""
    exit_code: int | None = None
    """Status the child left with, if it left by itself."""
    signal: int | None = None
    """Number of the signal that ended the child, if one did that the sandbox did not send."""
    stdout_tail: str = ""
    stderr_tail: str = ""
    seconds: float = 0.0
    peak_bytes: int = 0
    """Largest memory seen over all processes of the job, as counted for `Limits.memory_bytes`."""
    protections: tuple[Protection, ...] = ()
    """What the child said it stood behind before it ran the entry."""
    left_behind: int = 0
    """Processes that the child had started and that were alive when it had ended by itself; they were killed."""
    left_files: LeftFiles = field(default_factory=LeftFiles)
    """What it left in its scratch folder; removed with it."""
    survivors: tuple[int, ...] = ()
    """Process ids that could not be killed (a hung driver call); empty in all but broken machines."""

    @property
    def finished(self) -> bool:
        """True when the entry returned."""
        return self.ending is Ending.FINISHED
