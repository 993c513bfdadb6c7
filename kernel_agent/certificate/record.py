"""`Certificate`: a green verdict in one JSON file, with the sources, the seeds and the versions that a replay needs.

It is data and no proof: whoever can write the file can write anything into it. `kernel_agent.certificate.judged_again`
judges its sources again, and that is what tells.
"""

from __future__ import annotations

import hashlib
from datetime import datetime, timezone
from typing import Literal

from pydantic import Field

from kernel_agent.bench.records import Measurement
from kernel_agent.gate.mutants.records import MutationTally
from kernel_agent.gate.verdict import Status, Suite, Tier, Verdict
from kernel_agent.machine import Machine
from kernel_agent.pairs.spec import ShapeEntry
from kernel_agent.pairs.values import Values
from kernel_agent.record import Record

FORMAT = 2
"""Of `Certificate`. Raised with every change that older readers would misread; the first one held no sources."""


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


class Sources(Record):
    """The texts that the verdict speaks of, whole."""

    pair: str = Field(description="the pair file whose backward was judged")
    forward: str | None = Field(
        description="the file that the exact gradients are of; None where that is the pair file itself"
    )

    @property
    def truth(self) -> str:
        """The file that the exact gradients are of."""
        return self.pair if self.forward is None else self.forward


class Hashes(Record):
    """SHA-256 of texts in UTF-8, as hex."""

    forward: str = Field(description="the forward section of the pair")
    backward: str = Field(description="its backward section")
    truth: str = Field(description="what the exact gradients are computed from: their file without any backward")
    delivered: str = Field(description="the finished file that lies beside the certificate, byte for byte")


class InputRecord(Record):
    """One tensor input."""

    name: str
    dtypes: tuple[str, ...] = Field(description="over the entries of SWEEP, such as `float32`")
    gradient: bool = Field(description="whether the backward returns its gradient")


class TierRecord(Record):
    """What one tier says."""

    tier: Tier
    status: Status
    cases: int = Field(description="cases that were judged")
    device: str = Field(description="name of the GPU; `CPU` for the exact tier, which runs nowhere else")


class GradientRecord(Record):
    """One gradient in the case where it is worst."""

    grad: str = Field(description="name of the input")
    tier: Tier
    ratio: float = Field(description="error of the worst tile over what is allowed there; at most 1 passes")
    tile: tuple[int, ...] = Field(description="index of that tile, one entry per dimension")
    relative_error: float = Field(description="norm of the whole error over the norm of the truth, in that case")
    case: str = Field(description="name of that case: shape, seed, cotangent")
    values: Values = Field(description="distribution of the inputs in that case")
    cases: int = Field(description="cases in which this gradient was compared")


class Certificate(Record):
    """A green verdict beside everything needed to repeat it offline."""

    format: Literal[2] = 2
    delivered: str = Field(
        pattern=r"^[^/\\\x00-\x1f\x7f]+$",
        max_length=255,
        description="file name of the finished pair, without a folder",
    )
    stub: str = Field(description="the function that the gradients are of")
    grads: tuple[str, ...] = Field(description="inputs whose gradients the backward returns, in order")
    gradients: tuple[GradientRecord, ...] = Field(description="per tier and gradient the worst case")
    tiers: tuple[TierRecord, ...]
    verdict: Verdict = Field(description="every case, what was asked, and the machine it was made with")
    inputs: tuple[InputRecord, ...]
    sweep: tuple[ShapeEntry, ...] = Field(description="the shapes that the file asks for; cases may be smaller")
    sources: Sources
    hashes: Hashes
    mutants: MutationTally | None = Field(
        default=None, description="wrong backwards of this very pair before the gate; None where none were made"
    )
    provenance: Provenance | None = Field(default=None, description="None for a file that was only checked")
    issued: str = Field(description="UTC, ISO 8601")
    verify: str = Field(description="the command that proves it again")

    @property
    def suite(self) -> Suite | None:
        """What was asked; None in what was resumed from before verdicts said so."""
        return self.verdict.suite

    @property
    def machine(self) -> Machine | None:
        """What the verdict was made with."""
        return self.verdict.machine


def digest(text: str | bytes) -> str:
    """SHA-256 of bytes, or of a text in UTF-8, as hex."""
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    return hashlib.sha256(data).hexdigest()


def utc_now() -> str:
    """The present second in UTC, ISO 8601."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
