"""`sanitize_file`: what the sanitizer says of a user's file, or of a pair and its backward, at every SWEEP entry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pydantic import TypeAdapter

from kernel_agent.ir.sanitizer.sanitizer_report import SanitizerReport
from kernel_agent.oracle.job import run_truth
from kernel_agent.pairs.spec import FileFacts
from kernel_agent.sandbox import Limits, Message, Sandbox

LIMITS = Limits(wall_s=600.0)
"""Every access is judged, at every shape."""
MAX_ELEMENTS = 1 << 19
MAX_VOLUME = 1 << 23
"""Larger entries are run at halved sizes, as the gate does; their offsets are judged at the sizes asked for."""


@dataclass(frozen=True)
class SanitizedPart:
    """One part of a file at one entry of its SWEEP."""

    place: int
    """Position of the entry in SWEEP."""
    label: str
    """The entry, such as `M=17 N=100`."""
    required: bool
    """Whether the entry must run."""
    run_at: str
    """The entry that was run: smaller where the one asked for is too large for a CPU."""
    part: str
    """`forward` or `backward`."""
    report: SanitizerReport

    @property
    def clean(self) -> bool:
        """Nothing found; an entry that is not required may refuse to run."""
        return not self.report.findings and (self.report.stop is None or not self.required)


def sanitize_file(
    facts: FileFacts,
    sandbox: Sandbox,
    on_part: Callable[[SanitizedPart, int], None] | None = None,
    *,
    seed: int = 0,
    limits: Limits = LIMITS,
) -> tuple[SanitizedPart, ...]:
    """Run the forward, and a pair's backward with random cotangents, at every entry in a confined child.

    `on_part` is told of each part as it is done, with the number of entries. Raises as `run_truth` does: `InputError`
    for a file that cannot be imported or has no SWEEP that can be read.
    """
    payload = {
        "facts": facts.model_dump(mode="json"),
        "max_elements": MAX_ELEMENTS,
        "max_volume": MAX_VOLUME,
        "seed": seed,
    }
    entries = 0

    def told(message: Message) -> None:
        nonlocal entries
        entries = message.record.get("entries", entries)
        if on_part is not None and "part" in message.record:
            on_part(_part(message.record, facts), entries)

    messages = run_truth(sandbox, "sanitizer_child:sanitized", facts, payload, limits=limits, on_message=told)
    return tuple(_part(message.record, facts) for message in messages if "part" in message.record)


def _part(record: dict[str, Any], facts: FileFacts) -> SanitizedPart:
    """A message of the child; it ran a copy of the file, and findings name the file itself."""
    report = TypeAdapter(SanitizerReport).validate_python(record["report"])
    findings = tuple(
        replace(finding, file=str(facts.path)) if finding.file.endswith(f"/{facts.stem}.py") else finding
        for finding in report.findings
    )
    return SanitizedPart(
        record["place"],
        record["label"],
        record["required"],
        record["run_at"],
        record["part"],
        replace(report, findings=findings),
    )
