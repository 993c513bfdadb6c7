"""`gpu_facts`: which GPU a child of the sandbox sees. The parent itself never starts CUDA."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from pydantic import Field

from kernel_agent.errors import EnvironmentProblem
from kernel_agent.record import Record
from kernel_agent.sandbox import Job, Limits

if TYPE_CHECKING:
    from kernel_agent.sandbox import Call, Sandbox

GPU_LIMITS = Limits(wall_s=420.0, memory_bytes=64 << 30, output_bytes=64 << 30, file_bytes=4 << 30, threads=4096)
"""Of a child that uses a GPU: CUDA reserves address space, not memory, and compilers are slow."""


class GpuFacts(Record):
    """The GPU that kernels are run on, and with what."""

    name: str
    capability: str = Field(description="`9.0`")
    multiprocessors: int
    memory_bytes: int
    l2_bytes: int
    versions: tuple[str, ...] = Field(description="such as `torch 2.11.0`")


def has_gpu() -> bool:
    """Whether torch sees a CUDA device here."""
    return bool(torch.cuda.is_available())


def gpu_facts(sandbox: Sandbox) -> GpuFacts:
    """Ask a child which GPU it sees. Raises `EnvironmentProblem` where there is none, or where none can be used."""
    if not has_gpu():
        raise EnvironmentProblem(
            "there is no CUDA device here: times of kernels are only taken on a GPU",
            remedy="Run this on a machine with a GPU, or let times be modelled: "
            "kernel-agent bench FILE --modelled 'H100 SXM'",
        )
    report = sandbox.run(Job("kernel_agent.bench.gpu:seen", limits=GPU_LIMITS, label="looks at the GPU"))
    if not report.finished or not report.messages:
        said = report.error.message if report.error else report.message
        raise EnvironmentProblem(f"a sandboxed child cannot use the GPU: {said}", remedy="Run `kernel-agent doctor`.")
    return GpuFacts.model_validate(report.messages[0].record)


def seen(call: Call) -> None:
    """Entry of a child: sends a `GpuFacts`."""
    import triton

    found = torch.cuda.get_device_properties(0)
    facts = GpuFacts(
        name=found.name,
        capability=f"{found.major}.{found.minor}",
        multiprocessors=found.multi_processor_count,
        memory_bytes=found.total_memory,
        l2_bytes=getattr(found, "L2_cache_size", 0) or 64 << 20,
        versions=(f"torch {torch.__version__}", f"triton {triton.__version__}", f"CUDA {torch.version.cuda}"),
    )
    call.send(facts.model_dump(mode="json"))
