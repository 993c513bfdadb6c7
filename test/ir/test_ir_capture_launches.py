"""Every way to launch a kernel and every kind of argument that Triton takes."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from gradient_check import check_gradients
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernel_agent.ir import LaunchError, execute

FACTOR = tl.constexpr(3)


@triton.jit
def _scale(X, Y, n, scale, BLOCK: tl.constexpr, SQUARE: tl.constexpr = False):
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(X + c, mask=c < n) * scale
    if SQUARE:
        value = value * value
    tl.store(Y + c, value, mask=c < n)


def by_run(x: Tensor, y: Tensor) -> None:
    _scale.run(x, y, x.numel(), 3.0, BLOCK=16, grid=(3,), warmup=False)


def by_keywords(x: Tensor, y: Tensor) -> None:
    _scale[lambda meta: (triton.cdiv(meta["n"], meta["BLOCK"]),)](
        scale=3.0, X=x, BLOCK=16, Y=y, n=x.numel(), SQUARE=False, num_warps=8, num_stages=3
    )


def by_list(x: Tensor, y: Tensor) -> None:
    _scale[[3, 1]](x, y, x.numel(), 3.0, 16, num_ctas=1, enable_fp_fusion=False)


def by_tensor(x: Tensor, y: Tensor) -> None:
    _scale[(torch.tensor(3, device=x.device),)](x, y, x.numel(), 3, 16)


def by_constexpr(x: Tensor, y: Tensor) -> None:
    _scale[(3, 1, 1)](x, y, x.numel(), FACTOR, tl.constexpr(16))


def by_three_warps(x: Tensor, y: Tensor) -> None:
    compiled = _scale.warmup(torch.float32, torch.float32, 40, 3.0, BLOCK=16, grid=(1,))
    compiled[(3, 1, 1)](x, y, x.numel(), 3.0)


@pytest.mark.parametrize("launch", [by_run, by_keywords, by_list, by_tensor, by_constexpr, by_three_warps])
def test_a_kernel_may_be_launched_in_every_way(launch):
    def stub(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        launch(x, y)
        return y

    check_gradients(stub, (torch.randn(40),), lambda x: 3 * x)


@pytest.mark.parametrize("grid", [(1.5,), (1, 1, 1, 1), (-1,), ()])
def test_a_grid_that_is_none_is_refused(grid):
    with pytest.raises(LaunchError, match="grid"):
        execute(lambda x: _scale[grid](x, x, 4, 1.0, 4), (torch.ones(4),))


@pytest.mark.parametrize("grid", [(1, 65536), (1, 1, 65536), lambda meta: (1, 70000)])
def test_a_grid_that_no_gpu_takes_is_refused(grid):
    # Programs are cheap in an executor and the values come out right: on a device the launch is an error.
    with pytest.raises(LaunchError, match="a GPU takes at most"):
        execute(lambda x: _scale[grid](x, x, 4, 1.0, 4), (torch.ones(4),))


def test_an_empty_grid_launches_nothing():
    assert execute(lambda x: _scale[(0,)](x, x, 4, 1.0, 4) and x, (torch.ones(4),)).result.tolist() == [1.0] * 4


class Matrix(NamedTuple):
    pointer: Any
    stride: int
    scale: float


@triton.jit
def _tuples(pair, nested, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    x = tl.load(pair[0] + c * nested[1][0])
    tl.store(pair[1] + c, x * nested[0] + nested[1][1])


@triton.jit
def _named(x, y, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    tl.store(y.pointer + c * y.stride, tl.load(x.pointer + c * x.stride) * x.scale)


def test_tuples_of_tensors_and_numbers():
    def stub(x: Tensor) -> Tensor:
        y = torch.empty(8, device=x.device)
        _tuples[(1,)]((x, y), (2.0, (x.stride(0), 1)), BLOCK=8)
        return y

    check_gradients(stub, (torch.randn(16)[::2],), lambda x: 2 * x + 1)


def test_named_tuples_are_read_by_name():
    def stub(x: Tensor) -> Tensor:
        y = torch.empty(8, device=x.device)
        _named[(1,)](Matrix(x, x.stride(0), 2.5), Matrix(y, 1, 1.0), BLOCK=8)
        return y

    check_gradients(stub, (torch.randn(16)[::2],), lambda x: 2.5 * x)


@triton.jit
def _copy_tile(source, target, ROWS: tl.constexpr, COLS: tl.constexpr):
    r, c = tl.program_id(0) * ROWS, tl.program_id(1) * COLS
    target.store([r, c], source.load([r, c]) * 2)


@triton.jit
def _make_descriptors(X, Y, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    source = tl.make_tensor_descriptor(X, [rows, cols], [cols, 1], [ROWS, COLS])
    target = tl.make_tensor_descriptor(Y, [rows, cols], [cols, 1], [ROWS, COLS])
    _copy_tile(source, target, ROWS, COLS)


def with_host_descriptors(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    tiles = [TensorDescriptor.from_tensor(tensor, [4, 8]) for tensor in (x, y)]
    _copy_tile[(triton.cdiv(x.shape[0], 4), triton.cdiv(x.shape[1], 8))](*tiles, 4, 8)
    return y


def with_device_descriptors(x: Tensor) -> Tensor:
    def allocate(size: int, _alignment: int, _stream: Any) -> Tensor:
        return torch.empty(size, dtype=torch.int8, device="cuda")

    triton.set_allocator(allocate)
    y = torch.empty_like(x)
    _make_descriptors[(triton.cdiv(x.shape[0], 4), triton.cdiv(x.shape[1], 8))](x, y, *x.shape, 4, 8)
    return y


@pytest.mark.parametrize("stub", [with_host_descriptors, with_device_descriptors])
def test_tensor_descriptors_stop_at_the_edges(stub):
    check_gradients(stub, (torch.randn(6, 12),), lambda x: 2 * x)


@triton.jit
def _load_beyond(source, Y, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    tl.store(Y + c, source.load([0]))


def test_a_descriptor_may_pad_with_nan():
    def stub(x: Tensor) -> Tensor:
        y = torch.empty(8, device=x.device)
        _load_beyond[(1,)](TensorDescriptor.from_tensor(x, [8], padding="nan"), y, 8)
        return y

    result = execute(stub, (torch.ones(6),)).result
    assert result[:6].tolist() == [1.0] * 6
    assert bool(result[6:].isnan().all())


@triton.jit
def _pad_on_the_device(X, Y, n, BLOCK: tl.constexpr):
    source = tl.make_tensor_descriptor(X, [n], [1], [BLOCK], padding_option="nan")
    tl.store(Y + tl.arange(0, BLOCK), source.load([0]))


def test_a_descriptor_made_on_the_device_may_pad_with_nan():
    def stub(x: Tensor) -> Tensor:
        y = torch.empty(8, device=x.device)
        _pad_on_the_device[(1,)](x, y, x.numel(), 8)
        return y

    assert execute(stub, (torch.ones(6),)).result.isnan().tolist() == [False] * 6 + [True] * 2


@triton.jit
def _grouped(POINTERS, LENGTHS, Y, width, BLOCK: tl.constexpr):
    g = tl.program_id(0)
    pointer = tl.load(POINTERS + g).to(tl.pointer_type(tl.float32))
    c = tl.arange(0, BLOCK)
    value = tl.load(pointer + c, mask=c < tl.load(LENGTHS + g), other=0.0)
    tl.store(Y + g * width + c, value * value, mask=c < width)


@triton.jit
def _descriptor_and_flag(source, flag, Y, BLOCK: tl.constexpr):
    value = source.load([0])
    if flag:
        value = value * 2
    tl.store(Y + tl.arange(0, BLOCK), value)


@pytest.mark.parametrize("flag", [False, True])
def test_a_flag_behind_a_descriptor_keeps_its_value(flag):
    # some versions of Triton put flags of their own there
    def stub(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        _descriptor_and_flag[(1,)](TensorDescriptor.from_tensor(x, [8]), flag, y, 8)
        return y

    check_gradients(stub, (torch.randn(8),), lambda x: x * (2 if flag else 1))


def test_a_table_of_addresses_leads_to_all_tensors():
    def stub(a: Tensor, b: Tensor) -> Tensor:
        table = torch.tensor([a.data_ptr(), b[2:].data_ptr()], dtype=torch.int64, device=a.device)
        lengths = torch.tensor([a.numel(), b.numel() - 2], device=a.device, dtype=torch.int32)
        y = torch.zeros(2, 8, device=a.device)
        _grouped[(2,)](table, lengths, y, 8, BLOCK=8)
        return y

    def reference(a: Tensor, b: Tensor) -> Tensor:
        pad = torch.nn.functional.pad
        return torch.stack([pad(a * a, (0, 3)), pad(b[2:] * b[2:], (0, 1))])

    check_gradients(stub, (torch.randn(5), torch.randn(9)), reference)


def test_addresses_behind_addresses():
    @triton.jit
    def kernel(TABLES, Y, BLOCK: tl.constexpr):
        table = tl.load(TABLES).to(tl.pointer_type(tl.int64))
        pointer = tl.load(table + 1).to(tl.pointer_type(tl.float32))
        c = tl.arange(0, BLOCK)
        tl.store(Y + c, tl.load(pointer + c) * 3)

    def stub(a: Tensor, b: Tensor) -> Tensor:
        table = torch.tensor([a.data_ptr(), b.data_ptr()], device=a.device)
        tables = torch.tensor([table.data_ptr()], device=a.device)
        y = torch.empty(4, device=a.device)
        kernel[(1,)](tables, y, BLOCK=4)
        return y

    check_gradients(lambda b: stub(torch.zeros(4), b), (torch.randn(4),), lambda b: 3 * b)


def test_values_of_tensors_steer_the_stub():
    def stub(x: Tensor, lengths: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        start = 0
        for length in lengths.tolist():
            if length and (x[start : start + length] > -100).all():
                _scale[(1,)](x[start:], y[start:], length, 2.0 + start, BLOCK=16)
            start += length
        return y * int(lengths.max().item())

    def reference(x: Tensor, lengths: Tensor) -> Tensor:
        assert lengths.tolist() == [3, 0, 5]
        return 5 * torch.cat([x[:3] * 2, x[3:] * 5])

    check_gradients(stub, (torch.randn(8), torch.tensor([3, 0, 5])), reference)


def test_questions_about_the_gpu_are_answered():
    def stub(x: Tensor) -> Tensor:
        assert (x.is_cuda, x.is_contiguous(), x.device.type, x.get_device()) == (True, True, "cuda", 0)
        assert torch.cuda.get_device_capability(x.device) >= (9, 0)
        assert x.data_ptr() % 16 == 0
        assert (torch.finfo(x.dtype).bits, x.element_size()) == (32, 4)
        assert torch.accelerator.current_accelerator().type == "cuda"
        side, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
        with torch.cuda.device(x.device), torch.cuda.stream(side):
            y = torch.empty(x.shape, device=x.device, dtype=x.dtype)
            _scale[(1,)](x, y, x.numel(), 2.0, BLOCK=16)
            event.record()
        torch.cuda.current_stream().wait_stream(side)
        event.synchronize()
        x.record_stream(side)
        return y.view(4, 2).t().contiguous().to(x.device, non_blocking=True)

    check_gradients(stub, (torch.randn(8),), lambda x: 2 * x.view(4, 2).t())


def contiguous_arguments(stub: Any) -> Any:
    """What libraries put around their stubs."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        def make(value: Any) -> Any:
            return value.contiguous() if isinstance(value, Tensor) else value

        device = next(value.device for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        with torch.cuda.device(device.index):
            return stub(*map(make, args), **{key: make(value) for key, value in kwargs.items()})

    return wrapper


@contiguous_arguments
def decorated(x: Tensor, scale: float) -> Tensor:
    y = torch.empty_like(x)
    _scale[(1,)](x, y, x.numel(), scale, BLOCK=32, SQUARE=True)
    return y


def test_stubs_whose_arguments_are_made_contiguous_by_a_decorator():
    check_gradients(lambda x: decorated(x, scale=2.0), (torch.randn(4, 6).t(),), lambda x: 4 * x * x)


class Strided:
    """A pointer with strides of its own, as libraries make them where torch has no such view."""

    def __init__(self, base: Tensor, offset: int) -> None:
        self.base, self.offset, self.dtype = base, offset, base.dtype

    def data_ptr(self) -> int:
        return int(self.base.data_ptr()) + self.offset * self.base.element_size()


@triton.jit
def _backwards(X, Y, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    tl.store(Y + c, tl.load(X - c) * 2)


def test_whatever_has_an_address_and_a_dtype_is_a_pointer():
    def stub(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        _backwards[(1,)](Strided(x, 7), y, BLOCK=8)
        return y

    check_gradients(stub, (torch.randn(8),), lambda x: 2 * x.flip(0))


def test_a_tensor_may_be_reinterpreted_for_a_kernel():
    def stub(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        _scale[(1,)](triton.reinterpret(x, tl.float32), y, x.numel(), 2.0, BLOCK=8)
        return y

    check_gradients(stub, (torch.randn(8),), lambda x: 2 * x)


def test_a_compiled_kernel_that_a_library_keeps_launches_in_the_next_call_too():
    # the second execution must not run in the memory of the first
    kept: list[Any] = []

    def stub(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        if not kept:
            kept.append(_scale[(1,)](x, y, x.numel(), 2.0, BLOCK=8))
        else:
            kept[0][(1, 1, 1)](x, y, x.numel(), 2.0)
        return y

    for _ in range(2):
        check_gradients(stub, (torch.randn(8),), lambda x: 2 * x)
