"""What a harvest found and what it left, with reasons: records that a table, a file and a test can read."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import Field

from kernel_agent.record import Record


class Kind(str, enum.Enum):
    """How a checkout writes a forward and its backward."""

    FUNCTION = "autograd.Function"
    OPERATOR = "operator"
    """`torch.library.triton_op` or `custom_op` with `register_autograd`."""
    FUNCTIONS = "two functions"


class Reason(str, enum.Enum):
    """Why a candidate is no entry."""

    NO_KERNEL = "forward reaches no Triton kernel"
    KERNEL_ELSEWHERE = "kernel comes from another package"
    NO_BACKWARD = "no backward"
    BACKWARD_NO_KERNEL = "backward reaches no Triton kernel"
    HELPER_MISSING = "a helper cannot be found"
    LOCAL = "defined inside a function or class"
    TOO_LARGE = "too much code"
    DUPLICATE = "same code as another"
    NOT_PYTHON = "file cannot be read"


class Found(Record):
    """One pair."""

    kind: Kind
    name: str = Field(description="the class, operator or forward function")
    file: str = Field(description="where it is defined, relative to the checkout")
    line: int
    files: tuple[str, ...] = Field(description="all files that its code comes from, sorted")
    licence: str = Field(description="the strictest of all its files and their folders; empty: none was found")
    licence_from: str = Field(default="", description="the file that says so")
    grads: tuple[str, ...] = Field(description="inputs whose gradients it returns, as far as can be read")
    runnable: bool = Field(description="it lacks only SWEEP and make_args to be judged by the gate")
    slug: str = ""
    text: str = Field(exclude=True, repr=False, description="the pair file")


class Skipped(Record):
    """One candidate that is no entry."""

    reason: Reason
    name: str = Field(description="empty for a whole file")
    file: str
    line: int = 0
    detail: str = ""


@dataclass(frozen=True)
class HarvestReport:
    """All that a harvest has to say."""

    repository: str
    """Name of the checkout's folder."""
    family: str
    """The folder that its entries go to."""
    commit: str
    """What is checked out; empty where that cannot be read."""
    files: int
    """Python files that were looked at."""
    found: tuple[Found, ...]
    """By file and line."""
    skipped: tuple[Skipped, ...]
    """By file and line."""
    reasons: Mapping[Reason, int] = field(init=False)
    """How many candidates were left for which reason."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "reasons", Counter(left.reason for left in self.skipped))

    def as_json(self) -> dict[str, object]:
        """For `--json` and for the report's file; without the code."""
        return {
            "repository": self.repository,
            "family": self.family,
            "commit": self.commit,
            "files": self.files,
            "found": [found.model_dump(mode="json") for found in self.found],
            "skipped": [left.model_dump(mode="json") for left in self.skipped],
        }
