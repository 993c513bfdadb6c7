"""What the sanitizer found: data, not exceptions, so that one run reports everything."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace


class FindingKind(str, enum.Enum):
    """What went wrong in a kernel."""

    OUT_OF_BOUNDS = "OUT_OF_BOUNDS"
    RACE = "RACE"
    UNINITIALIZED_READ = "UNINITIALIZED_READ"
    UNWRITTEN_OUTPUT = "UNWRITTEN_OUTPUT"
    WILD_POINTER = "WILD_POINTER"
    ASSERTION = "ASSERTION"


@dataclass(frozen=True)
class Finding:
    """One defect, at the first place it showed; repetitions at the same line and buffer are counted."""

    kind: FindingKind
    message: str
    """One sentence with kernel, line, buffer and numbers."""
    kernel: str = ""
    """Name of the kernel; empty for an output that no kernel wrote."""
    file: str = ""
    line: int | None = None
    """Line of the kernel's source."""
    buffer: str = ""
    """Name of the argument whose memory it is about."""
    offset: int | None = None
    """First offending element, counted from the start of the buffer."""
    size: int | None = None
    """Number of elements of the buffer."""
    program: tuple[int, int, int] | None = None
    """Program ids of the first offender."""
    count: int = 1
    """Number of offending element accesses."""


class Findings:
    """Collects findings of one execution, one per kind, kernel, line and buffer."""

    def __init__(self) -> None:
        self._found: dict[tuple[FindingKind, str, int | None, str], Finding] = {}

    def add(self, finding: Finding) -> None:
        """Record a finding, or add its count to the one already there."""
        key = (finding.kind, finding.kernel, finding.line, finding.buffer)
        known = self._found.get(key)
        self._found[key] = finding if known is None else replace(known, count=known.count + finding.count)

    def all(self) -> tuple[Finding, ...]:
        """In the order of first appearance."""
        return tuple(self._found.values())
