"""Floats that kernels are compiled with have names, but where kernels ask for one of them."""

from __future__ import annotations

import front_checks
import torch
import triton
import triton.language as tl

from kernel_agent.compiler.front import read_launch
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.special import Special
from kernel_agent.compiler.ssa.value import Kernel


@triton.jit
def mixed_kernel(X, Y, N, eps: tl.constexpr, beta: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + at, mask=at < N, other=0.0)
    if beta == 0.0:
        y = tl.exp(x + eps)
    else:
        y = beta * tl.exp(x + eps) + (1 - beta) * tl.exp(-x)
    tl.store(Y + at, y, mask=at < N)


def read(beta: float, floats: tuple[str, ...], others: tuple[float, ...] = ()) -> Kernel:
    kernels: list[Kernel] = []

    def note(launch: object) -> Kernel:
        given = [{"eps": 0.1, "beta": other, "BLOCK": 64} for other in others]
        kernels.append(read_launch(launch, others=given, floats=floats))
        return read_launch(launch, distinct=False)

    def stub(x: torch.Tensor, y: torch.Tensor) -> None:
        mixed_kernel[(1,)](x, y, 40, eps=0.1, beta=beta, BLOCK=64)

    front_checks.compare(stub, torch.randn(40), torch.zeros(40), read=note)
    (kernel,) = kernels
    return kernel


def symbols(kernel: Kernel) -> set[str]:
    consts = [op.attributes["symbol"] for op in kernel.ops if op.code is Code.CONST]
    return {symbol for symbol in consts if symbol and symbol != "BLOCK"}


def test_floats_that_calls_change_bear_their_names() -> None:
    # As numbers they held for this call alone.
    kernel = read(0.3, ("eps", "beta"))
    assert symbols(kernel) == {"eps", "beta", "(1.0 - beta)"}
    assert not kernel.fixed
    assert symbols(read(0.3, ())) == set(), "what is the same in every call stays a number"


def test_a_float_that_the_kernel_asks_for_is_set_apart() -> None:
    # With beta 0.0 half of the kernel is not there: its gradient is not that of 0.3, and a call has to be refused. At
    # 1.0 Triton drops a product, and the same gradient holds.
    assert read(0.3, ("eps", "beta"), others=(0.0, 0.6, 1.0)).special == {"beta": Special((0.0,))}
    assert read(0.0, ("eps", "beta")).fixed == {"beta"}
