"""Torch code of a stub sees the GPU it was written for: dtypes, devices, views, casts, allocations, launches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from gradient_check import check_gradients
from torch import Tensor

from kernel_agent.ir import CallClass, LaunchError, as_image, declared_dtype, execute


@triton.jit
def _double(X, Y, n, BLOCK: tl.constexpr):
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + c, tl.load(X + c, mask=c < n) * 2, mask=c < n)


def double(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _double[(triton.cdiv(x.numel(), 32),)](x, y, x.numel(), BLOCK=32)
    return y


def test_tensors_report_declared_dtype_device_and_size():
    seen: dict[str, Any] = {}

    def stub(x: Tensor) -> Tensor:
        seen.update(
            dtype=x.dtype, device=x.device, cuda=x.is_cuda, item=x.element_size(), bytes=x.nbytes, top=x.t().dtype
        )
        assert torch.finfo(x.dtype).bits == 16
        assert (x[1:].data_ptr() - x.data_ptr()) == 2 * x.stride(0)
        return x

    execute(stub, (torch.randn(3, 4, dtype=torch.bfloat16),))
    assert seen == {
        "dtype": torch.bfloat16,
        "device": torch.device("cuda", 0),
        "cuda": True,
        "item": 2,
        "bytes": 24,
        "top": torch.bfloat16,
    }


@pytest.mark.parametrize(
    ("operation", "dtype"),
    [
        (lambda x: x.float(), torch.float32),
        (lambda x: x.to(torch.bfloat16), torch.bfloat16),
        (lambda x: x + torch.ones(4, device=x.device), torch.float32),
        (lambda x: x.sum(-1, dtype=torch.float32), torch.float32),
        (lambda x: x > 0, torch.bool),
        (lambda x: torch.zeros(4, device=x.device), torch.float32),
        (lambda x: torch.empty(4, dtype=torch.float16, device="cuda"), torch.float16),
        (lambda x: x.new_zeros(4), torch.float16),
        (lambda x: x.argmax(-1), torch.int64),
        (lambda x: torch.cat([x, x.float()]), torch.float32),
        (lambda x: x.unbind(0)[1], torch.float16),
        (lambda x: next(iter(x)), torch.float16),
        (lambda x: x[x > 0], torch.float16),
        (lambda x: x.type_as(torch.zeros(1)), torch.float32),
    ],
)
def test_result_dtypes_are_those_torch_would_give(operation, dtype):
    execution = execute(operation, (torch.randn(3, 4, dtype=torch.float16),))
    assert declared_dtype(execution.result) == dtype


def test_a_cast_makes_new_memory_and_the_same_dtype_does_not():
    def stub(x: Tensor) -> tuple[bool, bool]:
        return x.float().data_ptr() == x.data_ptr(), x.half().data_ptr() == x.data_ptr()

    assert execute(stub, (torch.randn(3).half(),)).result == (False, True)


def test_values_are_not_rounded_by_casts():
    x = torch.randn(100, dtype=torch.float64)
    result = execute(lambda x: double(x.half().to(torch.bfloat16)), (as_image(x, torch.float32),)).result
    assert torch.equal(result, 2 * x)


def test_torch_code_around_launches_is_differentiated():
    def stub(x: Tensor, w: Tensor) -> Tensor:
        return (double(x.float().t().contiguous()) @ w.float()).sum(0)

    check_gradients(stub, (torch.randn(4, 5).half(), torch.randn(4, 3)), lambda x, w: (2 * x.t() @ w).sum(0))


def test_kernels_that_write_into_views_of_one_allocation():
    def stub(x: Tensor) -> Tensor:
        both = torch.empty(2, x.numel(), device=x.device)
        first, second = both.unbind(0)
        _double[(1,)](x, first, x.numel(), BLOCK=32)
        _double[(1,)](first, second, x.numel(), BLOCK=32)
        return first + second

    check_gradients(stub, (torch.randn(20),), lambda x: 6 * x)


def test_arguments_that_share_storage_get_their_own_gradients():
    packed = torch.randn(2, 8)
    check_gradients(lambda a, b: double(a) * b, (packed[0], packed[1]), lambda a, b: 2 * a * b)


def test_a_stub_under_no_grad_or_detach_still_gives_the_kernels_gradient():
    @torch.no_grad()
    def stub(x: Tensor) -> Tensor:
        return double(x.detach())

    check_gradients(stub, (torch.randn(20),), lambda x: 2 * x)


def test_an_expanded_leaf_gets_one_gradient_element_per_index():
    check_gradients(lambda x: x.contiguous() * 2.0, (torch.randn(3, 1).expand(3, 4),), lambda x: 2 * x)


def test_functions_that_return_several_tensors_under_names():
    execution = execute(lambda x: x.max(-1).indices.dtype, (torch.randn(3, 4).half(),))
    assert execution.result is torch.int64


def test_torch_functions_are_sorted_by_what_they_do():
    def stub(x: Tensor) -> Tensor:
        partial = torch.zeros(4, x.shape[1], device=x.device, dtype=torch.float32)
        partial[0] = x.float().sum(0)
        lengths = torch.arange(4, device=x.device) * 2
        assert lengths.shape == (4,)
        return torch.softmax(partial.sum(0).to(x.dtype).view(1, -1), -1)

    execution = execute(stub, (torch.randn(3, 4).half(),))
    assert execution.torch_ops == ("softmax",)
    kinds = {call.name: call.kind for call in execution.torch_calls}
    assert kinds["zeros"] is CallClass.ALLOCATION
    assert kinds["__setitem__"] is CallClass.COPY
    assert kinds["sum"] is CallClass.REDUCTION
    assert kinds["view"] is CallClass.VIEW
    assert kinds["mul"] is CallClass.INDEX


@triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})
@triton.jit
def _heuristic(X, Y, n, scale, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if EVEN:
        tl.store(Y + c, tl.load(X + c) * scale)
    else:
        tl.store(Y + c, tl.load(X + c, mask=c < n) * scale, mask=c < n)


@pytest.mark.parametrize("n", [32, 33, 1])
def test_heuristics_defaults_and_ones_that_triton_makes_constants(n):
    def stub(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        _heuristic[(triton.cdiv(n, 16),)](x, y, n, 1, BLOCK=16, num_warps=2)
        return y

    execution = check_gradients(stub, (torch.randn(n),), lambda x: x)
    assert execution.launches[0].kernel == "_heuristic"
    assert execution.launches[0].grid == (triton.cdiv(n, 16), 1, 1)
    assert execution.launches[0].file == __file__


def test_a_warm_up_gives_the_numbers_stubs_compute_their_grid_from():
    def stub(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        kernel = _double.warmup(x, y, x.numel(), BLOCK=32, num_warps=4, grid=(1,))
        kernel._init_handles()
        assert kernel.n_regs > 0
        assert kernel.metadata.shared >= 0
        kernel[(1, 1, 1)](x, y, x.numel())
        return y

    check_gradients(stub, (torch.randn(20),), lambda x: 2 * x)


def test_a_launch_with_an_unknown_argument_names_it():
    def stub(x: Tensor) -> None:
        _double[(1,)](x, x, 3, BLOKC=32)

    with pytest.raises(LaunchError, match="_double has no parameter BLOKC"):
        execute(stub, (torch.randn(3),))


def test_a_launch_with_a_missing_argument_names_it():
    def stub(x: Tensor) -> None:
        _double[(1,)](x, x, BLOCK=32)

    with pytest.raises(LaunchError, match="missing a required argument: 'n'"):
        execute(stub, (torch.randn(3),))
