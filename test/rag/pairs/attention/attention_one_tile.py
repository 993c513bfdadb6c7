"""Causal attention of short sequences: queries, keys and values of a head fit one tile."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "attention_one_tile",
    "family": "attention",
    "op": "attention",
    "schema": 1,
    "saves": ("lse: fp32 (H, N)",),
    "grads": ("q", "k", "v"),
}


# --- forward ---
@triton.jit
def _attention_fwd(Q, K, V, OUT, LSE, N, scale, BLOCK: tl.constexpr, D: tl.constexpr):
    n, d = tl.arange(0, BLOCK), tl.arange(0, D)
    at = tl.program_id(0) * N * D + n[:, None] * D + d[None, :]
    inside = n[:, None] < N
    q, k = tl.load(Q + at, mask=inside, other=0.0), tl.load(K + at, mask=inside, other=0.0)
    s = tl.where(n[:, None] >= n[None, :], tl.dot(q, tl.trans(k)) * scale, -float("inf"))
    lse = tl.max(s, 1) + tl.log(tl.sum(tl.exp(s - tl.max(s, 1)[:, None]), 1))
    o = tl.dot(tl.exp(s - lse[:, None]), tl.load(V + at, mask=inside, other=0.0))
    tl.store(OUT + at, o, mask=inside)
    tl.store(LSE + tl.program_id(0) * N + n, lse, mask=n < N)


def forward(q, k, v):
    H, N, D = q.shape
    o, lse = torch.empty_like(q), torch.empty(H, N, device=q.device, dtype=torch.float32)
    _attention_fwd[(H,)](q, k, v, o, lse, N, D**-0.5, BLOCK=max(16, triton.next_power_of_2(N)), D=D)
    return o, (q, k, v, o, lse)


# --- backward ---
@triton.jit
def _attention_bwd(DO, Q, K, V, OUT, LSE, DQ, DK, DV, N, scale, BLOCK: tl.constexpr, D: tl.constexpr):
    n, d = tl.arange(0, BLOCK), tl.arange(0, D)
    at = tl.program_id(0) * N * D + n[:, None] * D + d[None, :]
    inside = n[:, None] < N
    q, k = tl.load(Q + at, mask=inside, other=0.0), tl.load(K + at, mask=inside, other=0.0)
    do = tl.load(DO + at, mask=inside, other=0.0)
    delta = tl.sum(do * tl.load(OUT + at, mask=inside, other=0.0), 1)
    lse = tl.load(LSE + tl.program_id(0) * N + n, mask=n < N, other=0.0)
    p = tl.where(n[:, None] >= n[None, :], tl.exp(tl.dot(q, tl.trans(k)) * scale - lse[:, None]), 0.0)
    ds = p * (tl.dot(do, tl.trans(tl.load(V + at, mask=inside, other=0.0))) - delta[:, None]) * scale
    tl.store(DV + at, tl.dot(tl.trans(p), do), mask=inside)
    tl.store(DQ + at, tl.dot(ds, k), mask=inside)
    tl.store(DK + at, tl.dot(tl.trans(ds), q), mask=inside)


def backward(saved, grad_o, needs=None):
    q, k, v, o, lse = saved
    H, N, D = q.shape
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    block = max(16, triton.next_power_of_2(N))
    _attention_bwd[(H,)](grad_o.contiguous(), q, k, v, o, lse, dq, dk, dv, N, D**-0.5, BLOCK=block, D=D)
    return dq, dk, dv


# --- check ---
SWEEP = [{"H": 2, "N": 20, "D": 16}]


def make_args(H, N, D, device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(H, N, D, generator=g).to(device) for _ in range(3))


def reference(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
