"""Faithful arithmetic of elementwise kernels, reductions, casts and atomics: bit for bit where torch does the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from kernel_agent.errors import InputError
from kernel_agent.ir import CaptureError, ExecOptions, Numerics, execute
from kernel_agent.ir.rounding import Mode, fused_multiply_add, rounded, tf32_nearest, tf32_truncated

FAITHFUL = ExecOptions(numerics=Numerics.FAITHFUL)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def faithful(stub, *args):
    """The stub's result as the dtype it declares; every value must fit that dtype already."""
    result = execute(stub, args, options=FAITHFUL).result
    stored = result.to(result._declared_dtype)
    assert torch.equal(stored.double(), result.detach()) or result.isnan().any()
    return stored


@triton.jit
def arithmetic_kernel(x_ptr, y_ptr, out_ptr, n, scale, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + i, mask=i < n), tl.load(y_ptr + i, mask=i < n)
    tl.store(out_ptr + i, (x + y) * x - y * y + scale, mask=i < n)


def arithmetic(x, y):
    out = torch.empty_like(x)
    arithmetic_kernel[(triton.cdiv(x.numel(), 64),)](x, y, out, x.numel(), 0.1, BLOCK=64)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_and_products_are_those_of_torch_bit_for_bit(dtype):
    # torch rounds after every operation; the float32 scalar makes the last sum one of float32, rounded at the store.
    x, y = torch.randn(1000).to(dtype), torch.randn(1000).to(dtype)
    expected = (((x + y) * x - y * y).float() + torch.tensor([0.1])).to(dtype)
    assert torch.equal(faithful(arithmetic, x, y), expected)


@triton.jit
def quotient_kernel(x_ptr, y_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + i).to(tl.float32), tl.load(y_ptr + i).to(tl.float32)
    tl.store(out_ptr + i, (x / y + tl.abs(x)).to(out_ptr.dtype.element_ty))


def quotient(x, y):
    out = torch.empty_like(x)
    quotient_kernel[(1,)](x, y, out, BLOCK=1024)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_kernel_that_computes_in_float32_rounds_once_more_at_its_store(dtype):
    x, y = torch.randn(1024).to(dtype), torch.randn(1024).to(dtype)
    expected = (x.float() / y.float() + x.float().abs()).to(dtype)
    assert torch.equal(faithful(quotient, x, y), expected)


def test_the_exact_mode_never_rounds():
    x, y = torch.randn(1000).half(), torch.randn(1000).half()
    result = execute(arithmetic, (x, y)).result
    a, b = x.double(), y.double()
    assert (result - ((a + b) * a - b * b + 0.1)).abs().max() < 1e-7, "the scalar alone is a float32"
    assert not torch.equal(result.half().double(), result), "a float16 kernel in exact mode keeps all its digits"


def test_float16_overflows_to_infinity_and_exact_arithmetic_does_not():
    x, y = torch.full((64,), 400.0).half(), torch.full((64,), -3.0).half()
    assert bool(faithful(arithmetic, x, y).isinf().all()), "400 * 397 is beyond 65504"
    assert bool(execute(arithmetic, (x, y)).result.isfinite().all())


@triton.jit
def sum_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    tl.store(out_ptr, tl.sum(x, 0))
    tl.store(out_ptr + 1, tl.sum(tl.cumsum(x, 0), 0))


def sums(x):
    out = torch.empty(2, dtype=x.dtype)
    sum_kernel[(1,)](x, out, BLOCK=x.numel())
    return out


def test_a_sum_of_float16_rounds_at_every_step_of_a_tree():
    # Rounded once at the end, 1 + 1023 * 2**-11 would be 1.4995; in a tree the first pair alone loses its 2**-11.
    x = torch.full((1024,), 2.0**-11).half()
    x[0] = 1.0
    pairs = x.clone()
    while pairs.numel() > 1:
        pairs = pairs[0::2] + pairs[1::2]
    assert faithful(sums, x)[0] == pairs[0]
    assert pairs[0] != x.double().sum().half()


def test_a_sum_of_float16_that_leaves_the_range_is_infinite():
    assert faithful(sums, torch.full((256,), 300.0).half())[0] == torch.inf


@triton.jit
def cast_kernel(x_ptr, near_ptr, cut_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    tl.store(near_ptr + i, x.to(near_ptr.dtype.element_ty))
    tl.store(cut_ptr + i, x.to(cut_ptr.dtype.element_ty, fp_downcast_rounding="rtz"))


def casts(dtype):
    def stub(x):
        near, cut = torch.empty_like(x, dtype=dtype), torch.empty_like(x, dtype=dtype)
        cast_kernel[(1,)](x, near, cut, BLOCK=x.numel())
        return near, cut

    return stub


def all_sizes(count):
    """Values of every size that float16 and bfloat16 tell apart, and special ones."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, generator=generator) * 2.0 ** torch.randint(-30, 18, (count,), generator=generator).float()
    x[:8] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 65519.9, 65520.0, 1e-40])
    return x


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_casts_round_to_nearest_as_torch_does_or_towards_zero_when_asked(dtype):
    x = all_sizes(4096)
    near, cut = (t.detach() for t in execute(casts(dtype), (x,), options=FAITHFUL).result)
    assert torch.equal(near.nan_to_num(7.0), x.to(dtype).double().nan_to_num(7.0)), "to nearest"
    ordinary = x.isfinite()
    assert bool((cut[ordinary].abs() <= x[ordinary].double().abs()).all()), "towards zero never grows"
    stored = x.to(dtype)
    step = torch.where(stored.double().abs() > x.double().abs(), 0.0, torch.inf).to(dtype)
    expected = torch.where(step == 0, torch.nextafter(stored, step), stored)
    assert torch.equal(cut[ordinary], expected.double()[ordinary]), "towards zero, the neighbour below"
    assert torch.equal(cut[2:4], x[2:4].double()), "infinity stays"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_casts_to_8_bits_are_those_of_torch_within_the_range_and_saturate_beyond(dtype):
    # The hardware's cvt has satfinite; torch gives NaN or infinity there.
    x = all_sizes(4096)

    def stub(x):
        out = torch.empty_like(x, dtype=dtype)
        one_cast_kernel[(1,)](x, out, BLOCK=x.numel())
        return out

    got = execute(stub, (x,), options=FAITHFUL).result.detach()
    largest = torch.finfo(dtype).max
    inside = x.abs() <= largest
    assert torch.equal(got[inside], x.to(dtype).double()[inside])
    beyond = x.abs() > largest
    assert torch.equal(got[beyond], largest * x[beyond].double().sign())
    assert bool(got[x.isnan()].isnan().all())


@triton.jit
def one_cast_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i).to(out_ptr.dtype.element_ty))


@triton.jit
def atomic_kernel(x_ptr, out_ptr):
    tl.atomic_add(out_ptr, tl.load(x_ptr + tl.program_id(0)))


def test_atomic_additions_round_one_after_the_other():
    def stub(x):
        out = torch.zeros(1, dtype=x.dtype)
        atomic_kernel[(x.numel(),)](x, out)
        return out

    x = torch.full((4096,), 1.0).half()
    assert faithful(stub, x) == 2048, "2048 + 1 is 2048 in float16, however often it is added"
    assert execute(stub, (x,)).result == 4096


@triton.jit
def exponential_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.exp(tl.load(x_ptr + i)))


def test_exp_multiplies_by_log2_of_e_in_float32_first():
    # What ex2.approx is given has 24 bits: at x = 80 the error is about 80 times an ulp, far more than torch's.
    def stub(x):
        out = torch.empty_like(x)
        exponential_kernel[(1,)](x, out, BLOCK=x.numel())
        return out

    x = torch.linspace(-80, 80, 1024)
    got = faithful(stub, x)
    expected = torch.exp2((x * torch.tensor(1.4426950408889634)).double()).float()
    assert torch.equal(got, expected)
    assert float((got / x.double().exp() - 1).abs().max()) > 1e-6


SOFTMAX = """
import sys
import torch, triton
import triton.language as tl

@triton.jit
def rows_kernel(x_ptr, w_ptr, softmax_ptr, norm_ptr, n, BLOCK: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * n + i, mask=i < n, other=-float("inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, 0))
    tl.store(softmax_ptr + row * n + i, e / tl.sum(e, 0), mask=i < n)
    x = tl.where(i < n, x, 0.0)
    centred = tl.where(i < n, x - tl.sum(x, 0) / n, 0.0)
    y = centred * tl.rsqrt(tl.sum(centred * centred, 0) / n + 1e-5) * tl.load(w_ptr + i, mask=i < n)
    tl.store(norm_ptr + row * n + i, y, mask=i < n)

def stub(x, w):
    a, b = torch.empty_like(x), torch.empty_like(x)
    rows_kernel[(x.shape[0],)](x, w, a, b, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return a, b

if __name__ == "__main__":
    x, w = torch.load(sys.argv[1])
    torch.save(stub(x, w), sys.argv[2])
"""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_softmax_and_layernorm_agree_with_tritons_interpreter_to_a_few_ulps(tmp_path, dtype):
    # The interpreter rounds per operation too; it sums in another order and computes exp with numpy.
    from kernel_agent.ir import import_module

    (tmp_path / "rows.py").write_text(SOFTMAX)
    x, w = torch.randn(5, 200).to(dtype), torch.randn(200).to(dtype)
    torch.save((x, w), tmp_path / "in.pt")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "rows.py", "in.pt", "out.pt"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=120)
    stub = import_module(Path(tmp_path / "rows.py"), "rows_on_images").stub
    mine = execute(stub, (x, w), options=FAITHFUL).result
    for name, got, other in zip(("softmax", "layernorm"), mine, torch.load(tmp_path / "out.pt"), strict=True):
        ulp = torch.finfo(dtype).eps * other.double().abs().clamp(min=1e-3 if name == "softmax" else 1.0)
        worst = float(((got.detach() - other.double()).abs() / ulp).max())
        assert worst <= (8 if dtype == torch.float32 else 1), f"{name} is {worst:.1f} ulps off"


def test_rounding_one_number_to_every_format_gives_a_neighbour_and_the_nearer_one():
    values = all_sizes(4096).double() * (1 + 2.0**-30)
    for dtype in (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        inside = values[values.abs() <= torch.finfo(dtype).max]
        near, cut = rounded(inside, dtype), rounded(inside, dtype, Mode.TO_ZERO)
        assert torch.equal(near.to(dtype).double(), near), f"{dtype} holds every result"
        assert bool(((near - inside).abs() <= (cut - inside).abs()).all()), f"{dtype} takes the nearer neighbour"


def test_a_double_is_rounded_once_to_float16_and_not_by_way_of_float32():
    # 1 + 2**-11 is the middle between two float16 numbers; a trace above it is lost in float32.
    value = torch.tensor([1 + 2.0**-11 + 2.0**-40], dtype=torch.float64)
    assert rounded(value, torch.float16).item() == 1 + 2.0**-10
    assert value.half().item() == 1.0, "what torch makes of it"


def test_a_fused_multiply_add_is_rounded_once():
    # (1 + 2**-12) ** 2 is 1 + 2**-11 + 2**-24, the middle of two float32 numbers; c lies far below a float64's digits.
    a, c = (torch.tensor([value], dtype=torch.float64) for value in (1 + 2.0**-12, 2.0**-80))
    assert rounded(fused_multiply_add(a, a, c), torch.float32).item() == 1 + 2.0**-11 + 2.0**-23, "above the middle: up"
    assert rounded(fused_multiply_add(a, a, -c), torch.float32).item() == 1 + 2.0**-11, "below the middle: down"
    assert rounded(a * a + c, torch.float32).item() == 1 + 2.0**-11, "what rounding twice makes of it"


def test_tf32_keeps_ten_bits_by_truncation_in_tensor_cores_and_by_rounding_in_cvt():
    x = torch.tensor([1 + 2.0**-10 + 2.0**-11, 1 + 2.0**-11 - 2.0**-23, -(1 + 2.0**-11), torch.inf]).double()
    assert tf32_truncated(x).tolist() == [1 + 2.0**-10, 1.0, -1.0, torch.inf]
    assert tf32_nearest(x).tolist() == [1 + 2.0**-9, 1.0, -(1 + 2.0**-10), torch.inf], "the middle goes away from zero"


def test_gradients_of_rounded_arithmetic_are_refused_with_what_to_do_instead():
    with pytest.raises(InputError, match="does not record gradients") as caught:
        execute(arithmetic, (torch.randn(64), torch.randn(64)), leaves=(0,), options=FAITHFUL)
    assert "EXACT" in caught.value.remedy


def test_a_kernel_that_cannot_be_run_exactly_is_refused_faithfully_too():
    def stub(x):
        out = torch.empty(x.numel(), dtype=torch.float64)
        arithmetic_kernel[(1,)](x.view(torch.int16), x, out, 64, 1.0, BLOCK=64)
        return out

    with pytest.raises(CaptureError):
        execute(stub, (torch.randn(64),), options=FAITHFUL)


@triton.jit
def integer_kernel(x_ptr, out_ptr):
    tl.store(out_ptr, tl.load(x_ptr).to(tl.float32))


def test_a_64_bit_integer_is_rounded_once_on_its_way_to_float32():
    # By way of float64 the last 1 is lost, and what remains is the middle of two float32 numbers.
    def stub(x):
        out = torch.empty(1)
        integer_kernel[(1,)](x, out)
        return out

    x = torch.tensor([2**60 + 2**36 + 1])
    assert faithful(stub, x).item() == 2**60 + 2**37
