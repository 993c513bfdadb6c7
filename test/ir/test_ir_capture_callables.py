"""Whatever can be called is a stub: modules, methods, partials, custom operators, compiled functions."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from gradient_check import check_gradients
from torch import Tensor, nn

from kernel_agent.ir import CaptureError, execute


@triton.jit
def _scale_rows(X, W, Y, cols, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    value = tl.load(X + r * cols + c, mask=c < cols) * tl.load(W + c, mask=c < cols)
    tl.store(Y + r * cols + c, value, mask=c < cols)


def scale(x: Tensor, w: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _scale_rows[(x.shape[0],)](x, w, y, x.shape[1], BLOCK=16)
    return y


class Scale(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(features))
        self.register_buffer("calls", torch.zeros(features))
        self.linear = nn.Linear(features, 3)
        self.cache: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = scale(x.contiguous(), self.weight)
        self.calls += 1
        self.cache = y
        return self.linear(y)

    def twice(self, x: Tensor, *, factor: float = 2.0) -> Tensor:
        return scale(x, self.weight.data) * factor


class Subclass(Scale):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


PARAMETERS = ("weight", "linear.weight", "linear.bias")


def check_module(module: nn.Module, offset: float) -> None:
    x = torch.randn(4, 8)
    execution = execute(module, (x,), {}, leaves=("x", *PARAMETERS))
    exact = {"x": x.double(), **{name: dict(module.named_parameters())[name].detach().double() for name in PARAMETERS}}
    exact = {name: tensor.requires_grad_() for name, tensor in exact.items()}
    expected = (exact["x"] * exact["weight"]) @ exact["linear.weight"].t() + exact["linear.bias"] + offset
    torch.testing.assert_close(execution.result, expected)
    cotangent = torch.randn(4, 3, dtype=torch.float64)
    ours = torch.autograd.grad(execution.result, [execution.leaves[name] for name in exact], cotangent)
    theirs = torch.autograd.grad(expected, list(exact.values()), cotangent)
    for name, got, want in zip(exact, ours, theirs, strict=True):
        torch.testing.assert_close(got, want, msg=lambda text, name=name: f"gradient of {name}: {text}")
    assert execution.mutated == ("calls",)


def test_a_module_has_gradients_for_its_input_and_its_parameters():
    check_module(Scale(8), 0.0)


def test_a_subclassed_module_and_its_forward_are_stubs_too():
    check_module(Subclass(8), 1.0)
    module = Subclass(8)
    assert execute(module.forward, (torch.randn(4, 8),), {}, leaves=("weight",)).leaves["weight"].shape == (8,)


def test_a_module_is_left_as_it_was():
    # images of a capture must not stay in the module: its next call would compute with them
    module = Scale(8)
    weight, before = module.weight, module.weight.detach().clone()
    execute(module, (torch.randn(4, 8),), {}, leaves=("weight",))
    assert module.cache is None
    assert module.calls.tolist() == [0.0] * 8
    assert type(module.calls) is Tensor
    assert module.calls.dtype is torch.float32
    assert module.weight is weight
    assert torch.equal(weight, before)


def test_methods_with_keyword_arguments():
    module = Scale(8)
    x = torch.randn(4, 8)
    result = execute(module.twice, (x,), {"factor": 3.0}).result
    torch.testing.assert_close(result, x.double() * module.weight.detach().double() * 3)


def test_partials_lambdas_and_objects_with_a_call():
    class Stub:
        def __call__(self, x: Tensor, w: Tensor) -> Tensor:
            return scale(x, w)

    x, w = torch.randn(4, 8), torch.randn(8)
    for stub in (Stub(), Stub().__call__, lambda x, w: scale(x, w), functools.partial(Stub())):
        check_gradients(stub, (x, w), lambda x, w: x * w)
    check_gradients(functools.partial(scale, w=w), (x,), lambda x: x * w)


TABLE = torch.randn(8)


def test_a_table_among_the_globals_is_read_exactly_and_left_alone():
    # not as an image, it would be float32 memory under a float64 kernel
    before = TABLE.clone()

    def stub(x: Tensor) -> Tensor:
        TABLE.add_(1)
        return scale(x, TABLE)

    check_gradients(stub, (torch.randn(4, 8),), lambda x: x * (before.double() + 1))
    assert torch.equal(TABLE, before)


@torch.library.custom_op("kernel_agent_test::scale", mutates_args=())
def scale_op(x: Tensor, w: Tensor) -> Tensor:
    return scale(x, w)


@scale_op.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.triton_op("kernel_agent_test::scale_triton", mutates_args=())
def scale_triton_op(x: Tensor, w: Tensor) -> Tensor:
    y = torch.empty_like(x)
    torch.library.wrap_triton(_scale_rows)[(x.shape[0],)](x, w, y, x.shape[1], BLOCK=16)
    return y


@torch.library.custom_op("kernel_agent_test::scale_gpu", mutates_args=(), device_types="cuda")
def scale_gpu_op(x: Tensor, w: Tensor) -> Tensor:
    return scale(x, w)


LIBRARY = torch.library.Library("kernel_agent_test", "FRAGMENT")
LIBRARY.define("scale_old(Tensor x, Tensor w) -> Tensor")
LIBRARY.impl("scale_old", scale, "CUDA")


@pytest.mark.parametrize(
    "stub",
    [
        scale_op,
        scale_triton_op,
        scale_gpu_op,
        lambda x, w: torch.ops.kernel_agent_test.scale(x, w),
        lambda x, w: torch.ops.kernel_agent_test.scale_triton.default(x, w),
        lambda x, w: torch.ops.kernel_agent_test.scale_old(x, w),
    ],
    ids=["custom_op", "triton_op", "for the GPU alone", "by name", "overload", "library"],
)
def test_custom_operators_run_their_python_function(stub):
    check_gradients(stub, (torch.randn(4, 8), torch.randn(8)), lambda x, w: x * w)


def test_a_kernel_that_is_wrapped_for_the_compiler_is_launched_as_itself():
    def stub(x: Tensor, w: Tensor) -> Tensor:
        y = torch.empty_like(x)
        torch.library.wrap_triton(_scale_rows)[(x.shape[0],)](x, w, y, x.shape[1], BLOCK=16)
        return y

    check_gradients(stub, (torch.randn(4, 8), torch.randn(8)), lambda x, w: x * w)


@torch.compile(backend="eager")
def compiled_early(x: Tensor, w: Tensor) -> Tensor:
    return scale(x, w) * 2


def test_compiled_functions_run_as_they_are_written():
    def stub(x: Tensor, w: Tensor) -> Tensor:
        late = torch.compile(lambda y: y + 1, dynamic=False)
        decorated = torch.compile(dynamic=True)(lambda y: y * 3)
        return decorated(late(compiled_early(x, w)))

    check_gradients(stub, (torch.randn(4, 8), torch.randn(8)), lambda x, w: 3 * (2 * x * w + 1))


@torch.compile(backend="eager", fullgraph=True)
def compiled_whole(x: Tensor) -> Tensor:
    return x * 2


def test_functions_that_insist_on_being_compiled_as_a_whole_run_as_they_are_written():
    check_gradients(compiled_whole, (torch.randn(4),), lambda x: 2 * x)


def test_checkpointed_stubs_are_recorded_like_any_other():
    from torch.utils.checkpoint import checkpoint

    for reentrant in (False, True):
        check_gradients(
            lambda x, w, reentrant=reentrant: checkpoint(scale, x, w, use_reentrant=reentrant),
            (torch.randn(4, 8), torch.randn(8)),
            lambda x, w: x * w,
        )


def test_a_kernel_made_for_the_interpreter_is_refused(monkeypatch):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    kernel = triton.jit(_scale_rows.fn)
    monkeypatch.undo()
    with pytest.raises(CaptureError, match="interpreter"):
        execute(lambda x: kernel[(1,)](x, x, x, 4, BLOCK=4), (torch.ones(4),))
