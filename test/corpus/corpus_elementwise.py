"""Activations, gates and dropout: one lane in, one lane out."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from corpus.case import Case, in_dtypes
from corpus.philox import philox, uniform

BF16, HALF, DOUBLE = torch.bfloat16, torch.float16, torch.float64


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _gelu_tanh(X, Y, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + o, mask=o < n, other=0.0).to(tl.float32)
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    tl.store(Y + o, 0.5 * x * (1.0 + _tanh(inner)), mask=o < n)


def gelu_tanh(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _gelu_tanh[(triton.cdiv(x.numel(), 128),)](x, y, x.numel(), BLOCK=128)
    return y


@triton.jit
def _gelu_erf(X, Y, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + o, mask=o < n, other=0.0)
    tl.store(Y + o, 0.5 * x * (1.0 + tl.erf(x / tl.sqrt(2.0))), mask=o < n)


def gelu_erf(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _gelu_erf[(triton.cdiv(x.numel(), 64),)](x, y, x.numel(), BLOCK=64)
    return y


@triton.jit
def _swiglu(A, B, C, stride_a, stride_b, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    mask = c < n_cols
    a = tl.load(A + row * stride_a + c, mask=mask, other=0).to(tl.float32)
    b = tl.load(B + row * stride_b + c, mask=mask, other=0)
    tl.store(C + row * n_cols + c, (a * tl.sigmoid(a)).cast(b.dtype) * b, mask=mask)


def swiglu(gate_up: Tensor) -> Tensor:
    """Both halves are views of one projection."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    gate, up = gate_up.split(width, dim=1)
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    _swiglu[(rows,)](gate, up, out, gate.stride(0), up.stride(0), width, BLOCK=triton.next_power_of_2(width))
    return out


def _swiglu_reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, 1)
    return F.silu(gate) * up


@triton.jit
def _relu_squared(X, Y, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + o, mask=o < n)
    r = tl.maximum(x, 0.0)
    tl.store(Y + o, r * r, mask=o < n)


def relu_squared(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _relu_squared[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, x.numel(), BLOCK=32)
    return y


@triton.jit
def _smooth(X, BETA, MISH, SOFTPLUS, SNAKE, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + o, mask=o < n, other=0.0)
    beta = tl.load(BETA)
    softplus = tl.where(beta * x > 20.0, x, libdevice.log1p(tl.exp(beta * x)) / beta)
    wave = tl.sin(beta * x)
    tl.store(SOFTPLUS + o, softplus, mask=o < n)
    tl.store(MISH + o, x * libdevice.tanh(softplus), mask=o < n)
    tl.store(SNAKE + o, x + wave * wave / beta, mask=o < n)


def smooth(x: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    mish, softplus, snake = (torch.empty_like(x) for _ in range(3))
    _smooth[(triton.cdiv(x.numel(), 64),)](x, beta, mish, softplus, snake, x.numel(), BLOCK=64)
    return mish, softplus, snake


def _smooth_reference(x: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    softplus = torch.where(beta * x > 20, x, torch.log1p((beta * x).clamp(max=20).exp()) / beta)
    return x * softplus.tanh(), softplus, x + (beta * x).sin() ** 2 / beta


@triton.jit
def _piecewise(X, HARDSWISH, ELU, LEAKY, n, alpha, slope, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + o, mask=o < n, other=1.0).to(tl.float32)
    tl.store(HARDSWISH + o, x * tl.clamp(x + 3.0, 0.0, 6.0) / 6.0, mask=o < n)
    tl.store(ELU + o, tl.where(x > 0, x, alpha * (tl.exp(x) - 1.0)), mask=o < n)
    tl.store(LEAKY + o, tl.where(x >= 0, x, slope * x), mask=o < n)


def piecewise(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    outputs = [torch.empty_like(x) for _ in range(3)]
    _piecewise[(triton.cdiv(x.numel(), 64),)](x, *outputs, x.numel(), 1.3, 0.01, BLOCK=64)
    return tuple(outputs)


def _piecewise_reference(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return F.hardswish(x), F.elu(x, 1.3), F.leaky_relu(x, 0.01)


@triton.jit
def _dropout(X, Y, n, p, seed, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + o, mask=o < n, other=0.0)
    keep = tl.rand(seed, o) > p
    tl.store(Y + o, tl.where(keep, x / (1 - p), 0.0), mask=o < n)


@triton.jit
def _bias_dropout_residual(X, BIAS, RESIDUAL, Y, KEEP, cols, n, p, seed, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = o < n
    h = tl.load(X + o, mask=live, other=0.0) + tl.load(BIAS + o % cols, mask=live, other=0.0)
    keep = tl.rand(seed, o) >= p
    y = tl.where(keep, h * (1 / (1 - p)), 0.0) + tl.load(RESIDUAL + o, mask=live, other=0.0)
    tl.store(Y + o, y, mask=live)
    tl.store(KEEP + o, keep, mask=live)


def dropout_twice(x: Tensor, bias: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """The mask of the second kernel is stored as bool, that of the first is drawn again from the seed."""
    h, y = torch.empty_like(x), torch.empty_like(x)
    keep = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    grid = (triton.cdiv(x.numel(), 128),)
    _dropout[grid](x, h, x.numel(), 0.25, 1234567, BLOCK=128)
    _bias_dropout_residual[grid](h, bias, residual, y, keep, x.shape[1], x.numel(), 0.5, 99, BLOCK=128)
    _dropout[grid](y, h, x.numel(), 0.25, 1234567, BLOCK=128)
    return h, keep


def _dropout_reference(x: Tensor, bias: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    index = torch.arange(x.numel()).view(x.shape)
    first = uniform(philox(1234567, index)[0]) > 0.25
    keep = uniform(philox(99, index)[0]) >= 0.5
    y = torch.where(keep, (torch.where(first, x / 0.75, 0.0) + bias) * 2, 0.0) + residual
    return torch.where(first, y / 0.75, 0.0), keep


@triton.jit
def _horner(X, C, Y, n, DEGREE: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + o, mask=o < n, other=0.0)
    y = tl.zeros_like(x) + tl.load(C + DEGREE)
    for k in tl.static_range(DEGREE - 1, -1, -1):
        y = tl.fma(y, x, tl.load(C + k))
    tl.store(Y + o, y, mask=o < n)


def horner(x: Tensor, coefficients: Tensor) -> Tensor:
    y = torch.empty_like(x)
    degree = coefficients.numel() - 1
    _horner[(triton.cdiv(x.numel(), 32),)](x, coefficients, y, x.numel(), DEGREE=degree, BLOCK=32)
    return y


def _horner_reference(x: Tensor, coefficients: Tensor) -> Tensor:
    return sum(c * x**k for k, c in enumerate(coefficients))


@triton.jit
def _special(X, Y, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + o, mask=o < n, other=1.0)
    a = libdevice.atan2(x, x * x + 1.0) + libdevice.asinh(x) + libdevice.expm1(x)
    b = tl.rsqrt(x * x + 1.0) + tl.exp2(x) + tl.log2(x * x + 2.0) + libdevice.pow(x * x + 1.0, 1.5)
    c = tl.floor(x) * x + tl.ceil(x) - tl.abs(x) + tl.cos(x) + libdevice.erfc(x) * libdevice.cbrt(x * x + 1.0)
    tl.store(Y + o, a + b * c, mask=o < n)


def special(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _special[(triton.cdiv(x.numel(), 64),)](x, y, x.numel(), BLOCK=64)
    return y


def _special_reference(x: Tensor) -> Tensor:
    a = torch.atan2(x, x * x + 1) + x.asinh() + x.expm1()
    b = (x * x + 1).rsqrt() + torch.exp2(x) + (x * x + 2).log2() + (x * x + 1) ** 1.5
    return a + b * (x.floor() * x + x.ceil() - x.abs() + x.cos() + torch.erfc(x) * (x * x + 1) ** (1 / 3))


CASES = [
    *in_dtypes(
        Case(
            "gelu_tanh",
            gelu_tanh,
            lambda: (torch.randn(5, 61),),
            lambda x: F.gelu(x, approximate="tanh"),
            literal="0.7978845608028654 and 0.044715",
        ),
        BF16,
        HALF,
    ),
    Case("gelu_erf", gelu_erf, lambda: (torch.randn(150),), F.gelu, literal="the root of 2.0, folded in f32"),
    *in_dtypes(Case("swiglu", swiglu, lambda: (torch.randn(6, 2 * 37),), _swiglu_reference), BF16),
    Case("relu_squared", relu_squared, lambda: (torch.randn(3, 3, 11, dtype=DOUBLE),), lambda x: x.relu() ** 2),
    Case("mish_softplus_snake", smooth, lambda: (torch.randn(90) * 8, torch.tensor([1.7])), _smooth_reference),
    *in_dtypes(Case("hardswish_elu_leaky", piecewise, lambda: (torch.randn(100) * 3,), _piecewise_reference), HALF),
    Case(
        "dropout_replayed",
        dropout_twice,
        lambda: (torch.randn(7, 33), torch.randn(33), torch.randn(7, 33)),
        _dropout_reference,
    ),
    Case("horner_polynomial", horner, lambda: (torch.randn(50), torch.randn(7)), _horner_reference),
    Case("special_functions", special, lambda: (torch.randn(75),), _special_reference),
]
