"""Linear attention token by token with the state in registers: forward replay and reverse loop share one launch.

    o[t] = scale q[t] S[t],    S[t] = S[t - 1] + k[t] v[t]^T

Nothing is saved. Half of the backward's programs replay the states forwards for dq, the other half run the state's
gradient backwards for dk and dv; the two loops do not depend on each other, so they fill the device side by side.
Sums over value channels are partial per slab of BLOCK_V channels and are added afterwards.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "linattn_recurrent_fused",
    "family": "linear_attention",
    "op": "linear_attention",
    "schema": 1,
    "techniques": ("reverse-scan", "recompute", "one-launch", "two-stage-partials", "optional-cotangent"),
    "saves": (),
    "grads": ("q", "k", "v", "initial"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _recurrent_fwd(
    Q, K, V, Initial, Out, Final, T, DK, DV, scale, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, BLOCK_K)
    j = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    tile = (head * DK + i[:, None]) * DV + j[None, :]
    in_tile = (i[:, None] < DK) & (j[None, :] < DV)
    state = tl.load(Initial + tile, mask=in_tile, other=0.0)
    Q += head * T * DK
    K += head * T * DK
    V += head * T * DV
    Out += head * T * DV
    for _ in range(T):
        q = tl.load(Q + i, mask=i < DK, other=0.0).to(tl.float32) * scale
        k = tl.load(K + i, mask=i < DK, other=0.0).to(tl.float32)
        v = tl.load(V + j, mask=j < DV, other=0.0).to(tl.float32)
        state += k[:, None] * v[None, :]
        tl.store(Out + j, tl.sum(q[:, None] * state, 0), mask=j < DV)
        Q += DK
        K += DK
        V += DV
        Out += DV
    tl.store(Final + tile, state, mask=in_tile)


def _slab(q, v):
    """(BLOCK_K, BLOCK_V): few value channels per program, since the loop over time is serial."""
    return triton.next_power_of_2(q.shape[3]), min(32, triton.next_power_of_2(v.shape[3]))


def forward(q, k, v, initial):
    q, k, v, initial = q.contiguous(), k.contiguous(), v.contiguous(), initial.contiguous()
    (B, H, T, DK), DV = q.shape, v.shape[3]
    out = torch.empty_like(v)
    final = torch.empty_like(initial)
    BLOCK_K, BLOCK_V = _slab(q, v)
    _recurrent_fwd[(triton.cdiv(DV, BLOCK_V), B * H)](
        q, k, v, initial, out, final, T, DK, DV, DK**-0.5, BLOCK_K=BLOCK_K, BLOCK_V=BLOCK_V, num_warps=2
    )
    return (out, final), (q, k, v, initial)


# --- backward ---
@triton.jit
def _recurrent_bwd(
    Q, K, V, Initial, DO, DFinal, DQParts, DKParts, DVal, DInitial, H, T, DK, DV, scale, df_b, df_h, df_k, df_v,
    HAS_DF: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, BLOCK_K)
    j = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    tile = (head * DK + i[:, None]) * DV + j[None, :]
    in_tile = (i[:, None] < DK) & (j[None, :] < DV)
    # This slab's share of dq and dk: (slabs, B, H, T, DK).
    part = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + head) * T * DK
    if tl.program_id(2) == 0:
        state = tl.load(Initial + tile, mask=in_tile, other=0.0)
        for t in range(T):
            k = tl.load(K + (head * T + t) * DK + i, mask=i < DK, other=0.0).to(tl.float32)
            v = tl.load(V + (head * T + t) * DV + j, mask=j < DV, other=0.0).to(tl.float32)
            do = tl.load(DO + (head * T + t) * DV + j, mask=j < DV, other=0.0).to(tl.float32)
            state += k[:, None] * v[None, :]
            tl.store(DQParts + part + t * DK + i, tl.sum(state * do[None, :], 1) * scale, mask=i < DK)
    else:
        dstate = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
        if HAS_DF:
            df_at = head // H * df_b + head % H * df_h + i[:, None].to(tl.int64) * df_k + j[None, :] * df_v
            dstate = tl.load(DFinal + df_at, mask=in_tile, other=0.0).to(tl.float32)
        for back in range(T):
            t = T - 1 - back
            q = tl.load(Q + (head * T + t) * DK + i, mask=i < DK, other=0.0).to(tl.float32) * scale
            k = tl.load(K + (head * T + t) * DK + i, mask=i < DK, other=0.0).to(tl.float32)
            v = tl.load(V + (head * T + t) * DV + j, mask=j < DV, other=0.0).to(tl.float32)
            do = tl.load(DO + (head * T + t) * DV + j, mask=j < DV, other=0.0).to(tl.float32)
            dstate += q[:, None] * do[None, :]
            tl.store(DKParts + part + t * DK + i, tl.sum(dstate * v[None, :], 1), mask=i < DK)
            tl.store(DVal + (head * T + t) * DV + j, tl.sum(dstate * k[:, None], 0), mask=j < DV)
        tl.store(DInitial + tile, dstate, mask=in_tile)


def backward(saved, grad_out, grad_final, needs=None):
    q, k, v, initial = saved
    (B, H, T, DK), DV = q.shape, v.shape[3]
    do = torch.zeros_like(v) if grad_out is None else grad_out.contiguous()
    df = initial if grad_final is None else grad_final
    BLOCK_K, BLOCK_V = _slab(q, v)
    slabs = triton.cdiv(DV, BLOCK_V)
    parts = torch.empty(2, slabs, B, H, T, DK, device=q.device, dtype=torch.float32)
    dv, dinitial = torch.empty_like(v), torch.empty_like(initial)
    _recurrent_bwd[(slabs, B * H, 2)](
        q, k, v, initial, do, df, parts[0], parts[1], dv, dinitial, H, T, DK, DV, DK**-0.5, *df.stride(),
        HAS_DF=grad_final is not None, BLOCK_K=BLOCK_K, BLOCK_V=BLOCK_V, num_warps=4,
    )  # fmt: skip
    dq, dk = parts.sum(1).to(q.dtype).unbind(0)
    return dq, dk, dv, dinitial


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "T": 32, "K": 16, "V": 32},
    {"B": 2, "H": 1, "T": 27, "K": 12, "V": 20},
    {"B": 1, "H": 2, "T": 20, "K": 8, "V": 8, "dtype": "bfloat16"},
)
BENCH = ({"B": 8, "H": 16, "T": 512, "K": 64, "V": 64, "dtype": "bfloat16"},)


def make_args(B, H, T, K, V, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, H, T, n, generator=g).to(device, getattr(torch, dtype)) for n in (K, K, V))
    # The state, unlike what flows through it, stays in fp32.
    return q, k, v, torch.randn(B, H, K, V, generator=g).to(device)


def reference(q, k, v, initial):
    # Chunks of 64 tokens: dense within, running sums of k^T v between.
    T = q.shape[2]
    size = 64 if T > 256 else 16
    q, k, v = (torch.nn.functional.pad(x, (0, 0, 0, -T % size)).unflatten(2, (-1, size)) for x in (q, k, v))
    states = torch.cat((initial[:, :, None], (k.transpose(-1, -2) @ v).float()), 2).cumsum(2)
    out = (q @ k.transpose(-1, -2)).tril() @ v + q @ states[:, :, :-1].to(q.dtype)
    return (out * q.shape[-1] ** -0.5).flatten(2, 3)[:, :, :T], states[:, :, -1]
