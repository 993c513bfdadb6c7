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


CHOSEN = """

@triton.autotune([{configs}], key=["n"])
@triton.jit
def _copy(X, Y, n, BLOCK: tl.constexpr, KIND: tl.constexpr = 0):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + i, mask=i < n)
    tl.store(Y + i, 2 * x if KIND > 48 else x, mask=i < n)


def backward(saved, g):
    dx = by_kernel(saved, g)
    same = torch.empty_like(dx)
    _copy[lambda meta: (triton.cdiv(dx.numel(), meta["BLOCK"]),)](dx, same, dx.numel())
    return same
"""
BY_KERNEL = ADDED.partition("@triton.jit\ndef _bwd")[2].partition("def backward")[0]
BY_KERNEL = f"""@triton.jit
def _bwd{BY_KERNEL}def by_kernel(saved, g):
    y, = saved
    dx = torch.empty_like(y)
    _bwd[(y.shape[0],)](g, y, dx, g.stride(0), g.stride(1), y.shape[1], BLOCK=triton.next_power_of_2(y.shape[1]))
    return dx
"""


def test_a_case_that_is_asked_again_runs_the_configuration_of_the_first_time(judge):
    # Its fifth call took a configuration that no call before had taken: the sizes in that one stood in none of them,
    # which is refused as a gradient that was kept. So was every kernel with more than four different sizes.
    configs = "triton.Config({'BLOCK': 2**k}) for k in range(4, 14)"
    verdict = judge.with_backward("softmax", BY_KERNEL + CHOSEN.format(configs=configs))
    assert verdict.green, verdict.message
    assert any(case.case.endswith(" again") for case in verdict.cases)


def test_each_of_many_configurations_is_run(judge):
    # The standard suite has fewer cases than this kernel has configurations: the last one was never run.
    many = "triton.Config({'BLOCK': 16, 'KIND': k}) for k in range(%d)"
    verdict = judge.with_backward("softmax", BY_KERNEL + CHOSEN.format(configs=many % 50))
    assert verdict.status is Status.WRONG_GRADIENT, verdict.message
    assert "KIND: 49" in verdict.message
    assert str(verdict.case).endswith("configuration=49")
    right = judge.with_backward("softmax", BY_KERNEL + CHOSEN.format(configs=many % 49))
    assert right.green, right.message
    assert len(right.cases) == right.cases_planned == 51, "two cases are asked with the configuration of another one"


def test_configurations_that_only_count_stages_or_warps_are_one(judge):
    # They compute the same: the wrong one stands behind so many of them that going through all in turn never met it.
    configs = "triton.Config({'BLOCK': 16, 'KIND': k // 90 * 49}, num_stages=1 + k) for k in range(91)"
    verdict = judge.with_backward("softmax", BY_KERNEL + CHOSEN.format(configs=configs), QUICK)
    assert verdict.status is Status.WRONG_GRADIENT, verdict.message


def test_configurations_for_which_there_is_no_room_are_noted(judge):
    configs = "triton.Config({'BLOCK': 16, 'KIND': k - 60}) for k in range(99)"
    verdict = judge.with_backward("softmax", BY_KERNEL + CHOSEN.format(configs=configs))
    assert verdict.green, verdict.message
    assert "37 of 99 configurations of an autotuned kernel left out: the budget is 64" in verdict.notes
