"""Gradients through everyday kernels equal float64 autograd of a reference written in torch."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from gradient_check import check_gradients
from torch import Tensor

from kernel_agent.ir import ExecOptions, Safety, execute


@triton.jit
def _gated(X, Z, Y, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(X + offsets, mask=mask).to(tl.float32)
    z = tl.load(Z + offsets, mask=mask).to(tl.float32)
    y = 0.5 * x * (1.0 + tl.erf(x * 0.75)) * tl.sigmoid(z)
    tl.store(Y + offsets, y, mask=mask)


def gated(x: Tensor, z: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _gated[(triton.cdiv(x.numel(), 64),)](x, z, y, x.numel(), BLOCK=64)
    return y


def test_elementwise_gradients_are_exact_whatever_the_declared_dtype():
    # bfloat16 inputs: any rounding inside the executor would show as a relative error of 1e-3
    args = (torch.randn(7, 29, dtype=torch.bfloat16), torch.randn(7, 29, dtype=torch.bfloat16))
    check_gradients(gated, args, lambda x, z: 0.5 * x * (1 + torch.erf(0.75 * x)) * z.sigmoid())


@triton.jit
def _layernorm(X, W, B, Y, MEAN, RSTD, stride, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    mask = c < N
    x = tl.load(X + row * stride + c, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(x, 0) / N
    d = tl.where(mask, x - mean, 0.0)
    rstd = 1 / tl.sqrt(tl.sum(d * d, 0) / N + eps)
    y = d * rstd * tl.load(W + c, mask=mask) + tl.load(B + c, mask=mask)
    tl.store(Y + row * N + c, y, mask=mask)
    tl.store(MEAN + row, mean)
    tl.store(RSTD + row, rstd)


def layernorm(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    M, N = x.shape
    y = torch.empty((M, N), dtype=x.dtype, device=x.device)
    mean, rstd = torch.empty(M, device=x.device), torch.empty(M, device=x.device)
    _layernorm[(M,)](x, w, b, y, mean, rstd, x.stride(0), N, 1e-5, BLOCK=triton.next_power_of_2(N))
    return y, mean, rstd


def _layernorm_reference(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    mean = x.mean(-1)
    rstd = (x.var(-1, unbiased=False) + 1e-5).rsqrt()
    return (x - mean[:, None]) * rstd[:, None] * w + b, mean, rstd


def test_layernorm_gradients_flow_through_its_saved_statistics_too():
    check_gradients(layernorm, (torch.randn(5, 100), torch.randn(100), torch.randn(100)), _layernorm_reference)


def test_an_input_with_row_stride_keeps_it():
    # a stub that passes x.stride(0) would read the wrong rows if images were made contiguous
    def stub(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert x.stride() == (256, 1)
        return layernorm(x, w, b)

    x = torch.randn(5, 256)[:, :100]
    check_gradients(stub, (x, torch.randn(100), torch.randn(100)), _layernorm_reference)


@triton.jit
def _softmax(X, Y, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    x = tl.load(X + row * N + c, mask=c < N, other=float("-inf"))
    e = tl.exp(x - tl.max(x, 0))
    tl.store(Y + row * N + c, e / tl.sum(e, 0), mask=c < N)


def softmax(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _softmax[(x.shape[0],)](x, y, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return y


def test_softmax_with_masked_lanes_at_minus_infinity():
    check_gradients(softmax, (torch.randn(6, 77),), lambda x: x.softmax(-1))


@triton.autotune(
    [triton.Config({"BM": 32, "BN": 16, "BK": 16}), triton.Config({"BM": 64, "BN": 64, "BK": 32})], key=["M"]
)
@triton.jit
def _matmul(A, B, BIAS, C, M, N, K, sam, sak, sbk, sbn, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, K, BK):
        rk = start + tl.arange(0, BK)
        a = tl.load(A + rm[:, None] * sam + rk[None, :] * sak, mask=(rm[:, None] < M) & (rk[None, :] < K), other=0.0)
        b = tl.load(B + rk[:, None] * sbk + rn[None, :] * sbn, mask=(rk[:, None] < K) & (rn[None, :] < N), other=0.0)
        acc = tl.dot(a, b, acc)
    acc += tl.load(BIAS + rn, mask=rn < N, other=0.0)[None, :]
    tl.store(C + rm[:, None] * N + rn[None, :], acc.to(C.dtype.element_ty), mask=(rm[:, None] < M) & (rn[None, :] < N))


def matmul(a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty((M, N), device=a.device, dtype=a.dtype)

    def grid(meta: dict[str, int]) -> tuple[int, int]:
        return triton.cdiv(M, meta["BM"]), triton.cdiv(N, meta["BN"])

    _matmul[grid](a, b, bias, c, M, N, K, a.stride(0), a.stride(1), b.stride(0), b.stride(1))
    return c


def test_matmul_with_accumulator_masks_and_a_transposed_operand():
    args = (torch.randn(50, 37).half(), torch.randn(41, 37).half().t(), torch.randn(41))
    check_gradients(matmul, args, lambda a, b, bias: a @ b + bias)


@triton.jit
def _attention(Q, K, V, OUT, LSE, N, scale, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    first = tl.program_id(0) * BM
    base = tl.program_id(1) * N * D
    m, d = first + tl.arange(0, BM), tl.arange(0, D)
    q = tl.load(Q + base + m[:, None] * D + d[None, :], mask=m[:, None] < N, other=0.0)
    top = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    for start in range(0, tl.minimum(first + BM, N), BN):
        n = start + tl.arange(0, BN)
        k = tl.load(K + base + n[None, :] * D + d[:, None], mask=n[None, :] < N, other=0.0)
        v = tl.load(V + base + n[:, None] * D + d[None, :], mask=n[:, None] < N, other=0.0)
        s = tl.dot(q, k) * scale
        s = tl.where((n[None, :] <= m[:, None]) & (n[None, :] < N), s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        p = tl.exp(s - new_top[:, None])
        shrink = tl.exp(top - new_top)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v)
        top = new_top
    tl.store(OUT + base + m[:, None] * D + d[None, :], acc / total[:, None], mask=m[:, None] < N)
    tl.store(LSE + tl.program_id(1) * N + m, top + tl.log(total), mask=m < N)


def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    B, N, D = q.shape
    o, lse = torch.empty_like(q), torch.empty((B, N), device=q.device)
    _attention[(triton.cdiv(N, 32), B)](q, k, v, o, lse, N, D**-0.5, D=D, BM=32, BN=16)
    return o, lse


def _attention_reference(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


@pytest.mark.parametrize("length", [64, 75, 1])
def test_causal_attention_with_online_softmax(length):
    # programs run different numbers of iterations; at length 75 the last tile is ragged
    args = tuple(torch.randn(2, length, 16) for _ in range(3))
    check_gradients(attention, args, _attention_reference)


@pytest.mark.parametrize(("stub", "shapes"), [(layernorm, [(40, 30), (30,), (30,)]), (attention, [(2, 70, 16)] * 3)])
def test_running_in_checkpointed_chunks_changes_nothing(stub, shapes):
    # every chunk is replayed in the backward on one shared adjoint buffer
    args = tuple(torch.randn(shape) for shape in shapes)
    options = ExecOptions(memory=1 << 15)
    reference = _layernorm_reference if stub is layernorm else _attention_reference
    check_gradients(stub, args, reference, options=options)


@triton.jit
def _sum_of_roots(X, Y, N, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    x = tl.load(X + tl.program_id(0) * N + c, mask=c < N, other=0.0)
    total = tl.sum(tl.where(c < N, tl.sqrt(x), 0.0), 0)
    scale = tl.load(X + tl.program_id(0) * N)
    spread = tl.where(c < N, scale / (x * 0.0 + tl.where(c < N, 1.0, 0.0)), 0.0)
    tl.store(Y + tl.program_id(0), total * total + tl.sum(spread, 0) * 0.0)


def sum_of_roots(x: Tensor) -> Tensor:
    y = torch.empty(x.shape[0], device=x.device)
    _sum_of_roots[(x.shape[0],)](x, y, x.shape[1], BLOCK=32)
    return y


def test_masked_lanes_with_infinite_derivatives_do_not_reach_live_ones():
    # lanes 20..31 compute x/0: their zero cotangent times an infinite derivative is NaN without the safe rerun
    check_gradients(sum_of_roots, (torch.rand(3, 20) + 0.5,), lambda x: x.sqrt().sum(-1) ** 2)


def test_the_safe_rerun_is_what_removes_the_nan():
    # power of the test above: without safety the same kernel gives NaN
    x = torch.rand(3, 20) + 0.5
    unsafe = execute(sum_of_roots, (x,), {}, leaves=(0,), options=ExecOptions(safety=Safety.NEVER))
    (gradient,) = torch.autograd.grad(unsafe.result.sum(), [unsafe.leaves[0]])
    assert gradient.isnan().any()
