"""Measures one pair of the dataset on this process's GPU at its BENCH: real kernels are proven, then timed."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from kernel_agent.bench.measure import measure_source
from kernel_agent.bench.native import check_native
from kernel_agent.bench.records import Measurement, ShapeTime
from kernel_agent.bench.rig import BenchOptions, Rig
from kernel_agent.collection.counted import COUNT_LIMITS, with_cost
from kernel_agent.collection.in_process import InProcess, lacks_memory
from kernel_agent.collection.proof import worst_ratios
from kernel_agent.collection.speeds import PairSpeed, SpeedStatus
from kernel_agent.collection.tuning import fastest
from kernel_agent.errors import InputError, KernelAgentError
from kernel_agent.gate.verdict import Status, Verdict
from kernel_agent.oracle import describe
from kernel_agent.oracle.costs import EntryCost, costs
from kernel_agent.pairs.spec import FileFacts, KernelSpec, content_hash
from kernel_agent.pairs.userfile import read_file, read_source

OPTIONS = BenchOptions(
    budget_s=0.15,
    ways=("eager", "compiled"),
    way_s=30.0,
    count_limits=COUNT_LIMITS,
    proof_elements=1 << 24,  # in float64, with all that lies between, that is what several processes at once can hold
)


class Stages:
    """How long each stage of one pair took, told on stderr when it is through: where a sitting's time goes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seconds: dict[str, float] = {}
        """Of each stage, on the clock, waits for other processes included."""
        self._notes: list[str] = []

    @contextmanager
    def stage(self, done: str) -> Iterator[None]:
        """A stage of the work, named by what is done after it."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[done] = time.monotonic() - start

    def note(self, line: str) -> None:
        """Something to be told along with the stages."""
        self._notes.append(line)

    def tell(self) -> None:
        """Write the line, in one piece."""
        told = ", ".join(f"{done} {seconds:.1f} s" for done, seconds in self.seconds.items())
        sys.stderr.write(f"{self.name}: {'; '.join((told, *self._notes))}\n")
        sys.stderr.flush()


@dataclass(frozen=True)
class Sat:
    """What one pair's turn at the GPU came to."""

    speeds: tuple[PairSpeed, ...]
    """One per entry of BENCH, or one for all where the pair fails as a whole."""
    source: str | None = None
    """A faster text of the pair, which `speeds` are of; None where its own stands."""


def measured(path: Path, sandbox: InProcess, device: str, variants: int = 0) -> Sat:
    """Prove and time a pair at its BENCH; with `variants`, the fastest of so many variants of its backward.

    Raises `torch.AcceleratorError` and what else leaves the GPU unusable: this process must end then.
    """
    stages = Stages(path.stem)
    try:
        sat = _measured(read_file(path), sandbox, device, stages, variants)
    finally:
        stages.tell()
    took = round(stages.seconds.get("proven", 0.0) + stages.seconds.get("timed", 0.0), 1)
    return replace(sat, speeds=tuple(speed.model_copy(update={"seconds": took}) for speed in sat.speeds))


def _measured(facts: FileFacts, sandbox: InProcess, device: str, stages: Stages, variants: int) -> Sat:
    tuned: str | None = None
    try:
        if not facts.bench:
            raise InputError("the pair has no BENCH", path=facts.path, remedy="docs/pair-format.md")
        with stages.stage("described"):
            spec = at_bench(describe(facts, sandbox))
        with stages.stage("proven"):
            rig, verdict = sandbox.with_memory(lambda: _proven(spec, sandbox))
        if not verdict.green:
            return Sat((_failed(facts, device, _status_of(verdict), _said(verdict)),))
        if variants:
            with stages.stage("tuned"):
                found_text = sandbox.with_memory(lambda: fastest(facts.source, spec, sandbox, rig, variants))
            stages.note(found_text.line)
            if found_text.verdict is not None:
                tuned, verdict = found_text.source, found_text.verdict
                facts = read_source(tuned, facts.path)
                spec = at_bench(spec.model_copy(update={"facts": facts}))
        with stages.stage("counted"):  # kept for `measure_source`, which then holds no memory of the GPU meanwhile
            counted = _counted(spec, sandbox, device)
        rig.options = OPTIONS  # on the GPU that times
        with stages.stage("timed"):
            found = sandbox.with_memory(lambda: measure_source(spec, spec.facts.source, sandbox, rig))
    except (RuntimeError, KernelAgentError) as error:
        short = lacks_memory(str(error))
        if not short and not isinstance(error, KernelAgentError):
            raise
        status = SpeedStatus.OUT_OF_MEMORY if short else SpeedStatus.FAILED
        return Sat((_failed(facts, device, status, _one_line(error)),))
    speeds = (speed_of(facts, shape, found, verdict, counted.get(shape.label)) for shape in found.shapes)
    return Sat(tuple(speeds), tuned)


def _proven(spec: KernelSpec, sandbox: InProcess) -> tuple[Rig, Verdict]:
    rig = Rig(spec, sandbox, replace(OPTIONS, device=sandbox.proves_on))
    return rig, check_native(spec, spec.facts.source, sandbox, rig)


def _said(verdict: Verdict) -> str:
    return "; ".join((verdict.status.value, verdict.message, *verdict.notes))


def _status_of(verdict: Verdict) -> SpeedStatus:
    """What a verdict comes to: proven, or no memory, nothing to judge by, gradients that are wrong."""
    if verdict.green:
        return SpeedStatus.MEASURED
    said = _said(verdict)
    if lacks_memory(said):
        return SpeedStatus.OUT_OF_MEMORY
    return SpeedStatus.FAILED if verdict.status is Status.NO_CASE else SpeedStatus.RED


def at_bench(spec: KernelSpec) -> KernelSpec:
    """The spec of the same pair with its BENCH for its SWEEP, all entries required."""
    source = f"{spec.facts.source.rstrip()}\n\n\nSWEEP = BENCH\n"
    facts = spec.facts.model_copy(update={"source": source})
    return spec.model_copy(update={"facts": facts, "sweep": spec.facts.bench})


def _counted(spec: KernelSpec, sandbox: InProcess, device: str) -> dict[str, EntryCost]:
    """Costs by the label of the entry; empty where they cannot be counted."""
    try:
        return {
            cost.label: cost
            for cost in costs(spec.facts, sandbox, device, range(len(spec.sweep)), OPTIONS.count_limits)
        }
    except KernelAgentError:  # `measure` notes why there is no bound
        return {}


def speed_of(
    facts: FileFacts, shape: ShapeTime, found: Measurement, verdict: Verdict, cost: EntryCost | None
) -> PairSpeed:
    """The record of a backward that was proven and timed at one entry."""
    us = shape.median_us
    timed = PairSpeed(
        slug=facts.path.stem,
        family=facts.path.resolve().parent.name,
        hash=content_hash(facts.source),
        device=found.device,
        entry=shape.label,
        status=SpeedStatus.MEASURED,
        message="; ".join((*verdict.notes, *found.facts)),
        backward_us=round(us, 2),
        spread=round(shape.spread, 4),
        compiled_us=_rounded(shape.compiled_us),
        eager_us=_rounded(shape.eager_us),
        to_compiled=_rounded(None if shape.compiled_us is None else shape.compiled_us / us),
        to_eager=_rounded(None if shape.eager_us is None else shape.eager_us / us),
        worst=_rounded(max(worst_ratios(verdict).values(), default=0.0)),
        versions=found.versions,
    )
    return with_cost(timed, cost)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _failed(facts: FileFacts, device: str, status: SpeedStatus, message: str) -> PairSpeed:
    return failed(facts.path, facts.source, device, status, message)


def failed(path: Path, source: str, device: str, status: SpeedStatus, message: str) -> PairSpeed:
    """The record of a pair without a time."""
    return PairSpeed(
        slug=path.stem,
        family=path.resolve().parent.name,
        hash=content_hash(source),
        device=device,
        entry="",
        status=status,
        message=message[:1000],
    )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
