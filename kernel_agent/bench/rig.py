"""`Rig`: what the measurements of all candidates of one spec share: inputs, truths and baselines on this GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from kernel_agent.bench.gpu import GPU_LIMITS, GpuFacts, gpu_facts
from kernel_agent.bench.statistics import Timing, timing_of
from kernel_agent.errors import EnvironmentProblem
from kernel_agent.pairs.spec import KernelSpec, ShapeEntry
from kernel_agent.sandbox import Ending, Job, Limits, Message, Sandbox

if TYPE_CHECKING:
    from kernel_agent.bench.native import NativeTruth


@dataclass(frozen=True)
class BenchOptions:
    """How thoroughly is measured. Nothing here loosens a rule."""

    seed: int = 0
    """Of make_args and of the cotangents."""
    budget_s: float = 0.4
    """Seconds of repetitions per shape."""
    baselines: bool = True
    """Time the user's reference, too, eager and compiled."""
    limits: Limits = GPU_LIMITS
    """Of every child."""


STANDARD = BenchOptions()
"""What a run measures with."""


@dataclass(frozen=True)
class Inputs:
    """One call at a required entry of SWEEP, with real dtypes."""

    entry: ShapeEntry
    arguments: dict[str, Any]
    """See `realdevice.packed`."""
    cotangents: list[str | None]
    """Tensor keys per output."""
    dot_bits: int | None
    """Of the coarsest product in the user's own kernels; None without products."""
    tensors: Mapping[str, Tensor]
    """On the CPU, by key."""

    @property
    def form(self) -> dict[str, Any]:
        """What a child is told."""
        return {
            "entry": self.entry.model_dump(mode="json"),
            "arguments": self.arguments,
            "cotangents": self.cotangents,
            "dot_bits": self.dot_bits,
        }


@dataclass(frozen=True)
class Skipped:
    """A required entry that cannot be run on this GPU."""

    entry: ShapeEntry
    reason: str


@dataclass(frozen=True)
class Baselines:
    """Times of the user's own ways to the gradients at one entry; None with a reason in `notes`."""

    forward: Timing | None = None
    """The user's stub itself."""
    eager: Timing | None = None
    compiled: Timing | None = None
    own: Timing | None = None


class Rig:
    """Answers about one spec on this machine's GPU; everything is computed once, when it is first asked for.

    Raises `EnvironmentProblem` where there is no GPU.
    """

    def __init__(self, spec: KernelSpec, sandbox: Sandbox, options: BenchOptions = STANDARD) -> None:
        self.spec = spec
        self.sandbox = sandbox
        self.options = options
        self.gpu: GpuFacts = gpu_facts(sandbox)
        self.notes: list[str] = []
        """What of the baselines could not be timed, in words."""
        self.natives: dict[int, NativeTruth] = {}
        """Truths of the native tier by position in `inputs`."""
        self.unanswered: dict[int, str] = {}
        """Positions in `inputs` without a truth, and why."""
        self._inputs: list[Inputs] | None = None
        self._skipped: list[Skipped] = []
        self._baselines: dict[int, Baselines] | None = None

    @property
    def flush_bytes(self) -> int:
        """Bytes to write over so that nothing stays in the cache."""
        return max(256 << 20, 4 * self.gpu.l2_bytes)

    @property
    def inputs(self) -> list[Inputs]:
        """One per required entry, or per entry where none is required, that the user's forward runs at."""
        if self._inputs is None:
            entries = [entry for entry in self.spec.sweep if entry.required] or list(self.spec.sweep)
            payload = {
                "spec": self.spec.model_dump(mode="json"),
                "entries": [entry.model_dump(mode="json") for entry in entries],
                "seed": self.options.seed,
            }
            self._inputs = []
            messages = self.trusted("baseline_child:inputs", payload, {})
            for message in messages:
                entry, record = entries[message.record["entry"]], message.record
                if "refusal" in record:
                    self._skipped.append(Skipped(entry, record["refusal"]))
                else:
                    self._inputs.append(
                        Inputs(entry, record["arguments"], record["cotangents"], record["dot_bits"], message.tensors)
                    )
        return self._inputs

    @property
    def skipped(self) -> list[Skipped]:
        """Required entries at which the user's own forward does not run here."""
        _ = self.inputs
        return self._skipped

    def baselines(self) -> dict[int, Baselines]:
        """By position in `inputs`."""
        if self._baselines is None:
            self._baselines = self._timed_baselines() if self.options.baselines else {}
        return self._baselines

    def _timed_baselines(self) -> dict[int, Baselines]:
        facts = self.spec.facts
        if not facts.has_reference and (facts.is_pair or not facts.has_backward):
            self.notes.append("the file has no `reference`, so there is no baseline")
        found: dict[int, dict[str, Timing]] = {}
        payload = {
            "spec": self.spec.model_dump(mode="json"),
            "entries": [inputs.form for inputs in self.inputs],
            "flush_bytes": self.flush_bytes,
            "budget_s": self.options.budget_s,
        }
        for message in self.trusted("baseline_child:baselines", payload, self.tensors(), partial=True):
            record = message.record
            if "failed" in record:
                label = self.inputs[record["entry"]].entry.label
                self.notes.append(f"no time of {_WAYS[record['way']]} at {label}: {record['failed']}")
            else:
                found.setdefault(record["entry"], {})[record["way"]] = timing_of(record["times"])
        return {number: Baselines(**ways) for number, ways in found.items()}

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of `inputs`, by key."""
        return {name: tensor for inputs in self.inputs for name, tensor in inputs.tensors.items()}

    def trusted(
        self, entry: str, payload: dict[str, Any], tensors: Mapping[str, Tensor], *, partial: bool = False
    ) -> tuple[Message, ...]:
        """Run an entry that sees no candidate. With `partial`, what came before a bad ending counts.

        Raises `EnvironmentProblem` for a bad ending.
        """
        label = f"{self.spec.facts.path.name} on the GPU"
        report = self.sandbox.run(Job(f"kernel_agent.bench.{entry}", payload, tensors, self.options.limits, label))
        if report.ending is Ending.FINISHED:
            return report.messages
        said = f"{report.error.type}: {report.error.message}" if report.error else report.message
        if partial:
            self.notes.append(f"the baselines were not timed to the end: {said}")
            return report.messages
        raise EnvironmentProblem(
            f"{self.spec.facts.path.name} cannot be run on this GPU: {said}",
            remedy="Run the file's stub on this GPU by hand, and `kernel-agent doctor`.",
        )


_WAYS = {
    "forward": "the stub itself",
    "eager": "eager autograd of `reference`",
    "compiled": "torch.compile of `reference`",
    "own": "the file's own `backward`",
}
