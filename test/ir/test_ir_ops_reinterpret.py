"""Memory read and written as another type than the tensor's own."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from gradient_check import check_gradients

from kernel_agent.ir import UnsupportedOp, execute


@triton.jit
def _copy_as(X, Y, n: tl.constexpr, SOURCE: tl.constexpr, TARGET: tl.constexpr):
    c = tl.arange(0, n)
    x = tl.load(X.to(tl.pointer_type(SOURCE), bitcast=True) + c)
    tl.store(Y.to(tl.pointer_type(TARGET), bitcast=True) + c, x)


def _copy(x, count, source, target, like):
    def stub(x):
        y = torch.empty(like.shape, dtype=like.dtype, device=x.device)
        _copy_as[(1,)](x, y, count, source, target)
        return y

    return execute(stub, (x,))


def test_int8_memory_read_four_at_a_time():
    x = torch.randint(-128, 128, (32,), dtype=torch.int8)
    got = _copy(x, 8, tl.int32, tl.int32, torch.empty(8, dtype=torch.int32))
    assert torch.equal(got.result, x.view(torch.int32))
    assert got.findings == ()


def test_int32_memory_read_byte_by_byte():
    x = torch.randint(-(2**31), 2**31 - 1, (8,), dtype=torch.int32)
    assert torch.equal(_copy(x, 32, tl.int8, tl.int8, torch.empty(32, dtype=torch.int8)).result, x.view(torch.int8))


def test_bytes_written_into_int32_memory():
    # four lanes share an element; taken one at a time, three of them would be lost
    x = torch.randint(-128, 128, (32,), dtype=torch.int8)
    got = _copy(x, 32, tl.int8, tl.int8, torch.empty(8, dtype=torch.int32))
    assert torch.equal(got.result, x.view(torch.int32))
    assert got.findings == ()


def test_wide_integers_written_into_narrow_memory():
    x = torch.randint(-(2**62), 2**62, (4,), dtype=torch.int64)
    assert torch.equal(_copy(x, 4, tl.int64, tl.int64, torch.empty(16, dtype=torch.int16)).result, x.view(torch.int16))


def test_pairs_of_bfloat16_read_as_int32():
    x = torch.randn(16).bfloat16()
    got = _copy(x, 8, tl.int32, tl.int32, torch.empty(8, dtype=torch.int32))
    assert torch.equal(got.result, x.view(torch.int32))


def test_pairs_of_bfloat16_moved_as_int32():
    x = torch.randn(16).bfloat16()
    assert torch.equal(_copy(x, 8, tl.int32, tl.int32, torch.empty(16, dtype=torch.bfloat16)).result, x.double())


@triton.jit
def _widen(X, Y, n: tl.constexpr, KIND: tl.constexpr):
    c = tl.arange(0, n)
    tl.store(Y + c, tl.load(X.to(tl.pointer_type(KIND), bitcast=True) + c).to(tl.float32))


@pytest.mark.parametrize(("kind", "dtype"), [(tl.float8e4nv, torch.float8_e4m3fn), (tl.float8e5, torch.float8_e5m2)])
def test_bytes_read_as_fp8(kind, dtype):
    def stub(x):
        y = torch.empty(256, device=x.device)
        _widen[(1,)](x, y, 256, kind)
        return y

    x = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    torch.testing.assert_close(execute(stub, (x,)).result, x.view(dtype).double(), equal_nan=True, rtol=0, atol=0)


def test_an_address_between_two_elements_is_refused():
    @triton.jit
    def shifted(X, Y):
        tl.store(
            Y, tl.load((X.to(tl.pointer_type(tl.int8), bitcast=True) + 2).to(tl.pointer_type(tl.int32), bitcast=True))
        )

    def stub(x):
        y = torch.empty(1, dtype=torch.int32, device=x.device)
        shifted[(1,)](x, y)
        return y

    with pytest.raises(UnsupportedOp, match="no multiple of 4"):
        execute(stub, (torch.arange(4, dtype=torch.int32),))


def test_half_a_float_that_carries_a_gradient_is_refused():
    def stub(x):
        y = torch.empty(32, dtype=torch.int8, device=x.device)
        _copy_as[(1,)](x, y, 32, tl.int8, tl.int8)
        return y

    with pytest.raises(UnsupportedOp, match="splits floats that carry gradients") as refusal:
        execute(stub, (torch.randn(8),), leaves=(0,))
    assert "dtype" in refusal.value.remedy


def test_floats_moved_as_integers_of_their_width_keep_value_and_gradient():
    def stub(x):
        y = torch.empty_like(x)
        _copy_as[(1,)](
            x,
            y,
            x.numel(),
            tl.int32 if x.dtype == torch.float32 else tl.int16,
            tl.int32 if x.dtype == torch.float32 else tl.int16,
        )
        return y

    check_gradients(stub, (torch.randn(16),), lambda x: x.clone())
    check_gradients(stub, (torch.randn(16).bfloat16(),), lambda x: x.clone())


@triton.jit
def _nibbles(X, Y, n: tl.constexpr):
    c = tl.arange(0, n)
    packed = tl.load(X + c // 2)
    shift = (c % 2) * 4
    tl.store(Y + c, ((packed >> shift) & 0xF).to(tl.int8) - 8)


def test_int4_unpacked_from_int8():
    def stub(x):
        y = torch.empty(2 * x.numel(), dtype=torch.int8, device=x.device)
        _nibbles[(1,)](x, y, 2 * x.numel())
        return y

    x = torch.randint(-128, 128, (16,), dtype=torch.int8)
    wanted = torch.stack([(x & 15) - 8, ((x >> 4) & 15) - 8], -1).flatten()
    assert torch.equal(execute(stub, (x,)).result, wanted)
