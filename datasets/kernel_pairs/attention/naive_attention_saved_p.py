"""Attention of short sequences, one program per head: weights are saved, the backward is four products of tiles.

Up to 128 tokens the whole (T, T) matrix is one tile. Saving it in the inputs' dtype costs less than q and k together
read twice, and spares the backward the scores, the exponential and every statistic:

    dV = P^T dO,    dS = P (dO V^T - rowsum(P dP)),    dQ = scale dS K,    dK = scale dS^T Q
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "naive_attention_saved_p",
    "family": "attention",
    "op": "attention",
    "schema": 1,
    "techniques": ("row-local", "saved-output", "one-launch", "strided-cotangent"),
    "saves": ("p: fp32 or bf16 (B, H, T, T)",),
    "grads": ("q", "k", "v"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _short_fwd(Q, K, V, Out, P, T, D, scale, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    head = tl.program_id(0).to(tl.int64)
    t = tl.arange(0, BLOCK_T)
    d = tl.arange(0, BLOCK_D)
    at = head * T * D + t[:, None] * D + d[None, :]
    inside = (t[:, None] < T) & (d[None, :] < D)
    q = tl.load(Q + at, mask=inside, other=0.0)
    k = tl.load(K + at, mask=inside, other=0.0)
    v = tl.load(V + at, mask=inside, other=0.0)
    s = tl.where(t[None, :] < T, tl.dot(q, tl.trans(k)) * scale, float("-inf"))
    e = tl.exp(s - tl.max(s, 1)[:, None])
    p = (e / tl.sum(e, 1)[:, None]).to(v.dtype)
    tl.store(P + head * T * T + t[:, None] * T + t[None, :], p, mask=(t[:, None] < T) & (t[None, :] < T))
    tl.store(Out + at, tl.dot(p, v), mask=inside)


def _tiles(T, D):
    return max(16, triton.next_power_of_2(T)), max(16, triton.next_power_of_2(D))


def forward(q, k, v):
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    B, H, T, D = q.shape
    if T > 128 or D > 128:
        raise ValueError(f"sequences of {T} and heads of {D} are too long for one tile; this schedule takes up to 128")
    o = torch.empty_like(q)
    p = torch.empty(B, H, T, T, device=q.device, dtype=q.dtype)
    BLOCK_T, BLOCK_D = _tiles(T, D)
    _short_fwd[(B * H,)](
        q, k, v, o, p, T, D, D**-0.5, BLOCK_T=BLOCK_T, BLOCK_D=BLOCK_D, num_warps=8 if BLOCK_T > 64 else 4
    )
    return o, (q, k, v, p)


# --- backward ---
@triton.jit
def _short_bwd(
    Q, K, V, P, DO, DQ, DK, DV, H, T, D, do_b, do_h, do_t, do_d, scale, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr
):
    head = tl.program_id(0).to(tl.int64)
    t = tl.arange(0, BLOCK_T)
    d = tl.arange(0, BLOCK_D)
    at = head * T * D + t[:, None] * D + d[None, :]
    inside = (t[:, None] < T) & (d[None, :] < D)
    p_at = head * T * T + t[:, None] * T + t[None, :]
    p = tl.load(P + p_at, mask=(t[:, None] < T) & (t[None, :] < T), other=0.0)
    do_at = head // H * do_b + head % H * do_h + t[:, None].to(tl.int64) * do_t + d[None, :] * do_d
    do = tl.load(DO + do_at, mask=inside, other=0.0)
    # Each product is stored before the next operand is loaded: few tiles are alive at a time.
    tl.store(DV + at, tl.dot(tl.trans(p), do), mask=inside)
    v = tl.load(V + at, mask=inside, other=0.0)
    weights = p.to(tl.float32)
    dp = tl.dot(do, tl.trans(v))
    ds = (weights * (dp - tl.sum(weights * dp, 1)[:, None])).to(v.dtype)
    k = tl.load(K + at, mask=inside, other=0.0)
    tl.store(DQ + at, tl.dot(ds, k) * scale, mask=inside)
    q = tl.load(Q + at, mask=inside, other=0.0)
    tl.store(DK + at, tl.dot(tl.trans(ds), q) * scale, mask=inside)


def backward(saved, grad_o, needs=None):
    q, k, v, p = saved
    B, H, T, D = q.shape
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    BLOCK_T, BLOCK_D = _tiles(T, D)
    _short_bwd[(B * H,)](
        q, k, v, p, grad_o, dq, dk, dv, H, T, D, *grad_o.stride(), D**-0.5,
        BLOCK_T=BLOCK_T, BLOCK_D=BLOCK_D, num_warps=8 if BLOCK_T > 64 else 4,
    )  # fmt: skip
    return dq, dk, dv


# --- check ---
SWEEP = (
    {"B": 2, "H": 2, "T": 32, "D": 32},
    {"B": 2, "H": 1, "T": 45, "D": 20},
    {"B": 3, "H": 2, "T": 27, "D": 16, "dtype": "bfloat16"},
)
BENCH = ({"B": 512, "H": 16, "T": 64, "D": 64, "dtype": "bfloat16"},)


def make_args(B, H, T, D, dtype="float32", device="cpu", seed=0):
    if T > 128 or D > 128:
        raise ValueError("T and D may be at most 128")
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(B, H, T, D, generator=g).to(device, getattr(torch, dtype)) for _ in range(3))


def reference(q, k, v):
    # The weights are rounded as the kernel saves them.
    p = ((q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5).softmax(-1).to(q.dtype)
    return p @ v
