"""`ByModel`: variants of a backward compiled for sm_90 and timed by the model, where no GPU is at hand."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from kernel_agent.bench.launch_facts import EntryFacts
from kernel_agent.bench.launch_time import launch_time
from kernel_agent.bench.modelled import NotModelled, check_fits, entry_facts
from kernel_agent.compiler.tuning.trial import KernelTrial, Trial, Tried
from kernel_agent.ir.cost.devices import Device, device_table
from kernel_agent.pairs.assemble import assemble
from kernel_agent.pairs.spec import Candidate, KernelSpec, ShapeEntry
from kernel_agent.sandbox import Sandbox

DEVICE = "H100 SXM"


class ByModel:
    """Compiles and models one variant after the other."""

    def __init__(
        self,
        spec: KernelSpec,
        entries: Sequence[ShapeEntry],
        sandbox: Sandbox,
        device: str = DEVICE,
        *,
        until: float = math.inf,
    ) -> None:
        """`until`: by `time.monotonic`, when variants are left out, all but the first one asked for."""
        self.until = until
        self.spec = spec
        self.entries = tuple(entries)
        self.sandbox = sandbox
        self.device: Device = device_table().find(device)

    def __call__(self, variants: Sequence[Candidate]) -> Tried:
        """See `trial.Judge`. No sizes are told: shape classes are for times that were measured."""
        late = Trial(problem="there was no time left")
        trials: list[Trial] = []
        for variant in variants:
            trials.append(self._trial(variant) if not trials or time.monotonic() < self.until else late)
        return Tried(trials)

    def _trial(self, variant: Candidate) -> Trial:
        try:
            facts = entry_facts(self.spec, assemble(self.spec, variant), self.sandbox, self.device.name, self.entries)
            for entry in facts:
                for kernel in entry.compiled.values():
                    check_fits(kernel)
        except NotModelled as error:
            return Trial(problem=error.message)
        rows = {entry.label: self._kernels(entry) for entry in facts}
        return Trial(rows, {label: sum(row.microseconds for row in some) for label, some in rows.items()})

    def _kernels(self, entry: EntryFacts) -> tuple[KernelTrial, ...]:
        found: dict[str, KernelTrial] = {}
        for launch in entry.launches:
            compiled = entry.compiled[launch.build]
            seconds = launch_time(launch, compiled, self.device).seconds
            known = found.get(launch.kernel)
            found[launch.kernel] = KernelTrial(
                launch.kernel,
                1e6 * seconds + (known.microseconds if known else 0.0),
                max(compiled.spill_stores, known.spills if known else 0),
                max(compiled.shared_bytes, known.shared_bytes if known else 0),
                max(compiled.registers, known.registers if known else 0),
            )
        return tuple(found.values())
