"""The real rooms of the house, put together for the loop. Nothing here decides anything."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kernel_agent.agent.events import TruthCrossChecked
from kernel_agent.agent.retrieval import retrieve, retrieve_techniques
from kernel_agent.agent.tools import OnCase, OnVariant, Tools, TunedCandidate
from kernel_agent.bench.records import Basis, Measurement
from kernel_agent.config import RunConfig
from kernel_agent.deliver.certificate import Provenance
from kernel_agent.gate.verdict import CaseResult, Verdict
from kernel_agent.pairs.assemble import assemble
from kernel_agent.pairs.spec import Candidate, KernelSpec

if TYPE_CHECKING:
    from kernel_agent.oracle import CrossCheck, DerivativeCheck, ReferenceCheck, Truths


CHECKED_ELEMENTS = 1 << 16
"""Elements of the arguments at which the truth is cross-checked: several whole forwards are run there."""

CHECKED_VOLUME = 1 << 22
"""Product of the dims there, a bound of the work of most kernels."""


@contextmanager
def open_tools(config: RunConfig) -> Iterator[Tools]:
    """The rooms around one sandbox, which is closed, with all its children ended, when the block is left."""
    from kernel_agent import gate, oracle
    from kernel_agent.agent.pricing import sandboxed_pricer
    from kernel_agent.agent.stopwatch import Stopwatch
    from kernel_agent.deliver import deliver
    from kernel_agent.gate.cases import forward_findings
    from kernel_agent.sandbox import Sandbox

    with Sandbox() as sandbox:
        known: dict[str, oracle.Truths] = {}
        options = gate.GateOptions(seeds=(config.seed, config.seed + 1))
        stopwatch = Stopwatch(config, sandbox)

        def truths_of(spec: KernelSpec) -> oracle.Truths:
            return known.setdefault(spec.hash8, oracle.Truths(spec, sandbox))

        def cross_check(spec: KernelSpec) -> TruthCrossChecked:
            started = time.monotonic()
            truths = truths_of(spec)
            found = cross_check_small(truths, config.seed)
            findings = forward_findings(truths, options)
            return cross_checked(found, time.monotonic() - started, findings)

        def check(spec: KernelSpec, pair_source: str, on_case: OnCase) -> Verdict:
            exact = gate.check(
                spec, pair_source, sandbox, options, on_case, truths=truths_of(spec), diagnose=config.diagnosis
            )
            return stopwatch.confirm(spec, pair_source, exact, on_case)

        def tune(spec: KernelSpec, candidate: Candidate, start: Measurement, on_variant: OnVariant) -> TunedCandidate:
            def judge(variant: Candidate) -> Verdict:
                return check(spec, assemble(spec, variant), _unwatched)

            return stopwatch.tune(spec, candidate, start, judge, on_variant)

        def finish(
            spec: KernelSpec, candidate: Candidate, verdict: Verdict, provenance: Provenance, folder: Path
        ) -> tuple[Path, ...]:
            return deliver(spec, candidate, verdict, provenance, folder).files()

        yield Tools(
            describe=lambda facts: oracle.describe(facts, sandbox),
            cross_check=cross_check,
            retrieve=lambda spec: retrieve(spec, config),
            retrieve_techniques=lambda spec, wanted, shown: retrieve_techniques(spec, config, wanted, shown),
            price=sandboxed_pricer(sandbox, config.device).price,
            check=check,
            deliver=finish,
            analyse=lambda spec: oracle.analyse(truths_of(spec)),
            fingerprint=stopwatch.fingerprint,
            modelled_cost=stopwatch.modelled,
            measure=stopwatch.measure,
            recall=stopwatch.recall,
            confirm=stopwatch.confirm if stopwatch.basis is Basis.MEASURED else None,
            basis=stopwatch.basis,
            tune=tune,
        )


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
