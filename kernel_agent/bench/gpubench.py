"""`GpuBench`: both uses of a GPU in a run, its native tier and its clock, over candidates of any number of specs."""

from __future__ import annotations

from collections.abc import Callable

from kernel_agent.bench.measure import measure
from kernel_agent.bench.native import check_native
from kernel_agent.bench.records import Measurement
from kernel_agent.bench.rig import STANDARD, BenchOptions, Rig
from kernel_agent.gate.verdict import CaseResult, Status, Verdict
from kernel_agent.pairs.spec import Candidate, KernelSpec
from kernel_agent.sandbox import Sandbox


class GpuBench:
    """Keeps a `Rig` per spec, so that inputs, truths and baselines are computed once in a run."""

    def __init__(self, sandbox: Sandbox, options: BenchOptions = STANDARD) -> None:
        self._sandbox = sandbox
        self._options = options
        self._rigs: dict[str, Rig] = {}

    def rig(self, spec: KernelSpec) -> Rig:
        """The rig of a spec. Raises `EnvironmentProblem` where no GPU can be used."""
        if spec.hash8 not in self._rigs:
            self._rigs[spec.hash8] = Rig(spec, self._sandbox, self._options)
        return self._rigs[spec.hash8]

    def confirm(
        self,
        spec: KernelSpec,
        pair_source: str,
        exact: Verdict,
        on_case: Callable[[CaseResult, int, int], None] | None = None,
    ) -> Verdict:
        """The verdict of both tiers: real kernels are only run for what the exact tier accepts.

        Raises `EnvironmentProblem` where no GPU can be used, or the user's own forward cannot be run on it.
        """
        if not exact.green:
            return exact
        return joined(exact, check_native(spec, pair_source, self._sandbox, self.rig(spec), on_case=on_case))

    def measure(self, spec: KernelSpec, candidate: Candidate) -> Measurement:
        """See `kernel_agent.bench.measure.measure`. Raises `NotMeasured`."""
        return measure(spec, candidate, self._sandbox, self.rig(spec))


def joined(exact: Verdict, native: Verdict) -> Verdict:
    """One verdict of two: green when both are, else the native one with the cases that were right before it.

    Where no required shape can be checked on the GPU, the exact verdict stands and its notes say so.
    """
    if native.status is Status.NO_CASE:
        return exact.model_copy(update={"notes": (*exact.notes, native.message, *native.notes)})
    both = {
        "cases": (*exact.cases, *native.cases),
        "cases_planned": exact.cases_planned + native.cases_planned,
        "notes": (*exact.notes, *native.notes),
        "forward": exact.forward,
        "seconds": exact.seconds + native.seconds,
    }
    if native.green:
        return exact.model_copy(
            update={**both, "message": f"{exact.message}; {native.message}", "tier": f"{exact.tier} and {native.tier}"}
        )
    return native.model_copy(update=both)
