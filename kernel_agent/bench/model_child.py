"""What runs in the child that counts a candidate's backward at the real sizes and compiles its kernels for sm_90.

The candidate's own code runs here. What this sends is used to rank candidates, never to accept one.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from types import ModuleType
from typing import TYPE_CHECKING

from kernel_agent.bench.compiled import CompiledKernel, compile_build
from kernel_agent.bench.launch_facts import BlockFacts, EntryFacts, LaunchFacts, TorchFacts
from kernel_agent.ir import standin
from kernel_agent.ir.capture.capture import Launch
from kernel_agent.ir.cost.address_slice import ACCESSES
from kernel_agent.ir.cost.cost import Counts, execute_call, report, walk_call
from kernel_agent.ir.cost.cost_report import LaunchCost
from kernel_agent.ir.cost.counting import Counted
from kernel_agent.ir.cost.devices import Device, device_table
from kernel_agent.ir.cost.footprint import SECTOR
from kernel_agent.ir.cost.ghost import NeedsValues
from kernel_agent.ir.cost.meter import Access
from kernel_agent.ir.cost.tally import LOOPS, loop_body
from kernel_agent.ir.cost.work import block_work
from kernel_agent.oracle.child import answered
from kernel_agent.oracle.cost_child import part_counts, shapes_of
from kernel_agent.pairs.arguments import build_arguments
from kernel_agent.pairs.load import load_truth
from kernel_agent.pairs.spec import FileFacts, ShapeEntry

if TYPE_CHECKING:
    from kernel_agent.ir.capture.build import Build
    from kernel_agent.sandbox import Call


def entries(call: Call) -> None:
    """Payload: `facts` of a pair file, `entries` of its SWEEP, `device`, and whether to `compile`. Sends one
    `EntryFacts` per entry; of kernels that are not compiled it holds the names."""
    with answered(call):
        facts = FileFacts.model_validate(call.payload["facts"])
        device = device_table().find(call.payload["device"])
        module = load_truth(facts, call.scratch, source=facts.source)
        compiled: dict[str, CompiledKernel] = {}
        for form in call.payload["entries"]:
            entry = ShapeEntry.model_validate(form)
            counts = backward_counts(module, facts, entry)
            make = compile_build if call.payload["compile"] else _uncompiled
            call.send({"entry": entry_facts(entry.label, counts, device, compiled, make).model_dump(mode="json")})


def backward_counts(module: ModuleType, facts: FileFacts, entry: ShapeEntry) -> Counts:
    """Counts of a pair's backward: without values where that is possible, else by executing it in full."""
    try:
        return part_counts(module, facts, shapes_of(module, entry), walk_call)["backward"]
    except NeedsValues:
        pass
    with standin():
        arguments = build_arguments(module, entry, device="cpu", seed=0)
    try:
        return part_counts(module, facts, arguments, functools.partial(walk_call, values=True))["backward"]
    except NeedsValues as reason:
        counts = part_counts(module, facts, arguments, execute_call)["backward"]
        return replace(counts, notes=(f"executed in full: {reason.message}",))


def _uncompiled(build: Build) -> CompiledKernel:
    return CompiledKernel(name=build.kernel.fn.__name__)


def entry_facts(
    label: str,
    counts: Counts,
    device: Device,
    compiled: dict[str, CompiledKernel],
    make: Callable[[Build], CompiledKernel] = compile_build,
) -> EntryFacts:
    """One entry; kernels that `compiled` lacks are compiled and added to it."""
    costs = report(counts, device).launches
    launches = []
    for (launch, counted), cost in zip(counts.launches, costs, strict=True):
        key = sha256(launch.build.key.encode()).hexdigest()[:16]
        if key not in compiled:
            compiled[key] = make(launch.build)
        launches.append(launch_facts(launch, counted, cost, key))
    return EntryFacts(
        label=label,
        launches=tuple(launches),
        torch=tuple(TorchFacts(name=m.name, read_bytes=m.read, written_bytes=m.written) for m in counts.moves),
        compiled={launch.build: compiled[launch.build] for launch in launches},
        notes=counts.notes,
    )


def launch_facts(launch: Launch, counted: Counted, cost: LaunchCost, key: str) -> LaunchFacts:
    """One launch as the model of its time reads it."""
    plain = {place: touch for place, touch in counted.touched.items() if place[1] is not Access.ATOMIC}
    atomic = [touch for (_, kind), touch in counted.touched.items() if kind is Access.ATOMIC]
    again = {place: max(0.0, touch.sectors * SECTOR - _unique(counted, place)) for place, touch in plain.items()}
    largest = max(again, key=lambda place: again[place], default=None)
    return LaunchFacts(
        kernel=launch.kernel,
        grid=launch.grid,
        programs=counted.programs,
        unique_bytes=float(cost.unique_bytes),
        reread_bytes=sum(again.values()),
        largest_bytes=0.0 if largest is None else _unique(counted, largest),
        sector_bytes=sum(touch.sectors for touch in plain.values()) * SECTOR,
        atomic_bytes=sum(_unique(counted, place) for place in counted.touched if place[1] is Access.ATOMIC),
        atomic_sector_bytes=sum(touch.sectors for touch in atomic) * SECTOR,
        atomic_updates=sum(touch.lanes for touch in atomic),
        atomic_turns=max((touch.lanes / max(touch.unique, 1.0) for touch in atomic), default=0.0),
        work={kind: float(operations) for kind, operations in counted.work.items()},
        blocks=_blocks(counted),
        bound_s=cost.bound.seconds,
        bound_by="" if cost.bound.by is None else cost.bound.by.value,
        build=key,
    )


def _unique(counted: Counted, place: tuple[int, Access]) -> float:
    return counted.touched[place].unique * counted.buffers[place[0]].itemsize


def _blocks(counted: Counted) -> tuple[BlockFacts, ...]:
    module, programs = counted.module, max(counted.programs, 1)
    work = block_work(module)
    loads: Counter[int] = Counter()
    reductions: Counter[int] = Counter()
    for op in module.all_ops:
        place = id(module.parents[id(op)])
        loads[place] += ACCESSES.get(op.name) is Access.READ
        reductions[place] += op.name in ("tt.reduce", "tt.scan")
    loops = [id(loop_body(op)) for op in module.all_ops if op.name in LOOPS]
    bodies = {place: order for order, place in enumerate(loops, 1)}
    uneven = {id(loop_body(trips.op)): trips.maximum / trips.mean for trips in counted.trips if trips.mean}
    return tuple(
        BlockFacts(
            runs=runs / programs,
            most=runs / programs * uneven.get(place, 1.0),
            loads=loads[place],
            reductions=reductions[place],
            in_loop=place in bodies,
            order=bodies.get(place, 0),
            work={kind: round(operations) for kind, operations in work.get(place, Counter()).items() if operations},
        )
        for place, runs in counted.blocks.items()
        if loads[place] or reductions[place] or work.get(place) or place in bodies
    )
