"""Causal attention that rotates queries and keys as it loads them, and rotates their gradients back before the store.

A head's channels are two halves, rotated against each other by the position's angles; scores are the sum of two
half-wide products, q1 k1^T + q2 k2^T of what was rotated. No rotated copy of q or k is ever written: the accumulators
of dq and dk hold the gradients of the rotated halves, and since a rotation's adjoint is its inverse, the epilogue turns

    d1 = cos d1' + sin d2',    d2 = cos d2' - sin d1'

in fp32, before the one rounding. Angles come as tables, which a sequence's heads share through the cache.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "fa_rope_inside",
    "family": "attention",
    "op": "rotary_attention",
    "schema": 1,
    "techniques": (
        "prologue-fusion", "epilogue-fusion", "orthogonal-adjoint", "saved-lse", "loop-swap", "owner-grid",
        "causal-bounds", "recompute", "strided-cotangent",
    ),
    "saves": ("o: fp32 or bf16 or fp16 (B, T, H, D)", "lse: fp32 (B, H, T)"),
    "grads": ("q", "k", "v"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}  # fmt: skip


# --- forward ---
@triton.jit
def _columns(X, t, T, s_t, s_d, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    inside = (t[:, None] < T) & (c[None, :] < WIDTH)
    return tl.load(X + t[:, None].to(tl.int64) * s_t + c[None, :] * s_d, mask=inside, other=0.0)


@triton.jit
def _rotated(X, Cos, Sin, t, T, s_t, HALF: tl.constexpr, BLOCK_H: tl.constexpr):
    """Both halves of rows t, rotated in fp32 and rounded to the dtype of the products."""
    x1 = _columns(X, t, T, s_t, 1, HALF, BLOCK_H)
    x2 = _columns(X + HALF, t, T, s_t, 1, HALF, BLOCK_H)
    cos = _columns(Cos, t, T, HALF, 1, HALF, BLOCK_H)
    sin = _columns(Sin, t, T, HALF, 1, HALF, BLOCK_H)
    return (x1 * cos - x2 * sin).to(x1.dtype), (x2 * cos + x1 * sin).to(x1.dtype)


@triton.jit
def _put_rotated_back(DX, d1, d2, Cos, Sin, t, T, s_t, HALF: tl.constexpr, BLOCK_H: tl.constexpr):
    c = tl.arange(0, BLOCK_H)
    cos = _columns(Cos, t, T, HALF, 1, HALF, BLOCK_H)
    sin = _columns(Sin, t, T, HALF, 1, HALF, BLOCK_H)
    at = t[:, None].to(tl.int64) * s_t + c[None, :]
    inside = (t[:, None] < T) & (c[None, :] < HALF)
    tl.store(DX + at, d1 * cos + d2 * sin, mask=inside)
    tl.store(DX + HALF + at, d2 * cos - d1 * sin, mask=inside)


@triton.jit
def _rotary_fwd(
    Q, K, V, Cos, Sin, Out, LSE, H, T, scale_log2, HALF: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr, OWN: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * OWN
    batch = (tl.program_id(1) // H).to(tl.int64)
    row = H * 2 * HALF
    base = batch * T * row + tl.program_id(1) % H * 2 * HALF
    m = first + tl.arange(0, OWN)
    q1, q2 = _rotated(Q + base, Cos, Sin, m, T, row, HALF, BLOCK_H)
    top = tl.full((OWN,), float("-inf"), tl.float32)
    norm = tl.zeros((OWN,), tl.float32)
    acc = tl.zeros((OWN, BLOCK_D), tl.float32)
    for start in range(0, tl.minimum(first + OWN, T), STEP):
        n = start + tl.arange(0, STEP)
        k1, k2 = _rotated(K + base, Cos, Sin, n, T, row, HALF, BLOCK_H)
        s = tl.dot(q2, tl.trans(k2), tl.dot(q1, tl.trans(k1))) * scale_log2
        s = tl.where(m[:, None] >= n[None, :], s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - higher[:, None])
        fade = tl.exp2(top - higher)
        norm = norm * fade + tl.sum(p, 1)
        v = _columns(V + base, n, T, row, 1, 2 * HALF, BLOCK_D)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None])
        top = higher
    d = tl.arange(0, BLOCK_D)
    at = base + m[:, None].to(tl.int64) * row + d[None, :]
    tl.store(Out + at, acc / norm[:, None], mask=(m[:, None] < T) & (d[None, :] < 2 * HALF))
    tl.store(LSE + tl.program_id(1).to(tl.int64) * T + m, top + tl.log2(norm), mask=m < T)


def _tiles(q):
    T, D = q.shape[1], q.shape[3]
    sizes = {
        "HALF": D // 2, "BLOCK_H": max(16, triton.next_power_of_2(D // 2)),
        "BLOCK_D": max(16, triton.next_power_of_2(D)),
    }  # fmt: skip
    if T <= 256:
        return sizes | {"OWN": 32, "STEP": 16, "num_warps": 4}
    if q.element_size() == 4:
        return sizes | {"OWN": 64, "STEP": 32, "num_warps": 8}
    return sizes | {"OWN": 128, "STEP": 64 if D <= 64 else 32, "num_warps": 8}


def forward(q, k, v, cos, sin):
    q, k, v, cos, sin = (x.contiguous() for x in (q, k, v, cos, sin))
    B, T, H, D = q.shape
    if D % 2:
        raise ValueError(f"a head of {D} channels has no two halves")
    o = torch.empty_like(q)
    lse = torch.empty(B, H, T, device=q.device, dtype=torch.float32)
    tiles = _tiles(q)
    _rotary_fwd[(triton.cdiv(T, tiles["OWN"]), B * H)](
        q, k, v, cos, sin, o, lse, H, T, D**-0.5 * 1.4426950408889634, **tiles
    )
    return o, (q, k, v, cos, sin, o, lse)


# --- backward ---
@triton.jit
def _rotary_dq(
    Q, K, V, Cos, Sin, Out, DO, LSE, Delta, DQ, H, T, do_b, do_t, do_h, do_d, scale, HALF: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, OWN: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * OWN
    batch = (tl.program_id(1) // H).to(tl.int64)
    head = (tl.program_id(1) % H).to(tl.int64)
    row = H * 2 * HALF
    base = batch * T * row + head * 2 * HALF
    statistics = (batch * H + head) * T
    m = first + tl.arange(0, OWN)
    q1, q2 = _rotated(Q + base, Cos, Sin, m, T, row, HALF, BLOCK_H)
    o = _columns(Out + base, m, T, row, 1, 2 * HALF, BLOCK_D)
    do = _columns(DO + batch * do_b + head * do_h, m, T, do_t, do_d, 2 * HALF, BLOCK_D)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(Delta + statistics + m, delta, mask=m < T)
    lse = tl.load(LSE + statistics + m, mask=m < T, other=float("inf"))
    d1 = tl.zeros((OWN, BLOCK_H), tl.float32)
    d2 = tl.zeros((OWN, BLOCK_H), tl.float32)
    for start in range(0, tl.minimum(first + OWN, T), STEP):
        n = start + tl.arange(0, STEP)
        k1, k2 = _rotated(K + base, Cos, Sin, n, T, row, HALF, BLOCK_H)
        v = _columns(V + base, n, T, row, 1, 2 * HALF, BLOCK_D)
        s = tl.dot(q2, tl.trans(k2), tl.dot(q1, tl.trans(k1))) * (scale * 1.4426950408889634)
        p = tl.exp2(tl.where(m[:, None] >= n[None, :], s - lse[:, None], float("-inf")))
        ds = (p * (tl.dot(do, tl.trans(v)) - delta[:, None])).to(k1.dtype)
        d1 = tl.dot(ds, k1, d1)
        d2 = tl.dot(ds, k2, d2)
    _put_rotated_back(DQ + base, d1 * scale, d2 * scale, Cos, Sin, m, T, row, HALF, BLOCK_H)


@triton.jit
def _rotary_dkdv(
    Q, K, V, Cos, Sin, DO, LSE, Delta, DK, DV, H, T, do_b, do_t, do_h, do_d, scale, HALF: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, OWN: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * OWN
    batch = (tl.program_id(1) // H).to(tl.int64)
    head = (tl.program_id(1) % H).to(tl.int64)
    row = H * 2 * HALF
    base = batch * T * row + head * 2 * HALF
    statistics = (batch * H + head) * T
    n = first + tl.arange(0, OWN)
    k1, k2 = _rotated(K + base, Cos, Sin, n, T, row, HALF, BLOCK_H)
    v = _columns(V + base, n, T, row, 1, 2 * HALF, BLOCK_D)
    d1 = tl.zeros((OWN, BLOCK_H), tl.float32)
    d2 = tl.zeros((OWN, BLOCK_H), tl.float32)
    dv = tl.zeros((OWN, BLOCK_D), tl.float32)
    for start in range(first, T, STEP):
        m = start + tl.arange(0, STEP)
        q1, q2 = _rotated(Q + base, Cos, Sin, m, T, row, HALF, BLOCK_H)
        do = _columns(DO + batch * do_b + head * do_h, m, T, do_t, do_d, 2 * HALF, BLOCK_D)
        lse = tl.load(LSE + statistics + m, mask=m < T, other=float("inf"))
        delta = tl.load(Delta + statistics + m, mask=m < T, other=0.0)
        s = tl.dot(k2, tl.trans(q2), tl.dot(k1, tl.trans(q1))) * (scale * 1.4426950408889634)
        p = tl.exp2(tl.where(m[None, :] >= n[:, None], s - lse[None, :], float("-inf")))
        dv = tl.dot(p.to(do.dtype), do, dv)
        ds = (p * (tl.dot(v, tl.trans(do)) - delta[None, :])).to(q1.dtype)
        d1 = tl.dot(ds, q1, d1)
        d2 = tl.dot(ds, q2, d2)
    _put_rotated_back(DK + base, d1 * scale, d2 * scale, Cos, Sin, n, T, row, HALF, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    at = base + n[:, None].to(tl.int64) * row + d[None, :]
    tl.store(DV + at, dv, mask=(n[:, None] < T) & (d[None, :] < 2 * HALF))


def backward(saved, grad_o, needs=None):
    q, k, v, cos, sin, o, lse = saved
    _, need_k, need_v = needs or (True, True, True)
    B, T, H, D = q.shape
    tiles = _tiles(q)
    grid = (triton.cdiv(T, tiles["OWN"]), B * H)
    sizes = (H, T, *grad_o.stride(), D**-0.5)
    dq, delta = torch.empty_like(q), torch.empty_like(lse)
    _rotary_dq[grid](q, k, v, cos, sin, o, grad_o, lse, delta, dq, *sizes, **tiles)
    if not (need_k or need_v):
        return dq, None, None
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    _rotary_dkdv[grid](q, k, v, cos, sin, grad_o, lse, delta, dk, dv, *sizes, **tiles)
    return dq, dk, dv


# --- check ---
SWEEP = (
    {"B": 1, "T": 64, "H": 2, "HALF": 16},
    {"B": 2, "T": 77, "H": 1, "HALF": 10, "dtype": "float16"},
    {"B": 1, "T": 50, "H": 2, "HALF": 8, "dtype": "bfloat16"},
)
BENCH = ({"B": 4, "T": 2048, "H": 16, "HALF": 32, "dtype": "bfloat16"},)


def make_args(B, T, H, HALF, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, T, H, 2 * HALF, generator=g).to(device, getattr(torch, dtype)) for _ in range(3))
    angle = torch.arange(T)[:, None] * 10000.0 ** (-torch.arange(HALF) / HALF)
    # Tables of angles stay in fp32.
    return q, k, v, angle.cos().to(device), angle.sin().to(device)


def reference(q, k, v, cos, sin):
    def rotate(x):
        x1, x2 = x.float().transpose(1, 2).chunk(2, -1)
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1).to(v.dtype)

    o = torch.nn.functional.scaled_dot_product_attention(rotate(q), rotate(k), v.transpose(1, 2), is_causal=True)
    return o.transpose(1, 2)
