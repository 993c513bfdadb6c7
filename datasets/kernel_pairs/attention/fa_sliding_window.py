"""Attention within a sliding window: loops of both backward kernels are bounded from both sides.

Query i sees the keys i - left to i + right. A query tile [a, b) therefore loops over keys [a - left, b + right), a
key tile over queries [a - right, b + left): the work grows with T times the window. Tiles that lie inside the band as
a whole are told by two comparisons of scalars and take no mask.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "fa_sliding_window",
    "family": "attention",
    "op": "sliding_window_attention",
    "schema": 1,
    "techniques": ("masking", "saved-lse", "loop-swap", "owner-grid", "recompute", "strided-cotangent"),
    "saves": ("o: fp32 or bf16 (B, H, T, D)", "lse: fp32 (B, H, T)"),
    "grads": ("q", "k", "v"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _in_band(s, m, n, first_m, first_n, T, left, right, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    # s with -inf outside of the window; m and n carry their broadcast axes. Most tiles need no comparison per element.
    whole = (first_n >= first_m + BLOCK_M - 1 - left) & (first_n + BLOCK_N - 1 <= first_m + right)
    if not (whole & (first_n + BLOCK_N <= T)):
        s = tl.where((n >= m - left) & (n <= m + right) & (n < T), s, float("-inf"))
    return s


@triton.jit
def _window_fwd(
    Q, K, V, Out, LSE, T, D, left, right, scale_log2,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK_M
    base = tl.program_id(1).to(tl.int64) * T
    m = first + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    in_q = (m[:, None] < T) & (d[None, :] < D)
    q_at = (base + m[:, None]) * D + d[None, :]
    q = tl.load(Q + q_at, mask=in_q, other=0.0)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    norm = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    begin = tl.maximum(first - left, 0) // BLOCK_N * BLOCK_N
    for start in range(begin, tl.minimum(first + BLOCK_M + right, T), BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        in_kv = (n[:, None] < T) & (d[None, :] < D)
        k = tl.load(K + (base + n[:, None]) * D + d[None, :], mask=in_kv, other=0.0)
        v = tl.load(V + (base + n[:, None]) * D + d[None, :], mask=in_kv, other=0.0)
        s = tl.dot(q, tl.trans(k)) * scale_log2
        s = _in_band(s, m[:, None], n[None, :], first, start, T, left, right, BLOCK_M, BLOCK_N)
        # The first tiles may lie left of some rows' windows: those rows still stand at -inf.
        new_top = tl.maximum(top, tl.max(s, 1))
        origin = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink = tl.exp2(top - origin)
        p = tl.exp2(s - origin[:, None])
        norm = norm * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
        top = new_top
    # Rows past T may have no key at all; they are not stored.
    norm = tl.where(m < T, norm, 1.0)
    tl.store(Out + q_at, acc / norm[:, None], mask=in_q)
    tl.store(LSE + base + m, top + tl.log2(norm), mask=m < T)


def _blocks(q):
    """(owned rows, rows of the other side, warps): with 128 rows and short windows most of a tile would be masked."""
    T, D = q.shape[2:]
    if T <= 256:
        return 16, 16, 4
    return (64, 32, 4) if q.element_size() == 4 or D > 64 else (64, 64, 4)


def forward(q, k, v, left, right):
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    B, H, T, D = q.shape
    o = torch.empty_like(q)
    lse = torch.empty(B, H, T, device=q.device, dtype=torch.float32)
    own, other, warps = _blocks(q)
    _window_fwd[(triton.cdiv(T, own), B * H)](
        q, k, v, o, lse, T, D, left, right, D**-0.5 * 1.4426950408889634,
        BLOCK_M=own, BLOCK_N=other, BLOCK_D=max(16, triton.next_power_of_2(D)), num_warps=warps,
    )  # fmt: skip
    return o, (q, k, v, o, lse, left, right)


# --- backward ---
@triton.jit
def _window_dq(
    Q, K, V, Out, DO, LSE, Delta, DQ, H, T, D, left, right, do_b, do_h, do_t, do_d, scale, scale_log2,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1).to(tl.int64)
    base = head * T
    m = first + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    in_q = (m[:, None] < T) & (d[None, :] < D)
    q_at = (base + m[:, None]) * D + d[None, :]
    q = tl.load(Q + q_at, mask=in_q, other=0.0)
    o = tl.load(Out + q_at, mask=in_q, other=0.0)
    do_at = head // H * do_b + head % H * do_h + m[:, None].to(tl.int64) * do_t + d[None, :] * do_d
    do = tl.load(DO + do_at, mask=in_q, other=0.0)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(Delta + base + m, delta, mask=m < T)
    lse = tl.load(LSE + base + m, mask=m < T, other=float("inf"))
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    begin = tl.maximum(first - left, 0) // BLOCK_N * BLOCK_N
    for start in range(begin, tl.minimum(first + BLOCK_M + right, T), BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        in_kv = (n[:, None] < T) & (d[None, :] < D)
        k = tl.load(K + (base + n[:, None]) * D + d[None, :], mask=in_kv, other=0.0)
        v = tl.load(V + (base + n[:, None]) * D + d[None, :], mask=in_kv, other=0.0)
        s = tl.dot(q, tl.trans(k)) * scale_log2 - lse[:, None]
        p = tl.exp2(_in_band(s, m[:, None], n[None, :], first, start, T, left, right, BLOCK_M, BLOCK_N))
        ds = p * (tl.dot(do, tl.trans(v)) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    tl.store(DQ + q_at, dq * scale, mask=in_q)


@triton.jit
def _window_dkdv(
    Q, K, V, DO, LSE, Delta, DK, DV, H, T, D, left, right, do_b, do_h, do_t, do_d, scale, scale_log2,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK_N
    head = tl.program_id(1).to(tl.int64)
    base = head * T
    n = first + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    in_kv = (n[:, None] < T) & (d[None, :] < D)
    kv_at = (base + n[:, None]) * D + d[None, :]
    k = tl.load(K + kv_at, mask=in_kv, other=0.0)
    v = tl.load(V + kv_at, mask=in_kv, other=0.0)
    DO += head // H * do_b + head % H * do_h
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    # Seen from the keys the window is turned round: its left reach bounds the last query.
    begin = tl.maximum(first - right, 0) // BLOCK_M * BLOCK_M
    for start in range(begin, tl.minimum(first + BLOCK_N + left, T), BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        in_q = (m[:, None] < T) & (d[None, :] < D)
        q = tl.load(Q + (base + m[:, None]) * D + d[None, :], mask=in_q, other=0.0)
        do = tl.load(DO + m[:, None].to(tl.int64) * do_t + d[None, :] * do_d, mask=in_q, other=0.0)
        lse = tl.load(LSE + base + m, mask=m < T, other=float("inf"))
        delta = tl.load(Delta + base + m, mask=m < T, other=0.0)
        s = tl.dot(k, tl.trans(q)) * scale_log2 - lse[None, :]
        p = tl.exp2(_in_band(s, m[None, :], n[:, None], start, first, T, left, right, BLOCK_M, BLOCK_N))
        dv = tl.dot(p.to(do.dtype), do, dv)
        ds = p * (tl.dot(v, tl.trans(do)) - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk)
    tl.store(DK + kv_at, dk * scale, mask=in_kv)
    tl.store(DV + kv_at, dv, mask=in_kv)


def backward(saved, grad_o, needs=None):
    q, k, v, o, lse, left, right = saved
    _, need_k, need_v = needs or (True, True, True)
    B, H, T, D = q.shape
    scale = D**-0.5
    BLOCK_D = max(16, triton.next_power_of_2(D))
    own, other, warps = _blocks(q)
    grid = (triton.cdiv(T, own), B * H)
    sizes = (H, T, D, left, right, *grad_o.stride(), scale, scale * 1.4426950408889634)
    dq, delta = torch.empty_like(q), torch.empty_like(lse)
    _window_dq[grid](
        q, k, v, o, grad_o, lse, delta, dq, *sizes, BLOCK_M=own, BLOCK_N=other, BLOCK_D=BLOCK_D, num_warps=warps
    )
    if not (need_k or need_v):
        return dq, None, None
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    _window_dkdv[grid](
        q, k, v, grad_o, lse, delta, dk, dv, *sizes, BLOCK_M=other, BLOCK_N=own, BLOCK_D=BLOCK_D, num_warps=warps
    )
    return dq, dk, dv


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "T": 96, "D": 32, "left": 40, "right": 35},
    {"B": 2, "H": 1, "T": 75, "D": 20, "left": 23, "right": 0},
    {"B": 1, "H": 2, "T": 50, "D": 16, "left": 3, "right": 9, "dtype": "bfloat16"},
)
BENCH = ({"B": 1, "H": 16, "T": 8192, "D": 64, "left": 512, "right": 0, "dtype": "bfloat16"},)


def make_args(B, H, T, D, left, right, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, H, T, D, generator=g).to(device, getattr(torch, dtype)) for _ in range(3))
    return q, k, v, left, right


def reference(q, k, v, left, right):
    # Blocks of as many queries as keys reach past them, so that the dense part is twice the window and no more.
    T, size = q.shape[2], max(left + right, 64)
    blocks = -(-T // size)
    pad = torch.nn.functional.pad
    query = pad(q, (0, 0, 0, blocks * size - T)).flatten(0, 1).unflatten(1, (blocks, size))
    key, value = (
        pad(x.flatten(0, 1), (0, 0, left, blocks * size - T + right)).unfold(1, size + left + right, size)
        for x in (k, v)
    )
    at = torch.arange(blocks * size, device=q.device).view(blocks, size, 1)
    there = at[:, :1] - left + torch.arange(size + left + right, device=q.device)
    seen = (there >= at - left) & (there <= at + right) & (there >= 0) & (there < T)
    # Padded queries see everything: a row without a key has no softmax.
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key.transpose(-1, -2), value.transpose(-1, -2), attn_mask=(seen | (at >= T))[None]
    )
    return out.flatten(1, 2)[:, :T].view(q.shape)
