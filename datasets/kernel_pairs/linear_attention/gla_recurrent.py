"""Gated linear attention token by token: two loops in one program, and the gates' gradient without any stored state.

    o_t = scale q_t S_t,    S_t = diag(exp(g_t)) S_(t - 1) + k_t v_t^T

The first loop replays the states and writes dq. The second runs backwards with the gradient of the state in registers
and gives dk and dv; since only sums of gates between two tokens matter, dg_t is the sum of q_s dq_s - k_s dk_s over s
>= t, which is linear in the slab's shares of dq and dk: each slab of value channels sums its own, in one register per
key channel. The shares of the slabs are added afterwards.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "gla_recurrent",
    "family": "linear_attention",
    "op": "gated_linear_attention",
    "schema": 1,
    "techniques": ("reverse-scan", "recompute", "two-stage-partials", "one-launch", "closed-form"),
    "saves": (),
    "grads": ("q", "k", "v", "g"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _gla_step_fwd(
    Q, K, V, G, Out, T, DK, DV, scale, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr
):  # fmt: skip
    base = tl.program_id(1).to(tl.int64) * T
    i = tl.arange(0, BLOCK_K)
    j = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    for t in range(T):
        q = tl.load(Q + (base + t) * DK + i, mask=i < DK, other=0.0).to(tl.float32) * scale
        k = tl.load(K + (base + t) * DK + i, mask=i < DK, other=0.0).to(tl.float32)
        g = tl.load(G + (base + t) * DK + i, mask=i < DK, other=0.0).to(tl.float32)
        v = tl.load(V + (base + t) * DV + j, mask=j < DV, other=0.0).to(tl.float32)
        state = tl.exp(g)[:, None] * state + k[:, None] * v[None, :]
        tl.store(Out + (base + t) * DV + j, tl.sum(q[:, None] * state, 0), mask=j < DV)


def _slab(q, v):
    """(BLOCK_K, BLOCK_V): few value channels per program, since the loop over time is serial."""
    return triton.next_power_of_2(q.shape[3]), min(32, triton.next_power_of_2(v.shape[3]))


def forward(q, k, v, g):
    q, k, v, g = q.contiguous(), k.contiguous(), v.contiguous(), g.contiguous()
    (B, H, T, DK), DV = q.shape, v.shape[3]
    out = torch.empty_like(v)
    BLOCK_K, BLOCK_V = _slab(q, v)
    _gla_step_fwd[(triton.cdiv(DV, BLOCK_V), B * H)](
        q, k, v, g, out, T, DK, DV, DK**-0.5, BLOCK_K=BLOCK_K, BLOCK_V=BLOCK_V, num_warps=2
    )
    return out, (q, k, v, g)


# --- backward ---
@triton.jit
def _gla_step_bwd(
    Q, K, V, G, DO, DQParts, DKParts, DGParts, DVal, H, T, DK, DV, do_b, do_h, do_t, do_d, scale,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    base = head * T
    i = tl.arange(0, BLOCK_K)
    j = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    DO += head // H * do_b + head % H * do_h + j.to(tl.int64) * do_d
    # (slabs, B, H, T, DK): this slab's rows.
    part = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + head) * T * DK + i
    state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    for t in range(T):
        k = tl.load(K + (base + t) * DK + i, mask=i < DK, other=0.0).to(tl.float32)
        g = tl.load(G + (base + t) * DK + i, mask=i < DK, other=0.0).to(tl.float32)
        v = tl.load(V + (base + t) * DV + j, mask=j < DV, other=0.0).to(tl.float32)
        do = tl.load(DO + tl.cast(t, tl.int64) * do_t, mask=j < DV, other=0.0).to(tl.float32)
        state = tl.exp(g)[:, None] * state + k[:, None] * v[None, :]
        tl.store(DQParts + part + t * DK, tl.sum(state * do[None, :], 1) * scale, mask=i < DK)
    # The second loop reads dq back, perhaps by other threads.
    tl.debug_barrier()
    dstate = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    dg = tl.zeros((BLOCK_K,), tl.float32)
    for back in range(T):
        t = T - 1 - back
        q = tl.load(Q + (base + t) * DK + i, mask=i < DK, other=0.0).to(tl.float32)
        k = tl.load(K + (base + t) * DK + i, mask=i < DK, other=0.0).to(tl.float32)
        g = tl.load(G + (base + t) * DK + i, mask=i < DK, other=0.0).to(tl.float32)
        v = tl.load(V + (base + t) * DV + j, mask=j < DV, other=0.0).to(tl.float32)
        do = tl.load(DO + tl.cast(t, tl.int64) * do_t, mask=j < DV, other=0.0).to(tl.float32)
        dstate += (q * scale)[:, None] * do[None, :]
        dk = tl.sum(dstate * v[None, :], 1)
        dg += q * tl.load(DQParts + part + t * DK, mask=i < DK, other=0.0) - k * dk
        tl.store(DKParts + part + t * DK, dk, mask=i < DK)
        tl.store(DGParts + part + t * DK, dg, mask=i < DK)
        tl.store(DVal + (base + t) * DV + j, tl.sum(dstate * k[:, None], 0), mask=j < DV)
        dstate *= tl.exp(g)[:, None]


def backward(saved, grad_out, needs=None):
    q, k, v, g = saved
    (B, H, T, DK), DV = q.shape, v.shape[3]
    BLOCK_K, BLOCK_V = _slab(q, v)
    slabs = triton.cdiv(DV, BLOCK_V)
    parts = torch.empty(3, slabs, B, H, T, DK, device=q.device, dtype=torch.float32)
    dv = torch.empty_like(v)
    _gla_step_bwd[(slabs, B * H)](
        q, k, v, g, grad_out, *parts, dv, H, T, DK, DV, *grad_out.stride(), DK**-0.5,
        BLOCK_K=BLOCK_K, BLOCK_V=BLOCK_V, num_warps=2,
    )  # fmt: skip
    dq, dk, dg = parts.sum(1).to(q.dtype).unbind(0)
    return dq, dk, dv, dg


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "T": 32, "K": 16, "V": 32},
    {"B": 2, "H": 1, "T": 27, "K": 12, "V": 20},
    {"B": 1, "H": 2, "T": 20, "K": 8, "V": 8, "dtype": "bfloat16"},
)
BENCH = ({"B": 8, "H": 16, "T": 512, "K": 64, "V": 64, "dtype": "bfloat16"},)


def make_args(B, H, T, K, V, dtype="float32", device="cpu", seed=0):
    r = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, H, T, n, generator=r) for n in (K, K, V))
    g = torch.nn.functional.logsigmoid(torch.randn(B, H, T, K, generator=r)) / 16
    return tuple(x.to(device=device, dtype=getattr(torch, dtype)) for x in (q, k, v, g))


def reference(q, k, v, g):
    # Chunks of 64 tokens: dense within, states with a decay per channel between.
    T = q.shape[2]
    size = 64 if T > 256 else 16
    q, k, v, g = (torch.nn.functional.pad(x, (0, 0, 0, -T % size)).unflatten(2, (-1, size)) for x in (q, k, v, g))
    b = g.float().cumsum(3)
    q_gated, k_gated, k_ending = ((x * y.exp()).to(x.dtype) for x, y in ((q, b), (k, -b), (k, b[:, :, :, -1:] - b)))
    total = b[:, :, :, -1].cumsum(2)
    passed = (total - b[:, :, :, -1])[:, :, :, None] - total[:, :, None]
    chunk = torch.arange(total.shape[2], device=q.device)
    passed = passed.masked_fill((chunk[:, None] <= chunk)[..., None], float("-inf")).exp()
    states = torch.einsum("bhcdk,bhdkv->bhckv", passed, (k_ending.transpose(-1, -2) @ v).float())
    out = (q_gated @ k_gated.transpose(-1, -2)).tril() @ v + q_gated @ states.to(q.dtype)
    return (out * q.shape[-1] ** -0.5).flatten(2, 3)[:, :, :T]
