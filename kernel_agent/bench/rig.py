"""`Rig`: what the measurements of all candidates of one spec share: inputs, truths and baselines on this GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kernel_agent.bench.gpu import GPU_LIMITS, GpuFacts, require_gpu
from kernel_agent.bench.honest import HonestError
from kernel_agent.bench.kinks import at_kinks
from kernel_agent.bench.native_truth import Inputs, NativeTruth, errors_in, inputs_in, truth_in
from kernel_agent.bench.records import Basis, Measurement, ShapeTime
from kernel_agent.bench.second_look import Looks
from kernel_agent.bench.statistics import Timing, timing_of
from kernel_agent.errors import EnvironmentProblem
from kernel_agent.oracle.costs import LIMITS as COUNTING
from kernel_agent.pairs.spec import KernelSpec, ShapeEntry
from kernel_agent.sandbox import Ending, Job, Limits, Message, Sandbox


@dataclass(frozen=True)
class BenchOptions:
    """How thoroughly is measured. Nothing here loosens a rule."""

    device: int = 0
    """Number of the GPU, as torch counts them."""
    seed: int = 0
    """Of make_args and of the cotangents."""
    budget_s: float = 0.4
    """Seconds of repetitions per shape."""
    deterministic: bool = False
    """Reject real kernels whose gradients are not the same bits in every call."""
    baselines: bool = True
    """Time the user's reference, too, eager and compiled."""
    bounds: bool = True
    """Count what the backward costs at least, too."""
    ways: tuple[str, ...] = ("forward", "own", "eager", "compiled")
    """Which of the user's own ways are timed beside the candidate."""
    way_s: float = 45.0
    """Seconds of processor time for one way at one entry: compiled, a loop over time becomes a graph without end."""
    proof_elements: int | None = None
    """Elements of the arguments at which real kernels are proven at most, where a larger entry need only be timed.
    None: the entry itself, as far as memory allows."""
    count_limits: Limits = COUNTING
    """Of the child that counts what a backward costs at least."""
    limits: Limits = GPU_LIMITS
    """Of every child."""


STANDARD = BenchOptions()
"""What a run measures with."""


@dataclass(frozen=True)
class Skipped:
    """A required entry that cannot be run on this GPU."""

    entry: ShapeEntry
    reason: str


@dataclass(frozen=True)
class Prepared:
    """What a child says that runs the user's file and sees no candidate."""

    gpu: GpuFacts
    inputs: list[Inputs]
    """Of the entries that the user's forward runs at."""
    skipped: list[Skipped]
    natives: dict[int, NativeTruth]
    """By position in `inputs`."""
    unanswered: dict[int, str]
    """Positions in `inputs` without a truth, and why."""


@dataclass(frozen=True)
class Baselines:
    """Times of the user's own ways to the gradients at one entry; None with a reason in `notes`."""

    forward: Timing | None = None
    """The user's stub itself."""
    eager: Timing | None = None
    compiled: Timing | None = None
    own: Timing | None = None

    @classmethod
    def of(cls, shape: ShapeTime) -> Baselines:
        """Those that an earlier measurement holds."""

        def timing(median_us: float | None) -> Timing | None:
            return None if median_us is None else Timing(median_us, 0.0, 0)

        return cls(None, timing(shape.eager_us), timing(shape.compiled_us), timing(shape.own_us))


class Rig:
    """Answers about one spec on this machine's GPU; everything is computed once, when it is first asked for.

    Raises `EnvironmentProblem` where there is no GPU.
    """

    def __init__(self, spec: KernelSpec, sandbox: Sandbox, options: BenchOptions = STANDARD) -> None:
        require_gpu()
        self.spec = spec
        self.sandbox = sandbox
        self.options = options
        self.notes: list[str] = []
        """What could not be timed or computed, in words."""
        self._prepared: Prepared | None = None
        self._baselines: dict[int, Baselines] | None = None
        self._looks: dict[int, Looks] = {}

    def with_options(self, options: BenchOptions) -> Rig:
        """Another rig, with other options, that has the inputs and truths of this one."""
        other = Rig(self.spec, self.sandbox, options)
        other._prepared = self.prepared
        return other

    @property
    def prepared(self) -> Prepared:
        """What the truth child says. Raises `EnvironmentProblem` where it cannot use the GPU."""
        if self._prepared is None:
            self._prepared = self._prepare()
        return self._prepared

    @property
    def gpu(self) -> GpuFacts:
        """The GPU of all children."""
        return self.prepared.gpu

    @property
    def inputs(self) -> list[Inputs]:
        """One per required entry, or per entry where none is required, that the user's forward runs at."""
        return self.prepared.inputs

    @property
    def natives(self) -> dict[int, NativeTruth]:
        """Truths of the native tier by position in `inputs`."""
        return self.prepared.natives

    @property
    def flush_bytes(self) -> int:
        """Bytes to write over so that nothing stays in the cache."""
        return max(256 << 20, 4 * self.gpu.l2_bytes)

    def learn(self, earlier: Measurement) -> None:
        """Take the baselines of an earlier measurement on the same GPU instead of timing them again."""
        if self._baselines is not None or earlier.basis is not Basis.MEASURED or earlier.device != self.gpu.name:
            return
        known = {shape.label: shape for shape in earlier.shapes}
        found = [(number, known.get(inputs.entry.label)) for number, inputs in enumerate(self.inputs)]
        self._baselines = {number: Baselines.of(shape) for number, shape in found if shape is not None}

    def _prepare(self) -> Prepared:
        entries = [entry for entry in self.spec.sweep if entry.required] or list(self.spec.sweep)
        payload = {
            "device": self.options.device,
            "spec": self.spec.model_dump(mode="json"),
            "entries": [entry.model_dump(mode="json") for entry in entries],
            "seed": self.options.seed,
            "proof_elements": self.options.proof_elements,
        }
        gpu: GpuFacts | None = None
        found: dict[int, Inputs] = {}
        skipped: list[Skipped] = []
        truths: dict[int, NativeTruth] = {}
        refused: dict[int, str] = {}
        for message in self.trusted("native_truth_child:prepared", payload, {}):
            record = message.record
            if "gpu" in record:
                gpu = GpuFacts.model_validate(record["gpu"])
            elif "truth" in record and "refusal" in record:
                refused[record["truth"]] = record["refusal"]
            elif "truth" in record:
                truths[record["truth"]] = truth_in(message, found[record["truth"]])
            elif "refusal" in record:
                skipped.append(Skipped(entries[record["inputs"]], record["refusal"]))
            else:
                found[record["inputs"]] = inputs_in(message, entries[record["inputs"]])
        if gpu is None or len(found) + len(skipped) < len(entries):
            raise EnvironmentProblem(
                f"{self.spec.facts.path.name} cannot be run on this GPU: {'; '.join(self.notes)}",
                remedy="Run the file's stub on this GPU by hand, and `kernel-agent doctor`.",
            )
        order = list(found)
        return Prepared(
            gpu,
            list(found.values()),
            skipped,
            {order.index(number): truth for number, truth in truths.items()},
            {
                order.index(number): refused.get(number, "the exact execution did not come to its end")
                for number in order
                if number not in truths
            },
        )

    def looks(self, number: int) -> Looks:
        """What a second look at the gradients at a position of `natives` needs, kept for the next candidate."""
        return self._looks.setdefault(number, _LooksOnGpu(self, self.natives[number]))

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
            "device": self.options.device,
            "spec": self.spec.model_dump(mode="json"),
            "entries": [inputs.form for inputs in self.inputs],
            "flush_bytes": self.flush_bytes,
            "budget_s": self.options.budget_s,
            "ways": list(self.options.ways),
            "way_s": self.options.way_s,
        }
        for message in self.trusted("baseline_child:baselines", payload, self.tensors()):
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

    def trusted(self, entry: str, payload: dict[str, Any], tensors: Mapping[str, Tensor]) -> tuple[Message, ...]:
        """Run an entry that sees no candidate. What came before a bad ending counts; the ending is noted."""
        label = f"{self.spec.facts.path.name} on the GPU"
        report = self.sandbox.run(Job(f"kernel_agent.bench.{entry}", payload, tensors, self.options.limits, label))
        if report.ending is not Ending.FINISHED:
            said = f"{report.error.type}: {report.error.message}" if report.error else report.message
            what = "the baselines were not timed" if entry.startswith("baseline") else "the truth was not computed"
            self.notes.append(f"{what} to the end: {said}")
        return report.messages


class _LooksOnGpu:
    """Second looks at one truth, in children that see no candidate."""

    def __init__(self, rig: Rig, truth: NativeTruth) -> None:
        self._rig = rig
        self._truth = truth
        self._kinks: dict[str, Tensor] | None = None
        self._drawn: dict[range, dict[str, HonestError]] = {}

    def kinks(self) -> dict[str, Tensor]:
        """Which elements of the gradients stand at a kink of the forward, by gradient; only gradients of which few do.
        It takes two more exact executions."""
        if self._kinks is None:
            messages = self._rig.trusted(
                "kinks_child:moved", {**self._payload, "seed": self._rig.options.seed}, self._truth.given
            )
            moved = [message.tensors for message in messages if "sign" in message.record]
            found = {g.name: at_kinks(g.truth, [other[g.name] for other in moved]) for g in self._truth.grads}
            self._kinks = {name: where for name, where in found.items() if where is not None}
        return self._kinks

    def with_draws(self, truth: NativeTruth, draws: range) -> NativeTruth:
        """`truth` with the errors of further draws; as it is where they cannot be computed."""
        if draws not in self._drawn:
            exact = {f"truth.{grad.name}": grad.truth for grad in self._truth.grads}
            payload = {
                **self._payload,
                "dot_bits": self._truth.inputs.dot_bits,
                "dtypes": {grad.name: str(grad.dtype).removeprefix("torch.") for grad in self._truth.grads},
                "draws": [draws.start, draws.stop],
            }
            messages = self._rig.trusted("draws_child:drawn", payload, {**self._truth.given, **exact})
            self._drawn[draws] = next((errors_in(message) for message in messages), {})
        return truth.joined(self._drawn[draws])

    @property
    def _payload(self) -> dict[str, Any]:
        return {
            "device": self._rig.options.device,
            "spec": self._rig.spec.model_dump(mode="json"),
            "arguments": self._truth.inputs.arguments,
            "cotangents": self._truth.inputs.cotangents,
        }


_WAYS = {
    "forward": "the stub itself",
    "eager": "eager autograd of `reference`",
    "compiled": "torch.compile of `reference`",
    "own": "the file's own `backward`",
}
