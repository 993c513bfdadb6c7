"""A pair's kernels as sm_90 gets them at the sizes of BENCH: registers, spills, shared memory. Needs no GPU."""

from __future__ import annotations

from kernel_agent.bench.compiled import SHARED_LIMIT, CompiledKernel
from kernel_agent.collection.kernelfacts import KernelFacts
from kernel_agent.oracle.job import run_truth
from kernel_agent.pairs.spec import FileFacts
from kernel_agent.sandbox import Limits, Sandbox

LIMITS = Limits(wall_s=600.0)
"""Compiling a kernel takes about a second of processor time, and a machine may be busy."""


def compiled_kernels(facts: FileFacts, sandbox: Sandbox) -> tuple[KernelFacts, ...]:
    """Compile what a pair launches at the entries of its BENCH, in the order of first launches.

    Raises `InputError` for what is wrong in the file and `TruthError` where the launches cannot be told.
    """
    payload = {"facts": facts.model_dump(mode="json")}
    messages = run_truth(sandbox, "compile_child:compiled", facts, payload, limits=LIMITS, room="collection")
    found: dict[tuple[str, str], KernelFacts] = {}
    for message in messages:
        kernel = CompiledKernel.model_validate(message.record["kernel"])
        here = _facts(str(message.record["part"]), kernel)
        before = found.get((here.part, here.kernel))
        found[here.part, here.kernel] = here if before is None else _most(before, here)
    return tuple(found.values())


def _facts(part: str, kernel: CompiledKernel) -> KernelFacts:
    problem = kernel.problem
    if not problem and not kernel.fits:
        problem = f"{kernel.shared_bytes} bytes of shared memory, sm_90 has {SHARED_LIMIT}"
    return KernelFacts(
        part=part,
        kernel=kernel.name,
        registers=kernel.registers,
        spills=kernel.spills,
        shared_bytes=kernel.shared_bytes,
        problem=problem,
    )


def _most(one: KernelFacts, other: KernelFacts) -> KernelFacts:
    return KernelFacts(
        part=one.part,
        kernel=one.kernel,
        registers=max(one.registers, other.registers),
        spills=max(one.spills, other.spills),
        shared_bytes=max(one.shared_bytes, other.shared_bytes),
        problem=one.problem or other.problem,
    )
