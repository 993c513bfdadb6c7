"""What the sanitizer found: data, not exceptions, so that one run reports everything."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace


class FindingKind(str, enum.Enum):
    """What went wrong in a kernel; `str(kind)` is its name in words."""

    OUT_OF_BOUNDS = "OUT_OF_BOUNDS"
    """An access outside of what the pointer's argument reaches."""
    WILD_POINTER = "WILD_POINTER"
    """A pointer into no tensor of the call."""
    WRAPPED_OFFSET = "WRAPPED_OFFSET"
    """An address made with a 32-bit number whose true value has more bits."""
    RACE = "RACE"
    """Two programs meet at one element, one of them writes, and nothing puts them in order."""
    DUPLICATE_LANES = "DUPLICATE_LANES"
    """One store of one program writes different values to one element."""
    UNINITIALIZED_READ = "UNINITIALIZED_READ"
    """A read of memory that nothing wrote."""
    UNWRITTEN_OUTPUT = "UNWRITTEN_OUTPUT"
    """A returned tensor with elements that nothing wrote."""
    ASSERTION = "ASSERTION"
    """A `tl.device_assert` that did not hold."""
    FALSE_PROMISE = "FALSE_PROMISE"
    """What a kernel promises the compiler, by `tl.assume` and the like, is not so: a device may do anything."""
    CONFIG_DISAGREEMENT = "CONFIG_DISAGREEMENT"
    """An autotuned kernel computes something else with another configuration."""

    def __str__(self) -> str:
        return _WORDS[self]


_WORDS = {
    FindingKind.OUT_OF_BOUNDS: "out of bounds",
    FindingKind.WILD_POINTER: "wild pointer",
    FindingKind.WRAPPED_OFFSET: "wrapped offset",
    FindingKind.RACE: "race",
    FindingKind.DUPLICATE_LANES: "duplicate lanes",
    FindingKind.UNINITIALIZED_READ: "uninitialized read",
    FindingKind.UNWRITTEN_OUTPUT: "unwritten output",
    FindingKind.ASSERTION: "assertion",
    FindingKind.FALSE_PROMISE: "false promise",
    FindingKind.CONFIG_DISAGREEMENT: "configurations disagree",
}


@dataclass(frozen=True)
class Finding:
    """One defect, at the first place it showed; repetitions at the same line and buffer are counted."""

    kind: FindingKind
    message: str
    """One sentence with kernel, file and line, buffer, numbers, program and lane."""
    kernel: str = ""
    """Name of the kernel; empty for an output that no kernel wrote."""
    file: str = ""
    line: int | None = None
    """Line of the kernel's source."""
    buffer: str = ""
    """Name of the argument whose memory it is about."""
    offset: int | None = None
    """First offending element, counted from the first element of the argument."""
    size: int | None = None
    """Number of elements of the argument."""
    program: tuple[int, int, int] | None = None
    """Program ids of the first offender; None where all programs do the same."""
    lane: tuple[int, ...] | None = None
    """Index of the first offender within the tile; empty for a scalar access."""
    variables: tuple[str, ...] = ()
    """Names of the source variables that the address is made of."""
    in_storage: bool = False
    """Whether an access out of bounds stays in the storage of its argument, so that what it finds is defined."""
    count: int = 1
    """Number of offending element accesses."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


@dataclass(frozen=True)
class Unordered:
    """A place where several programs, or lanes of one, change one float element in an order that nothing fixes.

    Nothing is lost, so it is no finding; but sums in another order round otherwise, and no two runs need agree in bits.
    """

    kernel: str
    file: str
    line: int | None
    buffer: str
    """Name of the argument whose memory it is."""
    programs: int
    """How many programs change it there."""
    how: str
    """What each does, as `adds to`."""

    def __str__(self) -> str:
        at = f", {self.file.rpartition('/')[2]}:{self.line}" if self.line else ""
        many = f"{self.programs} programs" if self.programs > 1 else "several lanes of one program"
        return f"{self.kernel}{at}: {self.how} {self.buffer} from {many}"


class Findings:
    """Collects findings of one execution, one per kind, kernel, line and buffer, and what has no order."""

    def __init__(self) -> None:
        self._found: dict[tuple[FindingKind, str, int | None, str], Finding] = {}
        self._unordered: dict[tuple[str, int | None, str], Unordered] = {}
        self._unpromised: dict[str, None] = {}

    def add(self, finding: Finding) -> None:
        """Record a finding, or add its count to the one already there."""
        key = (finding.kind, finding.kernel, finding.line, finding.buffer)
        known = self._found.get(key)
        self._found[key] = finding if known is None else replace(known, count=known.count + finding.count)

    def without_order(self, place: Unordered) -> None:
        """Record a place without order; of several launches the one with most programs is kept."""
        key = (place.kernel, place.line, place.buffer)
        known = self._unordered.get(key)
        if known is None or known.programs < place.programs:
            self._unordered[key] = place

    def unpromise(self, sentence: str) -> None:
        """Record that a device may have any result for something, which is no defect where nobody needs it."""
        self._unpromised[sentence] = None

    def unpromised(self) -> tuple[str, ...]:
        """In the order of first appearance."""
        return tuple(self._unpromised)

    def take(self, others: Findings) -> None:
        """Add all that others hold."""
        self._unpromised |= others._unpromised
        for finding in others.all():
            self.add(finding)
        for place in others.unordered():
            self.without_order(place)

    def unordered(self) -> tuple[Unordered, ...]:
        """In the order of first appearance."""
        return tuple(self._unordered.values())

    def all(self) -> tuple[Finding, ...]:
        """In the order of first appearance."""
        return tuple(self._found.values())
