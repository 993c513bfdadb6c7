"""Numbers that a kernel asks its constexprs for are no sizes like others."""

from __future__ import annotations

import front_checks
import torch
import triton
import triton.language as tl

from kernel_agent.compiler.front import read_launch
from kernel_agent.compiler.front.asked import asked_numbers
from kernel_agent.compiler.ssa.value import Kernel


@triton.jit
def raised(x, POWER: tl.constexpr):
    if POWER == 2:
        y = x * x
    else:
        y = tl.exp(x * POWER)
    return y


@triton.jit
def power_kernel(X, Y, n, ORDER: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(X + at, mask=at < n, other=0.0)
    if ORDER == 1:
        y = tl.abs(x)
    else:
        y = raised(x, POWER=ORDER)
    tl.store(Y + at, y, mask=at < n)


def read(order: int, others: tuple[int, ...] = ()) -> Kernel:
    kernels: list[Kernel] = []

    def note(launch: object) -> Kernel:
        kernels.append(read_launch(launch, others=[{"ORDER": other, "BLOCK": 32} for other in others]))
        return read_launch(launch, distinct=False)

    def stub(x: torch.Tensor, y: torch.Tensor) -> None:
        power_kernel[(1,)](x, y, 20, ORDER=order, BLOCK=32)

    front_checks.compare(stub, torch.randn(20), torch.zeros(20), read=note)
    (kernel,) = kernels
    return kernel


def test_literals_are_found_in_the_kernel_and_in_functions_that_it_hands_its_constexprs() -> None:
    assert asked_numbers(power_kernel) == {"ORDER": (1, 2)}


def test_the_kernel_of_most_orders_is_not_that_of_the_orders_it_asks_for() -> None:
    # Where 5 becomes 6 only numbers change, so that the gradient of exp(5 x) was taken for that of abs(x), too: nothing
    # refused the call.
    assert read(5).special == {"ORDER": (1, 2)}
    assert read(5, others=(4, 2, 1)).fixed == frozenset()
    assert read(2).fixed == {"ORDER"}
    assert read(1, others=(5,)).fixed == {"ORDER"}, "the launch that is read is not the general case"
