"""Backwards with one planted mistake each: what a diagnosis is measured by.

The mistakes are mutants of a proven backward (`kernel_agent.gate.mutants`) of the classes that the bank of hypotheses
knows, and of some that it does not. The class is the one that the edit is, not what a diagnosis says of it. Whether an
edit makes a gradient wrong is for the gate to say.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernel_agent.gate.diagnosis.records import Fault
from kernel_agent.gate.mutants import host, memory, terms
from kernel_agent.gate.mutants.sources import MUTATORS, Edits, source_mutants

_FAULTS: dict[Edits, Fault | None] = {
    terms.dropped_term: Fault.MISSING_TERM,
    terms.dropped_one_plus: Fault.MISSING_TERM,
    terms.doubled_term: Fault.DOUBLED_TERM,
    terms.sign_of_a_term: Fault.TERM_SIGN,
    terms.dropped_factor: Fault.FACTOR,
    terms.squared_factor: Fault.FACTOR,
    terms.sum_for_product: None,
    terms.wrong_scale: Fault.SCALE,
    terms.wrong_sign: Fault.SIGN,
    memory.unmasked_tail: Fault.UNMASKED_TAIL,
    memory.dropped_causal_mask: None,
    memory.last_block_skipped: Fault.LAST_BLOCK_SKIPPED,
    memory.stale_statistic: Fault.STALE_STATISTIC,
    host.ignored_cotangent_stride: Fault.STRIDES_IGNORED,
    host.wrong_axis_of_partial_sums: Fault.WRONG_AXIS,
    host.ignored_output: Fault.OUTPUT_IGNORED,
    host.transposed_gradient: Fault.TRANSPOSED,
    host.swapped_gradients: Fault.EXCHANGED,
}
"""What each class of mutants is to a diagnosis; None: outside the bank, to be given no name."""


@dataclass(frozen=True)
class Planted:
    """One mistake."""

    fault: Fault | None
    """None: a mistake of no class of the bank, which no diagnosis should name."""
    line: int
    """Line of the pair file."""
    old: str
    new: str
    source: str
    """The whole pair file with the mistake."""

    @property
    def name(self) -> str:
        """`missing term, line 41: a - b -> a`."""
        kind = self.fault.value if self.fault else "outside the bank"
        return f"{kind}, line {self.line}: {' '.join(self.old.split())} -> {' '.join(self.new.split())}"


def plant(source: str) -> tuple[Planted, ...]:
    """Every mistake of these classes that a pair file has a place for, in order of lines and classes."""
    mutators = [mutator for mutator in MUTATORS if mutator.edits in _FAULTS]
    found = [
        Planted(_FAULTS[m.mutator.edits], m.line, m.old, m.new, m.source) for m in source_mutants(source, mutators)
    ]
    return tuple(sorted(found, key=lambda p: (p.line, p.fault or "", p.old, p.new)))
