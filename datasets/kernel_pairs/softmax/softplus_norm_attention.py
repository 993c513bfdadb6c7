"""Attention by normalised softplus, o = sum f(s) v / sum f(s): the ratio rule takes the place of the softmax's.

f = softplus grows like s, not like exp s: no running maximum is carried, parts of a row add up as they are, and the
norm S = sum f is all that the forward leaves beside o. With delta = <o, do> the gradient of a score is ds = sigmoid(s)
(<do, v> - delta) / S: the slope is a sigmoid of the score, not the weight itself, so that weights f / S are needed for
dv alone and the walk for dq takes no softplus at all. Query tiles own dq, key tiles dk and dv.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "softplus_norm_attention",
    "family": "softmax",
    "op": "softplus_attention",
    "schema": 1,
    "techniques": ("saved-statistics", "delta-preprocess", "loop-swap", "owner-grid", "recompute"),
    "saves": ("o: fp32 or bf16 or fp16 (B, H, T, D)", "norm: fp32 (B, H, T)"),
    "grads": ("q", "k", "v"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _load_rows(X, head, at, T, D: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    offset = (head * T + at[:, None]) * D + d[None, :]
    return tl.load(X + offset, mask=(at[:, None] < T) & (d[None, :] < D), other=0.0)


@triton.jit
def _softplus(s):
    return tl.maximum(s, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(s)))


@triton.jit
def _softplus_fwd(
    Q, K, V, Out, Norm, T, scale, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    head = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    q = _load_rows(Q, head, m, T, D, BLOCK_D)
    norm = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(0, T, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        k = _load_rows(K, head, n, T, D, BLOCK_D)
        v = _load_rows(V, head, n, T, D, BLOCK_D)
        f = _softplus(tl.dot(q, tl.trans(k)) * scale)
        # A score of zero, as columns outside have it, weighs log 2.
        f = tl.where(n[None, :] < T, f, 0.0)
        norm += tl.sum(f, 1)
        acc = tl.dot(f.to(v.dtype), v, acc)
    # Rows outside sum to a norm as well: none divides by zero.
    out_at = (head * T + m[:, None]) * D + d[None, :]
    tl.store(Out + out_at, acc / norm[:, None], mask=(m[:, None] < T) & (d[None, :] < D))
    tl.store(Norm + head * T + m, norm, mask=m < T)


def _blocks(q):
    """Owned rows and rows of the other side."""
    return (128, 64) if q.element_size() == 2 else (64, 32)


def forward(q, k, v):
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    B, H, T, D = q.shape
    o, norm = torch.empty_like(q), torch.empty(B, H, T, device=q.device, dtype=torch.float32)
    own, other = _blocks(q)
    _softplus_fwd[(triton.cdiv(T, own), B * H)](
        q, k, v, o, norm, T, D**-0.5, D=D, BLOCK_D=max(16, triton.next_power_of_2(D)), BLOCK_M=own, BLOCK_N=other,
        num_warps=8, num_stages=2,
    )  # fmt: skip
    return o, (q, k, v, o, norm)


# --- backward ---
@triton.jit
def _softplus_dq(
    Q, K, V, Out, DO, Norm, Delta, DQ, T, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    q = _load_rows(Q, head, m, T, D, BLOCK_D)
    do = _load_rows(DO, head, m, T, D, BLOCK_D)
    o = _load_rows(Out, head, m, T, D, BLOCK_D)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(Delta + head * T + m, delta, mask=m < T)
    inv = 1.0 / tl.load(Norm + head * T + m, mask=m < T, other=1.0)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(0, T, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        k = _load_rows(K, head, n, T, D, BLOCK_D)
        v = _load_rows(V, head, n, T, D, BLOCK_D)
        slope = tl.sigmoid(tl.dot(q, tl.trans(k)) * scale)
        # Keys outside are zero rows of k: whatever ds they have, they add nothing.
        ds = slope * (tl.dot(do, tl.trans(v)) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    # One norm per row: it waits until the end.
    out_at = (head * T + m[:, None]) * D + d[None, :]
    tl.store(DQ + out_at, dq * (scale * inv)[:, None], mask=(m[:, None] < T) & (d[None, :] < D))


@triton.jit
def _softplus_dkdv(
    Q, K, V, DO, Norm, Delta, DK, DV, T, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    k = _load_rows(K, head, n, T, D, BLOCK_D)
    v = _load_rows(V, head, n, T, D, BLOCK_D)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for start in range(0, T, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        q = _load_rows(Q, head, m, T, D, BLOCK_D)
        do = _load_rows(DO, head, m, T, D, BLOCK_D)
        inv = 1.0 / tl.load(Norm + head * T + m, mask=m < T, other=1.0)
        delta = tl.load(Delta + head * T + m, mask=m < T, other=0.0)
        s = tl.dot(k, tl.trans(q)) * scale
        dv = tl.dot((_softplus(s) * inv[None, :]).to(do.dtype), do, dv)
        ds = tl.sigmoid(s) * (tl.dot(v, tl.trans(do)) - delta[None, :]) * inv[None, :]
        dk = tl.dot(ds.to(q.dtype), q, dk)
    at = (head * T + n[:, None]) * D + d[None, :]
    inside = (n[:, None] < T) & (d[None, :] < D)
    tl.store(DK + at, dk * scale, mask=inside)
    tl.store(DV + at, dv, mask=inside)


def backward(saved, grad_o, needs=None):
    q, k, v, o, norm = saved
    _, need_k, need_v = needs or (True, True, True)
    B, H, T, D = q.shape
    # Both kernels read the cotangent tile by tile: one copy is cheaper than strided reads in both.
    do = grad_o.contiguous()
    own, other = _blocks(q)
    sizes = {"D": D, "BLOCK_D": max(16, triton.next_power_of_2(D)), "num_warps": 8, "num_stages": 2}
    dq, delta = torch.empty_like(q), torch.empty_like(norm)
    grid = triton.cdiv(T, own), B * H
    _softplus_dq[grid](q, k, v, o, do, norm, delta, dq, T, D**-0.5, BLOCK_M=own, BLOCK_N=other, **sizes)
    if not (need_k or need_v):
        return dq, None, None
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    _softplus_dkdv[grid](q, k, v, do, norm, delta, dk, dv, T, D**-0.5, BLOCK_M=other, BLOCK_N=own, **sizes)
    return dq, dk, dv


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "T": 96, "D": 32},
    {"B": 2, "H": 1, "T": 151, "D": 24, "dtype": "float16"},
    {"B": 1, "H": 2, "T": 80, "D": 16, "dtype": "bfloat16"},
)
BENCH = ({"B": 2, "H": 16, "T": 2048, "D": 64, "dtype": "bfloat16"},)


def make_args(B, H, T, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(B, H, T, D, generator=g).to(device=device, dtype=getattr(torch, dtype)) for _ in range(3))


def reference(q, k, v):
    f = torch.nn.functional.softplus((q @ k.mT).float() * q.shape[-1] ** -0.5)
    return (f / f.sum(-1, keepdim=True)).to(v.dtype) @ v
