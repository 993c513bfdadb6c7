"""`Tools`: what the loop works with. Every room of the house is behind one of these callables.

`kernel_agent.agent.workshop` puts the real ones together; a test can stand in for any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kernel_agent.agent.events import Measurement, PairsRetrieved, TruthCrossChecked
from kernel_agent.deliver.certificate import Provenance
from kernel_agent.gate.verdict import CaseResult, Verdict
from kernel_agent.pairs.spec import Candidate, FileFacts, KernelSpec

OnCase = Callable[[CaseResult, int, int], None]
"""Receives a finished case, how many are done and how many are planned."""


@dataclass(frozen=True)
class Tools:
    """The rooms of the house as the loop sees them."""

    describe: Callable[[FileFacts], KernelSpec]
    """Run the user's stub once, in a child."""
    cross_check: Callable[[KernelSpec], TruthCrossChecked]
    """Compare the exact gradients with central differences."""
    retrieve: Callable[[KernelSpec], PairsRetrieved]
    """Find similar pairs."""
    check: Callable[[KernelSpec, str, OnCase], Verdict]
    """Judge a complete pair file against the spec."""
    deliver: Callable[[KernelSpec, Candidate, Verdict, Provenance, Path], tuple[Path, ...]]
    """Write the finished operator into a folder. Called again when a run was killed in the middle of it."""
    measure: Callable[[KernelSpec, Candidate], Measurement] | None = None
    """Time a green candidate; None where nothing can be timed."""
    unmeasured: str = "no GPU here, so nothing can be timed"
    """One line: why `measure` is None."""
