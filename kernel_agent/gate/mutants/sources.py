"""The classes of mutants that are made on the source of a backward, and all mutants of one file."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kernel_agent.gate.mutants import drafts, host, memory, terms
from kernel_agent.gate.mutants.edit import Edit
from kernel_agent.gate.mutants.flow import BackwardFlow

Edits = Callable[[BackwardFlow], Iterator[Edit]]
"""Every place that a backward has for one class of mistakes."""


@dataclass(frozen=True)
class Mutator:
    """One class of mistakes."""

    name: str
    sentence: str
    """What the mistake is."""
    edits: Edits
    rounds: bool = False
    """Whether it changes rounding alone, which the exact tier does not judge."""


@dataclass(frozen=True)
class Mutant:
    """A pair file with one mistake."""

    mutator: Mutator
    line: int
    """Line of the pair file."""
    old: str
    new: str
    source: str
    """The whole file."""

    @property
    def words(self) -> str:
        """`line 41: a - b -> a`."""
        return f"line {self.line}: {' '.join(self.old.split())} -> {' '.join(self.new.split())}"


def _said(edits: Edits, *, rounds: bool = False) -> Mutator:
    sentence = (edits.__doc__ or "").partition("\n")[0]
    return Mutator(edits.__name__.replace("_", " "), sentence, edits, rounds)


MUTATORS = (
    *(_said(edits) for edits in (terms.dropped_term, terms.doubled_term, terms.sign_of_a_term, terms.dropped_factor)),
    *(_said(edits) for edits in (terms.dropped_one_plus, terms.squared_factor, terms.sum_for_product)),
    *(_said(edits) for edits in (terms.wrong_scale, terms.wrong_sign, terms.wrong_constant, terms.wrong_function)),
    *(_said(edits) for edits in (terms.wrong_axis_of_a_sum, terms.dropped_transpose)),
    *(_said(edits) for edits in (memory.unmasked_tail, memory.dropped_causal_mask, memory.dropped_mask)),
    *(_said(edits) for edits in (memory.off_by_one_bound, memory.last_block_skipped, memory.first_block_skipped)),
    *(_said(edits) for edits in (memory.stale_statistic, memory.shifted_cotangent, memory.wrong_input)),
    *(_said(edits) for edits in (memory.plain_store, memory.overwritten_sum, memory.wrong_program_axis)),
    *(_said(edits) for edits in (host.ignored_cotangent_stride, host.wrong_axis_of_partial_sums, host.ignored_output)),
    *(_said(edits) for edits in (host.transposed_gradient, host.swapped_gradients, host.missing_dependence)),
    *(_said(edits) for edits in (host.result_of_the_first_call, host.overwritten_saved_tensor)),
    *(_said(edits) for edits in (host.uninitialised_accumulator, host.missing_program, host.wrong_needs)),
    *(_said(edits) for edits in (drafts.exchanged_strides, drafts.exchanged_grid, drafts.capped_block)),
    *(_said(edits) for edits in (drafts.gradient_of_another_dtype, drafts.wrong_in_one_dtype)),
    *(_said(edits) for edits in (drafts.wrong_at_odd_sizes, drafts.wrong_beyond_one_block)),
    *(_said(edits) for edits in (drafts.overwritten_accumulator, drafts.wrong_variable)),
    *(_said(edits, rounds=True) for edits in (drafts.dropped_upcast, drafts.narrow_accumulator, terms.narrow_operand)),
    *(_said(edits, rounds=True) for edits in (terms.narrow_product, terms.narrow_summand, host.narrow_partial_sums)),
)
"""All classes, named after their functions."""


def source_mutants(source: str, mutators: Sequence[Mutator] = MUTATORS) -> tuple[Mutant, ...]:
    """Every mutant that the backward of a pair file has a place for, by lines and classes; no text twice.

    Raises `InputError` for what is no pair file.
    """
    backward = BackwardFlow(source)
    seen: set[str] = {source}
    found: list[Mutant] = []
    for mutator in mutators:
        for edit in mutator.edits(backward):
            changed = edit.applied(source)
            if changed not in seen and _parses(edit.new):
                seen.add(changed)
                found.append(Mutant(mutator, edit.node.lineno, edit.replaces(source), edit.new, changed))
    return tuple(sorted(found, key=lambda m: (m.line, m.mutator.name, m.old, m.new)))


def sample(mutants: Sequence[Mutant], count: int) -> tuple[Mutant, ...]:
    """At most `count` mutants of each class, spread over the lines of the file; all for 0."""
    if not count:
        return tuple(mutants)
    kept: list[Mutant] = []
    for name in dict.fromkeys(m.mutator.name for m in mutants):
        here = [m for m in mutants if m.mutator.name == name]
        step = max(1, len(here) // count)
        kept += here[step // 2 :: step][:count]
    return tuple(kept)


def _parses(expression: str) -> bool:
    try:
        ast.parse(expression, mode="eval")
    except SyntaxError:
        return False
    return True
