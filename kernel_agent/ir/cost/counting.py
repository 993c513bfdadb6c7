"""Counts one launch: by walking all programs, a sample of them where that takes too long, or by executing it."""

from __future__ import annotations

import contextlib
import enum
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kernel_agent.ir.cost.ghost import TOGETHER, Ghost
from kernel_agent.ir.cost.meter import Access
from kernel_agent.ir.cost.sampling import different, halves, strata
from kernel_agent.ir.cost.tally import LOOPS, Tally, TooMuch, loop_body
from kernel_agent.ir.cost.work import Work, block_work
from kernel_agent.ir.launch import LaunchOptions, launch
from kernel_agent.ir.memory import Buffer
from kernel_agent.ir.program import Module, Op
from kernel_agent.ir.sanitizer.findings import Findings
from kernel_agent.ir.values import RuntimeValue


class How(str, enum.Enum):
    """How the figures of a launch were found."""

    WALKED = "all programs, addresses only"
    """Exact: every program was followed, without its arithmetic on floats."""
    EXECUTED = "all programs, executed"
    """Exact: addresses depend on data, so the launch was run in full."""
    SAMPLED = "sampled programs"
    """Work, trips and traffic are scaled up from a stratified sample. Different elements are estimated as if every
    element were touched by equally many programs."""


@dataclass(frozen=True)
class Touch:
    """How a buffer is touched in one way."""

    unique: float
    """Different elements."""
    lanes: float
    """Elements, each as often as it was touched."""
    issued: float
    """Bytes of those."""
    sectors: float
    """Memory sectors of 32 bytes, each once per program and access."""


@dataclass(frozen=True)
class Trips:
    """How often the body of a loop runs in one program, over all programs."""

    op: Op
    minimum: int
    mean: float
    maximum: int
    entries: float
    """How often a program reaches the loop, on average."""


@dataclass(frozen=True)
class Counted:
    """One launch in numbers."""

    module: Module
    programs: int
    how: How
    walked: int
    """Programs that were followed."""
    buffers: tuple[Buffer, ...] = ()
    touched: dict[tuple[int, Access], Touch] = field(default_factory=dict)
    """(Position in `buffers`, kind of access) -> how."""
    work: Counter[Work] = field(default_factory=Counter)
    trips: tuple[Trips, ...] = ()
    atomics: float = 0.0
    """Elements updated atomically, each as often as it was."""
    spread: float = 0.0
    """Largest relative difference between two halves of the sample in the different elements of a buffer."""
    blocks: Mapping[int, float] = field(default_factory=dict)
    """Identity of a block of the module -> how often it runs in all programs together."""


@dataclass(frozen=True)
class Effort:
    """How much work a count may be."""

    budget: int = 1 << 29
    """Elements of integer values computed for one launch; a launch that needs more is sampled."""
    sample: int = 512
    """Programs of a sample, at most."""


_PILOT = 32
"""Programs that are walked first, to learn what one takes."""
_OPERATION = 1 << 13
"""What starting one operation costs, in elements."""
_LEAST = 128
"""Programs of a sample, whatever they cost."""
_SINGLES = 6
"""Programs that are walked alone, to learn how often one program comes back to an element."""


def execute_counted(
    module: Module,
    grid: tuple[int, int, int],
    arguments: Sequence[RuntimeValue],
    buffers: dict[int, Buffer],
    findings: Findings,
    options: LaunchOptions,
) -> Counted:
    """Execute a launch, see `launch`, and count everything."""
    programs = torch.arange(math.prod(grid))
    tally = Tally(module, programs)
    launch(module, grid, arguments, buffers, findings, options, tally)
    return _counted([(tally, 1.0)], module, math.prod(grid), How.EXECUTED)


def count(ghost: Ghost, effort: Effort) -> Counted:
    """Count a launch without executing it. Raises `NeedsValues` and `UnsupportedOp`."""
    programs = math.prod(ghost.grid)
    if programs <= _PILOT:
        return _all(ghost)
    ids = torch.cat([stratum.programs for stratum in strata(ghost.grid, _PILOT)]).sort().values
    tally, walked = Tally(ghost.module, ids), ids.numel()
    pilot = ghost.walk(ids, tally)
    together = max(1, TOGETHER // pilot.widest)
    starts = -(-programs // together) * pilot.operations * _OPERATION
    each = pilot.elements / walked
    if each * programs + starts <= effort.budget:
        with contextlib.suppress(TooMuch):
            return _all(ghost, together, effort.budget // 8)
    each += tally.written / walked
    sample = min(effort.sample, programs // 2, max(_LEAST, int(effort.budget / 4 / each)))
    return _sampled(ghost, sample)


def _walk_strata(ghost: Ghost, count: int) -> list[tuple[Tally, float]]:
    tallies = []
    for stratum in strata(ghost.grid, count):
        tally = Tally(ghost.module, stratum.programs)
        ghost.walk(stratum.programs, tally)
        tallies.append((tally, stratum.weight))
    return tallies


def _all(ghost: Ghost, together: int | None = None, limit: int | None = None) -> Counted:
    programs = torch.arange(math.prod(ghost.grid))
    tally = Tally(ghost.module, programs, limit)
    if programs.numel():
        ghost.walk(programs, tally, together)
    return _counted([(tally, 1.0)], ghost.module, programs.numel(), How.WALKED)


def _sampled(ghost: Ghost, sample: int) -> Counted:
    programs = math.prod(ghost.grid)
    scaled = _counted(_walk_strata(ghost, sample), ghost.module, programs, How.SAMPLED)
    parts = []
    for ids in halves(programs, sample):
        tally = Tally(ghost.module, ids)
        ghost.walk(ids, tally)
        parts.append(tally)
    singles = []
    for program in parts[0].programs[:: max(1, sample // 2 // _SINGLES)].split(1):
        alone = Tally(ghost.module, program)
        ghost.walk(program, alone)
        singles.append(alone)
    touched, spread = {}, 0.0
    for (place, kind), touch in scaled.touched.items():
        key = id(scaled.buffers[place])
        unique, apart = _estimate(key, kind, touch, (parts[0], parts[1]), singles, programs)
        touched[place, kind] = replace(touch, unique=unique)
        spread = max(spread, apart)
    walked = scaled.walked + sample
    return Counted(
        ghost.module,
        programs,
        How.SAMPLED,
        walked,
        scaled.buffers,
        touched,
        scaled.work,
        scaled.trips,
        scaled.atomics,
        spread,
        scaled.blocks,
    )


def _estimate(
    key: int, kind: Access, touch: Touch, parts: tuple[Tally, Tally], singles: list[Tally], programs: int
) -> tuple[float, float]:
    """Different elements that all programs touch, and how far two halves of the sample are apart on it."""
    found = [tally.touched[key][kind] for tally in (*parts, *singles) if kind in tally.touched.get(key, {})]
    alone = [tally.touched[key][kind] for tally in singles if kind in tally.touched.get(key, {})]
    both = [tally.touched[key][kind] for tally in parts if kind in tally.touched.get(key, {})]
    if len(both) < 2:  # few programs touch it at all
        return float(max(touch.unique, *(f.elements for f in found))) if found else touch.unique, 1.0
    lanes = sum(f.lanes for f in alone)
    once = sum(f.elements for f in alone) / lanes if lanes else 1.0
    touches = touch.lanes * once
    size = both[0].size
    seen = both[0].union(both[1])
    if seen == both[0].elements + both[1].elements:  # nothing is shared
        return min(touches, float(size)), 0.0
    shares = [part.programs.numel() / programs for part in parts]
    whole = different(seen, sum(shares), touches, size)
    first, second = (different(f.elements, share, touches, size) for f, share in zip(both, shares, strict=True))
    return max(whole, touch.unique), abs(first - second) / max(first + second, 1.0)


def _counted(tallies: list[tuple[Tally, float]], module: Module, programs: int, how: How) -> Counted:
    """Weighted sums of tallies. Different elements are those of the tallies, unweighted."""
    buffers = list({key: buffer for tally, _ in tallies for key, buffer in tally.buffers.items()}.values())
    touched = {}
    for place, buffer in enumerate(buffers):
        for kind in Access:
            parts = [(t.touched[id(buffer)][kind], w) for t, w in tallies if kind in t.touched.get(id(buffer), {})]
            if parts:
                lanes = sum(part.lanes * weight for part, weight in parts)
                issued = sum(part.bytes * weight for part, weight in parts)
                sectors = sum(part.sectors * weight for part, weight in parts)
                touched[place, kind] = Touch(max(part.elements for part, _ in parts), lanes, issued, sectors)
    blocks: Counter[int] = Counter()
    for tally, weight in tallies:
        for key, runs in tally.blocks.items():
            blocks[key] += runs * weight  # type: ignore[assignment]
    work: Counter[Work] = Counter()
    for key, each in block_work(module).items():
        for kind_of_work, operations in each.items():
            if blocks[key]:
                work[kind_of_work] += operations * blocks[key]
    atomics = sum(touch.lanes for (_, kind), touch in touched.items() if kind is Access.ATOMIC)
    walked = sum(tally.programs.numel() for tally, _ in tallies)
    trips = tuple(_trips(op, tallies, blocks, programs) for op in module.all_ops if op.name in LOOPS and blocks)
    return Counted(module, programs, how, walked, tuple(buffers), touched, work, trips, atomics, 0.0, blocks)


def _trips(op: Op, tallies: list[tuple[Tally, float]], blocks: Counter[int], programs: int) -> Trips:
    body = id(loop_body(op))
    counts: list[Tensor] = [tally.trips[body] for tally, _ in tallies]
    module = tallies[0][0].module
    return Trips(
        op,
        min(int(part.min()) for part in counts),
        blocks[body] / programs,
        max(int(part.max()) for part in counts),
        blocks[id(module.parents[id(op)])] / programs,
    )
