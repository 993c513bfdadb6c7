"""Attention with dropout on the weights: the mask is drawn again from (head, query, key) in both loop orders.

Philox is a function of seed and counter: element (i, j) of head h uses seed + h, counter i ceil(S / 4) + j / 4 and word
j % 4, whichever kernel visits it and in which order, so neither mask nor tile order is saved; a call serves four keys.
o already holds the mask, hence delta = rowsum(o do) stays what the softmax takes off; only dP = keep / (1 - p) (do v^T)
and the weights that dv sees carry it.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "fa_dropout_philox",
    "family": "attention",
    "op": "attention_dropout",
    "schema": 1,
    "techniques": ("rng-replay", "saved-lse", "delta-preprocess", "loop-swap", "owner-grid", "recompute"),
    "saves": ("o: fp32 or bf16 (B, H, T, D)", "lse: fp32 (B, H, T)"),
    "grads": ("q", "k", "v"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _tile_at(X, row, length, D, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    return tl.load(X + row[:, None] * D + d[None, :], mask=(row[:, None] < length) & (d[None, :] < D), other=0.0)


@triton.jit
def _keep(seed, m, first_n, S, p, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    # (BLOCK_M, BLOCK_N): 1 / (1 - p) for kept elements, 0 for dropped ones. `first_n` is a multiple of four.
    fourth = first_n // 4 + tl.arange(0, BLOCK_N // 4)
    u0, u1, u2, u3 = tl.rand4x(seed, m[:, None] * tl.cdiv(S, 4) + fourth[None, :])
    u = tl.reshape(tl.join(tl.join(u0, u2), tl.join(u1, u3)), (BLOCK_M, BLOCK_N))
    return tl.where(u >= p, 1.0 / (1.0 - p), 0.0)


@triton.jit
def _dropout_fwd(
    Q, K, V, Out, LSE, T, S, D, seed, p_drop, scale_log2,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    q = _tile_at(Q + head * T * D, m, T, D, BLOCK_D)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    norm = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(0, S, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        k = _tile_at(K + head * S * D, n, S, D, BLOCK_D)
        v = _tile_at(V + head * S * D, n, S, D, BLOCK_D)
        s = tl.where(n[None, :] < S, tl.dot(q, tl.trans(k)) * scale_log2, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        shrink = tl.exp2(top - new_top)
        p = tl.exp2(s - new_top[:, None])
        # The normaliser sums all weights, dropped or not.
        norm = norm * shrink + tl.sum(p, 1)
        p *= _keep(seed + tl.program_id(1), m, start, S, p_drop, BLOCK_M, BLOCK_N)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
        top = new_top
    out_at = (head * T + m[:, None]) * D + d[None, :]
    tl.store(Out + out_at, acc / norm[:, None], mask=(m[:, None] < T) & (d[None, :] < D))
    tl.store(LSE + head * T + m, top + tl.log2(norm), mask=m < T)


def _blocks(length, q):
    """(owned rows, rows of the other side, warps): Philox wants registers, so tiles are smaller than without it."""
    if length <= 256:
        return 32, 16, 4
    if q.element_size() == 4:
        return 64, 32, 8
    return (128, 32, 8) if q.shape[3] > 64 else (64, 32, 4)


def forward(q, k, v, p=0.1, seed=0):
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    (B, H, T, D), S = q.shape, k.shape[2]
    o = torch.empty_like(q)
    lse = torch.empty(B, H, T, device=q.device, dtype=torch.float32)
    own, other, warps = _blocks(T, q)
    _dropout_fwd[(triton.cdiv(T, own), B * H)](
        q, k, v, o, lse, T, S, D, seed, p, D**-0.5 * 1.4426950408889634,
        BLOCK_M=own, BLOCK_N=other, BLOCK_D=max(16, triton.next_power_of_2(D)), num_warps=warps,
    )  # fmt: skip
    return o, (q, k, v, o, lse, p, seed)


# --- backward ---
@triton.jit
def _dropout_dq(
    Q, K, V, Out, DO, LSE, Delta, DQ, T, S, D, seed, p_drop, scale, scale_log2,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    q = _tile_at(Q + head * T * D, m, T, D, BLOCK_D)
    do = _tile_at(DO + head * T * D, m, T, D, BLOCK_D)
    o = _tile_at(Out + head * T * D, m, T, D, BLOCK_D)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(Delta + head * T + m, delta, mask=m < T)
    lse = tl.load(LSE + head * T + m, mask=m < T, other=float("inf"))
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(0, S, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        k = _tile_at(K + head * S * D, n, S, D, BLOCK_D)
        v = _tile_at(V + head * S * D, n, S, D, BLOCK_D)
        s = tl.dot(q, tl.trans(k)) * scale_log2 - lse[:, None]
        p = tl.exp2(tl.where(n[None, :] < S, s, float("-inf")))
        dp = tl.dot(do, tl.trans(v)) * _keep(seed + tl.program_id(1), m, start, S, p_drop, BLOCK_M, BLOCK_N)
        dq = tl.dot((p * (dp - delta[:, None])).to(k.dtype), k, dq)
    out_at = (head * T + m[:, None]) * D + d[None, :]
    tl.store(DQ + out_at, dq * scale, mask=(m[:, None] < T) & (d[None, :] < D))


@triton.jit
def _dropout_dkdv(
    Q, K, V, DO, LSE, Delta, DK, DV, T, S, D, seed, p_drop, scale, scale_log2,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    k = _tile_at(K + head * S * D, n, S, D, BLOCK_D)
    v = _tile_at(V + head * S * D, n, S, D, BLOCK_D)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for start in range(0, T, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        q = _tile_at(Q + head * T * D, m, T, D, BLOCK_D)
        do = _tile_at(DO + head * T * D, m, T, D, BLOCK_D)
        lse = tl.load(LSE + head * T + m, mask=m < T, other=float("inf"))
        delta = tl.load(Delta + head * T + m, mask=m < T, other=0.0)
        p = tl.exp2(tl.dot(k, tl.trans(q)) * scale_log2 - lse[None, :])
        # Keys are rows here: the tile is drawn as the forward drew it, and turned.
        keep = tl.trans(_keep(seed + tl.program_id(1), m, first, S, p_drop, BLOCK_M, BLOCK_N))
        dv = tl.dot((p * keep).to(do.dtype), do, dv)
        ds = p * (tl.dot(v, tl.trans(do)) * keep - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk)
    at = (head * S + n[:, None]) * D + d[None, :]
    inside = (n[:, None] < S) & (d[None, :] < D)
    tl.store(DK + at, dk * scale, mask=inside)
    tl.store(DV + at, dv, mask=inside)


def backward(saved, grad_o, needs=None):
    q, k, v, o, lse, p, seed = saved
    _, need_k, need_v = needs or (True, True, True)
    (B, H, T, D), S = q.shape, k.shape[2]
    # Every tile of the cotangent is read many times: one copy is cheaper than strided reads in all of them.
    do = grad_o.contiguous()
    scale = D**-0.5
    sizes = (T, S, D, seed, p, scale, scale * 1.4426950408889634)
    BLOCK_D = max(16, triton.next_power_of_2(D))
    own, other, warps = _blocks(T, q)
    dq, delta = torch.empty_like(q), torch.empty_like(lse)
    _dropout_dq[(triton.cdiv(T, own), B * H)](
        q, k, v, o, do, lse, delta, dq, *sizes, BLOCK_M=own, BLOCK_N=other, BLOCK_D=BLOCK_D, num_warps=warps
    )
    if not (need_k or need_v):
        return dq, None, None
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    own, other, warps = _blocks(S, q)
    _dropout_dkdv[(triton.cdiv(S, own), B * H)](
        q, k, v, do, lse, delta, dk, dv, *sizes, BLOCK_M=other, BLOCK_N=own, BLOCK_D=BLOCK_D, num_warps=warps
    )
    return dq, dk, dv


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "T": 64, "S": 48, "D": 32},
    {"B": 2, "H": 1, "T": 45, "S": 71, "D": 20, "p": 0.5},
    {"B": 1, "H": 2, "T": 33, "S": 40, "D": 16, "p": 0.0, "dtype": "bfloat16"},
)
BENCH = ({"B": 2, "H": 16, "T": 1024, "S": 1024, "D": 64, "dtype": "bfloat16"},)


def make_args(B, H, T, S, D, p=0.1, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = ((B, H, T, D), (B, H, S, D), (B, H, S, D))
    q, k, v = (torch.randn(shape, generator=g).to(device, getattr(torch, dtype)) for shape in shapes)
    return q, k, v, p, 1234 + seed


def _multiply_high(factor, word):
    """Both words of a 32 x 32 bit product: by halves, because int64 has no unsigned high part."""
    upper, lower = factor * (word >> 16), factor * (word & 0xFFFF)
    total = ((upper & 0xFFFF) << 16) + lower
    return (upper >> 16) + (total >> 32), total & 0xFFFFFFFF


def _philox_uniform(key, counter):
    """The four words of Philox4x32-10 at (counter, 0, 0, 0) under keys below 2^32, as floats in [0, 1), last axis 4."""
    low = 0xFFFFFFFF
    zero = torch.zeros_like(key + counter)
    c, k0, k1 = (zero + counter, zero, zero, zero), key, torch.zeros_like(key)
    for _ in range(10):
        high_a, low_a = _multiply_high(0xD2511F53, c[0])
        high_b, low_b = _multiply_high(0xCD9E8D57, c[2])
        c = ((high_b ^ c[1] ^ k0) & low, low_b, (high_a ^ c[3] ^ k1) & low, low_a)
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    words = torch.stack(c, -1)
    signed = torch.where(words >= 2**31, words - 2**32, words)
    return torch.where(signed < 0, -signed - 1, signed).double() * 4.6566127342e-10


def reference(q, k, v, p=0.1, seed=0):
    (B, H, T, D), S = q.shape, k.shape[2]
    heads = torch.arange(B * H, device=q.device).view(B, H, 1, 1)
    fourths = -(-S // 4)
    uniform = _philox_uniform(seed + heads, torch.arange(T * fourths, device=q.device).view(T, fourths))
    keep = uniform.flatten(-2)[..., :S] >= p
    weights = ((q @ k.transpose(-1, -2)).float() * D**-0.5).softmax(-1)
    return (weights * keep / (1.0 - p)).to(v.dtype) @ v
