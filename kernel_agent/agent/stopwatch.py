"""`Stopwatch`: how long candidates take, as this machine allows: measured on its GPU, or modelled without one.

On a GPU, real kernels are judged before they are timed: what is proven by execution from IR may still not compile, or
round too coarsely, there.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kernel_agent.agent.tools import NotTimed, OnCase, OnVariant, TunedCandidate
from kernel_agent.bench.fingerprint import fingerprint, source_fingerprint
from kernel_agent.bench.gpu import has_gpu
from kernel_agent.bench.measure import NotMeasured, measure
from kernel_agent.bench.modelled import NotModelled, modelled, screen
from kernel_agent.bench.native import check_native
from kernel_agent.bench.records import Basis, Measurement, Tuned, decide
from kernel_agent.bench.rig import BenchOptions, Rig
from kernel_agent.bench.tiers import joined
from kernel_agent.bench.tune import Tried, tune
from kernel_agent.compiler.tuning.tune import tune as tune_derived
from kernel_agent.config import Backend, RunConfig
from kernel_agent.gate.verdict import Verdict
from kernel_agent.pairs.assemble import assemble, candidate_from_pair
from kernel_agent.pairs.spec import Candidate, KernelSpec
from kernel_agent.sandbox import Sandbox

PROOF = 0.2
"""Share of the seconds for tuning that the gate is left, which proves what was chosen."""


class Stopwatch:
    """Times of the candidates of one run."""

    def __init__(self, config: RunConfig, sandbox: Sandbox) -> None:
        self.basis = Basis.MEASURED if config.device != "cpu" and has_gpu() else Basis.MODELLED
        self._config = config
        self._sandbox = sandbox
        self._rigs: dict[str, Rig] = {}

    def measure(self, spec: KernelSpec, candidate: Candidate) -> Measurement:
        """Time a green candidate. Raises `NotTimed`."""
        try:
            if self.basis is Basis.MEASURED:
                return measure(spec, candidate, self._sandbox, self._rig(spec))
            return modelled(spec, candidate, self._sandbox)
        except (NotMeasured, NotModelled) as error:
            raise NotTimed(error.message, remedy=error.remedy) from error

    def recall(self, spec: KernelSpec, earlier: Measurement) -> None:
        """Take the baselines of an earlier time, of this run, on this GPU: compiling them takes a minute."""
        if self.basis is Basis.MEASURED and earlier.basis is Basis.MEASURED:
            self._rig(spec).learn(earlier)

    def modelled(self, spec: KernelSpec, candidate: Candidate) -> Measurement | None:
        """The modelled time of a green candidate; None where it has none."""
        try:
            return modelled(spec, candidate, self._sandbox)
        except NotModelled:
            return None

    def fingerprint(self, spec: KernelSpec, pair_source: str, compiled: bool) -> str | None:
        """See `kernel_agent.bench.fingerprint`."""
        return fingerprint(spec, pair_source, self._sandbox) if compiled else source_fingerprint(pair_source)

    def confirm(self, spec: KernelSpec, pair_source: str, exact: Verdict, on_case: OnCase) -> Verdict:
        """The verdict of both tiers where there is a GPU, else that of the exact one."""
        if self.basis is not Basis.MEASURED or not exact.green:
            return exact
        return joined(exact, check_native(spec, pair_source, self._sandbox, self._rig(spec), on_case=on_case))

    def tune(
        self,
        spec: KernelSpec,
        candidate: Candidate,
        start: Measurement,
        check: Callable[[Candidate], Verdict],
        on_variant: OnVariant,
    ) -> TunedCandidate:
        """Sweep launch parameters of a green candidate whose time is `start`. Raises `NotTimed`."""
        if self._config.backend is Backend.COMPILER and self.basis is Basis.MEASURED:
            return self._searched(spec, candidate, start, check, on_variant)
        limit = self._config.tune_variants

        def tried(variant: Tried) -> None:
            on_variant(f"{variant.change}: {variant.line}", variant.number, variant.limit)

        found = tune(
            spec,
            candidate,
            check,
            lambda variant: self.measure(spec, variant),
            limit,
            tried,
            start=start,
            screen=screen(spec, candidate, self._sandbox) if self.basis is Basis.MEASURED else None,
            min_rel_impr=self._config.min_rel_impr,
        )
        return TunedCandidate(found.tuned, found.candidate, found.verdict)

    def _searched(
        self,
        spec: KernelSpec,
        candidate: Candidate,
        start: Measurement,
        check: Callable[[Candidate], Verdict],
        on_variant: OnVariant,
    ) -> TunedCandidate:
        """The compiler's own search for a backward that it derived: kernel by kernel, many variants compiled at once,
        the best numbers pinned per shape class. Judged and timed like any other candidate."""
        began, seconds = time.monotonic(), self._config.tune_seconds

        def told(line: str) -> None:
            on_variant(f"{line}, {time.monotonic() - began:.0f} of {seconds:.0f} s", 0, 0)

        pair = assemble(spec, candidate)
        search = tune_derived(
            spec, pair, self._sandbox, seconds=seconds, proof_s=PROOF * seconds, prove=False, on_line=told
        )
        found = candidate_from_pair(search.pair).model_copy(update={"forward": candidate.forward})
        if not search.changed:
            return TunedCandidate(Tuned(tried=search.tried, best=None, line=search.line))
        told("proving what was chosen")
        verdict = check(found)
        if not verdict.green:
            line = f"what is fastest is {verdict.status.value}: {verdict.message}"
            return TunedCandidate(Tuned(tried=search.tried, best=None, line=line))
        measured = self.measure(spec, found)
        decision = decide(start, measured, self._config.min_rel_impr)
        line = f"{decision.line}, after {search.tried} variants"
        if not decision.kept:
            return TunedCandidate(Tuned(tried=search.tried, best=None, line=line))
        tuned = Tuned(tried=search.tried, best=found.digest, line=line, measurement=measured)
        return TunedCandidate(tuned, found, verdict)

    def _rig(self, spec: KernelSpec) -> Rig:
        """What all candidates of a spec share on this GPU: inputs, truths, baselines."""
        if spec.hash8 not in self._rigs:
            number = int(self._config.device.partition(":")[2] or 0)
            config = self._config
            options = BenchOptions(device=number, seed=config.seed, deterministic=config.deterministic)
            self._rigs[spec.hash8] = Rig(spec, self._sandbox, options)
        return self._rigs[spec.hash8]
