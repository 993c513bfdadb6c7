"""Where a truth comes from: what computed it, from what, when, with which versions, and how long that took."""

from __future__ import annotations

import datetime
import enum
import platform
from functools import lru_cache

import torch
import triton
from pydantic import Field

import kernel_agent
from kernel_agent.oracle.digest import code_digest
from kernel_agent.record import Record


class Source(str, enum.Enum):
    """What computed a truth."""

    KERNELS = "the kernels themselves, executed from their Triton IR in float64"
    SURROGATE = "autograd through `surrogate` in float64, which the file declares as its gradient"


class Versions(Record):
    """The software that computed a truth."""

    kernel_agent: str
    code: str = Field(description="SHA-256 of the executor's and the oracle's source")
    triton: str
    torch: str
    python: str


class Provenance(Record):
    """The history of one truth. `print` shows it line by line."""

    what: str = Field(description="such as `forward at n=70 seed=0`")
    source: Source
    kernels: str = Field(description="SHA-256 of the file without its backward section")
    arguments: str = Field(description="SHA-256 of the arguments of the call")
    launches: tuple[str, ...] = Field(description="kernels in the order of their launches")
    when: str = Field(description="UTC, ISO 8601")
    seconds: float = Field(description="wall time of the execution")
    versions: Versions

    def __str__(self) -> str:
        v = self.versions
        count = f"{len(self.launches)} launch" + ("" if len(self.launches) == 1 else "es")
        return "\n".join(
            (
                f"{self.what}: {self.source.value}",
                f"  computed {self.when} in {self.seconds:.2f} s, {count}: {', '.join(dict.fromkeys(self.launches))}",
                f"  kernel-agent {v.kernel_agent} (code {v.code[:12]}), triton {v.triton}, torch {v.torch}, "
                f"Python {v.python}",
                f"  from source {self.kernels[:12]}, arguments {self.arguments[:12]}",
            )
        )


@lru_cache(maxsize=1)
def versions() -> Versions:
    """What is installed here."""
    return Versions(
        kernel_agent=kernel_agent.__version__,
        code=code_digest(),
        triton=triton.__version__,
        torch=torch.__version__,
        python=platform.python_version(),
    )


def now() -> str:
    """The time of day in UTC, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
