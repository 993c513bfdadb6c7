"""`SanitizerReport`: what one sanitized call did and what is wrong with it, for people and for programs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kernel_agent.ir.sanitizer.findings import Finding, FindingKind

EXPLANATIONS = {
    FindingKind.OUT_OF_BOUNDS: "an access outside of what its argument reaches",
    FindingKind.WILD_POINTER: "a pointer into no tensor of the call",
    FindingKind.WRAPPED_OFFSET: "an address made with an int32 number that overflows",
    FindingKind.RACE: "two programs meet at one element, one writes, and nothing puts them in order",
    FindingKind.DUPLICATE_LANES: "one store of one program writes different values to one element",
    FindingKind.UNINITIALIZED_READ: "memory is read that was never written",
    FindingKind.UNWRITTEN_OUTPUT: "elements of a returned tensor were never written",
    FindingKind.CONFIG_DISAGREEMENT: "configurations of an autotuned kernel give different results",
    FindingKind.ASSERTION: "a device assertion does not hold",
    FindingKind.FALSE_PROMISE: "the compiler is promised by tl.assume, tl.multiple_of or the like what is not so",
}
"""What each kind of finding means, in the order in which a report shows them."""


@dataclass(frozen=True)
class Launched:
    """One kernel launch."""

    kernel: str
    grid: tuple[int, int, int]


@dataclass(frozen=True)
class Stop:
    """Why a call did not come to its end."""

    message: str
    """What was raised: its type and text, or one of our own messages."""
    file: str = ""
    line: int | None = None
    remedy: str = ""

    def __str__(self) -> str:
        place = f" ({self.file.rpartition('/')[2]}:{self.line})" if self.line else ""
        return f"{self.message}{place}" + (f"\n  {self.remedy}" if self.remedy else "")


@dataclass(frozen=True)
class SanitizerReport:
    """The findings of one call of a stub. `str(report)` is for reading; an empty report says that it is clean."""

    name: str
    """The function that was called."""
    findings: tuple[Finding, ...] = ()
    """Every defect once, at the first place it showed."""
    launches: tuple[Launched, ...] = ()
    """Kernel launches in order."""
    stop: Stop | None = None
    """Why the call ended early; what came after that is not judged."""
    notes: tuple[str, ...] = ()
    """What was judged in part only."""

    @property
    def clean(self) -> bool:
        """Whether the whole call ran and nothing was found."""
        return not self.findings and self.stop is None

    @property
    def kinds(self) -> tuple[FindingKind, ...]:
        """The kinds found, each once, the gravest first."""
        found = {finding.kind for finding in self.findings}
        return tuple(kind for kind in EXPLANATIONS if kind in found)

    def of(self, kind: FindingKind) -> tuple[Finding, ...]:
        """Findings of one kind."""
        return tuple(finding for finding in self.findings if finding.kind is kind)

    def __str__(self) -> str:
        count = len(self.findings)
        what = f"{count} finding{'' if count == 1 else 's'}"
        if self.clean:
            what = "nothing found" if self.notes else "clean"
        lines = [f"{self.name}: {what} in {self._launched()}"]
        for kind in self.kinds:
            lines.append(f"{kind}: {EXPLANATIONS[kind]}")
            lines += [f"  {said(finding)}" for finding in self.of(kind)]
        if self.stop is not None:
            lines.append(f"stopped: {self.stop}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _launched(self) -> str:
        if not self.launches:
            return "0 launches"
        times = Counter(f"{launch.kernel}[{', '.join(map(str, launch.grid))}]" for launch in self.launches)
        named = [name + (f" x {count}" if count > 1 else "") for name, count in times.items()]
        more = [f"{len(named) - 4} more"] if len(named) > 4 else []
        count = len(self.launches)
        return f"{count} launch{'' if count == 1 else 'es'} ({', '.join([*named[:4], *more])})"


def said(finding: Finding) -> str:
    """The sentence of a finding, with the number of accesses it stands for."""
    return finding.message + (f" ({finding.count} accesses)" if finding.count > 1 and finding.kernel else "")
