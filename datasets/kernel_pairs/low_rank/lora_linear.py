"""LoRA linear y = x W + s (x A) B with W frozen: no dW at all; x A and dy B^T, rank wide, feed all three gradients."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "lora_linear",
    "family": "low_rank",
    "op": "lora_linear",
    "schema": 1,
    "techniques": ("recompute", "split-k", "tensor-core", "two-stage-partials", "strided-cotangent", "frozen-input"),
    "saves": (),
    "grads": ("x", "lora_a", "lora_b"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _lora_fwd(
    X, W, A, B, Y, M, N, K, R, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    r = tl.arange(0, BLOCK_R)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    low = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = (start + tl.arange(0, BLOCK_K)).to(tl.int64)
        x = tl.load(X + m[:, None] * K + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
        w = tl.load(W + k[:, None] * N + n[None, :], mask=(k[:, None] < K) & (n[None, :] < N), other=0.0)
        a = tl.load(A + k[:, None] * R + r[None, :], mask=(k[:, None] < K) & (r[None, :] < R), other=0.0)
        acc = tl.dot(x, w, acc)
        low = tl.dot(x, a, low)
    b = tl.load(B + r[:, None] * N + n[None, :], mask=(r[:, None] < R) & (n[None, :] < N), other=0.0)
    acc = tl.dot((low * scale).to(b.dtype), b, acc)
    tl.store(Y + m[:, None] * N + n[None, :], acc, mask=(m[:, None] < M) & (n[None, :] < N))


def _tile(size, most):
    return max(16, min(most, triton.next_power_of_2(size)))


def forward(x, weight, lora_a, lora_b, scale):
    x, weight, lora_a, lora_b = x.contiguous(), weight.contiguous(), lora_a.contiguous(), lora_b.contiguous()
    (M, K), (R, N) = x.shape, lora_b.shape
    y = torch.empty(M, N, device=x.device, dtype=x.dtype)
    BM, BN = _tile(M, 64), _tile(N, 128)
    _lora_fwd[(triton.cdiv(M, BM), triton.cdiv(N, BN))](
        x, weight, lora_a, lora_b, y, M, N, K, R, scale,
        BLOCK_M=BM, BLOCK_N=BN, BLOCK_K=_tile(K, 32), BLOCK_R=_tile(R, R * 2),
    )  # fmt: skip
    return y, (x, weight, lora_a, lora_b, scale)


# --- backward ---
@triton.jit
def _two_thin_products(
    X, A, DY, B, XA, DXA, M, N, K, R, scale, dy_m, dy_n,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    # s x A over K and s dy B^T over N for one row tile: both R wide, so recomputing x A costs little.
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    r = tl.arange(0, BLOCK_R)
    xa = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for start in range(0, K, BLOCK_C):
        k = (start + tl.arange(0, BLOCK_C)).to(tl.int64)
        x = tl.load(X + m[:, None] * K + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
        a = tl.load(A + k[:, None] * R + r[None, :], mask=(k[:, None] < K) & (r[None, :] < R), other=0.0)
        xa = tl.dot(x, a, xa)
    dxa = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for start in range(0, N, BLOCK_C):
        n = (start + tl.arange(0, BLOCK_C)).to(tl.int64)
        dy = tl.load(DY + m[:, None] * dy_m + n[None, :] * dy_n, mask=(m[:, None] < M) & (n[None, :] < N), other=0.0)
        b = tl.load(B + r[None, :] * N + n[:, None], mask=(r[None, :] < R) & (n[:, None] < N), other=0.0)
        dxa = tl.dot(dy, b, dxa)
    out = (m[:, None] < M) & (r[None, :] < R)
    tl.store(XA + m[:, None] * R + r[None, :], xa * scale, mask=out)
    tl.store(DXA + m[:, None] * R + r[None, :], dxa * scale, mask=out)


@triton.jit
def _lora_dx(
    DY, W, DXA, A, DX, M, N, K, R, dy_m, dy_n,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.program_id(1).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    r = tl.arange(0, BLOCK_R)
    dxa = tl.load(DXA + m[:, None] * R + r[None, :], mask=(m[:, None] < M) & (r[None, :] < R), other=0.0)
    a = tl.load(A + k[None, :] * R + r[:, None], mask=(k[None, :] < K) & (r[:, None] < R), other=0.0)
    acc = tl.dot(dxa, a)
    for start in range(0, N, BLOCK_N):
        n = (start + tl.arange(0, BLOCK_N)).to(tl.int64)
        dy = tl.load(DY + m[:, None] * dy_m + n[None, :] * dy_n, mask=(m[:, None] < M) & (n[None, :] < N), other=0.0)
        w = tl.load(W + k[None, :] * N + n[:, None], mask=(k[None, :] < K) & (n[:, None] < N), other=0.0)
        acc = tl.dot(dy, w, acc)
    tl.store(DX + m[:, None] * K + k[None, :], acc, mask=(m[:, None] < M) & (k[None, :] < K))


@triton.jit
def _thin_outer(
    P, Q, Parts, M, C, R, p_m, p_c, rows_each, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr
):
    # (C, R) product P^T Q over a slice of the rows; dA and the transpose of dB are both of this form.
    piece = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    r = tl.arange(0, BLOCK_R)
    last = tl.minimum((piece + 1) * rows_each, M)
    acc = tl.zeros((BLOCK_C, BLOCK_R), tl.float32)
    for start in range(piece * rows_each, last, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        p = tl.load(P + m[None, :] * p_m + c[:, None] * p_c, mask=(m[None, :] < last) & (c[:, None] < C), other=0.0)
        q = tl.load(Q + m[:, None] * R + r[None, :], mask=(m[:, None] < last) & (r[None, :] < R), other=0.0)
        acc = tl.dot(p, q, acc)
    tl.store(Parts + (piece * C + c[:, None]) * R + r[None, :], acc, mask=(c[:, None] < C) & (r[None, :] < R))


def _outer(p, q):
    (M, C), R = p.shape, q.shape[1]
    BM, BC = _tile(M, 64), _tile(C, 64)
    pieces = max(1, min(264 // triton.cdiv(C, BC), triton.cdiv(M, 2 * BM)))
    rows_each = triton.cdiv(triton.cdiv(M, pieces), BM) * BM
    pieces = triton.cdiv(M, rows_each)
    parts = torch.empty(pieces, C, R, device=p.device, dtype=torch.float32)
    _thin_outer[(triton.cdiv(C, BC), pieces)](
        p, q, parts, M, C, R, p.stride(0), p.stride(1), rows_each, BLOCK_M=BM, BLOCK_C=BC, BLOCK_R=_tile(R, R * 2)
    )
    return parts.sum(0).to(p.dtype)


def backward(saved, grad_y, needs=None):
    x, weight, lora_a, lora_b, scale = saved
    (M, K), (R, N) = x.shape, lora_b.shape
    xa, dxa = (torch.empty(M, R, device=x.device, dtype=x.dtype) for _ in range(2))
    BM, BR = _tile(M, 64), _tile(R, R * 2)
    dy_m, dy_n = grad_y.stride()
    _two_thin_products[(triton.cdiv(M, BM),)](
        x, lora_a, grad_y, lora_b, xa, dxa, M, N, K, R, scale, dy_m, dy_n, BLOCK_M=BM, BLOCK_C=32, BLOCK_R=BR
    )
    dx = torch.empty_like(x)
    BK = _tile(K, 128)
    _lora_dx[(triton.cdiv(M, BM), triton.cdiv(K, BK))](
        grad_y,
        weight,
        dxa,
        lora_a,
        dx,
        M,
        N,
        K,
        R,
        dy_m,
        dy_n,
        BLOCK_M=BM,
        BLOCK_K=BK,
        BLOCK_N=_tile(N, 32),
        BLOCK_R=BR,
    )
    return dx, _outer(x, dxa), _outer(grad_y, xa).T.contiguous()


# --- check ---
SWEEP = (
    {"M": 64, "N": 48, "K": 32, "R": 8},
    {"M": 150, "N": 37, "K": 45, "R": 5},
    {"M": 32, "N": 32, "K": 64, "R": 16, "dtype": "float16"},
)


def make_args(M, N, K, R, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = ((M, K), (K, N), (K, R), (R, N))
    tensors = (torch.randn(s, generator=g) / (1.0 if i == 0 else s[0] ** 0.5) for i, s in enumerate(shapes))
    return (*(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors), 2.0)


def reference(x, weight, lora_a, lora_b, scale):
    xf = x.float()
    return (xf @ weight.float() + scale * (xf @ lora_a.float()) @ lora_b.float()).to(x.dtype)
