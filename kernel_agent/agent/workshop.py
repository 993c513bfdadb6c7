"""The real rooms of the house, put together for the loop. Nothing here decides anything.

What is heavy is loaded when a step first needs it: a run that goes on with a plan that was answered needs no torch.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from kernel_agent import __version__
from kernel_agent.agent.counted import CountedForward, count_forward
from kernel_agent.agent.events import PairsRetrieved, TechniqueHit, TruthCrossChecked
from kernel_agent.agent.gatetried import GateTried
from kernel_agent.agent.plan import GradientPrice, Plan, Wanted
from kernel_agent.agent.pricing import price_plan
from kernel_agent.agent.queryvectors import QueryVectors
from kernel_agent.agent.retrieval import retrieve, retrieve_techniques
from kernel_agent.agent.runcache import RunCache
from kernel_agent.agent.tools import DerivedDraft, OnCase, OnMutant, OnVariant, Tools, TunedCandidate
from kernel_agent.bench.records import Basis, Measurement
from kernel_agent.certificate.record import Provenance
from kernel_agent.config import RunConfig
from kernel_agent.gate.mutants.records import MutationTally
from kernel_agent.gate.options import GateOptions
from kernel_agent.gate.verdict import CaseResult, Verdict
from kernel_agent.machine import gpu_name
from kernel_agent.pairs.assemble import assemble
from kernel_agent.pairs.forward_facts import ForwardFacts
from kernel_agent.pairs.spec import Candidate, FileFacts, KernelSpec, content_hash
from kernel_agent.sandbox import Sandbox
from kernel_agent.sandbox.supervisor import PRELOAD as STANDARD_PRELOAD

if TYPE_CHECKING:
    from kernel_agent.agent.stopwatch import Stopwatch
    from kernel_agent.oracle import CrossCheck, DerivativeCheck, ReferenceCheck, Truths


PRELOAD = ("rag.embed_child", *STANDARD_PRELOAD)
"""What the sandbox's server imports: embedding is one of its jobs."""

CHECKED_ELEMENTS = 1 << 16
"""Elements of the arguments at which the truth is cross-checked: several whole forwards are run there."""

CHECKED_VOLUME = 1 << 22
"""Product of the dims there, a bound of the work of most kernels."""


@contextmanager
def open_tools(config: RunConfig, cache: Path | None = None) -> Iterator[Tools]:
    """The rooms around one sandbox, which is closed, with all its children ended, when the block is left.

    `cache`: a folder for what is computed once for the run; None keeps it in memory.
    """
    with Sandbox(preload=PRELOAD) as sandbox, ThreadPoolExecutor(3) as beside:
        workshop = Workshop(config, sandbox, RunCache(cache), beside)
        try:
            yield workshop.tools()
        finally:
            sandbox.close()  # what runs beside ends with it


class Workshop:
    """The rooms of one run."""

    def __init__(self, config: RunConfig, sandbox: Sandbox, cache: RunCache, beside: ThreadPoolExecutor) -> None:
        self._config, self._sandbox, self._cache, self._beside = config, sandbox, cache, beside
        self._vectors = QueryVectors(sandbox, cache, beside)
        self._known: dict[str, Truths] = {}
        self._counting: dict[str, Future[CountedForward]] = {}
        self._analysing: dict[str, Future[ForwardFacts]] = {}

    def tools(self) -> Tools:
        """The rooms as the loop sees them."""
        measured = self._config.device != "cpu" and bool(self._gpu)
        return Tools(
            describe=self.describe,
            cross_check=self.cross_check,
            try_gradients=self.try_gradients,
            try_backward=self.try_backward,
            retrieve=self.retrieve,
            retrieve_techniques=self.retrieve_techniques,
            price=self.price,
            check=self.check,
            deliver=self.deliver,
            analyse=self.analyse,
            prepare=self.prepare,
            fingerprint=lambda *given: self._stopwatch.fingerprint(*given),
            modelled_cost=lambda *given: self._stopwatch.modelled(*given),
            measure=lambda *given: self._stopwatch.measure(*given),
            recall=lambda *given: self._stopwatch.recall(*given),
            confirm=(lambda *given: self._stopwatch.confirm(*given)) if measured else None,
            basis=Basis.MEASURED if measured else Basis.MODELLED,
            tune=self.tune,
            derive=self.derive,
        )

    @functools.cached_property
    def _gpu(self) -> str:
        """Name of the GPU that the run uses; empty for none."""
        return "" if self._config.device == "cpu" else gpu_name(self._config.device)

    @functools.cached_property
    def _stopwatch(self) -> Stopwatch:
        from kernel_agent.agent.stopwatch import Stopwatch

        return Stopwatch(self._config, self._sandbox)

    def _truths(self, spec: KernelSpec) -> Truths:
        from kernel_agent.oracle import Truths

        return self._known.setdefault(spec.hash8, Truths(spec, self._sandbox))

    def describe(self, facts: FileFacts) -> KernelSpec:
        """See `Tools.describe`."""
        self._sandbox.warm()  # it imports while we do
        from kernel_agent.oracle import describe

        return describe(facts, self._sandbox)

    def prepare(self, spec: KernelSpec) -> None:
        """See `Tools.prepare`: the embedding, the facts and the count of the forward are begun, each in a child."""
        from kernel_agent.oracle.analyse import analyse_spec

        if self._config.rag:
            self._vectors.begin(spec, self._config)
        self._analysing[spec.hash8] = self._beside.submit(analyse_spec, spec, self._sandbox)
        if self._config.reflect:
            self._counted(spec)

    def cross_check(self, spec: KernelSpec) -> TruthCrossChecked:
        """See `Tools.cross_check`."""
        from kernel_agent import gate
        from kernel_agent.gate.cases import forward_findings

        started = time.monotonic()
        truths = self._truths(spec)
        found = cross_check_small(truths, self._config.seed)
        findings = forward_findings(truths, gate.GateOptions(seeds=self._seeds))
        return cross_checked(found, time.monotonic() - started, findings)

    def try_gradients(self, spec: KernelSpec) -> GateTried:
        """See `Tools.try_gradients`."""
        from kernel_agent.gate.cases import looks
        from kernel_agent.gate.mutants.timed import gradient_report

        truths, options = self._truths(spec), GateOptions(seeds=self._seeds)
        tally = gradient_report(truths, options).tally
        looks(truths, options)  # at full sizes, beside what comes before the first check, which waits for them
        return GateTried(tally=tally)

    def try_backward(self, spec: KernelSpec, pair_source: str, on_mutant: OnMutant) -> GateTried:
        """See `Tools.try_backward`."""
        from kernel_agent.gate.mutants.timed import backward_report

        truths, options = self._truths(spec), GateOptions(seeds=self._seeds)
        report = backward_report(truths, pair_source, self._config.mutant_seconds, options, on_mutant)
        return GateTried(tally=report.tally)

    def analyse(self, spec: KernelSpec) -> ForwardFacts:
        """See `Tools.analyse`."""
        from kernel_agent import oracle

        begun = self._analysing.get(spec.hash8)
        return oracle.analyse(self._truths(spec)) if begun is None else begun.result()

    def retrieve(self, spec: KernelSpec) -> PairsRetrieved:
        """See `Tools.retrieve`."""
        return retrieve(spec, self._config, self._vectors.of)

    def retrieve_techniques(
        self, spec: KernelSpec, wanted: tuple[Wanted, ...], shown: tuple[str, ...]
    ) -> tuple[TechniqueHit, ...]:
        """See `Tools.retrieve_techniques`."""
        return retrieve_techniques(spec, self._config, wanted, shown, self._vectors.of)

    def price(self, spec: KernelSpec, plan: Plan, facts: ForwardFacts | None) -> tuple[GradientPrice, ...]:
        """See `Tools.price`."""
        return price_plan(spec, plan, facts, lambda: self._counted(spec).result())

    def _counted(self, spec: KernelSpec) -> Future[CountedForward]:
        """The count of the forward: known, under way, or begun now."""
        if spec.hash8 not in self._counting:
            self._counting[spec.hash8] = self._known_count(spec) or self._beside.submit(self._count, spec)
        return self._counting[spec.hash8]

    def _known_count(self, spec: KernelSpec) -> Future[CountedForward] | None:
        text = self._cache.get("forward-count", *self._count_of(spec))
        if text is None:
            self._sandbox.warm()
            import kernel_agent.oracle.costs  # noqa: F401 - not in a thread: imports of torch may meet there

            return None
        known: Future[CountedForward] = Future()
        try:
            known.set_result(CountedForward.model_validate_json(text))
        except ValidationError:  # of another version, or damaged
            return None
        return known

    def _count(self, spec: KernelSpec) -> CountedForward:
        counted = count_forward(spec, self._sandbox, self._gpu)
        self._cache.put(counted.model_dump_json(), "forward-count", *self._count_of(spec))
        return counted

    def _count_of(self, spec: KernelSpec) -> tuple[str, ...]:
        return __version__, content_hash(spec.facts.source), self._gpu

    def check(self, spec: KernelSpec, pair_source: str, on_case: OnCase) -> Verdict:
        """See `Tools.check`."""
        self._sandbox.warm()  # it imports while we do
        from kernel_agent import gate

        exact = gate.check(
            spec,
            pair_source,
            self._sandbox,
            self._proof,
            on_case,
            truths=self._truths(spec),
            diagnose=self._config.diagnosis,
        )
        return self._stopwatch.confirm(spec, pair_source, exact, on_case)

    @property
    def _proof(self) -> GateOptions:
        """What every candidate of this run is judged by."""
        return GateOptions(seeds=self._seeds, deterministic=self._config.deterministic)

    @property
    def _seeds(self) -> tuple[int, int]:
        return self._config.seed, self._config.seed + 1

    def derive(self, spec: KernelSpec, prove: bool, on_case: OnCase) -> DerivedDraft:
        """See `Tools.derive`."""
        self._sandbox.warm()  # it imports while we do
        from kernel_agent.agent.derivation import derivation

        return derivation(spec, self._sandbox, self._truths(spec) if prove else None, self._proof, on_case)

    def tune(self, spec: KernelSpec, candidate: Candidate, start: Measurement, on_variant: OnVariant) -> TunedCandidate:
        """See `Tools.tune`."""

        def judge(variant: Candidate) -> Verdict:
            return self.check(spec, assemble(spec, variant), _unwatched)

        return self._stopwatch.tune(spec, candidate, start, judge, on_variant)

    def deliver(
        self,
        spec: KernelSpec,
        candidate: Candidate,
        verdict: Verdict,
        provenance: Provenance,
        folder: Path,
        mutants: MutationTally | None,
    ) -> tuple[Path, ...]:
        """See `Tools.deliver`."""
        from kernel_agent.deliver import deliver

        return deliver(spec, candidate, verdict, provenance, folder, mutants).files()


def _unwatched(case: CaseResult, done: int, planned: int) -> None:
    """The cases of a variant are not told one by one."""


def cross_check_small(truths: Truths, seed: int) -> CrossCheck:
    """Cross-check the truth at the smallest SWEEP entry, shrunk to `CHECKED_ELEMENTS` and `CHECKED_VOLUME`."""
    from kernel_agent.oracle import Point, cross_check
    from kernel_agent.pairs.sweep import smallest

    entry = smallest(truths.spec.sweep)
    (fit,) = truths.fit([entry], max_elements=CHECKED_ELEMENTS, max_volume=CHECKED_VOLUME)
    return cross_check(truths, Point(entry=fit.entry, seed=seed))


def cross_checked(found: CrossCheck, seconds: float, findings: tuple[str, ...] = ()) -> TruthCrossChecked:
    """A cross-check in one sentence, and the first of what the user's own kernels do wrong, before an ask is paid."""
    from kernel_agent.oracle import Outcome

    checks: tuple[DerivativeCheck | ReferenceCheck, ...] = (*found.derivatives, *found.references)
    against = [c.reason for c in checks if c.outcome is Outcome.DISAGREES]
    unclear = [c.reason for c in checks if c.outcome is Outcome.INCONCLUSIVE]
    slopes = [c.relative_difference for c in found.derivatives if c.outcome is Outcome.AGREES]
    parts = []
    if slopes:
        count = (
            "a directional derivative agrees" if len(slopes) == 1 else f"{len(slopes)} directional derivatives agree"
        )
        parts.append(f"{count} with central differences to {max(slopes):.0e}")
    agreeing = [check for check in found.references if check.outcome is Outcome.AGREES]
    whats = ["the outputs"] if any(not check.gradient for check in agreeing) else []
    whats += ["the gradients"] if any(check.gradient for check in agreeing) else []
    if whats:
        precision = f", which computes in {found.precision}" if found.precision else ""
        parts.append(f"{' and '.join(whats)} agree with `reference`{precision}")
    if found.skipped:
        parts.append(f"no derivative was compared: {found.skipped}")
    parts += [f"not conclusive: {reason}" for reason in dict.fromkeys(unclear)]
    line = "; ".join(dict.fromkeys(against)) if against else "; ".join(parts)
    more = f" (and at {len(findings) - 1} more shapes)" if len(findings) > 1 else ""
    own = f"; the forward itself at {findings[0]}{more}" if findings else ""
    return TruthCrossChecked(
        passed=found.agrees,
        line=f"at {found.point}: {line}{own}",
        worst=max((check.relative_difference for check in found.derivatives), default=0.0),
        seconds=seconds,
    )
