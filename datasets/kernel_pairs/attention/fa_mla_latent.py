"""Latent attention (MLA) in absorbed form: keys and values are one latent shared by all heads, rope channels lie apart.

    s_ij = scale (q_i . c_j + r_i . p_j),    o_i = sum of p_ij c_j

c is (B, S, R), p (B, S, P); q and r have H heads, whose rows (t, h) form one matrix over the same keys. The latent is
key and value at once, so its gradient is one accumulator for both roles, dc = dS^T q + P^T do, filled by all heads of
all tokens; each tile of c is loaded once and serves three products.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "fa_mla_latent",
    "family": "attention",
    "op": "latent_attention",
    "schema": 1,
    "techniques": (
        "head-reduction", "saved-lse", "delta-preprocess", "causal-bounds", "loop-swap", "split-k",
        "two-stage-partials",
    ),
    "saves": ("o: fp32 or bf16 (B, T, H, R)", "lse: fp32 (B, T * H)"),
    "grads": ("q", "r", "c", "p"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
    "spills": "dc, 64 x 256 in fp32, fills a third of the registers; a smaller tile would slow every product",
}  # fmt: skip


# --- forward ---
@triton.jit
def _rows_of(X, row, end, W, BLOCK: tl.constexpr):
    w = tl.arange(0, BLOCK)
    return tl.load(X + row[:, None] * W + w[None, :], mask=(row[:, None] < end) & (w[None, :] < W), other=0.0)


@triton.jit
def _latent_fwd(
    Q, R, C, P, Out, LSE, rows, S, H, past, W, PW, scale_log2,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    batch = tl.program_id(1).to(tl.int64)
    m = first + tl.arange(0, BLOCK_M)
    w = tl.arange(0, BLOCK_W)
    q = _rows_of(Q + batch * rows * W, m, rows, W, BLOCK_W)
    r = _rows_of(R + batch * rows * PW, m, rows, PW, BLOCK_P)
    token = m // H + past
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    norm = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_W), tl.float32)
    for start in range(0, (tl.minimum(first + BLOCK_M, rows) - 1) // H + past + 1, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        c = _rows_of(C + batch * S * W, n, S, W, BLOCK_W)
        p = _rows_of(P + batch * S * PW, n, S, PW, BLOCK_P)
        s = tl.dot(r, tl.trans(p), tl.dot(q, tl.trans(c))) * scale_log2
        s = tl.where(token[:, None] >= n[None, :], s, float("-inf"))
        raised = tl.maximum(top, tl.max(s, 1))
        shrink = tl.exp2(top - raised)
        weights = tl.exp2(s - raised[:, None])
        norm = norm * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(c.dtype), c, acc * shrink[:, None])
        top = raised
    at = (batch * rows + m[:, None]) * W + w[None, :]
    tl.store(Out + at, acc / norm[:, None], mask=(m[:, None] < rows) & (w[None, :] < W))
    tl.store(LSE + batch * rows + m, top + tl.log2(norm), mask=m < rows)


def _tiles(q, r):
    """Widths of the tiles: whole latents, whole rope channels."""
    return {f"BLOCK_{name}": max(16, triton.next_power_of_2(x.shape[3])) for name, x in (("W", q), ("P", r))}


def _blocks(rows, q):
    """(owned rows, rows of the other side, warps): latents are wide."""
    if rows <= 512:
        return 32, 16, 4
    return (32, 32, 4) if q.element_size() == 4 else (64, 32, 8)


def forward(q, r, c, p):
    q, r, c, p = q.contiguous(), r.contiguous(), c.contiguous(), p.contiguous()
    (B, T, H, W), S, PW = q.shape, c.shape[1], r.shape[3]
    o = torch.empty_like(q)
    lse = torch.empty(B, T * H, device=q.device, dtype=torch.float32)
    own, other, warps = _blocks(T * H, q)
    _latent_fwd[(triton.cdiv(T * H, own), B)](
        q, r, c, p, o, lse, T * H, S, H, S - T, W, PW, (W + PW) ** -0.5 * 1.4426950408889634,
        BLOCK_M=own, BLOCK_N=other, **_tiles(q, r), num_warps=warps, num_stages=2,
    )  # fmt: skip
    return o, (q, r, c, p, o, lse)


# --- backward ---
@triton.jit
def _latent_dq(
    Q, R, C, P, Out, DO, LSE, Delta, DQ, DR, rows, S, H, past, W, PW, scale, scale_log2,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    batch = tl.program_id(1).to(tl.int64)
    m = first + tl.arange(0, BLOCK_M)
    w = tl.arange(0, BLOCK_W)
    x = tl.arange(0, BLOCK_P)
    q = _rows_of(Q + batch * rows * W, m, rows, W, BLOCK_W)
    r = _rows_of(R + batch * rows * PW, m, rows, PW, BLOCK_P)
    do = _rows_of(DO + batch * rows * W, m, rows, W, BLOCK_W)
    o = _rows_of(Out + batch * rows * W, m, rows, W, BLOCK_W)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(Delta + batch * rows + m, delta, mask=m < rows)
    lse = tl.load(LSE + batch * rows + m, mask=m < rows, other=float("inf"))
    token = m // H + past
    dq = tl.zeros((BLOCK_M, BLOCK_W), tl.float32)
    dr = tl.zeros((BLOCK_M, BLOCK_P), tl.float32)
    for start in range(0, (tl.minimum(first + BLOCK_M, rows) - 1) // H + past + 1, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        c = _rows_of(C + batch * S * W, n, S, W, BLOCK_W)
        p = _rows_of(P + batch * S * PW, n, S, PW, BLOCK_P)
        s = tl.dot(r, tl.trans(p), tl.dot(q, tl.trans(c))) * scale_log2 - lse[:, None]
        weights = tl.exp2(tl.where(token[:, None] >= n[None, :], s, float("-inf")))
        ds = (weights * (tl.dot(do, tl.trans(c)) - delta[:, None])).to(c.dtype)
        dq = tl.dot(ds, c, dq)
        dr = tl.dot(ds, p, dr)
    row = batch * rows + m[:, None]
    tl.store(DQ + row * W + w[None, :], dq * scale, mask=(m[:, None] < rows) & (w[None, :] < W))
    tl.store(DR + row * PW + x[None, :], dr * scale, mask=(m[:, None] < rows) & (x[None, :] < PW))


@triton.jit
def _latent_dcdp(
    Q, R, C, P, DO, LSE, Delta, DCParts, DPParts, rows, S, H, past, W, PW, scale, scale_log2, rows_each,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK_N
    split = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    n = first + tl.arange(0, BLOCK_N)
    w = tl.arange(0, BLOCK_W)
    x = tl.arange(0, BLOCK_P)
    c = _rows_of(C + batch * S * W, n, S, W, BLOCK_W)
    p = _rows_of(P + batch * S * PW, n, S, PW, BLOCK_P)
    dc = tl.zeros((BLOCK_N, BLOCK_W), tl.float32)
    dp = tl.zeros((BLOCK_N, BLOCK_P), tl.float32)
    seers = tl.maximum(first - past, 0) * H // BLOCK_M * BLOCK_M
    end = tl.minimum((split + 1) * rows_each, rows)
    for start in range(tl.maximum(split * rows_each, seers), end, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        q = _rows_of(Q + batch * rows * W, m, end, W, BLOCK_W)
        r = _rows_of(R + batch * rows * PW, m, end, PW, BLOCK_P)
        do = _rows_of(DO + batch * rows * W, m, end, W, BLOCK_W)
        lse = tl.load(LSE + batch * rows + m, mask=m < end, other=float("inf"))
        delta = tl.load(Delta + batch * rows + m, mask=m < end, other=0.0)
        s = tl.dot(p, tl.trans(r), tl.dot(c, tl.trans(q))) * scale_log2 - lse[None, :]
        weights = tl.exp2(tl.where((m // H + past)[None, :] >= n[:, None], s, float("-inf")))
        # Scaled here, since the value's share of dc takes no scale.
        ds = (weights * (tl.dot(c, tl.trans(do)) - delta[None, :]) * scale).to(q.dtype)
        dc = tl.dot(ds, q, dc)
        dc = tl.dot(weights.to(do.dtype), do, dc)
        dp = tl.dot(ds, r, dp)
    row = (split * tl.num_programs(2) + batch) * S + n[:, None]
    tl.store(DCParts + row * W + w[None, :], dc, mask=(n[:, None] < S) & (w[None, :] < W))
    tl.store(DPParts + row * PW + x[None, :], dp, mask=(n[:, None] < S) & (x[None, :] < PW))


def backward(saved, grad_o, needs=None):
    q, r, c, p, o, lse = saved
    (B, T, H, W), S, PW = q.shape, c.shape[1], r.shape[3]
    # The kernels see (T, H) as one axis of rows, which takes a dense cotangent.
    do = grad_o.contiguous()
    scale = (W + PW) ** -0.5
    sizes = (T * H, S, H, S - T, W, PW, scale, scale * 1.4426950408889634)
    own, other, warps = _blocks(T * H, q)
    tiles = _tiles(q, r)
    dq, dr, delta = torch.empty_like(q), torch.empty_like(r), torch.empty_like(lse)
    _latent_dq[(triton.cdiv(T * H, own), B)](
        q, r, c, p, o, do, lse, delta, dq, dr, *sizes, BLOCK_M=own, BLOCK_N=other, **tiles,
        num_warps=warps, num_stages=1,
    )  # fmt: skip
    # One key head: its tiles alone are few, so the rows are split. Causality leaves half of the programs without work,
    # whose rows all lie before their keys: of four for each of 132 processors two have some.
    blocks = triton.cdiv(S, own)
    splits = max(1, min(triton.cdiv(T * H, other), triton.cdiv(528, blocks * B)))
    rows_each = triton.cdiv(triton.cdiv(T * H, splits), other) * other
    splits = triton.cdiv(T * H, rows_each)
    dc_parts = torch.empty(splits, *c.shape, device=c.device, dtype=torch.float32)
    dp_parts = torch.empty(splits, *p.shape, device=c.device, dtype=torch.float32)
    _latent_dcdp[(blocks, splits, B)](
        q, r, c, p, do, lse, delta, dc_parts, dp_parts, *sizes, rows_each, BLOCK_M=other, BLOCK_N=own, **tiles,
        num_warps=warps, num_stages=2,
    )  # fmt: skip
    return dq, dr, dc_parts.sum(0).to(c.dtype), dp_parts.sum(0).to(p.dtype)


# --- check ---
SWEEP = (
    {"B": 1, "T": 24, "past": 0, "H": 2, "R": 32, "P": 16},
    {"B": 2, "T": 15, "past": 22, "H": 3, "R": 20, "P": 12},
    {"B": 1, "T": 20, "past": 13, "H": 2, "R": 32, "P": 16, "dtype": "bfloat16"},
)
BENCH = ({"B": 2, "T": 1024, "past": 0, "H": 16, "R": 256, "P": 64, "dtype": "bfloat16"},)


def make_args(B, T, past, H, R, P, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = ((B, T, H, R), (B, T, H, P), (B, past + T, R), (B, past + T, P))
    return tuple(torch.randn(shape, generator=g).to(device, getattr(torch, dtype)) for shape in shapes)


def reference(q, r, c, p):
    T, S = q.shape[1], c.shape[1]
    s = torch.einsum("bthw,bsw->bhts", torch.cat((q, r), -1), torch.cat((c, p), -1)).float()
    later = torch.ones(T, S, dtype=torch.bool, device=q.device).triu(S - T + 1)
    weights = (s * (q.shape[3] + r.shape[3]) ** -0.5).masked_fill(later, float("-inf")).softmax(-1)
    return torch.einsum("bhts,bsw->bthw", weights.to(c.dtype), c)
