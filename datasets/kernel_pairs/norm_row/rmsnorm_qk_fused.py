"""RMSNorm of the heads of q and of k in one launch: the program id picks the tensor, its weight and its head count.

Both launches are ranges of one grid: first the tiles of q, then those of k, which has fewer heads under grouped
queries. Each range keeps partial rows of its own weight, side by side in one buffer. The short kernel for k thus fills
the tail of q's instead of waiting for it.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "rmsnorm_qk_fused",
    "family": "norm_row",
    "op": "rms_norm_qk",
    "schema": 1,
    "techniques": (
        "one-launch", "multi-row-tile", "saved-statistics", "head-reduction", "two-stage-partials",
        "optional-cotangent", "strided-cotangent",
    ),
    "saves": ("inv_rms: fp32 (rows,)",),
    "grads": ("q", "k", "weight_q", "weight_k"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}  # fmt: skip


# --- forward ---
@triton.jit
def _head_rows_fwd(X, W, Y, Inv, tile, rows, H, D, x_t, eps, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """One tile of heads: row r is head r % H of token r // H; a token's heads are one piece."""
    r = tile * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    ok = (r[:, None] < rows) & (d[None, :] < D)
    at = (r // H).to(tl.int64) * x_t + (r % H) * D
    x = tl.load(X + at[:, None] + d[None, :], mask=ok, other=0.0).to(tl.float32)
    inv = tl.rsqrt(tl.sum(x * x, 1) / D + eps)
    tl.store(Inv + r, inv, mask=r < rows)
    w = tl.load(W + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(Y + r[:, None].to(tl.int64) * D + d[None, :], x * inv[:, None] * w[None, :], mask=ok)


@triton.jit
def _qk_norm_fwd(
    Q, K, WQ, WK, YQ, YK, Inv, rows_q, rows_k, HQ, HK, D, q_t, k_t, tiles_q, eps,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    if tile < tiles_q:
        _head_rows_fwd(Q, WQ, YQ, Inv, tile, rows_q, HQ, D, q_t, eps, ROWS, BLOCK_D)
    else:
        _head_rows_fwd(K, WK, YK, Inv + rows_q, tile - tiles_q, rows_k, HK, D, k_t, eps, ROWS, BLOCK_D)


def _tile(D):
    block_d = triton.next_power_of_2(D)
    return {"ROWS": max(1, 2048 // block_d), "BLOCK_D": block_d}


def _with_heads_together(x):
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def forward(q, k, weight_q, weight_k, eps=1e-6):
    # q and k may be slices of one packed projection.
    q, k = _with_heads_together(q), _with_heads_together(k)
    (T, HQ, D), HK = q.shape, k.shape[1]
    tile = _tile(D)
    tiles_q, tiles_k = triton.cdiv(T * HQ, tile["ROWS"]), triton.cdiv(T * HK, tile["ROWS"])
    y_q = torch.empty(q.shape, device=q.device, dtype=q.dtype)
    y_k = torch.empty(k.shape, device=k.device, dtype=k.dtype)
    inv_rms = torch.empty(T * (HQ + HK), device=q.device, dtype=torch.float32)
    _qk_norm_fwd[(tiles_q + tiles_k,)](
        q, k, weight_q, weight_k, y_q, y_k, inv_rms, T * HQ, T * HK, HQ, HK, D, q.stride(0), k.stride(0), tiles_q, eps,
        **tile,
    )  # fmt: skip
    return (y_q, y_k), (q, k, weight_q, weight_k, inv_rms)


# --- backward ---
@triton.jit
def _head_rows_bwd(
    DY, X, W, Inv, DX, Part, first, rows, H, D, x_t, dy_t, dy_h, dy_d, tiles_each,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`tiles_each` tiles of heads from tile `first` on, and their share of the weight's gradient."""
    d = tl.arange(0, BLOCK_D)
    w = tl.load(W + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    dw = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for step in range(tiles_each):
        r = (first + step) * ROWS + tl.arange(0, ROWS)
        ok = (r[:, None] < rows) & (d[None, :] < D)
        token = (r // H).to(tl.int64)
        head = r % H
        inv = tl.load(Inv + r, mask=r < rows, other=0.0)[:, None]
        unit = tl.load(X + (token * x_t + head * D)[:, None] + d[None, :], mask=ok, other=0.0).to(tl.float32) * inv
        dy_at = (token * dy_t + head.to(tl.int64) * dy_h)[:, None] + d[None, :].to(tl.int64) * dy_d
        dy = tl.load(DY + dy_at, mask=ok, other=0.0).to(tl.float32)
        dw += dy * unit
        g = dy * w
        radial = (tl.sum(g * unit, 1) / D)[:, None]
        tl.store(DX + r[:, None].to(tl.int64) * D + d[None, :], inv * (g - unit * radial), mask=ok)
    tl.store(Part + d, tl.sum(dw, 0), mask=d < D)


@triton.jit
def _qk_norm_bwd(
    DYQ, DYK, Q, K, WQ, WK, Inv, DQ, DK, Parts, rows_q, rows_k, HQ, HK, D, q_t, k_t,
    dq_t, dq_h, dq_d, dk_t, dk_h, dk_d, programs_q, tiles_each, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    part = Parts + pid.to(tl.int64) * D
    if pid < programs_q:
        _head_rows_bwd(
            DYQ, Q, WQ, Inv, DQ, part, pid * tiles_each, rows_q, HQ, D, q_t, dq_t, dq_h, dq_d, tiles_each,
            ROWS, BLOCK_D,
        )  # fmt: skip
    else:
        _head_rows_bwd(
            DYK, K, WK, Inv + rows_q, DK, part, (pid - programs_q) * tiles_each, rows_k, HK, D, k_t,
            dk_t, dk_h, dk_d, tiles_each, ROWS, BLOCK_D,
        )  # fmt: skip


def backward(saved, grad_q, grad_k, needs=None):
    q, k, weight_q, weight_k, inv_rms = saved
    (T, HQ, D), HK = q.shape, k.shape[1]
    tile = _tile(D)
    tiles_q, tiles_k = triton.cdiv(T * HQ, tile["ROWS"]), triton.cdiv(T * HK, tile["ROWS"])
    # Seven programs of four warps are resident on each of 132 processors; a missing cotangent gets none.
    tiles_each = triton.cdiv(tiles_q + tiles_k, 924)
    programs_q = triton.cdiv(tiles_q, tiles_each) if grad_q is not None else 0
    programs_k = triton.cdiv(tiles_k, tiles_each) if grad_k is not None else 0
    dq = torch.empty(q.shape, device=q.device, dtype=q.dtype)
    dk = torch.empty(k.shape, device=k.device, dtype=k.dtype)
    parts = torch.empty(programs_q + programs_k, D, device=q.device, dtype=torch.float32)
    dy_q, dy_k = q if grad_q is None else grad_q, k if grad_k is None else grad_k
    _qk_norm_bwd[(programs_q + programs_k,)](
        dy_q, dy_k, q, k, weight_q, weight_k, inv_rms, dq, dk, parts, T * HQ, T * HK, HQ, HK, D,
        q.stride(0), k.stride(0), *dy_q.stride(), *dy_k.stride(), programs_q, tiles_each, **tile,
    )  # fmt: skip
    dw_q = parts[:programs_q].sum(0).to(weight_q.dtype) if programs_q else None
    dw_k = parts[programs_q:].sum(0).to(weight_k.dtype) if programs_k else None
    return dq if programs_q else None, dk if programs_k else None, dw_q, dw_k


# --- check ---
SWEEP = (
    {"T": 24, "HQ": 4, "HK": 2, "D": 32},
    {"T": 19, "HQ": 6, "HK": 3, "D": 21, "dtype": "float16"},
    {"T": 11, "HQ": 4, "HK": 1, "D": 64, "dtype": "bfloat16"},
)
BENCH = ({"T": 16384, "HQ": 32, "HK": 8, "D": 128, "dtype": "bfloat16"},)


def make_args(T, HQ, HK, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    to = {"device": device, "dtype": getattr(torch, dtype)}
    packed = torch.randn(T, HQ + 2 * HK, D, generator=g).to(**to)
    weight_q, weight_k = (torch.rand(D, generator=g) + 0.5 for _ in range(2))
    return packed[:, :HQ], packed[:, HQ : HQ + HK], weight_q.to(**to), weight_k.to(**to)


def reference(q, k, weight_q, weight_k, eps=1e-6):
    def norm(x, w):
        return torch.nn.functional.rms_norm(x.float(), (x.shape[-1],), w.float(), eps).to(x.dtype)

    return norm(q, weight_q), norm(k, weight_k)
