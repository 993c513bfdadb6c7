"""`certificate.json`: what was proven about a delivered file, with what, and how to prove it again."""

from __future__ import annotations

import platform
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version

from pydantic import Field

from kernel_agent import __version__
from kernel_agent.bench.records import Measurement
from kernel_agent.gate.verdict import Verdict
from kernel_agent.record import Record


class Provenance(Record):
    """Where a backward came from and what it cost."""

    backend: str
    model: str
    asks: int
    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: float | None = Field(default=None, description="None when a price was unknown")
    run_id: str = ""
    speed: Measurement | None = Field(
        default=None, description="its time with basis, device and versions; None when none was taken"
    )


class Hashes(Record):
    """SHA-256 of the texts the verdict speaks of."""

    forward: str = Field(description="the user's file")
    candidate: str = Field(description="the delivered sections")
    delivered: str = Field(description="the finished file, byte for byte")


class Versions(Record):
    """The software that gave the verdict."""

    kernel_agent: str
    python: str
    torch: str
    triton: str


class Certificate(Record):
    """A green verdict beside everything needed to repeat it."""

    delivered: str = Field(description="file name of the finished pair")
    stub: str
    grads: tuple[str, ...]
    verdict: Verdict
    hashes: Hashes
    versions: Versions
    provenance: Provenance
    issued: str = Field(description="UTC, ISO 8601")
    verify: str = Field(description="the command that proves it again")


def installed_versions() -> Versions:
    """Versions without importing torch or triton."""

    def of(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return "not installed"

    return Versions(kernel_agent=__version__, python=platform.python_version(), torch=of("torch"), triton=of("triton"))


def utc_now() -> str:
    """The present second in UTC, ISO 8601."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
