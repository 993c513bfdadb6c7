"""Causal attention with RMSNorm of queries and keys inside: the norm's backward is the epilogue of dq and dk.

    q' = gain_q q / rms(q),  k' = gain_k k / rms(k) over the channels of a head,    o = softmax(scale q' k'^T) v

One number per row, 1 / rms, is saved; normalised rows are made again as tiles are loaded and never written. What the
loops accumulate are dq' and dk' of whole rows, so that the owner of a tile has all that the norm's backward asks for:

    dx = r (gain dx' - x^ mean(gain dx' x^)),    x^ = r x,    dgain = sum over rows of dx' x^

and the gains, shared by all heads, get one partial row per tile.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "fa_qk_norm_inside",
    "family": "attention",
    "op": "qk_norm_attention",
    "schema": 1,
    "techniques": (
        "prologue-fusion", "epilogue-fusion", "two-stage-partials", "broadcast-reduction", "saved-statistics",
        "saved-lse", "loop-swap", "owner-grid", "causal-bounds", "strided-cotangent",
    ),
    "saves": ("o: fp32 or bf16 (B, H, T, D)", "lse: fp32 (B, H, T)", "rstds: fp32 (2, B, H, T)"),
    "grads": ("q", "k", "v", "gain_q", "gain_k"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}  # fmt: skip


# --- forward ---
@triton.jit
def _rows(X, t, T, s_t, s_d, D: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    inside = (t[:, None] < T) & (d[None, :] < D)
    return tl.load(X + t[:, None].to(tl.int64) * s_t + d[None, :] * s_d, mask=inside, other=0.0)


@triton.jit
def _gain(Gain, D: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    return tl.load(Gain + d, mask=d < D, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _normed(X, Rstd, gain, t, T, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows t normalised and scaled, in the dtype of the products."""
    x = _rows(X, t, T, D, 1, D, BLOCK_D)
    r = tl.load(Rstd + t, mask=t < T, other=0.0)
    return (x.to(tl.float32) * r[:, None] * gain).to(x.dtype)


@triton.jit
def _rms_of_rows(Q, K, Rstds, rows, eps, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr):
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    q = _rows(Q, t, rows, D, 1, D, BLOCK_D).to(tl.float32)
    k = _rows(K, t, rows, D, 1, D, BLOCK_D).to(tl.float32)
    tl.store(Rstds + t, tl.rsqrt(tl.sum(q * q, 1) / D + eps), mask=t < rows)
    tl.store(Rstds + rows + t, tl.rsqrt(tl.sum(k * k, 1) / D + eps), mask=t < rows)


@triton.jit
def _normed_fwd(
    Q, K, V, GainQ, GainK, Rstds, Out, LSE, T, rows, scale_log2, D: tl.constexpr, BLOCK_D: tl.constexpr,
    OWN: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * OWN
    row = tl.program_id(1).to(tl.int64) * T
    m = first + tl.arange(0, OWN)
    gain_k = _gain(GainK, D, BLOCK_D)
    q = _normed(Q + row * D, Rstds + row, _gain(GainQ, D, BLOCK_D), m, T, D, BLOCK_D)
    top = tl.full((OWN,), float("-inf"), tl.float32)
    norm = tl.zeros((OWN,), tl.float32)
    acc = tl.zeros((OWN, BLOCK_D), tl.float32)
    for start in range(0, tl.minimum(first + OWN, T), STEP):
        n = start + tl.arange(0, STEP)
        k = _normed(K + row * D, Rstds + rows + row, gain_k, n, T, D, BLOCK_D)
        s = tl.where(m[:, None] >= n[None, :], tl.dot(q, tl.trans(k)) * scale_log2, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - higher[:, None])
        fade = tl.exp2(top - higher)
        norm = norm * fade + tl.sum(p, 1)
        v = _rows(V + row * D, n, T, D, 1, D, BLOCK_D)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None])
        top = higher
    d = tl.arange(0, BLOCK_D)
    tl.store(Out + (row + m[:, None]) * D + d[None, :], acc / norm[:, None], mask=(m[:, None] < T) & (d[None, :] < D))
    tl.store(LSE + row + m, top + tl.log2(norm), mask=m < T)


def _tiles(q):
    T, D = q.shape[2:]
    sizes = {"D": D, "BLOCK_D": max(16, triton.next_power_of_2(D))}
    if T <= 256:
        return sizes | {"OWN": 32, "STEP": 16, "num_warps": 4}
    if q.element_size() == 4:
        return sizes | {"OWN": 64, "STEP": 32, "num_warps": 8}
    return sizes | {"OWN": 128, "STEP": 64 if D <= 64 else 32, "num_warps": 8}


def forward(q, k, v, gain_q, gain_k, eps=1e-6):
    q, k, v, gain_q, gain_k = (x.contiguous() for x in (q, k, v, gain_q, gain_k))
    B, H, T, D = q.shape
    o = torch.empty_like(q)
    lse = torch.empty(B, H, T, device=q.device, dtype=torch.float32)
    rstds = torch.empty(2, B, H, T, device=q.device, dtype=torch.float32)
    tiles = _tiles(q)
    _rms_of_rows[(triton.cdiv(B * H * T, 64),)](q, k, rstds, B * H * T, eps, D=D, BLOCK_D=tiles["BLOCK_D"], ROWS=64)
    _normed_fwd[(triton.cdiv(T, tiles["OWN"]), B * H)](
        q, k, v, gain_q, gain_k, rstds, o, lse, T, B * H * T, D**-0.5 * 1.4426950408889634, **tiles
    )
    return o, (q, k, v, gain_q, gain_k, o, lse, rstds)


# --- backward ---
@triton.jit
def _through_norm(dnormed, X, DX, Rstd, Part, gain, t, T, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Stores dx of rows t and this tile's share of dgain."""
    d = tl.arange(0, BLOCK_D)
    r = tl.load(Rstd + t, mask=t < T, other=0.0)[:, None]
    unit = _rows(X, t, T, D, 1, D, BLOCK_D).to(tl.float32) * r
    tl.store(Part + d, tl.sum(dnormed * unit, 0), mask=d < D)
    dunit = dnormed * gain
    dx = r * (dunit - unit * (tl.sum(dunit * unit, 1) / D)[:, None])
    tl.store(DX + t[:, None] * D + d[None, :], dx, mask=(t[:, None] < T) & (d[None, :] < D))


@triton.jit
def _normed_dq(
    Q, K, V, GainQ, GainK, Rstds, Out, DO, LSE, Delta, DQ, Parts, H, T, rows, do_b, do_h, do_t, do_d, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, OWN: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * OWN
    head = tl.program_id(1).to(tl.int64)
    row = head * T
    m = first + tl.arange(0, OWN)
    gain_q, gain_k = _gain(GainQ, D, BLOCK_D), _gain(GainK, D, BLOCK_D)
    q = _normed(Q + row * D, Rstds + row, gain_q, m, T, D, BLOCK_D)
    o = _rows(Out + row * D, m, T, D, 1, D, BLOCK_D)
    do = _rows(DO + head // H * do_b + head % H * do_h, m, T, do_t, do_d, D, BLOCK_D)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(Delta + row + m, delta, mask=m < T)
    lse = tl.load(LSE + row + m, mask=m < T, other=float("inf"))
    dq = tl.zeros((OWN, BLOCK_D), tl.float32)
    for start in range(0, tl.minimum(first + OWN, T), STEP):
        n = start + tl.arange(0, STEP)
        k = _normed(K + row * D, Rstds + rows + row, gain_k, n, T, D, BLOCK_D)
        p = tl.exp2(tl.dot(q, tl.trans(k)) * (scale * 1.4426950408889634) - lse[:, None])
        p = tl.where(m[:, None] >= n[None, :], p, 0.0)
        ds = p * (tl.dot(do, tl.trans(_rows(V + row * D, n, T, D, 1, D, BLOCK_D))) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    part = Parts + (head * tl.num_programs(0) + tl.program_id(0)) * D
    _through_norm(dq * scale, Q + row * D, DQ + row * D, Rstds + row, part, gain_q, m, T, D, BLOCK_D)


@triton.jit
def _normed_dkdv(
    Q, K, V, GainQ, GainK, Rstds, DO, LSE, Delta, DK, DV, Parts, H, T, rows, do_b, do_h, do_t, do_d, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, OWN: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * OWN
    head = tl.program_id(1).to(tl.int64)
    row = head * T
    DO += head // H * do_b + head % H * do_h
    n = first + tl.arange(0, OWN)
    gain_q, gain_k = _gain(GainQ, D, BLOCK_D), _gain(GainK, D, BLOCK_D)
    k = _normed(K + row * D, Rstds + rows + row, gain_k, n, T, D, BLOCK_D)
    v = _rows(V + row * D, n, T, D, 1, D, BLOCK_D)
    dk = tl.zeros((OWN, BLOCK_D), tl.float32)
    dv = tl.zeros((OWN, BLOCK_D), tl.float32)
    for start in range(first, T, STEP):
        m = start + tl.arange(0, STEP)
        q = _normed(Q + row * D, Rstds + row, gain_q, m, T, D, BLOCK_D)
        do = _rows(DO, m, T, do_t, do_d, D, BLOCK_D)
        lse = tl.load(LSE + row + m, mask=m < T, other=float("inf"))
        delta = tl.load(Delta + row + m, mask=m < T, other=0.0)
        p = tl.exp2(tl.dot(k, tl.trans(q)) * (scale * 1.4426950408889634) - lse[None, :])
        p = tl.where(m[None, :] >= n[:, None], p, 0.0)
        dv = tl.dot(p.to(do.dtype), do, dv)
        ds = p * (tl.dot(v, tl.trans(do)) - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk)
    d = tl.arange(0, BLOCK_D)
    tl.store(DV + (row + n[:, None]) * D + d[None, :], dv, mask=(n[:, None] < T) & (d[None, :] < D))
    part = Parts + (head * tl.num_programs(0) + tl.program_id(0)) * D
    _through_norm(dk * scale, K + row * D, DK + row * D, Rstds + rows + row, part, gain_k, n, T, D, BLOCK_D)


def backward(saved, grad_o, needs=None):
    q, k, v, gain_q, gain_k, o, lse, rstds = saved
    _, need_k, need_v, _, need_gain_k = needs or (True,) * 5
    B, H, T, D = q.shape
    tiles = _tiles(q)
    grid = (triton.cdiv(T, tiles["OWN"]), B * H)
    sizes = (H, T, B * H * T, *grad_o.stride(), D**-0.5)
    parts = torch.empty(2, grid[0] * grid[1], D, device=q.device, dtype=torch.float32)
    dq, delta = torch.empty_like(q), torch.empty_like(lse)
    _normed_dq[grid](q, k, v, gain_q, gain_k, rstds, o, grad_o, lse, delta, dq, parts[0], *sizes, **tiles)
    dgain_q = parts[0].sum(0).to(gain_q.dtype)
    if not (need_k or need_v or need_gain_k):
        return dq, None, None, dgain_q, None
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    _normed_dkdv[grid](q, k, v, gain_q, gain_k, rstds, grad_o, lse, delta, dk, dv, parts[1], *sizes, **tiles)
    return dq, dk, dv, dgain_q, parts[1].sum(0).to(gain_k.dtype)


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "T": 64, "D": 32},
    {"B": 2, "H": 1, "T": 77, "D": 20},
    {"B": 1, "H": 2, "T": 50, "D": 16, "dtype": "bfloat16"},
)
BENCH = ({"B": 4, "H": 16, "T": 2048, "D": 64, "dtype": "bfloat16"},)


def make_args(B, H, T, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = (*((B, H, T, D) for _ in range(3)), (D,), (D,))
    return tuple(torch.randn(shape, generator=g).to(device, getattr(torch, dtype)) for shape in shapes)


def reference(q, k, v, gain_q, gain_k, eps=1e-6):
    q, k = (
        torch.nn.functional.rms_norm(x.float(), x.shape[-1:], gain.float(), eps).to(v.dtype)
        for x, gain in ((q, gain_q), (k, gain_k))
    )
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
