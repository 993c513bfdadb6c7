"""`Tools`: what the loop works with. Every room of the house is behind one of these callables.

`kernel_agent.agent.workshop` puts the real ones together; a test can stand in for any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kernel_agent.agent.derived import Derived
from kernel_agent.agent.events import PairsRetrieved, TechniqueHit, TruthCrossChecked
from kernel_agent.agent.gatetried import GateTried
from kernel_agent.agent.plan import GradientPrice, Plan, Wanted
from kernel_agent.bench.records import Basis, Measurement, Tuned
from kernel_agent.certificate.record import Provenance
from kernel_agent.errors import KernelAgentError
from kernel_agent.gate.mutants.records import MutantResult, MutationTally
from kernel_agent.gate.verdict import CaseResult, Verdict
from kernel_agent.pairs.forward_facts import ForwardFacts
from kernel_agent.pairs.spec import Candidate, FileFacts, KernelSpec

OnCase = Callable[[CaseResult, int, int], None]
"""Receives a finished case, how many are done and how many are planned."""

OnMutant = Callable[[MutantResult, int, int], None]
"""Receives a judged mutant, how many are done and how many there are; time may end before the last."""

OnVariant = Callable[[str, int, int], None]
"""Receives what a finished variant changes, how many are done and how many are planned."""

TechniqueSearch = Callable[[KernelSpec, tuple[Wanted, ...], tuple[str, ...]], tuple[TechniqueHit, ...]]
"""Receives the gradients to search for and the slugs of the pairs that were shown so far, best first."""


class NotTimed(KernelAgentError):
    """A proven candidate has no time: it fails at real sizes, or what it needs cannot be modelled."""


@dataclass(frozen=True)
class TunedCandidate:
    """What a sweep over launch parameters came to."""

    tuned: Tuned
    """`tuned.best` is the digest of `candidate`."""
    candidate: Candidate | None = None
    """The best variant; None when the start is best."""
    verdict: Verdict | None = None
    """Of the best variant, from the gate; None when the start is best."""


@dataclass(frozen=True)
class DerivedDraft:
    """What the compiler makes of a forward."""

    event: Derived
    """`event.digest` is that of `candidate`, blank lines around its sections aside."""
    candidate: Candidate | None = None
    """Proven; None where none was wanted or had."""


@dataclass(frozen=True)
class Tools:
    """The rooms of the house as the loop sees them. What is None is not at hand: its step is left out."""

    describe: Callable[[FileFacts], KernelSpec]
    """Run the user's stub once, in a child."""
    cross_check: Callable[[KernelSpec], TruthCrossChecked]
    """Compare the exact gradients with central differences."""
    retrieve: Callable[[KernelSpec], PairsRetrieved]
    """Find similar pairs."""
    check: Callable[[KernelSpec, str, OnCase], Verdict]
    """Judge a complete pair file against the spec."""
    deliver: Callable[[KernelSpec, Candidate, Verdict, Provenance, Path, MutationTally | None], tuple[Path, ...]]
    """Write the finished operator into a folder. Called again when a run was killed in the middle of it."""
    try_gradients: Callable[[KernelSpec], GateTried] | None = None
    """Hold gradients to the gate's rule that are wrong, made of the truth."""
    try_backward: Callable[[KernelSpec, str, OnMutant], GateTried] | None = None
    """Judge mutants of a complete pair file that is green, for as long as the configuration allows."""
    analyse: Callable[[KernelSpec], ForwardFacts] | None = None
    """Read off the forward's kernels what they do with memory."""
    prepare: Callable[[KernelSpec], None] | None = None
    """Begin, beside what comes first, what the first asks will want: the search for pairs, the count of the forward."""
    retrieve_techniques: TechniqueSearch | None = None
    """Find pairs that compute a gradient in a wanted technique."""
    derive: Callable[[KernelSpec, bool, OnCase], DerivedDraft] | None = None
    """Have the compiler read the forward; with True, prove the best backward that it derives as well."""
    price: Callable[[KernelSpec, Plan, ForwardFacts | None], tuple[GradientPrice, ...]] | None = None
    """Say what a plan costs in memory traffic."""
    fingerprint: Callable[[KernelSpec, str, bool], str | None] | None = None
    """Of a complete pair file: equal for two that compute by the same code, None when it cannot be told.

    The last argument asks for the compiled code to be compared, which takes seconds, and not the text alone.
    """
    modelled_cost: Callable[[KernelSpec, Candidate], Measurement | None] | None = None
    """The modelled time of a green candidate; None when it cannot be modelled."""
    measure: Callable[[KernelSpec, Candidate], Measurement] | None = None
    """Time a green candidate, on a GPU or, labelled so, by the model. Raises `NotTimed`."""
    recall: Callable[[KernelSpec, Measurement], None] | None = None
    """Take the baselines of an earlier time of this run, which `measure` then need not time again."""
    basis: Basis | None = None
    """Of the times that `measure` gives; None: of whatever was taken last."""
    confirm: Callable[[KernelSpec, str, Verdict, OnCase], Verdict] | None = None
    """Judge a complete pair file that is green in the exact tier with its real kernels; None where there is no GPU."""
    tune: Callable[[KernelSpec, Candidate, Measurement, OnVariant], TunedCandidate] | None = None
    """Sweep launch parameters of a green candidate of known time; what it comes to is judged. Raises `NotTimed`."""
    unmeasured: str = "no GPU here, so nothing can be timed"
    """One line: why `measure` is None."""
