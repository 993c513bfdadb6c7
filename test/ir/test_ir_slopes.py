"""Infinite derivatives are noticed while the kernel runs; only then is safe mode tried."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from gradient_check import check_gradients
from torch import Tensor

from kernel_agent.ir import ExecOptions, execute
from kernel_agent.ir.slopes import Slopes


@triton.jit
def _masked_roots(X, Y, N, ROUNDS: tl.constexpr, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    x = tl.load(X + tl.program_id(0) * N + c, mask=c < N, other=0.0)
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in range(ROUNDS):
        total += tl.where(c < N, tl.sqrt(x), 0.0)
    tl.store(Y + tl.program_id(0), tl.sum(total, 0))


def masked_roots(x: Tensor, rounds: int = 3) -> Tensor:
    y = torch.empty(x.shape[0], device=x.device)
    _masked_roots[(x.shape[0],)](x, y, x.shape[1], ROUNDS=rounds, BLOCK=32)
    return y


def test_an_infinite_derivative_in_a_checkpointed_launch_is_noticed_too():
    # the first run of a checkpoint records nothing, so whoever only looks at recorded values sees no danger
    options = ExecOptions(memory=1 << 11)
    check_gradients(masked_roots, (torch.rand(6, 20) + 0.5,), lambda x: 3 * x.sqrt().sum(-1), options=options)


def _all_finite(function, *operands: Tensor) -> bool:
    execution = execute(function, operands, {}, leaves=range(len(operands)))
    slopes = Slopes()
    for op in execution.launches[0].module.all_ops:
        if op.name.endswith("sqrt"):
            with torch.no_grad():
                slopes.watch(op, operands[0].sqrt(), [operands[0]])
    return slopes.all_finite()


def test_finite_derivatives_are_told_from_an_infinite_one():
    x = torch.rand(2, 32) + 0.5
    assert _all_finite(masked_roots, x)
    x[1, 3] = 0.0  # d sqrt(x) = 1 / (2 sqrt(x))
    assert not _all_finite(masked_roots, x)
