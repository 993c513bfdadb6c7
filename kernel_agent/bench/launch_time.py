"""`launch_time`: how long one launch takes on a GPU, by a model made from counts and from the compiled kernel.

The time is that of starting a kernel plus the terms below, each the time of a resource that is used without a pause.
They overlap, but not perfectly: their OVERLAP-norm stands between their sum and the longest of them.

With P programs of W warps on S multiprocessors, `busy = min(P, S)`, and `each = ceil(P / S)` programs on the fullest:

memory        (unique bytes + missed rereads) / (bandwidth * ACHIEVED). Rereads miss L2 in the share of the largest
              reread buffer that L2 cannot hold. What is updated atomically is read first, and comes and goes again for
              every further sector, in the share of it that L2 cannot hold.
L2 traffic    sector bytes / (clock * min(busy * 64, S * 40) bytes)
atomics       the longer of: sector bytes of updates / (clock * min(busy * 32, S * 10) bytes); updates per address of
              the buffer where they are most, one per clock (NVIDIA Kepler GK110 whitepaper, 2012)
tensor cores  each * operations of a program / rate of one multiprocessor; 0.63 of it without wgmma on sm_90
float units, double units, special functions     each * operations of a program / rate of one multiprocessor
instructions  each * W * instructions of a warp / (4 * clock): those of the PTX, outside of loops, and in each loop as
              often as it turns
loads and stores     each * W * turns of the load and store unit, shuffles too, of a warp / clock
spills        each * spilled bytes of a program, as often as its most frequent block runs / (clock * 128 bytes)
latency       ceil(P / slots) * the time of one program alone: slots = S * programs that fit one multiprocessor by
              warps, registers and shared memory. A program waits once for memory per run of a block that loads (in a
              loop with asynchronous copies: divided by the stages), then for each reduction, and issues an instruction
              per warp every WARP_CLOCKS.

Constants and where they come from are at the constants.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kernel_agent.bench.compiled import CompiledKernel
from kernel_agent.bench.launch_facts import BlockFacts, LaunchFacts, TorchFacts
from kernel_agent.ir.cost.devices import Device
from kernel_agent.ir.cost.work import Work

START_S = 2.5e-6
"""Seconds from the end of one small kernel to the end of the next, of an empty kernel. Assumed; the order of 2 to 3 us
is what is commonly reported for kernels that are queued on a stream."""
ACHIEVED = 0.9
"""Share of the stated bandwidth that streaming kernels reach. Assumed; STREAM-like tests report 0.88 to 0.94."""
L2_SM_BYTES = 64
"""Bytes per clock that one multiprocessor takes from L2 (NVIDIA A100 whitepaper, 2020)."""
L2_BYTES = 40
"""Bytes per clock and multiprocessor that all of L2 gives: 5120 over the 132 or 108 of H100 and A100 (the same)."""
ATOMIC_BYTES = 10
"""Bytes per clock and multiprocessor that all of L2 updates: 653e9 float32 a second on an H200. Of 40 measured
backwards with atomics one reaches 638e9, the others 577e9 and less (`conv/deform_conv2d_sample` and
`gather_scatter/embedding_bag_sum` in `datasets/results/h200.jsonl`)."""
L1_BYTES = 128
"""Bytes per clock of L1 and shared memory of one multiprocessor (the same)."""
DRAM_CLOCKS = 479
L2_CLOCKS = 263
"""Latency of a load that is served by device memory and by L2 (Luo et al., Benchmarking and Dissecting the Nvidia
Hopper GPU Architecture via Microbenchmarking, 2024, H100 PCIe)."""
SHARED_CLOCKS = 29
"""Latency of shared memory (the same)."""
SHUFFLE_CLOCKS = 27
"""One step of a reduction in a warp: a shuffle and an operation. Assumed from latencies of 23 and 4."""
BARRIER_CLOCKS = 20
"""A barrier of one program. Assumed."""
PROGRAM_CLOCKS = 500
"""Beginning and end of one program. Assumed."""
MMA_SHARE = 0.63
"""What mma.sync reaches of the peak of sm_90, which wgmma reaches (Luo et al.)."""
WARP_CLOCKS = 2.0
"""Clocks from one instruction of a warp to its next. Assumed: dependent ones are 4 apart, and some do not depend."""
OVERLAP = 2.0
"""Order of the norm of the terms: 1 for resources that wait for each other, infinite for perfect overlap. Chosen: of 1,
1.5, 2, 3, 4 and infinity the one that ordered the times of `bench/modelled_accuracy.json` best, by little."""
SCHEDULERS = 4
"""Warps that one multiprocessor issues from at the same time."""
WARPS, REGISTERS, SHARED_BYTES, PROGRAMS = 64, 65536, 228 * 1024, 32
"""What one multiprocessor of sm_90 holds (CUDA C++ Programming Guide, table of compute capabilities)."""
_RESERVED_SHARED = 1024
_REGISTER_UNIT = 8
"""Registers per thread are given out in eights."""

_FLOATS = (Work.FP32, Work.FP16, Work.BF16, Work.DOT_FP32)
_DOUBLES = (Work.FP64,)


@dataclass(frozen=True)
class LaunchTime:
    """The modelled time of one launch, or of one torch call."""

    name: str
    start_s: float
    terms: tuple[tuple[str, float], ...]
    """Resource and seconds, longest first."""
    resident: int = 0
    """Programs that one multiprocessor holds at a time."""
    waves: int = 0
    """Rounds in which all programs are run."""

    @property
    def seconds(self) -> float:
        """Start, and all terms with what they overlap."""
        together = math.pow(math.fsum(math.pow(seconds, OVERLAP) for _, seconds in self.terms), 1 / OVERLAP)
        return self.start_s + together

    @property
    def bound_by(self) -> str:
        """What takes longest; starting the kernel may."""
        if not self.terms or self.terms[0][1] < self.start_s:
            return "start of the kernel"
        return self.terms[0][0]


def launch_time(facts: LaunchFacts, kernel: CompiledKernel, device: Device) -> LaunchTime:
    """The modelled time of a launch on a device. See the module for the formula."""
    if not facts.programs:
        return LaunchTime(facts.kernel, 0.0, ())
    clock = device.clock_mhz * 1e6
    resident = resident_programs(kernel)
    busy = min(facts.programs, device.multiprocessors)
    each = math.ceil(facts.programs / device.multiprocessors)
    waves = math.ceil(facts.programs / (device.multiprocessors * resident))
    l2 = clock * min(busy * L2_SM_BYTES, device.multiprocessors * L2_BYTES)
    missed = facts.reread_bytes * _missed(facts.largest_bytes, device)
    further = max(0.0, facts.atomic_sector_bytes - facts.atomic_bytes)
    missed += (facts.atomic_bytes + 2 * further) * _missed(facts.atomic_bytes, device)
    updated = clock * min(busy * L2_SM_BYTES / 2, device.multiprocessors * ATOMIC_BYTES)
    often = max((block.most for block in facts.blocks), default=1.0)
    instructions, moves = _executed(facts.blocks, kernel)
    per_program = {kind: operations / facts.programs for kind, operations in facts.work.items()}
    terms = {
        "memory": (facts.unique_bytes + missed) / (device.bandwidth_gb_s * 1e9 * ACHIEVED),
        "L2 traffic": facts.sector_bytes / l2,
        "atomics": max(
            facts.atomic_sector_bytes / updated,
            facts.atomic_turns / clock,
        ),
        "spills": each * kernel.spills * 32 * kernel.warps * max(often, 1.0) / (clock * L1_BYTES),
        "instructions": each * kernel.warps * instructions / (SCHEDULERS * clock),
        "loads and stores": each * kernel.warps * moves / clock,
        "latency": max(waves * _alone(facts, kernel, device), _alone(facts, kernel, device, most=True)),
    }
    for unit, seconds in _unit_seconds(per_program, kernel, device).items():
        terms[unit] = each * seconds
    ordered = sorted(((name, seconds) for name, seconds in terms.items() if seconds > 0), key=lambda term: -term[1])
    return LaunchTime(facts.kernel, START_S, tuple(ordered), resident, waves)


def torch_time(call: TorchFacts, device: Device) -> LaunchTime:
    """The modelled time of a torch call that moves memory: one kernel, bound by it."""
    moved = (call.read_bytes + call.written_bytes) / (device.bandwidth_gb_s * 1e9 * ACHIEVED)
    return LaunchTime(call.name, START_S, (("memory", moved),))


def resident_programs(kernel: CompiledKernel) -> int:
    """Programs that fit one multiprocessor of sm_90 at a time, at least one."""
    registers = math.ceil(max(kernel.registers, 16) / _REGISTER_UNIT) * _REGISTER_UNIT * 32 * kernel.warps
    limits = (
        PROGRAMS,
        WARPS // kernel.warps,
        REGISTERS // registers,
        SHARED_BYTES // (kernel.shared_bytes + _RESERVED_SHARED),
    )
    return max(1, min(limits))


def _missed(buffer_bytes: float, device: Device) -> float:
    """Share of rereads of a buffer that L2 does not serve."""
    kept = device.l2_mb * 2**20
    return max(0.0, 1.0 - kept / buffer_bytes) if buffer_bytes else 0.0


def _unit_seconds(work: dict[Work, float], kernel: CompiledKernel, device: Device) -> dict[str, float]:
    """How long arithmetic keeps each unit of one multiprocessor busy."""
    found: dict[str, float] = {}
    for kind, operations in work.items():
        rate = device.rate(kind)
        if rate is None or not operations:
            continue
        seconds = operations / (rate / device.multiprocessors)
        if kind in _FLOATS:
            unit = "float units"
        elif kind in _DOUBLES:
            unit = "double units"
        elif kind is Work.SPECIAL:
            unit = "special functions"
        else:
            share = MMA_SHARE if device.capability == "9.0" and not kernel.wgmma else 1.0
            unit, seconds = "tensor cores", seconds / share
        found[unit] = found.get(unit, 0.0) + seconds
    return found


def _executed(blocks: tuple[BlockFacts, ...], kernel: CompiledKernel, *, most: bool = False) -> tuple[float, float]:
    """Instructions, and turns of the load and store unit, of one warp.

    Loops of the code are those of the IR in the same order. Where the compiler unrolled or split some, every loop of
    the code is taken to run as often as the most frequent one of the IR.
    """
    runs = {block.order: block.most if most else block.runs for block in blocks if block.order}
    matched = len(kernel.code) - 1 == len(runs)
    usual = max(runs.values(), default=1.0)
    often = [1.0, *(runs.get(order, 0.0) if matched else usual for order in range(1, len(kernel.code)))]
    return (
        sum(times * part.instructions for times, part in zip(often, kernel.code, strict=False)),
        sum(times * part.moves for times, part in zip(often, kernel.code, strict=False)),
    )


def _alone(facts: LaunchFacts, kernel: CompiledKernel, device: Device, *, most: bool = False) -> float:
    """Seconds of one program that has a multiprocessor for itself: the average one, or the one with most to do."""
    fresh = min(1.0, facts.unique_bytes / facts.sector_bytes) if facts.sector_bytes else 1.0
    wait = fresh * DRAM_CLOCKS + (1 - fresh) * L2_CLOCKS
    steps = math.log2(kernel.warps)
    across = 2 * SHARED_CLOCKS + BARRIER_CLOCKS + steps * SHUFFLE_CLOCKS if kernel.warps > 1 else 0.0
    reduction = 5 * SHUFFLE_CLOCKS + across
    instructions, moves = _executed(facts.blocks, kernel, most=most)
    clocks = PROGRAM_CLOCKS + max(instructions * max(WARP_CLOCKS, kernel.warps / SCHEDULERS), moves * kernel.warps)
    for block in facts.blocks:
        ahead = kernel.stages if block.in_loop and kernel.async_copies else 1
        once = (wait / ahead if block.loads else 0.0) + block.reductions * reduction
        clocks += (block.most if most else block.runs) * once
    return clocks / (device.clock_mhz * 1e6)
