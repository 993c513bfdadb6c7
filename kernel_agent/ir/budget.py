"""How much memory an execution may use for values on the way: a figure on the CPU, half of what is free on a GPU."""

from __future__ import annotations

import torch
from torch.cuda.memory import empty_cache, mem_get_info, memory_allocated, memory_reserved

from kernel_agent.ir.errors import IRError
from kernel_agent.ir.memory import CPU

ON_CPU = 1 << 30
"""Bytes; enough for values of all examples, and little enough for a test machine."""


class OutOfDeviceMemory(IRError):
    """Not even one program at a time fits beside the buffers of a launch."""


def memory_for(device: torch.device) -> int:
    """Bytes that intermediate values may take on a device: half of what it has free, what torch keeps unused included.

    The names above are bound when this module is imported: under the stand-in, `torch.cuda` answers for another GPU.
    """
    if device == CPU:
        return ON_CPU
    free, _ = mem_get_info(device)
    return int(free + memory_reserved(device) - memory_allocated(device)) // 2


def release(device: torch.device) -> None:
    """Give back what torch keeps unused, after a device ran out of memory."""
    if device.type == "cuda":
        empty_cache()


def indexed(device: torch.device) -> torch.device:
    """`cuda` as the device it means now, `cuda:0`; torch's CUDA runtime must run."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", int(torch._C._cuda_getDevice()))
    return device
