"""Faithful matrix products: what tensor cores read of their operands, and what they accumulate in."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from kernel_agent.ir import ExecOptions, Numerics, execute
from kernel_agent.ir.rounding import tf32_truncated

FAITHFUL = ExecOptions(numerics=Numerics.FAITHFUL)


@triton.jit
def dot_kernel(
    a_ptr, b_ptr, out_ptr, K, M: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr, NARROW: tl.constexpr
):
    m, k = tl.arange(0, M), tl.arange(0, BLOCK)
    if NARROW:
        total = tl.zeros((M, M), tl.float16)
    else:
        total = tl.zeros((M, M), tl.float32)
    for start in range(0, K, BLOCK):
        a = tl.load(a_ptr + m[:, None] * K + start + k[None, :])
        b = tl.load(b_ptr + (start + k[:, None]) * M + m[None, :])
        total = tl.dot(a, b, total, input_precision=PRECISION, out_dtype=total.dtype)
    tl.store(out_ptr + m[:, None] * M + m[None, :], total)


def product(precision="tf32", *, narrow=False):
    def stub(a, b):
        m, k = a.shape
        out = torch.empty(m, m, dtype=torch.float16 if narrow else torch.float32)
        dot_kernel[(1,)](a, b, out, k, M=m, BLOCK=32, PRECISION=precision, NARROW=narrow)
        return out

    return stub


def operands(dtype=torch.float32, k=256):
    return torch.randn(32, k).to(dtype), torch.randn(k, 32).to(dtype)


def run(stub, a, b):
    return execute(stub, (a, b), options=FAITHFUL).result.detach()


def relative(error, truth):
    return float(error.norm() / truth.norm())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_narrow_operands_are_exact_and_accumulate_in_float32(dtype):
    a, b = operands(dtype)
    truth = a.double() @ b.double()
    error = relative(run(product(), a, b) - truth, truth)
    assert error < 1e-6, "rounded by no more than float32 rounds"
    assert error > 1e-8 or dtype.itemsize == 1, "rounded at all: only 8-bit products have sums that float32 can hold"


def test_an_ieee_product_adds_one_term_after_the_other():
    # The device has no float32 tensor cores. A sum in any other order differs in some last bit.
    a, b = operands()
    expected = torch.zeros(32, 32)
    for k in range(a.shape[1]):
        expected = (expected.double() + a[:, k : k + 1].double() * b[k : k + 1].double()).float()
    assert torch.equal(run(product("ieee"), a, b), expected.double())


def test_a_tf32_product_is_that_of_operands_cut_to_ten_bits():
    # Plain tf32 has no cvt in its PTX: the tensor core ignores the low 13 bits. float32 accumulation adds little.
    a, b = operands()
    cut = tf32_truncated(a) @ tf32_truncated(b)
    got, truth = run(product("tf32"), a, b), a.double() @ b.double()
    assert relative(got - cut, truth) < 1e-6
    assert 1e-4 < relative(got - truth, truth) < 1e-2


@pytest.mark.parametrize(("precision", "allowed"), [("tf32x3", 2e-6), ("bf16x3", 5e-5), ("bf16x6", 2e-6)])
def test_products_in_parts_are_far_better_than_one_narrow_product(precision, allowed):
    a, b = operands()
    truth = a.double() @ b.double()
    error = relative(run(product(precision), a, b) - truth, truth)
    assert 1e-8 < error < allowed, f"{precision} has relative error {error:.1e}"


def test_a_float16_accumulator_rounds_after_every_instruction_and_overflows():
    a, b = operands(torch.float16)
    truth = a.double() @ b.double()
    narrow = relative(run(product(narrow=True), a, b) - truth, truth)
    once = relative(truth.half().double() - truth, truth)
    assert 1.5 * once < narrow < 20 * once, "sixteen roundings, not one"
    large = torch.full((32, 64), 40.0).half(), torch.full((64, 32), 40.0).half()
    assert bool((run(product(narrow=True), *large) == torch.inf).all()), "64 * 1600 is beyond 65504"


def test_a_float32_accumulator_overflows_too():
    large = torch.full((32, 64), 2.0**65), torch.full((64, 32), 2.0**65)
    assert bool((run(product("tf32"), *large) == torch.inf).all())


@triton.jit
def integer_kernel(a_ptr, b_ptr, out_ptr, M: tl.constexpr):
    m = tl.arange(0, M)
    a, b = tl.load(a_ptr + m[:, None] * M + m[None, :]), tl.load(b_ptr + m[:, None] * M + m[None, :])
    tl.store(out_ptr + m[:, None] * M + m[None, :], tl.dot(a, b))


def test_integer_products_are_exact():
    def stub(a, b):
        out = torch.empty(32, 32, dtype=torch.int32)
        integer_kernel[(1,)](a, b, out, M=32)
        return out

    a, b = (torch.randint(-128, 128, (32, 32)).to(torch.int8) for _ in range(2))
    assert torch.equal(run(stub, a, b), a.int() @ b.int())
