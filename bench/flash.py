"""PyTorch's own fused attention, and its backward times: what a derived attention is compared with in the same run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernel_agent.bench.clock import Clock

SHARE = 0.3
"""Seconds of the GPU that a time may take."""


@dataclass(frozen=True)
class Flash:
    """Microseconds of one backward, of which gradients are all it computes."""

    flash_us: float | None
    """FlashAttention-2; None where PyTorch has none for the shape."""
    cudnn_us: float | None
    """cuDNN; None where it has none."""


def flash(entry: dict[str, Any]) -> Flash:
    """Times at an entry of attention's SWEEP: queries and keys of one length, scaled by 1 / sqrt(D).

    Inputs lie as (B, T, H, D) or as (B, H, T, D), whichever is faster for the backend.
    """
    return Flash(*(_best(entry, backend) for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)))


def backwards(entry: dict[str, Any], backend: SDPBackend) -> Iterator[Callable[[], object]]:
    """Backwards of a backend at an entry, one for each way that inputs may lie; none where it takes no such shape."""
    dtype = getattr(torch, entry["dtype"])
    shape = (entry["B"], entry["T"], entry["H"], entry["D"])
    for heads_first in (False, True):
        inputs = [torch.randn(shape, device="cuda").to(dtype).transpose(1, 2) for _ in range(3)]
        if heads_first:
            inputs = [tensor.contiguous() for tensor in inputs]
        inputs = [tensor.requires_grad_() for tensor in inputs]
        try:
            with sdpa_kernel(backend):
                output = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=entry["causal"])
            yield _backward(output, inputs)
        except RuntimeError as error:  # PyTorch says in many ways that a backend does not take a shape
            print(f"{backend.name}: {str(error).splitlines()[0]}", flush=True)


def _backward(output: torch.Tensor, inputs: list[torch.Tensor]) -> Callable[[], object]:
    cotangent = torch.randn_like(output)

    def work() -> object:
        return torch.autograd.grad(output, inputs, cotangent, retain_graph=True)

    work()
    return work


def _best(entry: dict[str, Any], backend: SDPBackend) -> float | None:
    return min(map(_median, backwards(entry, backend)), default=None)


def _median(work: Callable[[], object]) -> float:
    clock = Clock(256 << 20)
    times = sorted(clock.times(work, clock.pace(work, SHARE)))
    return times[len(times) // 2]
