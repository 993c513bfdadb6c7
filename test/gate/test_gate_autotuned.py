"""Autotuned kernels: what Triton may choose, and what choosing leaves in memory, is part of what is judged."""

from __future__ import annotations

import pytest

from kernel_agent.gate import GateOptions, Status

QUICK = GateOptions(seeds=(0,), odd_sizes=0, max_cases=4, values=())
ADDED = """

@triton.autotune([triton.Config({{"BLOCK": 16}}), triton.Config({{"BLOCK": 64}})], key=["n"]{options})
@triton.jit
def _add(X, Y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(Y + i, tl.load(X + i, mask=i < n), mask=i < n)


@triton.jit
def _bwd(DY, Y, DX, stride_m, stride_n, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    m = c < N
    g = tl.load(DY + row * stride_m + c * stride_n, mask=m, other=0.0)
    y = tl.load(Y + row * N + c, mask=m, other=0.0)
    tl.store(DX + row * N + c, y * (g - tl.sum(g * y, 0)), mask=m)


def backward(saved, g):
    y, = saved
    part, dx = torch.empty_like(y), torch.zeros_like(y)
    _bwd[(y.shape[0],)](g, y, part, g.stride(0), g.stride(1), y.shape[1], BLOCK=triton.next_power_of_2(y.shape[1]))
    _add[lambda meta: (triton.cdiv(y.numel(), meta["BLOCK"]),)](part, dx, y.numel())
    return dx
"""


def test_additions_into_memory_that_timing_has_added_into_are_wrong(judge):
    # Every configuration alone is right: only the launches by which Triton chooses make the sum too large.
    verdict = judge.with_backward("softmax", ADDED.format(options=""), QUICK)
    assert verdict.status is Status.WRONG_GRADIENT, verdict.message
    assert "_add with BLOCK: 16" in verdict.message
    assert "on the same memory" in verdict.details


@pytest.mark.parametrize(
    "options",
    [', reset_to_zero=["Y"]', ', restore_value=["Y"]', ", pre_hook=lambda named, reset_only=False: named['Y'].zero_()"],
    ids=["reset", "restored", "hook"],
)
def test_memory_that_is_made_ready_for_each_launch_is_right(judge, options):
    verdict = judge.with_backward("softmax", ADDED.format(options=options), QUICK)
    assert verdict.green, verdict.message
