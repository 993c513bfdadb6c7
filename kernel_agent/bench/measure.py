"""`measure`: the time of a candidate's backward alone at every required shape, beside the user's own and the bound.

The candidate runs in a child that nobody vouches for; `kernel_agent.bench.hearing` says what of its words is believed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernel_agent.bench.hearing import Ear, NotMeasured, Probes, believed
from kernel_agent.bench.launches import TF32_BITS, KernelSeen
from kernel_agent.bench.native import has_own_forward
from kernel_agent.bench.native_truth import Inputs, NativeTruth
from kernel_agent.bench.records import Basis, KernelTime, Measurement, ShapeTime
from kernel_agent.bench.rig import STANDARD, Baselines, BenchOptions, Rig
from kernel_agent.bench.statistics import Timing, timing_of
from kernel_agent.errors import KernelAgentError
from kernel_agent.gate.candidate import read_candidate
from kernel_agent.gate.judge import judge_failure
from kernel_agent.ir.cost.cost_report import CostReport
from kernel_agent.ir.cost.devices import device_table
from kernel_agent.oracle.costs import costs
from kernel_agent.oracle.wire import unpack
from kernel_agent.pairs.arguments import argument_places
from kernel_agent.pairs.assemble import assemble
from kernel_agent.pairs.spec import Candidate, KernelSpec
from kernel_agent.pairs.userfile import read_source
from kernel_agent.sandbox import Job, Sandbox

__all__ = ["NotMeasured", "measure", "measure_source"]

PROBES = 256
"""Elements of each gradient that are looked at after every repetition."""


def measure(
    spec: KernelSpec,
    candidate: Candidate,
    sandbox: Sandbox,
    rig: Rig | None = None,
    options: BenchOptions = STANDARD,
) -> Measurement:
    """Time a candidate that is green in both tiers. `rig` keeps what candidates of one spec share.

    Raises `NotMeasured` for a candidate that fails or does not answer truthfully, and `EnvironmentProblem` where there
    is no GPU or the user's own forward cannot be run on it.
    """
    return measure_source(spec, assemble(spec, candidate), sandbox, rig, options)


def measure_source(
    spec: KernelSpec, pair_source: str, sandbox: Sandbox, rig: Rig | None = None, options: BenchOptions = STANDARD
) -> Measurement:
    """As `measure`, for a whole pair file."""
    rig = rig or Rig(spec, sandbox, options)
    shown = read_candidate(spec, pair_source).shown
    if not rig.inputs:
        reasons = "; ".join(f"{skipped.entry.label}: {skipped.reason}" for skipped in rig.prepared.skipped)
        raise NotMeasured(
            f"no required entry of SWEEP runs on this GPU: {reasons}", remedy="Give SWEEP an entry that fits."
        )
    probes = [_probes(spec, inputs, rig.natives.get(number)) for number, inputs in enumerate(rig.inputs)]
    ear = Ear()
    report = sandbox.run(_job(rig, shown, probes, has_own_forward(spec, pair_source)), on_message=ear.hear)
    if ear.nonsense:
        raise NotMeasured("the candidate wrote to the result channel while it was timed")
    if ear.failure is not None:
        where, failure = ear.failure
        problem = judge_failure(failure, pair_source, f"{where} on the GPU")
        raise NotMeasured(problem.message, remedy=problem.details)
    heard = [
        believed(ear, report, number, inputs.entry.label, probes[number]) for number, inputs in enumerate(rig.inputs)
    ]
    baselines = rig.baselines()
    bounds = _bounds(spec, pair_source, rig)
    shapes = tuple(
        _shape(inputs, one.timing, baselines.get(number, Baselines()), bounds.by_label.get(inputs.entry.label))
        for number, (inputs, one) in enumerate(zip(rig.inputs, heard, strict=True))
    )
    slowest = max(range(len(shapes)), key=lambda number: shapes[number].median_us)
    seen = ear.kernels.get(slowest)
    label = rig.inputs[slowest].entry.label
    kernels = _kernels(seen.kernels, bounds.by_label.get(label)) if seen else ()
    facts = (
        *(f"{skipped.entry.label} was not timed: {skipped.reason}" for skipped in rig.prepared.skipped),
        *(one.note for one in heard if one.note),
        *_kernel_facts(kernels, shapes[slowest], label),
        *_host_facts(ear, rig),
        *_forward_facts(ear, rig),
        *_fairness(rig),
        *rig.notes,
        *bounds.notes,
    )
    return Measurement(
        basis=Basis.MEASURED,
        device=rig.gpu.name,
        shapes=shapes,
        kernels=kernels,
        facts=tuple(dict.fromkeys(facts)),
        versions=rig.gpu.versions,
    )


def _probes(spec: KernelSpec, inputs: Inputs, truth: NativeTruth | None) -> Probes:
    """Places chosen by the parent: no candidate knows them beforehand."""
    generator = torch.Generator().manual_seed(time.time_ns() & 0xFFFFFFFF)
    sizes = _gradient_sizes(spec, inputs)
    places = tuple(
        None if size is None else torch.randint(max(1, size), (min(PROBES, size),), generator=generator)
        for size in sizes
    )
    known = {} if truth is None or truth.shrunk else {grad.name: grad for grad in truth.grads}
    pairs = [(known.get(name), where) for name, where in zip(spec.grads, places, strict=True) if where is not None]
    grads = [(grad, where) for grad, where in pairs if grad is not None]
    if not grads or len(grads) < len(pairs):
        return Probes(places, None, 0.0)
    scale = math.sqrt(sum(grad.scale**2 * len(where) for grad, where in grads))
    return Probes(places, torch.cat([grad.truth.reshape(-1)[where] for grad, where in grads]), scale)


def _gradient_sizes(spec: KernelSpec, inputs: Inputs) -> list[int | None]:
    """Elements of the inputs with a gradient; None where there is no floating tensor at this entry."""
    args = unpack(inputs.arguments["args"], inputs.tensors)
    kwargs = unpack(inputs.arguments["kwargs"], inputs.tensors)
    found = argument_places([fact.name for fact in spec.inputs], args, kwargs)
    values = {name: args[place] if isinstance(place, int) else kwargs[place] for name, place in found.items()}
    wanted = [values.get(name) for name in spec.grads]
    return [value.numel() if isinstance(value, Tensor) and value.is_floating_point() else None for value in wanted]


def _job(rig: Rig, shown: str, probes: Sequence[Probes], own_forward: bool) -> Job:
    tensors = rig.tensors()
    entries: list[dict[str, Any]] = []
    for number, (inputs, wanted) in enumerate(zip(rig.inputs, probes, strict=True)):
        keys = [None if where is None else f"e{number}.probe.{place}" for place, where in enumerate(wanted.places)]
        tensors |= {key: where for key, where in zip(keys, wanted.places, strict=True) if key and where is not None}
        entries.append({"arguments": inputs.arguments, "cotangents": inputs.cotangents, "probes": keys})
    payload = {
        "device": rig.options.device,
        "source": shown,
        "own_forward": own_forward,
        "entries": entries,
        "flush_bytes": rig.flush_bytes,
        "budget_s": rig.options.budget_s,
        "seed": time.time_ns() & 0xFFFFFFFF,
    }
    return Job("kernel_agent.bench.timing_child:timed", payload, tensors, rig.options.limits, "timed candidate")


@dataclass(frozen=True)
class _Bounds:
    """What the cost counter says of the backward, by the label of the entry."""

    by_label: dict[str, CostReport]
    notes: tuple[str, ...] = ()


def _bounds(spec: KernelSpec, pair_source: str, rig: Rig) -> _Bounds:
    if not rig.options.bounds:
        return _Bounds({})
    labels = {inputs.entry.label for inputs in rig.inputs}
    positions = [place for place, entry in enumerate(spec.sweep) if entry.label in labels]
    try:
        device_table().find(rig.gpu.name)
        facts = read_source(pair_source, spec.facts.path)
        found = costs(facts, rig.sandbox, rig.gpu.name, positions, rig.options.count_limits)
    except KernelAgentError as error:  # a bound is good to have, a time is a time without one
        return _Bounds({}, (f"no bound of the time is known: {error.message}",))
    return _Bounds({cost.label: cost.parts["backward"] for cost in found if "backward" in cost.parts})


def _shape(inputs: Inputs, timing: Timing, baselines: Baselines, bound: CostReport | None) -> ShapeTime:
    return ShapeTime(
        label=inputs.entry.label,
        median_us=timing.median_us,
        spread=timing.spread,
        bound_us=bound.whole_seconds * 1e6 if bound is not None and bound.whole_seconds > 0 else None,
        eager_us=baselines.eager.median_us if baselines.eager else None,
        compiled_us=baselines.compiled.median_us if baselines.compiled else None,
        own_us=baselines.own.median_us if baselines.own else None,
    )


def _kernels(seen: Sequence[KernelSeen], bound: CostReport | None) -> tuple[KernelTime, ...]:
    """Launches with what the cost counter says of them: the n-th launch of a kernel is its n-th in the count."""
    left = list(bound.launches) if bound is not None else []
    found = []
    for launch in seen:
        cost = next((one for one in left if one.kernel == launch.name), None)
        if cost is not None:
            left.remove(cost)
        found.append(
            KernelTime(
                name=launch.name,
                microseconds=launch.microseconds,
                bound_by=cost.bound.by.value if cost is not None and cost.bound.by is not None else "",
                bound_us=cost.bound.seconds * 1e6 if cost is not None else None,
                atomics=cost.atomics if cost is not None else 0,
                registers=launch.registers,
                spills=launch.spills,
                shared_bytes=launch.shared_bytes,
            )
        )
    return tuple(found)


def _kernel_facts(kernels: Sequence[KernelTime], shape: ShapeTime, label: str) -> list[str]:
    """What is not inside any kernel of the candidate."""
    inside = sum(kernel.microseconds for kernel in kernels)
    outside = shape.median_us - inside
    if kernels and outside > 0.1 * shape.median_us:
        return [
            f"at {label}, {outside:.0f} of {shape.median_us:.0f} us pass outside of its Triton kernels: in torch calls "
            "(copies, fills, casts) and between launches"
        ]
    return []


def _host_facts(ear: Ear, rig: Rig) -> list[str]:
    """Where the host needs longer to launch than the device to compute."""
    slow = [
        f"{rig.inputs[number].entry.label} ({said.host_us:.0f} us)"
        for number, (said, _) in ear.times.items()
        if said.host_us > 1.2 * timing_of(said.times).median_us
    ]
    if not slow:
        return []
    return [f"launching takes the host longer than the device computes, which is not in the times: {', '.join(slow)}"]


def _forward_facts(ear: Ear, rig: Rig) -> list[str]:
    """What a forward of the candidate's own costs beside the user's stub."""
    facts = []
    for number, said in ear.forwards.items():
        base = rig.baselines().get(number, Baselines()).forward
        label = rig.inputs[number].entry.label
        if base is not None:
            own = timing_of(said.forward).median_us
            facts.append(f"its own forward takes {own:.1f} us at {label}, the user's stub {base.median_us:.1f} us")
    return facts


def _fairness(rig: Rig) -> list[str]:
    if any(inputs.dot_bits == TF32_BITS and _has_float32(inputs) for inputs in rig.inputs):
        return ["the forward's products cut float32 to tf32, so torch was allowed to do the same in the baselines"]
    return []


def _has_float32(inputs: Inputs) -> bool:
    return any(tensor.dtype == torch.float32 for tensor in inputs.tensors.values())
