"""RWKV-6 recurrence with per-channel decay and bonus: saved chunk states are replayed while the adjoint runs back.

o[t] = r[t] (S[t] + diag(u) k[t]^T v[t]),    S[t + 1] = diag(exp(w[t])) S[t] + k[t]^T v[t]
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "rwkv6_recurrent",
    "family": "linear_attention",
    "op": "gated_linear_recurrence",
    "schema": 1,
    "techniques": (
        "reverse-scan", "checkpointed-states", "recompute", "two-stage-partials", "broadcast-reduction",
        "strided-cotangent", "optional-cotangent",
    ),
    "saves": ("states: fp32 (B, H, chunks, K, V)",),
    "grads": ("r", "k", "v", "w", "u", "initial"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}  # fmt: skip


# --- forward ---
@triton.jit
def _rwkv6_fwd(
    R, K, V, W, U, Initial, Out, Final, States, H, T, CHUNK, DK: tl.constexpr, DV: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    # One program: all key channels and BLOCK_V value channels of one head, the state in registers through all time.
    head = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, BLOCK_K)
    j = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    i_ok, j_ok = i < DK, j < DV
    ij = i[:, None] * DV + j[None, :]
    ij_ok = i_ok[:, None] & j_ok[None, :]
    u = tl.load(U + head % H * DK + i, mask=i_ok, other=0.0).to(tl.float32)
    state = tl.load(Initial + head * DK * DV + ij, mask=ij_ok, other=0.0).to(tl.float32)
    States += head * tl.cdiv(T, CHUNK) * DK * DV
    for t in range(T):
        if t % CHUNK == 0:
            tl.store(States + t // CHUNK * DK * DV + ij, state, mask=ij_ok)
        row = head * T + t
        r = tl.load(R + row * DK + i, mask=i_ok, other=0.0).to(tl.float32)
        k = tl.load(K + row * DK + i, mask=i_ok, other=0.0).to(tl.float32)
        w = tl.load(W + row * DK + i, mask=i_ok, other=0.0).to(tl.float32)
        v = tl.load(V + row * DV + j, mask=j_ok, other=0.0).to(tl.float32)
        kv = k[:, None] * v[None, :]
        tl.store(Out + row * DV + j, tl.sum(r[:, None] * (state + u[:, None] * kv), 0), mask=j_ok)
        state = tl.exp(w)[:, None] * state + kv
    tl.store(Final + head * DK * DV + ij, state, mask=ij_ok)


def forward(r, k, v, w, u, initial):
    r, k, v, w, u, initial = (x.contiguous() for x in (r, k, v, w, u, initial))
    B, H, T, DK = k.shape
    DV = v.shape[-1]
    chunk = 32
    out = torch.empty_like(v)
    final = torch.empty(B, H, DK, DV, device=k.device, dtype=torch.float32)
    states = torch.empty(B, H, triton.cdiv(T, chunk), DK, DV, device=k.device, dtype=torch.float32)
    BLOCK_V = min(32, triton.next_power_of_2(DV))
    _rwkv6_fwd[(triton.cdiv(DV, BLOCK_V), B * H)](
        r, k, v, w, u, initial, out, final, states, H, T, chunk, DK=DK, DV=DV,
        BLOCK_K=triton.next_power_of_2(DK), BLOCK_V=BLOCK_V, num_warps=4,
    )  # fmt: skip
    return (out, final), (r, k, v, w, u, initial, states)


# --- backward ---
@triton.jit
def _rwkv6_bwd(
    DO, DFinal, R, K, V, W, U, States, Replay, DR, DKey, DVal, DW, DU, DInitial, H, T, CHUNK,
    do_b, do_h, do_t, do_v, df_b, df_h, df_k, df_v, HAS_DO: tl.constexpr, HAS_DF: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    slab = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    heads = tl.num_programs(1)
    i = tl.arange(0, BLOCK_K)
    j = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    i_ok, j_ok = i < DK, j < DV
    ij = i[:, None] * DV + j[None, :]
    ij_ok = i_ok[:, None] & j_ok[None, :]
    DO += head // H * do_b + head % H * do_h
    DFinal += head // H * df_b + head % H * df_h
    # Sums over value channels of this slab only: the slabs' shares of dr, dk, dw and du are added afterwards.
    part = (slab * heads + head) * T * DK
    chunks = tl.cdiv(T, CHUNK)
    States += head * chunks * DK * DV
    Replay += (slab * heads + head) * CHUNK * BLOCK_K * BLOCK_V
    here = i[:, None] * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    u = tl.load(U + head % H * DK + i, mask=i_ok, other=0.0).to(tl.float32)
    du = tl.zeros((BLOCK_K,), tl.float32)
    dstate = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    if HAS_DF:
        df_at = i[:, None].to(tl.int64) * df_k + j[None, :].to(tl.int64) * df_v
        dstate = tl.load(DFinal + df_at, mask=ij_ok, other=0.0).to(tl.float32)
    for back in range(chunks):
        first = (chunks - 1 - back) * CHUNK
        last = tl.minimum(first + CHUNK, T)
        # Dividing by the decay would lose the state where it decays fast: replay the chunk, keep its states in cache.
        state = tl.load(States + (first // CHUNK) * DK * DV + ij, mask=ij_ok, other=0.0)
        for t in range(first, last):
            tl.store(Replay + (t - first) * BLOCK_K * BLOCK_V + here, state)
            row = head * T + t
            k = tl.load(K + row * DK + i, mask=i_ok, other=0.0).to(tl.float32)
            w = tl.load(W + row * DK + i, mask=i_ok, other=0.0).to(tl.float32)
            v = tl.load(V + row * DV + j, mask=j_ok, other=0.0).to(tl.float32)
            state = tl.exp(w)[:, None] * state + k[:, None] * v[None, :]
        tl.debug_barrier()
        for ago in range(last - first):
            t = last - 1 - ago
            row = head * T + t
            state = tl.load(Replay + (t - first) * BLOCK_K * BLOCK_V + here)
            r = tl.load(R + row * DK + i, mask=i_ok, other=0.0).to(tl.float32)
            k = tl.load(K + row * DK + i, mask=i_ok, other=0.0).to(tl.float32)
            w = tl.load(W + row * DK + i, mask=i_ok, other=0.0).to(tl.float32)
            v = tl.load(V + row * DV + j, mask=j_ok, other=0.0).to(tl.float32)
            do = tl.zeros((BLOCK_V,), tl.float32)
            if HAS_DO:
                do = tl.load(DO + t.to(tl.int64) * do_t + j * do_v, mask=j_ok, other=0.0).to(tl.float32)
            decay = tl.exp(w)
            v_do = tl.sum(v * do, 0)
            dr = tl.sum(state * do[None, :], 1) + u * k * v_do
            dk = tl.sum(dstate * v[None, :], 1) + u * r * v_do
            dv = tl.sum(dstate * k[:, None], 0) + tl.sum(u * r * k, 0) * do
            dw = decay * tl.sum(dstate * state, 1)
            du += r * k * v_do
            tl.store(DR + part + t * DK + i, dr, mask=i_ok)
            tl.store(DKey + part + t * DK + i, dk, mask=i_ok)
            tl.store(DW + part + t * DK + i, dw, mask=i_ok)
            tl.store(DVal + row * DV + j, dv, mask=j_ok)
            dstate = decay[:, None] * dstate + r[:, None] * do[None, :]
        # The next chunk overwrites the replayed states.
        tl.debug_barrier()
    tl.store(DU + (slab * heads + head) * DK + i, du, mask=i_ok)
    tl.store(DInitial + head * DK * DV + ij, dstate, mask=ij_ok)


def backward(saved, grad_out, grad_final, needs=None):
    r, k, v, w, u, initial, states = saved
    B, H, T, DK = k.shape
    DV = v.shape[-1]
    chunk = 32
    BLOCK_K, BLOCK_V = triton.next_power_of_2(DK), min(32, triton.next_power_of_2(DV))
    slabs = triton.cdiv(DV, BLOCK_V)
    replay = torch.empty(slabs, B, H, chunk, BLOCK_K, BLOCK_V, device=k.device, dtype=torch.float32)
    parts = torch.empty(3, slabs, B, H, T, DK, device=k.device, dtype=torch.float32)
    du_parts = torch.empty(slabs, B, H, DK, device=k.device, dtype=torch.float32)
    dv, dinitial = torch.empty_like(v), torch.empty_like(initial)
    do = v if grad_out is None else grad_out
    df = initial if grad_final is None else grad_final
    _rwkv6_bwd[(slabs, B * H)](
        do, df, r, k, v, w, u, states, replay, parts[0], parts[1], dv, parts[2], du_parts, dinitial, H, T, chunk,
        *do.stride(), *df.stride(), HAS_DO=grad_out is not None, HAS_DF=grad_final is not None,
        DK=DK, DV=DV, BLOCK_K=BLOCK_K, BLOCK_V=BLOCK_V, num_warps=4,
    )  # fmt: skip
    dr, dk, dw = parts.sum(1).unbind(0)
    du = du_parts.sum((0, 1))
    return dr.to(r.dtype), dk.to(k.dtype), dv, dw.to(w.dtype), du.to(u.dtype), dinitial


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "T": 32, "K": 16, "V": 32},
    {"B": 2, "H": 1, "T": 45, "K": 12, "V": 40, "dtype": "float16"},
    {"B": 1, "H": 2, "T": 20, "K": 8, "V": 8, "dtype": "bfloat16"},
)
BENCH = ({"B": 8, "H": 16, "T": 512, "K": 64, "V": 64, "dtype": "bfloat16"},)


def make_args(B, H, T, K, V, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    r, k = (torch.randn(B, H, T, K, generator=g) * 0.5 for _ in range(2))
    v = torch.randn(B, H, T, V, generator=g)
    # w is the logarithm of the decay, -exp(.) as the layer above computes it.
    w = -torch.exp(torch.randn(B, H, T, K, generator=g) - 1.0)
    u = torch.randn(H, K, generator=g) * 0.5
    initial = torch.randn(B, H, K, V, generator=g) * 0.5
    return (*(t.to(device=device, dtype=getattr(torch, dtype)) for t in (r, k, v, w, u)), initial.to(device))


def reference(r, k, v, w, u, initial):
    # Chunks of 16 tokens: decays within a chunk are differences of running sums, masked before the exponential.
    T, size, dtype = k.shape[2], 16, v.dtype
    r, k, v, w = (
        torch.nn.functional.pad(x.float(), (0, 0, 0, -T % size)).unflatten(2, (-1, size)) for x in (r, k, v, w)
    )
    till = w.cumsum(3)
    token = torch.arange(size, device=k.device)
    between = (till - w)[:, :, :, :, None] - till[:, :, :, None]
    between = between.masked_fill((token[:, None] <= token)[..., None], float("-inf")).exp()
    scores = (r[:, :, :, :, None] * k[:, :, :, None] * between).sum(-1)
    bonus = (r * u.float()[:, None, None] * k).sum(-1, keepdim=True)
    added = (k * (till[:, :, :, -1:] - till).exp()).transpose(-1, -2) @ v
    passed = till[:, :, :, -1].exp()[..., None]
    state, states = initial.float(), []
    for chunk in range(k.shape[2]):
        states.append(state)
        state = passed[:, :, chunk] * state + added[:, :, chunk]
    out = scores @ v + bonus * v + (r * (till - w).exp()) @ torch.stack(states, 2)
    return out.flatten(2, 3)[:, :, :T].to(dtype), state
