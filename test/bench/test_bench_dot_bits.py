"""How coarse the products of a kernel are, read from the TTIR that Triton itself prints."""

from __future__ import annotations

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernel_agent.bench.launches import TF32_BITS, dot_bits

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset:UserWarning")


@triton.jit
def _product(A, B, C, PRECISION: tl.constexpr):
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(C + at, tl.dot(tl.load(A + at), tl.load(B + at), input_precision=PRECISION))


@triton.jit
def _copy(A, B):
    tl.store(B + tl.arange(0, 16), tl.load(A + tl.arange(0, 16)))


def ttir(kernel: triton.JITFunction, signature: dict[str, str], constants: dict[str, str]) -> str:
    source = ASTSource(kernel, {**signature, **dict.fromkeys(constants, "constexpr")}, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ttir"]


@pytest.mark.parametrize(
    ("dtype", "precision", "bits"),
    [
        ("fp32", "tf32", TF32_BITS),
        ("fp32", "ieee", 24),
        ("fp32", "tf32x3", 24),
        ("fp16", "tf32", 11),
        ("bf16", "tf32", 8),
    ],
)
def test_bits_of_a_product(dtype: str, precision: str, bits: int):
    text = ttir(_product, {"A": f"*{dtype}", "B": f"*{dtype}", "C": "*fp32"}, {"PRECISION": precision})
    assert "tt.dot" in text
    assert dot_bits(text) == bits


def test_a_kernel_without_products_has_none():
    assert dot_bits(ttir(_copy, {"A": "*fp32", "B": "*fp32"}, {})) is None


def test_the_coarsest_of_several_counts():
    coarse = ttir(_product, {"A": "*bf16", "B": "*bf16", "C": "*fp32"}, {"PRECISION": "tf32"})
    fine = ttir(_product, {"A": "*fp32", "B": "*fp32", "C": "*fp32"}, {"PRECISION": "ieee"})
    assert dot_bits(fine + coarse) == 8
