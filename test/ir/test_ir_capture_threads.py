"""A capture belongs to its thread: others run their stubs, their torch code and their functions undisturbed."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_agent.ir import execute, standin


@triton.jit
def _scale(X, Y, n, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    tl.store(Y + c, tl.load(X + c, mask=c < n) * FACTOR, mask=c < n)


class Hundred(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 100


def while_captured(other: Callable[[], None]) -> list[BaseException]:
    """Run `other` on a second thread while a stub is being executed on this one; what it raised."""
    raised: list[BaseException] = []

    def guarded() -> None:
        try:
            other()
        except BaseException as error:
            raised.append(error)

    def stub(x: Tensor) -> Tensor:
        thread = threading.Thread(target=guarded)
        thread.start()
        thread.join()
        return x

    execute(stub, (torch.zeros(3),), {}, leaves=(0,))
    return raised


def plain_torch() -> None:
    assert torch.zeros(2).dtype == torch.float32
    assert (torch.arange(2) / 2).dtype == torch.float32
    assert torch.ones(2).device.type == "cpu"
    assert isinstance(torch.Generator(), torch.Generator)


def plain_function() -> None:
    x = torch.randn(3, requires_grad=True)
    Hundred.apply(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [100.0] * 3


def plain_cuda_question() -> None:
    assert torch.cuda.is_available() is WITH_GPU


def plain_launch() -> None:
    if WITH_GPU:
        return
    with pytest.raises(RuntimeError, match="driver"):
        _scale[(1,)](torch.zeros(4), torch.zeros(4), 4, FACTOR=2, BLOCK=4)


WITH_GPU = torch.cuda.is_available()


@pytest.mark.parametrize("other", [plain_torch, plain_function, plain_cuda_question, plain_launch])
def test_another_thread_meets_torch_and_triton_as_they_are(other):
    assert while_captured(other) == []


def test_a_capture_inside_of_a_stand_in_of_another_thread_goes_on_when_that_one_ends():
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with standin():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)

    def stub(x: Tensor) -> bool:
        thread.start()
        entered.wait(10)
        leave.set()
        thread.join()
        return torch.cuda.is_available() and x.is_cuda

    assert execute(stub, (torch.zeros(3),)).result


def test_stubs_on_two_threads_get_their_own_launches_and_gradients():
    meeting = threading.Barrier(2, timeout=20)
    found: dict[float, tuple[int, list[float]]] = {}

    def run(factor: float) -> None:
        def stub(x: Tensor) -> Tensor:
            y = torch.empty_like(x)
            for _ in range(3):
                meeting.wait()  # both are inside of their stubs
                _scale[(1,)](x, y, x.numel(), FACTOR=factor, BLOCK=8)
            return y + torch.zeros(5, device="cuda")

        execution = execute(stub, (torch.ones(5),), {}, leaves=(0,))
        (gradient,) = torch.autograd.grad(execution.result, [execution.leaves[0]], torch.ones(5, dtype=torch.float64))
        found[factor] = (len(execution.launches), gradient.tolist())

    threads = [threading.Thread(target=run, args=(factor,)) for factor in (2.0, 3.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {2.0: (3, [2.0] * 5), 3.0: (3, [3.0] * 5)}
