"""`modelled`: the time of a candidate's backward on a GPU that is not here. Modelled, not measured.

Per required entry of SWEEP, the sum over launches of `kernel_agent.bench.launch_time.launch_time`, and over torch calls
that move memory of `torch_time`. Counts come from the kernels' IR at the real sizes (`docs/cost.md`), registers, spills
and shared memory from a compile for sm_90. The candidate's code runs in a child; what the child says ranks candidates
and accepts none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from kernel_agent.bench.compiled import SHARED_LIMIT, CompiledKernel
from kernel_agent.bench.launch_facts import EntryFacts, LaunchFacts
from kernel_agent.bench.launch_time import LaunchTime, launch_time, torch_time
from kernel_agent.bench.records import Basis, KernelTime, Measurement, ShapeTime
from kernel_agent.errors import InputError, KernelAgentError
from kernel_agent.ir.cost.devices import Device, device_table
from kernel_agent.machine import installed_versions
from kernel_agent.pairs.assemble import assemble
from kernel_agent.pairs.spec import Candidate, KernelSpec, ShapeEntry, content_hash
from kernel_agent.pairs.userfile import read_source
from kernel_agent.sandbox import Ending, Job, Limits, Report, Sandbox

LIMITS = Limits(wall_s=180.0)
"""Counting takes seconds, compiling a kernel about one."""

_KNOWN: dict[str, tuple[EntryFacts, ...]] = {}
_KEPT = 256
"""Texts whose facts are remembered: a fingerprint and a time are made from the same."""

TORCH = "torch"
"""Name of the row of torch's own kernels among the kernels of a measurement."""


class NotModelled(KernelAgentError):
    """A candidate whose time cannot be modelled: it fails, does not compile for sm_90, or does not fit."""


def modelled(
    spec: KernelSpec, candidate: Candidate, sandbox: Sandbox, device: str = "H100 SXM", limits: Limits = LIMITS
) -> Measurement:
    """The modelled time of one backward at every required entry of SWEEP, in microseconds.

    `device` names a GPU of the table of devices; registers and shared memory are those of sm_90 on any. Raises
    `NotModelled` for a candidate without a time, and `InputError` for an unknown device.
    """
    target = device_table().find(device)
    entries = entry_facts(spec, assemble(spec, candidate), sandbox, device, required(spec), limits)
    for entry in entries:
        for kernel in entry.compiled.values():
            check_fits(kernel)
    return measurement(entries, target)


def required(spec: KernelSpec) -> tuple[ShapeEntry, ...]:
    """The required entries of SWEEP, or all where none is."""
    return tuple(entry for entry in spec.sweep if entry.required) or spec.sweep


def entry_facts(
    spec: KernelSpec,
    pair_source: str,
    sandbox: Sandbox,
    device: str,
    entries: Iterable[ShapeEntry],
    limits: Limits = LIMITS,
    *,
    compiled: bool = True,
) -> tuple[EntryFacts, ...]:
    """What a pair file's backward does at entries of SWEEP, told by a child, once per text. Raises `NotModelled`.

    Without `compiled` it is only counted: the times of such kernels leave out what registers and code decide.
    """
    entries = tuple(entries)
    key = f"{device}|{[entry.label for entry in entries]}|{content_hash(pair_source)}|{compiled}"
    found = _KNOWN.get(key)
    if found is None:
        found = _ask(spec, pair_source, sandbox, device, entries, limits, compiled=compiled)
        if len(_KNOWN) >= _KEPT:
            _KNOWN.clear()
        _KNOWN[key] = found
    return found


def _ask(
    spec: KernelSpec,
    pair_source: str,
    sandbox: Sandbox,
    device: str,
    entries: tuple[ShapeEntry, ...],
    limits: Limits,
    *,
    compiled: bool,
) -> tuple[EntryFacts, ...]:
    try:
        facts = read_source(pair_source, Path(f"{spec.facts.stem}.py"))
    except InputError as error:
        raise NotModelled(error.message, remedy=error.remedy) from error
    payload = {
        "facts": facts.model_dump(mode="json"),
        "device": device,
        "compile": compiled,
        "entries": [entry.model_dump(mode="json") for entry in entries],
    }
    job = Job("kernel_agent.bench.model_child:entries", payload, limits=limits, label=f"model of {spec.facts.stem}")
    report = sandbox.run(job)
    for message in report.messages:
        if "error" in message.record:
            raise NotModelled(str(message.record["error"].get("message", "the child fails")))
    if report.ending is not Ending.FINISHED:
        raise _ended(report, limits)
    return tuple(EntryFacts.model_validate(message.record["entry"]) for message in report.messages)


def check_fits(kernel: CompiledKernel) -> None:
    """Raises `NotModelled` for a kernel that no sm_90 can run."""
    if kernel.problem:
        raise NotModelled(f"kernel {kernel.name} does not compile for sm_90: {kernel.problem}")
    if not kernel.fits:
        raise NotModelled(
            f"kernel {kernel.name} needs {kernel.shared_bytes} bytes of shared memory, sm_90 has {SHARED_LIMIT}"
        )


def measurement(entries: tuple[EntryFacts, ...], device: Device) -> Measurement:
    """Modelled times of all entries, with the kernels of the longest."""
    timed = [(entry, _times(entry, device)) for entry in entries]
    shapes = tuple(
        ShapeTime(
            label=entry.label,
            median_us=1e6 * sum(time.seconds for time in times),
            bound_us=1e6 * sum(launch.bound_s for launch in entry.launches),
        )
        for entry, times in timed
    )
    longest, times = max(timed, key=lambda pair: sum(time.seconds for time in pair[1]))
    return Measurement(
        basis=Basis.MODELLED,
        device=device.name,
        shapes=shapes,
        kernels=_kernels(longest, times),
        facts=_facts(longest, times),
        versions=tuple(f"{name} {number}" for name, number in installed_versions().model_dump().items() if number),
    )


def _times(entry: EntryFacts, device: Device) -> tuple[LaunchTime, ...]:
    """Launches in order, then torch calls."""
    launches = [launch_time(launch, entry.compiled[launch.build], device) for launch in entry.launches]
    return (*launches, *(torch_time(call, device) for call in entry.torch))


def _kernels(entry: EntryFacts, times: tuple[LaunchTime, ...]) -> tuple[KernelTime, ...]:
    """One row per kernel, its launches added up, and one for torch."""
    rows = []
    for name in dict.fromkeys(launch.kernel for launch in entry.launches):
        mine = [pair for pair in zip(entry.launches, times, strict=False) if pair[0].kernel == name]
        compiled = [entry.compiled[launch.build] for launch, _ in mine]
        slowest = max(mine, key=lambda pair: pair[1].seconds)[1]
        rows.append(
            KernelTime(
                name=name,
                microseconds=1e6 * sum(time.seconds for _, time in mine),
                bound_by=slowest.bound_by,
                bound_us=1e6 * sum(launch.bound_s for launch, _ in mine),
                atomics=round(sum(launch.atomic_updates for launch, _ in mine)),
                registers=max(kernel.registers for kernel in compiled),
                spills=max(kernel.stack_bytes for kernel in compiled),
                shared_bytes=max(kernel.shared_bytes for kernel in compiled),
            )
        )
    calls = times[len(entry.launches) :]
    if calls:
        names = ", ".join(dict.fromkeys(call.name for call in calls))
        seconds = sum(call.seconds for call in calls)
        rows.append(KernelTime(name=f"{TORCH}: {names}", microseconds=1e6 * seconds, bound_by="memory"))
    return tuple(rows)


def _facts(entry: EntryFacts, times: tuple[LaunchTime, ...]) -> tuple[str, ...]:
    lines = [f"modelled, not measured; kernels and figures at {entry.label}", *entry.notes]
    for launch, time in zip(entry.launches, times, strict=False):
        lines.append(_launch_line(launch, entry.compiled[launch.build], time))
    return tuple(dict.fromkeys(lines))


def _launch_line(launch: LaunchFacts, kernel: CompiledKernel, time: LaunchTime) -> str:
    terms = ", ".join(f"{name} {1e6 * seconds:.3g} us" for name, seconds in time.terms[:3])
    line = f"{launch.kernel}: {launch.programs} programs of {kernel.warps} warps, {time.resident} at a time per SM, "
    line += f"{time.waves} {'wave' if time.waves == 1 else 'waves'}; {terms or 'no work'}"
    if launch.atomic_updates:
        line += f"; {launch.atomic_updates:.3g} atomic updates, up to {launch.atomic_turns:.3g} per address on average"
    if kernel.spills:
        line += f"; spills {kernel.spill_stores} bytes per thread"
    return line


def _ended(report: Report, limits: Limits) -> NotModelled:
    if report.ending is Ending.TIMED_OUT:
        return NotModelled(f"counting and compiling do not end within {limits.wall_s:.0f} s")
    if report.ending is Ending.OUT_OF_MEMORY:
        return NotModelled(f"counting needs more than {limits.memory_bytes >> 30} GiB")
    said = f"{report.error.type}: {report.error.message}" if report.error else report.message
    return NotModelled(f"the child that models it fails: {said}")


def screen(
    spec: KernelSpec, start: Candidate, sandbox: Sandbox, device: str = "H100 SXM"
) -> Callable[[Candidate], str]:
    """Why a variant of `start` need not be timed, by its kernels compiled for sm_90: see `kernel_agent.bench.tune`.

    It fails, does not compile, does not fit, or spills more than the start. Where the start itself cannot be compiled,
    the answer is always empty.
    """
    try:
        before = _spills(entry_facts(spec, assemble(spec, start), sandbox, device, required(spec)))
    except NotModelled:
        return lambda _: ""

    def why(variant: Candidate) -> str:
        try:
            entries = entry_facts(spec, assemble(spec, variant), sandbox, device, required(spec))
            for kernel in (kernel for entry in entries for kernel in entry.compiled.values()):
                check_fits(kernel)
        except NotModelled as error:
            return error.message
        after = _spills(entries)
        return f"spills {after} bytes per thread instead of {before}" if after > before else ""

    return why


def _spills(entries: tuple[EntryFacts, ...]) -> int:
    return max((kernel.spill_stores for entry in entries for kernel in entry.compiled.values()), default=0)
