"""Scores of invariant point attention: products of features minus squared distances of points, weighted per head.

s[i, j] = scale q_i . k_j - w / 2 * sum over the points of |a_ip - b_jp|^2. A cotangent ds pulls both sides together:
da_i = -w sum over j of ds (a_i - b_j), db_j = w sum over i of ds (a_i - b_j), dw = -1/2 sum of ds |a - b|^2. Two owner
grids share the work: rows walk the columns for dq, da and their part of dw, columns walk the rows for dk and db. The
differences are taken before anything is summed, as the expanded form (a row sum times a_i, minus ds b) would lose the
invariance under shifts to cancellation; the last axis of those tiles is the coordinate.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "ipa_point_attention",
    "family": "geometry",
    "op": "invariant_point_scores",
    "schema": 1,
    "techniques": ("owner-grid", "loop-swap", "two-stage-partials", "recompute", "strided-cotangent"),
    "saves": (),
    "grads": ("q", "k", "q_points", "k_points", "head_weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _rows(X, at, N, WIDTH, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    mask = (at[:, None] < N) & (column[None, :] < WIDTH)
    return tl.load(X + at.to(tl.int64)[:, None] * WIDTH + column[None, :], mask=mask, other=0.0)


@triton.jit
def _ipa_fwd(
    Q, K, A, B, Weight, S, H, N, D, C, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(N, BLOCK_N)
    i = tl.program_id(0) // tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    head = tl.program_id(1).to(tl.int64)
    base = head * N
    s = scale * tl.dot(_rows(Q + base * D, i, N, D, BLOCK_D), tl.trans(_rows(K + base * D, j, N, D, BLOCK_D)))
    square = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for c in range(C):
        a = tl.load(A + (base + i) * C + c, mask=i < N, other=0.0)
        b = tl.load(B + (base + j) * C + c, mask=j < N, other=0.0)
        apart = a[:, None] - b[None, :]
        square += apart * apart
    s -= 0.5 * tl.load(Weight + head % H) * square
    tl.store(S + (base + i[:, None]) * N + j[None, :], s, mask=(i[:, None] < N) & (j[None, :] < N))


def forward(q, k, q_points, k_points, head_weight):
    q, k, q_points, k_points = (t.contiguous() for t in (q, k, q_points, k_points))
    B, H, N, D = q.shape
    C = q_points.shape[3] * 3
    s = torch.empty(B, H, N, N, device=q.device, dtype=q.dtype)
    side = 64 if N >= 64 else 16
    _ipa_fwd[(triton.cdiv(N, side) ** 2, B * H)](
        q, k, q_points, k_points, head_weight, s, H, N, D, C, D**-0.5,
        BLOCK_M=side, BLOCK_N=side, BLOCK_D=max(16, triton.next_power_of_2(D)), num_warps=4,
    )  # fmt: skip
    return s, (q, k, q_points, k_points, head_weight)


# --- backward ---
@triton.jit
def _ipa_rows_bwd(
    DS, K, A, B, Weight, DQ, DA, Parts, H, N, D, C, scale, ds_b, ds_h, ds_i, ds_j,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    base = head * N
    i = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    c = tl.arange(0, BLOCK_C)
    DS += head // H * ds_b + head % H * ds_h
    a = _rows(A + base * C, i, N, C, BLOCK_C)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    pull = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    squares = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    for start in range(0, N, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        at = i.to(tl.int64)[:, None] * ds_i + j.to(tl.int64)[None, :] * ds_j
        ds = tl.load(DS + at, mask=(i[:, None] < N) & (j[None, :] < N), other=0.0)
        k = _rows(K + base * D, j, N, D, BLOCK_D)
        dq = tl.dot(ds, k, dq)
        apart = a[:, None, :] - _rows(B + base * C, j, N, C, BLOCK_C)[None, :, :]
        pulled = ds.to(tl.float32)[:, :, None] * apart
        pull += tl.sum(pulled, 1)
        squares += tl.sum(pulled * apart, 1)
    tl.store(DQ + (base + i[:, None]) * D + d[None, :], scale * dq, mask=(i[:, None] < N) & (d[None, :] < D))
    w = tl.load(Weight + head % H)
    tl.store(DA + (base + i[:, None]) * C + c[None, :], -w * pull, mask=(i[:, None] < N) & (c[None, :] < C))
    tl.store(Parts + head * tl.num_programs(0) + tl.program_id(0), -0.5 * tl.sum(squares))


@triton.jit
def _ipa_columns_bwd(
    DS, Q, A, B, Weight, DK, DB, H, N, D, C, scale, ds_b, ds_h, ds_i, ds_j,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    base = head * N
    j = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    c = tl.arange(0, BLOCK_C)
    DS += head // H * ds_b + head % H * ds_h
    b = _rows(B + base * C, j, N, C, BLOCK_C)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    pull = tl.zeros((BLOCK_N, BLOCK_C), tl.float32)
    for start in range(0, N, BLOCK_M):
        i = start + tl.arange(0, BLOCK_M)
        at = i.to(tl.int64)[:, None] * ds_i + j.to(tl.int64)[None, :] * ds_j
        ds = tl.load(DS + at, mask=(i[:, None] < N) & (j[None, :] < N), other=0.0)
        q = _rows(Q + base * D, i, N, D, BLOCK_D)
        dk = tl.dot(tl.trans(ds), q, dk)
        apart = _rows(A + base * C, i, N, C, BLOCK_C)[:, None, :] - b[None, :, :]
        pull += tl.sum(ds.to(tl.float32)[:, :, None] * apart, 0)
    tl.store(DK + (base + j[:, None]) * D + d[None, :], scale * dk, mask=(j[:, None] < N) & (d[None, :] < D))
    w = tl.load(Weight + head % H)
    tl.store(DB + (base + j[:, None]) * C + c[None, :], w * pull, mask=(j[:, None] < N) & (c[None, :] < C))


def backward(saved, grad_s, needs=None):
    q, k, a, b, head_weight = saved
    need_q, need_k, need_a, need_b, need_w = needs or (True,) * 5
    B, H, N, D = q.shape
    C = a.shape[3] * 3
    BLOCK = 32 if N >= 64 else 16
    tiles = triton.cdiv(N, BLOCK)
    widths = {"BLOCK_D": max(16, triton.next_power_of_2(D)), "BLOCK_C": triton.next_power_of_2(C)}
    dq = da = dw = dk = db = None
    if need_q or need_a or need_w:
        dq, da = torch.empty_like(q), torch.empty_like(a)
        parts = torch.empty(B, H, tiles, device=q.device, dtype=torch.float32)
        _ipa_rows_bwd[(tiles, B * H)](
            grad_s, k, a, b, head_weight, dq, da, parts, H, N, D, C, D**-0.5, *grad_s.stride(),
            BLOCK_M=BLOCK, BLOCK_N=16, **widths, num_warps=8,
        )  # fmt: skip
        dw = parts.sum((0, 2))
    if need_k or need_b:
        dk, db = torch.empty_like(k), torch.empty_like(b)
        _ipa_columns_bwd[(tiles, B * H)](
            grad_s, q, a, b, head_weight, dk, db, H, N, D, C, D**-0.5, *grad_s.stride(),
            BLOCK_M=BLOCK, BLOCK_N=BLOCK, **widths, num_warps=8,
        )  # fmt: skip
    return dq, dk, da, db, dw


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "N": 64, "D": 16, "P": 4},
    {"B": 2, "H": 1, "N": 45, "D": 12, "P": 2, "dtype": "float16"},
    {"B": 1, "H": 2, "N": 32, "D": 16, "P": 5, "dtype": "bfloat16"},
)
BENCH = ({"B": 2, "H": 12, "N": 1024, "D": 16, "P": 4, "dtype": "bfloat16"},)


def make_args(B, H, N, D, P, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(B, H, N, D, generator=g).to(device, getattr(torch, dtype)) for _ in range(2))
    # Points, in nanometres, and the weights of heads are geometry: they stay in fp32.
    a, b = (torch.randn(B, H, N, P, 3, generator=g).to(device) for _ in range(2))
    return q, k, a, b, (0.2 + 0.2 * torch.rand(H, generator=g)).to(device)


def reference(q, k, q_points, k_points, head_weight):
    features = (q @ k.mT).float() * q.shape[-1] ** -0.5
    a, b = q_points.flatten(3).unbind(-1), k_points.flatten(3).unbind(-1)
    square = sum((x[..., :, None] - y[..., None, :]).square() for x, y in zip(a, b, strict=True))
    return (features - 0.5 * head_weight[:, None, None] * square).to(q.dtype)
