"""Flash attention without a mask, head dims up to 64: whole tiles run unmasked, the ragged end in a step of its own.

Every loop is cut into whole tiles, which need neither load masks nor score masks, and one masked step for what is
left. The dq kernel owns query rows, so it computes delta = rowsum(o * do) on its way and leaves it to the dk/dv
kernel.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "fa2_noncausal_d64",
    "family": "attention",
    "op": "attention",
    "schema": 1,
    "techniques": ("saved-lse", "recompute", "loop-swap", "owner-grid", "strided-cotangent"),
    "saves": ("o: fp32 or bf16 (B, T, H, D)", "lse: fp32 (B, H, T)"),
    "grads": ("q", "k", "v"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _rows_of(X, first, row_stride, col_stride, length, ROWS: tl.constexpr, D: tl.constexpr, RAGGED: tl.constexpr):
    # Rows first to first + ROWS of one head; only a ragged tile pays for a mask.
    r = first + tl.arange(0, ROWS)
    at = X + r[:, None] * row_stride + tl.arange(0, D)[None, :] * col_stride
    if RAGGED:
        tile = tl.load(at, mask=r[:, None] < length, other=0.0)
    else:
        tile = tl.load(at)
    return tile


@triton.jit
def _d64_fwd_step(
    K, V, q, acc, top, norm, start, stride, S, scale_log2, BLOCK_N: tl.constexpr, D: tl.constexpr, RAGGED: tl.constexpr
):
    k = _rows_of(K, start, stride, 1, S, BLOCK_N, D, RAGGED)
    v = _rows_of(V, start, stride, 1, S, BLOCK_N, D, RAGGED)
    s = tl.dot(q, tl.trans(k)) * scale_log2
    if RAGGED:
        s = tl.where((start + tl.arange(0, BLOCK_N))[None, :] < S, s, float("-inf"))
    new_top = tl.maximum(top, tl.max(s, 1))
    shrink = tl.exp2(top - new_top)
    p = tl.exp2(s - new_top[:, None])
    norm = norm * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
    return acc, new_top, norm


@triton.jit
def _d64_fwd(
    Q, K, V, Out, LSE, H, T, S, scale_log2, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    first = tl.program_id(0) * BLOCK_M
    batch = (tl.program_id(1) // H).to(tl.int64)
    head = tl.program_id(1) % H
    stride = H * D
    K += (batch * S * H + head) * D
    V += (batch * S * H + head) * D
    q = _rows_of(Q + (batch * T * H + head) * D, first, stride, 1, T, BLOCK_M, D, True)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    norm = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    whole = S // BLOCK_N * BLOCK_N
    for start in range(0, whole, BLOCK_N):
        acc, top, norm = _d64_fwd_step(K, V, q, acc, top, norm, start, stride, S, scale_log2, BLOCK_N, D, False)
    if whole < S:
        acc, top, norm = _d64_fwd_step(K, V, q, acc, top, norm, whole, stride, S, scale_log2, BLOCK_N, D, True)
    m = first + tl.arange(0, BLOCK_M)
    at = (batch * T * H + head) * D + m[:, None] * stride + tl.arange(0, D)[None, :]
    tl.store(Out + at, acc / norm[:, None], mask=m[:, None] < T)
    tl.store(LSE + (batch * H + head) * T + m, top + tl.log2(norm), mask=m < T)


def _blocks(length, q):
    """(owned rows, rows of the other side, warps): small tiles for short sequences, and half of it in fp32."""
    if length <= 512:
        return 32, 16, 4
    return (128, 64, 8) if q.element_size() == 2 else (64, 32, 4)


def forward(q, k, v):
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    B, T, H, D = q.shape
    S = k.shape[1]
    if D not in (16, 32, 64):
        raise ValueError(f"the head dim is {D}; this schedule is for 16, 32 and 64")
    o = torch.empty_like(q)
    lse = torch.empty(B, H, T, device=q.device, dtype=torch.float32)
    BLOCK_M, BLOCK_N, warps = _blocks(T, q)
    _d64_fwd[(triton.cdiv(T, BLOCK_M), B * H)](
        q, k, v, o, lse, H, T, S, D**-0.5 * 1.4426950408889634, D=D, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=warps
    )
    return o, (q, k, v, o, lse)


# --- backward ---
@triton.jit
def _d64_dq_step(
    K, V, q, do, lse, delta, dq, start, stride, S, scale_log2,
    BLOCK_N: tl.constexpr, D: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    k = _rows_of(K, start, stride, 1, S, BLOCK_N, D, RAGGED)
    v = _rows_of(V, start, stride, 1, S, BLOCK_N, D, RAGGED)
    s = tl.dot(q, tl.trans(k)) * scale_log2 - lse[:, None]
    if RAGGED:
        s = tl.where((start + tl.arange(0, BLOCK_N))[None, :] < S, s, float("-inf"))
    ds = tl.exp2(s) * (tl.dot(do, tl.trans(v)) - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, dq)


@triton.jit
def _d64_dq(
    Q, K, V, Out, DO, LSE, Delta, DQ, H, T, S, do_b, do_t, do_h, do_d, scale, scale_log2,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK_M
    batch = (tl.program_id(1) // H).to(tl.int64)
    head = tl.program_id(1) % H
    stride = H * D
    base = (batch * T * H + head) * D
    K += (batch * S * H + head) * D
    V += (batch * S * H + head) * D
    m = first + tl.arange(0, BLOCK_M)
    row = (batch * H + head) * T + m
    q = _rows_of(Q + base, first, stride, 1, T, BLOCK_M, D, True)
    o = _rows_of(Out + base, first, stride, 1, T, BLOCK_M, D, True)
    do = _rows_of(DO + batch * do_b + head.to(tl.int64) * do_h, first, do_t, do_d, T, BLOCK_M, D, True)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(Delta + row, delta, mask=m < T)
    lse = tl.load(LSE + row, mask=m < T, other=float("inf"))
    dq = tl.zeros((BLOCK_M, D), tl.float32)
    whole = S // BLOCK_N * BLOCK_N
    for start in range(0, whole, BLOCK_N):
        dq = _d64_dq_step(K, V, q, do, lse, delta, dq, start, stride, S, scale_log2, BLOCK_N, D, False)
    if whole < S:
        dq = _d64_dq_step(K, V, q, do, lse, delta, dq, whole, stride, S, scale_log2, BLOCK_N, D, True)
    tl.store(DQ + base + m[:, None] * stride + tl.arange(0, D)[None, :], dq * scale, mask=m[:, None] < T)


@triton.jit
def _d64_dkdv_step(
    Q, DO, LSE, Delta, k, v, dk, dv, start, stride, do_t, do_d, T, scale_log2,
    BLOCK_M: tl.constexpr, D: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    q = _rows_of(Q, start, stride, 1, T, BLOCK_M, D, RAGGED)
    do = _rows_of(DO, start, do_t, do_d, T, BLOCK_M, D, RAGGED)
    m = start + tl.arange(0, BLOCK_M)
    if RAGGED:
        # Probabilities of rows past the end are exp2(-inf).
        lse = tl.load(LSE + m, mask=m < T, other=float("inf"))
        delta = tl.load(Delta + m, mask=m < T, other=0.0)
    else:
        lse = tl.load(LSE + m)
        delta = tl.load(Delta + m)
    p_t = tl.exp2(tl.dot(k, tl.trans(q)) * scale_log2 - lse[None, :])
    dv = tl.dot(p_t.to(do.dtype), do, dv)
    ds_t = p_t * (tl.dot(v, tl.trans(do)) - delta[None, :])
    dk = tl.dot(ds_t.to(q.dtype), q, dk)
    return dk, dv


@triton.jit
def _d64_dkdv(
    Q, K, V, DO, LSE, Delta, DK, DV, H, T, S, do_b, do_t, do_h, do_d, scale, scale_log2,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK_N
    batch = (tl.program_id(1) // H).to(tl.int64)
    head = tl.program_id(1) % H
    stride = H * D
    base = (batch * S * H + head) * D
    Q += (batch * T * H + head) * D
    DO += batch * do_b + head.to(tl.int64) * do_h
    LSE += (batch * H + head) * T
    Delta += (batch * H + head) * T
    k = _rows_of(K + base, first, stride, 1, S, BLOCK_N, D, True)
    v = _rows_of(V + base, first, stride, 1, S, BLOCK_N, D, True)
    dk = tl.zeros((BLOCK_N, D), tl.float32)
    dv = tl.zeros((BLOCK_N, D), tl.float32)
    whole = T // BLOCK_M * BLOCK_M
    for start in range(0, whole, BLOCK_M):
        dk, dv = _d64_dkdv_step(
            Q, DO, LSE, Delta, k, v, dk, dv, start, stride, do_t, do_d, T, scale_log2, BLOCK_M, D, False
        )
    if whole < T:
        dk, dv = _d64_dkdv_step(
            Q, DO, LSE, Delta, k, v, dk, dv, whole, stride, do_t, do_d, T, scale_log2, BLOCK_M, D, True
        )
    n = first + tl.arange(0, BLOCK_N)
    at = base + n[:, None] * stride + tl.arange(0, D)[None, :]
    tl.store(DK + at, dk * scale, mask=n[:, None] < S)
    tl.store(DV + at, dv, mask=n[:, None] < S)


def backward(saved, grad_o, needs=None):
    q, k, v, o, lse = saved
    _, need_k, need_v = needs or (True, True, True)
    B, T, H, D = q.shape
    S = k.shape[1]
    scale = D**-0.5
    scale_log2 = scale * 1.4426950408889634
    dq, delta = torch.empty_like(q), torch.empty_like(lse)
    # dq comes first in any case: it also writes the deltas.
    own, other, warps = _blocks(T, q)
    _d64_dq[(triton.cdiv(T, own), B * H)](
        q, k, v, o, grad_o, lse, delta, dq, H, T, S, *grad_o.stride(), scale, scale_log2,
        D=D, BLOCK_M=own, BLOCK_N=other, num_warps=warps, num_stages=3,
    )  # fmt: skip
    if not (need_k or need_v):
        return dq, None, None
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    own, other, warps = _blocks(S, q)
    _d64_dkdv[(triton.cdiv(S, own), B * H)](
        q, k, v, grad_o, lse, delta, dk, dv, H, T, S, *grad_o.stride(), scale, scale_log2,
        D=D, BLOCK_M=other, BLOCK_N=own, num_warps=warps, num_stages=3,
    )  # fmt: skip
    return dq, dk, dv


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "T": 64, "S": 64, "D": 32},
    {"B": 2, "H": 1, "T": 45, "S": 71, "D": 16},
    {"B": 1, "H": 2, "T": 50, "S": 33, "D": 16, "dtype": "bfloat16"},
)
BENCH = ({"B": 4, "H": 16, "T": 2048, "S": 2048, "D": 64, "dtype": "bfloat16"},)


def make_args(B, H, T, S, D, dtype="float32", device="cpu", seed=0):
    if D not in (16, 32, 64):
        raise ValueError("D must be 16, 32 or 64")
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(B, n, H, D, generator=g).to(device, getattr(torch, dtype)) for n in (T, S, S))


def reference(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
