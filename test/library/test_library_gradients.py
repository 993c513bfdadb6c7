"""`kernel_agent.gradients` and `outputs`: exact for undecorated functions that launch kernels."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

import kernel_agent
from kernel_agent.errors import InputError
from kernel_agent.library import BrokenForward


@triton.jit
def _scaled_silu(X, W, Y, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(X + offsets, mask=mask).to(tl.float32)
    w = tl.load(W + offsets, mask=mask).to(tl.float32)
    tl.store(Y + offsets, w * x * tl.sigmoid(x), mask=mask)


def scaled_silu(x: Tensor, w: Tensor, scale: float = 1.0) -> Tensor:
    y = torch.empty_like(x)
    _scaled_silu[(triton.cdiv(x.numel(), 16),)](x, w, y, x.numel(), BLOCK=16)
    return y * scale


def silu_into(x: Tensor, w: Tensor, out: Tensor) -> None:
    _scaled_silu[(triton.cdiv(x.numel(), 16),)](x, w, out, x.numel(), BLOCK=16)


def reference(x: Tensor, w: Tensor, scale: float = 1.0) -> Tensor:
    return w * torch.nn.functional.silu(x) * scale


def operands(dtype: torch.dtype = torch.float16) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, w, dy = (torch.randn(5, 9, generator=generator, dtype=torch.float64) for _ in range(3))
    return x.to(dtype), w.to(dtype), dy


def expected(x: Tensor, w: Tensor, dy: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
    exact = [value.double().requires_grad_() for value in (x, w)]
    dx, dw = torch.autograd.grad(reference(*exact, **kwargs), exact, dy)
    return dx, dw


def test_gradients_come_by_name_in_argument_order_and_in_float64():
    # A result by position, in float16, or in the order of the caller's cotangents would be another one.
    x, w, dy = operands()
    found = kernel_agent.gradients(scaled_silu, x, w, cotangents=dy)
    dx, dw = expected(x, w, dy)
    assert list(found) == ["x", "w"]
    assert found["x"].dtype == found["w"].dtype == torch.float64
    torch.testing.assert_close(found["x"], dx, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(found["w"], dw, rtol=1e-12, atol=1e-13)


def test_outputs_are_not_rounded_to_the_declared_dtype():
    # float16 outputs would be off by 1e-4.
    x, w, _ = operands()
    y = kernel_agent.outputs(scaled_silu, x, w)
    assert type(y) is Tensor
    assert y.dtype == torch.float64
    torch.testing.assert_close(y, reference(x.double(), w.double()), rtol=1e-12, atol=1e-13)


def test_wrt_chooses_arguments_by_name_and_by_position():
    x, w, dy = operands()
    assert list(kernel_agent.gradients(scaled_silu, x, w, cotangents=dy, wrt="w")) == ["w"]
    assert list(kernel_agent.gradients(scaled_silu, x, w, cotangents=dy, wrt=[1])) == ["w"]
    assert list(kernel_agent.gradients(scaled_silu, x, w, cotangents=dy, wrt=("w", "x"))) == ["x", "w"]


def test_wrt_refuses_what_is_no_floating_argument():
    x, w, dy = operands()
    with pytest.raises(InputError, match="'z' is no argument"):
        kernel_agent.gradients(scaled_silu, x, w, cotangents=dy, wrt="z")
    with pytest.raises(InputError, match="'scale' is no floating tensor"):
        kernel_agent.gradients(scaled_silu, x, w, scale=2.0, cotangents=dy, wrt="scale")


def test_keyword_arguments_reach_the_stub_and_may_be_differentiated():
    x, w, dy = operands()
    found = kernel_agent.gradients(scaled_silu, x, w=w, scale=3.0, cotangents=dy)
    dx, dw = expected(x, w, dy, scale=3.0)
    torch.testing.assert_close(found["x"], dx, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(found["w"], dw, rtol=1e-12, atol=1e-13)


def test_a_stub_that_writes_into_an_argument_is_differentiated_through_it():
    # Without this a stub of the `out=` kind has no output at all.
    x, w, dy = operands()
    found = kernel_agent.gradients(silu_into, x, w, torch.zeros_like(x), cotangents=dy)
    dx, dw = expected(x, w, dy)
    torch.testing.assert_close(found["x"], dx, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(found["w"], dw, rtol=1e-12, atol=1e-13)
    assert not found["out"].any()


def test_tensors_in_a_list_have_names_of_their_own():
    def stub(pair: list[Tensor]) -> Tensor:
        return scaled_silu(*pair)

    x, w, dy = operands()
    found = kernel_agent.gradients(stub, [x, w], cotangents=dy)
    dx, dw = expected(x, w, dy)
    torch.testing.assert_close(found["pair[0]"], dx, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(found["pair[1]"], dw, rtol=1e-12, atol=1e-13)


class _Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return scaled_silu(x, w)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        raise AssertionError("the backward that came with the forward proves nothing")


def test_an_autograd_function_takes_the_names_of_its_forward_and_not_its_backward():
    x, w, dy = operands()
    found = kernel_agent.gradients(_Silu.apply, x, w, cotangents=dy)
    dx, dw = expected(x, w, dy)
    torch.testing.assert_close(found["x"], dx, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(found["w"], dw, rtol=1e-12, atol=1e-13)


def test_reports_call_an_autograd_function_by_its_class():
    # Every one of them has the name `apply`.
    x, w, _ = operands()
    assert str(kernel_agent.sanitize(_Silu.apply, x, w)).startswith("_Silu: clean")
    assert str(kernel_agent.cost(_Silu.apply, x, w)).startswith("cost of _Silu")


def test_a_partial_and_a_lambda_are_stubs_too():
    x, w, dy = operands()
    dx, _ = expected(x, w, dy, scale=2.0)
    partial = kernel_agent.gradients(functools.partial(scaled_silu, scale=2.0), x, w, cotangents=dy)
    arrow = kernel_agent.gradients(lambda a, b: scaled_silu(a, b, 2.0), x, w, cotangents=dy)
    torch.testing.assert_close(partial["x"], dx, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(arrow["a"], dx, rtol=1e-12, atol=1e-13)


class _Scaled(torch.nn.Module):
    def __init__(self, w: Tensor) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(w)

    def forward(self, x: Tensor) -> Tensor:
        return scaled_silu(x, self.w)


def test_the_parameters_of_a_module_follow_its_arguments():
    x, w, dy = operands()
    dx, dw = expected(x, w, dy)
    module = _Scaled(w)
    found = kernel_agent.gradients(module, x, cotangents=dy)
    assert list(found) == ["x", "w"]
    torch.testing.assert_close(found["x"], dx, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(found["w"], dw, rtol=1e-12, atol=1e-13)
    assert list(kernel_agent.gradients(module, x, cotangents=dy, wrt="w")) == ["w"]
    assert module.w.grad is None


def test_an_argument_without_influence_has_a_zero_gradient():
    x, w, dy = operands()
    found = kernel_agent.gradients(lambda x, w, unused: scaled_silu(x, w), x, w, x.clone(), cotangents=dy)
    assert found["unused"].shape == x.shape
    assert not found["unused"].any()


def test_missing_and_none_cotangents_count_as_zero():
    def two(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return scaled_silu(x, w), scaled_silu(w, x)

    x, w, dy = operands()
    alone = kernel_agent.gradients(two, x, w, cotangents=[dy, torch.zeros_like(dy)])
    for short in (dy, [dy], [dy, None]):
        found = kernel_agent.gradients(two, x, w, cotangents=short)
        assert torch.equal(found["x"], alone["x"])
        assert torch.equal(found["w"], alone["w"])
    second = kernel_agent.gradients(two, x, w, cotangents=[None, dy])
    assert not torch.equal(second["x"], alone["x"])


def test_cotangents_are_asked_for_unless_the_output_is_one_number():
    x, w, _ = operands()
    with pytest.raises(InputError, match="cotangents are needed"):
        kernel_agent.gradients(scaled_silu, x, w)
    found = kernel_agent.gradients(lambda x, w: scaled_silu(x, w).sum(), x, w)
    dx, _ = expected(x, w, torch.ones(x.shape, dtype=torch.float64))
    torch.testing.assert_close(found["x"], dx, rtol=1e-12, atol=1e-13)


def test_a_cotangent_of_another_shape_is_refused_with_both_shapes():
    # Broadcasting it silently would multiply the gradient.
    x, w, dy = operands()
    with pytest.raises(InputError, match=r"\(9,\), but the output has \(5, 9\)"):
        kernel_agent.gradients(scaled_silu, x, w, cotangents=dy[0])
    with pytest.raises(InputError, match="2 cotangents for 1 outputs"):
        kernel_agent.gradients(scaled_silu, x, w, cotangents=[dy, dy])


def test_a_declared_statistic_takes_no_cotangent():
    @kernel_agent.autodiff(nondiff_outputs=(1,))
    def stub(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return scaled_silu(x, w), x.float().mean(-1)

    x, w, dy = operands()
    dx, _ = expected(x, w, dy)
    torch.testing.assert_close(kernel_agent.gradients(stub, x, w, cotangents=dy)["x"], dx, rtol=1e-12, atol=1e-13)
    with pytest.raises(InputError, match="output 1 has no gradient"):
        kernel_agent.gradients(stub, x, w, cotangents=[dy, torch.ones(5)])


@triton.jit
def _past_the_end(X, Y, n, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(Y + offsets, tl.load(X + offsets), mask=offsets < n)


def test_a_forward_that_reads_past_its_buffer_gives_no_numbers():
    # Its gradients would be those of memory that belongs to nobody.
    def stub(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        _past_the_end[(1,)](x, y, x.numel(), BLOCK=16)
        return y

    with pytest.raises(BrokenForward, match="outside of x"):
        kernel_agent.gradients(stub, torch.randn(9), cotangents=torch.randn(9))
    with pytest.raises(BrokenForward, match="outside of x"):
        kernel_agent.outputs(stub, torch.randn(9))


def test_arguments_are_left_as_they_were():
    x, w, dy = operands()
    out = torch.zeros_like(x)
    kernel_agent.gradients(silu_into, x, w, out, cotangents=dy)
    assert not out.any()
    assert not x.requires_grad


def test_a_file_that_asks_for_the_gpu_on_import_is_imported_under_the_stand_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # On a machine without a GPU both questions end the import.
    (tmp_path / "asks_on_import.py").write_text(
        "import torch, triton\n"
        "DEVICE = triton.runtime.driver.active.get_active_torch_device()\n"
        "SMS = torch.cuda.get_device_properties(DEVICE).multi_processor_count\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with kernel_agent.standin():
        module = importlib.import_module("asks_on_import")
    assert module.DEVICE.type == "cuda"
    assert module.SMS > 0
