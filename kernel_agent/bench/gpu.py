"""Which GPU kernels are run on, as a child sees it. The parent itself never starts CUDA."""

from __future__ import annotations

import torch
from pydantic import Field

from kernel_agent.errors import EnvironmentProblem
from kernel_agent.record import Record
from kernel_agent.sandbox import Limits

GPU_LIMITS = Limits(wall_s=420.0, memory_bytes=64 << 30, output_bytes=64 << 30, file_bytes=4 << 30, threads=4096)
"""Of a child that uses a GPU: CUDA reserves address space, not memory, and compilers are slow."""


GPU_SHARE = 0.9
"""Of a GPU's memory that torch may hold in one child: what takes all there is must not take it from a desktop, from
drivers, or from the child that carries on beside it."""


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


def require_gpu() -> None:
    """Raise `EnvironmentProblem` where torch sees no CUDA device."""
    if not has_gpu():
        raise EnvironmentProblem(
            "there is no CUDA device here: times of kernels are only taken on a GPU",
            remedy="Run this on a machine with a GPU, or let times be modelled: "
            "kernel-agent bench FILE --modelled 'H100 SXM'",
        )


def seen_gpu() -> GpuFacts:
    """The GPU that this process uses. For children: it starts CUDA."""
    import triton

    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return GpuFacts(
        name=found.name,
        capability=f"{found.major}.{found.minor}",
        multiprocessors=found.multi_processor_count,
        memory_bytes=found.total_memory,
        l2_bytes=getattr(found, "L2_cache_size", 0) or 64 << 20,
        versions=(f"torch {torch.__version__}", f"triton {triton.__version__}", f"CUDA {torch.version.cuda}"),
    )
