"""`compared`: the pairs that can be written of a forward in the order in which they are worth trying, with their costs.

The order of schedules counts atomic additions. Where the file has sizes of real work each backward is counted there and
one that the model of times finds clearly faster goes before the others. Small sizes say nothing: starting kernels takes
longer there than what they do.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import repeat
from typing import TYPE_CHECKING

from kernel_agent.bench.launch_facts import EntryFacts
from kernel_agent.bench.launch_time import launch_time, torch_time
from kernel_agent.bench.modelled import NotModelled, entry_facts
from kernel_agent.compiler.derived import Draft, DraftCost
from kernel_agent.ir.cost.devices import device_table
from kernel_agent.ir.cost.work import Work
from kernel_agent.sandbox import Limits, Sandbox

if TYPE_CHECKING:
    from kernel_agent.pairs.spec import KernelSpec, ShapeEntry

DEVICE = "H100 SXM"
LIMITS = Limits(wall_s=20.0)
"""Of counting one backward: where it takes longer, a smaller size is asked, and then the order stays as it is."""
APART = 0.9
"""Share of the first's modelled time below which another goes before it: times closer than that are often modelled in
the wrong order (`bench/modelled_accuracy.py`)."""
REAL_BYTES = 16 << 20
"""What a backward moves at least, for its time to be of more than starting kernels."""
_NO_FLOPS = frozenset((Work.INTEGER, Work.SPECIAL))


def has_real_sizes(spec: KernelSpec) -> bool:
    """Whether the file tells sizes of real work, at which drafts can be compared."""
    return bool(spec.facts.bench)


def compared(spec: KernelSpec, written: Sequence[Draft], sandbox: Sandbox) -> tuple[list[Draft], tuple[DraftCost, ...]]:
    """The pairs, the best first, and their costs in that order; as they were, where they cannot be compared."""
    if not written:
        return [], ()
    for entry in _entries(spec):
        with ThreadPoolExecutor(len(written)) as pool:
            costs = list(pool.map(cost, repeat(spec), written, repeat(entry), repeat(sandbox)))
        first = costs[0]
        if first.microseconds is not None:
            break
    if first.microseconds is None or first.bytes < REAL_BYTES:
        return list(written), tuple(costs)

    def rank(place: int) -> float:
        took = costs[place].microseconds
        return took if took is not None and took < APART * (first.microseconds or 0.0) else float("inf")

    order = sorted(range(len(written)), key=lambda place: (rank(place), place))
    best = costs[order[0]].microseconds or 0.0
    said = [costs[order[0]]]
    for place in order[1:]:
        took = costs[place].microseconds
        why = costs[place].why if took is None else f"{took / best:.2f}x"
        said.append(replace(costs[place], why=why))
    return [written[place] for place in order], tuple(said)


def _entries(spec: KernelSpec) -> list[ShapeEntry]:
    """The first size of real work, else the largest that is swept; and where nothing can be counted there in time, the
    largest one of an eighth of it."""
    first = spec.facts.bench[0] if spec.facts.bench else max(spec.sweep, key=_volume)
    smaller = [entry for entry in (*spec.facts.bench, *spec.sweep) if 8 * _volume(entry) <= _volume(first)]
    return [first, *([max(smaller, key=_volume)] if smaller else [])]


def cost(spec: KernelSpec, draft: Draft, entry: ShapeEntry, sandbox: Sandbox, device: str = DEVICE) -> DraftCost:
    """What a draft's backward costs at an entry."""
    try:
        (facts,) = entry_facts(spec, draft.pair, sandbox, device, [entry], LIMITS, compiled=False)
    except NotModelled as error:
        return DraftCost(draft.schedules, entry.label, why=error.message)
    return counted(draft.schedules, facts, device)


def counted(schedules: tuple[str, ...], facts: EntryFacts, device: str) -> DraftCost:
    """The cost that counts come to."""
    target = device_table().find(device)
    launches = facts.launches
    seconds = sum(launch_time(launch, facts.compiled[launch.build], target).seconds for launch in launches)
    seconds += sum(torch_time(call, target).seconds for call in facts.torch)
    return DraftCost(
        schedules,
        facts.label,
        bytes=sum(launch.unique_bytes for launch in launches)
        + sum(call.read_bytes + call.written_bytes for call in facts.torch),
        flops=sum(count for launch in launches for kind, count in launch.work.items() if kind not in _NO_FLOPS),
        atomics=sum(launch.atomic_updates for launch in launches),
        programs=min((launch.programs for launch in launches), default=0),
        microseconds=1e6 * seconds,
    )


def _volume(entry: ShapeEntry) -> int:
    total = 1
    for value in entry.dims.values():
        total *= value if type(value) is int and value > 0 else 1
    return total
