"""A stub's autograd functions are run plainly, whenever and wherever their `apply` was bound."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from gradient_check import check_gradients
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernel_agent.ir import execute, import_module


@triton.jit
def _double(X, Y, n, BLOCK: tl.constexpr):
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + c, tl.load(X + c, mask=c < n) * 2, mask=c < n)


def double(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _double[(triton.cdiv(x.numel(), 32),)](x, y, x.numel(), BLOCK=32)
    return y


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.shape, ctx.scale = x.shape, 2
        return double(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad * 100  # wrong on purpose: the truth must come from the kernel


bound_here = Double.apply


def test_autograd_functions_are_run_plainly():
    check_gradients(lambda x: Double.apply(x), (torch.randn(20),), lambda x: 2 * x)


def test_an_apply_that_was_bound_long_before_is_run_plainly():
    # a module that was imported as usual holds torch's own apply; its gradient would be 100 times the cotangent
    check_gradients(lambda x: bound_here(x), (torch.randn(20),), lambda x: 2 * x)


def test_an_apply_may_be_the_stub_itself():
    check_gradients(Double.apply, (torch.randn(20),), lambda x: 2 * x)


class Hundred(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 100


def test_after_a_capture_apply_is_torchs_own_again():
    hundred = Hundred.apply
    check_gradients(hundred, (torch.randn(3),), lambda x: 2 * x)
    x = torch.randn(3, requires_grad=True)
    hundred(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [100.0] * 3


BOUND_EARLY = """
import torch, triton
import triton.language as tl

@triton.jit
def kernel(X, Y, n, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    tl.store(Y + c, tl.load(X + c, mask=c < n) * 2, mask=c < n)

class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.empty_like(x)
        kernel[(1,)](x, y, x.numel(), BLOCK=32)
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad * 100

double = Double.apply
"""


def test_an_apply_that_was_bound_under_the_stand_in_is_run_plainly_too(tmp_path):
    path = tmp_path / "bound_early.py"
    path.write_text(BOUND_EARLY)
    module = import_module(path, "capture_bound_early")
    check_gradients(module.double, (torch.randn(20),), lambda x: 2 * x)
    assert module.double.__func__ is torch.autograd.Function.__dict__["apply"].__func__


class Outer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        return Double.apply(x) * Double.apply(w)

    @staticmethod
    def backward(ctx, grad):
        return grad, grad


def test_a_function_that_applies_others_in_its_forward():
    check_gradients(Outer.apply, (torch.randn(8), torch.randn(8)), lambda x, w: 4 * x * w)


class NewStyle(torch.autograd.Function):
    @staticmethod
    def forward(x, scale=3.0):
        return double(x) * scale, x.argmax()

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, scale = inputs
        ctx.save_for_backward(x)
        ctx.scale = scale
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, grad, _):
        return grad * 100, None


def test_a_function_with_a_setup_context_gets_its_defaults():
    # setup_context unpacks two inputs although the call gives one
    check_gradients(lambda x: NewStyle.apply(x), (torch.randn(8),), lambda x: (6 * x, None))


class Marked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y, statistic = double(x), double(x)
        ctx.mark_non_differentiable(statistic)
        return y, statistic

    @staticmethod
    def backward(ctx, grad, _):
        return grad * 100


def test_no_gradient_goes_through_an_output_that_is_marked():
    # not even by way of a kernel that reads its memory
    def stub(x: Tensor) -> Tensor:
        y, statistic = Marked.apply(x)
        return y + double(statistic)

    check_gradients(stub, (torch.randn(8),), lambda x: 2 * x + 4 * x.detach())


class Asks(torch.autograd.Function):
    seen = ()

    @staticmethod
    def forward(ctx, x, index, bias, flag):
        Asks.seen = ctx.needs_input_grad
        assert not torch.is_grad_enabled()
        return double(x.detach()) + x.data

    @staticmethod
    def backward(ctx, grad):
        return grad, None, None, None


def test_a_forward_sees_what_torch_would_show_it():
    # a function that is told an absent bias needs a gradient would read its shape; and what is detached inside of
    # a forward, where nothing is recorded, still depends on the input
    check_gradients(lambda x, i: Asks.apply(x, i, None, True), (torch.randn(8), torch.arange(8)), lambda x, _: 3 * x)
    assert Asks.seen == (True, False, False, False)


class Mixed(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float16)
    def forward(ctx, x):
        return double(x)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, grad):
        return grad * 100


@pytest.mark.parametrize("autocast", [False, True])
def test_functions_written_for_mixed_precision(autocast):
    def stub(x: Tensor) -> Tensor:
        with torch.autocast("cuda", enabled=autocast, dtype=torch.bfloat16):
            return Mixed.apply(x)

    check_gradients(stub, (torch.randn(8),), lambda x: 2 * x)


def test_results_under_autocast_have_the_dtypes_that_a_gpu_would_give_them():
    # a kernel that is given the product would be specialised for float32
    def stub(x: Tensor) -> list[torch.dtype]:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            inside = [
                (x @ x).dtype,
                torch.nn.functional.linear(x, x).dtype,
                (x.half()).softmax(-1).dtype,
                (x + x).dtype,
            ]
        return [*inside, (x @ x).dtype]

    expected = [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32, torch.float32]
    assert execute(stub, (torch.randn(4, 4),)).result == expected


def test_a_loss_that_writes_its_gradient_over_its_input_has_the_gradient_of_the_loss():
    # as Liger's cross entropy does: the memory of x holds dx afterwards, which is not what the loss was computed from
    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            loss = (x * x).sum()
            _double[(1,)](x, x, x.numel(), BLOCK=32)
            return loss

        @staticmethod
        def backward(ctx, grad):
            return grad

    execution = execute(Loss.apply, (torch.arange(4.0),), {}, leaves=(0,))
    assert execution.mutated == ("x",) or execution.mutated == ("args[0]",)
    (gradient,) = torch.autograd.grad(execution.result, list(execution.leaves.values()))
    assert gradient.tolist() == [0.0, 2.0, 4.0, 6.0]
