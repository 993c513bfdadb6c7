"""Numbers that a kernel asks its constexprs for are no sizes like others."""

from __future__ import annotations

import front_checks
import torch
import triton
import triton.language as tl

from kernel_agent.compiler.front import read_launch
from kernel_agent.compiler.front.asked import Asked, asked_numbers
from kernel_agent.compiler.ssa.special import Special
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


@triton.jit
def window_kernel(X, Y, n, WINDOW: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    y = tl.load(X + at, mask=at < n, other=0.0)
    if WINDOW > -1:
        y = y * WINDOW
    if WINDOW >= 6:
        y = tl.exp(y)
    tl.store(Y + at, y, mask=at < n)


def read_window(window: int) -> Kernel:
    kernels: list[Kernel] = []

    def note(launch: object) -> Kernel:
        kernels.append(read_launch(launch))
        return read_launch(launch, distinct=False)

    def stub(x: torch.Tensor, y: torch.Tensor) -> None:
        window_kernel[(1,)](x, y, 20, WINDOW=window, BLOCK=32)

    front_checks.compare(stub, torch.randn(20), torch.zeros(20), read=note)
    (kernel,) = kernels
    return kernel


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
    assert asked_numbers(power_kernel) == {"ORDER": Asked(equal=(1, 2))}
    assert asked_numbers(window_kernel) == {"WINDOW": Asked(sides=(-1, 6))}


def test_the_kernel_of_most_orders_is_not_that_of_the_orders_it_asks_for() -> None:
    # Where 5 becomes 6 only numbers change, so that the gradient of exp(5 x) was taken for that of abs(x), too: nothing
    # refused the call.
    assert read(5).special == {"ORDER": Special((1, 2))}
    assert read(5, others=(4, 2, 1)).fixed == frozenset()
    assert read(2).fixed == {"ORDER"}
    assert read(1, others=(5,)).fixed == {"ORDER"}, "the launch that is read is not the general case"


def test_the_kernel_of_a_window_is_not_that_of_windows_on_the_other_side_of_a_bound() -> None:
    # Where 4 becomes 5 only numbers change, as from 7 to 8; what lies beyond a bound was taken for the same kernel.
    assert read_window(4).special == {"WINDOW": Special(up_to=-1, down_to=6)}
    assert read_window(7).special == {"WINDOW": Special(up_to=5)}


def test_a_value_is_special_by_its_side_or_as_it_is() -> None:
    some = Special((3, 9), up_to=0, down_to=8)
    assert [value for value in range(-1, 10) if value in some] == [-1, 0, 3, 8, 9]
    for value in range(-1, 10):
        assert eval(some.denied("value"), {"value": value}) is (value not in some)
    assert some.denied("W") == "0 < W < 8 and W != 3"
    assert Special((1, 2)).denied("W") == "W not in (1, 2)"
    assert Special((), up_to=0).denied("W") == "W > 0"
    assert Special((), down_to=8).denied("W") == "W < 8"
    assert not Special()


@triton.jit
def smoothed_kernel(X, Y, n, SMOOTHING: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    y = tl.load(X + at, mask=at < n, other=0.0)
    if SMOOTHING > 0:
        y = tl.exp(y) * (1 - SMOOTHING) + SMOOTHING
    tl.store(Y + at, y, mask=at < n)


def test_a_side_that_a_float_is_on_is_said_by_the_number_in_the_source() -> None:
    # One minus the float next to zero is one, by which nothing is multiplied: another kernel than that of 0.1, so that
    # a backward asked whether the smoothing is more than 5e-324.
    kernels: list[Kernel] = []

    def note(launch: object) -> Kernel:
        kernels.append(read_launch(launch, floats=("SMOOTHING",)))
        return read_launch(launch, distinct=False)

    def stub(x: torch.Tensor, y: torch.Tensor) -> None:
        smoothed_kernel[(1,)](x, y, 20, SMOOTHING=0.1, BLOCK=32)

    front_checks.compare(stub, torch.randn(20), torch.zeros(20), read=note)
    assert kernels[0].special["SMOOTHING"].denied("s") == "s > 0.0"
