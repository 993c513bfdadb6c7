"""Attention with a pair bias shared by the whole batch: the owner of a bias tile loops over the batch for its gradient.

q, k and v are (B, H, T, D) with a large B of short sequences (rows of an alignment), bias is (H, T, T). Three owners:
query tiles for dq and delta, key tiles for dk and dv, bias tiles for dbias, whose program recomputes dS of each batch
element and keeps the sum in registers: nothing of size (B, H, T, T) is ever stored, and no atomics are needed.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "fa_bias_broadcast_heads",
    "family": "attention",
    "op": "attention_bias",
    "schema": 1,
    "techniques": ("broadcast-reduction", "saved-lse", "owner-grid", "loop-swap", "recompute"),
    "saves": ("o: fp32 or bf16 (B, H, T, D)", "lse: fp32 (B, H, T)"),
    "grads": ("q", "k", "v", "bias"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _rows(X, at, T, D, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    return tl.load(X + at[:, None] * D + d[None, :], mask=(at[:, None] < T) & (d[None, :] < D), other=0.0)


@triton.jit
def _log2_bias(Bias, m, n, T):
    inside = (m[:, None] < T) & (n[None, :] < T)
    bias = tl.load(Bias + m[:, None] * T + n[None, :], mask=inside, other=0.0).to(tl.float32)
    return tl.where(n[None, :] < T, bias * 1.4426950408889634, float("-inf"))


@triton.jit
def _pair_fwd(
    Q, K, V, Bias, Out, LSE, H, T, D, scale_log2,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # The batch is the fastest axis of the grid: programs that run together share a row of the bias in L2.
    batch = tl.program_id(0).to(tl.int64)
    head = tl.program_id(2)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    base = (batch * H + head) * T
    Bias += head.to(tl.int64) * T * T
    q = _rows(Q + base * D, m, T, D, BLOCK_D)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    norm = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(0, T, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        k = _rows(K + base * D, n, T, D, BLOCK_D)
        v = _rows(V + base * D, n, T, D, BLOCK_D)
        s = tl.dot(q, tl.trans(k)) * scale_log2 + _log2_bias(Bias, m, n, T)
        new_top = tl.maximum(top, tl.max(s, 1))
        shrink = tl.exp2(top - new_top)
        p = tl.exp2(s - new_top[:, None])
        norm = norm * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
        top = new_top
    out_at = (base + m[:, None]) * D + d[None, :]
    tl.store(Out + out_at, acc / norm[:, None], mask=(m[:, None] < T) & (d[None, :] < D))
    tl.store(LSE + base + m, top + tl.log2(norm), mask=m < T)


def _blocks(q):
    """(owned rows, rows of the other side, warps)."""
    if q.shape[2] <= 128:
        return 32, 16, 4
    return (128, 32, 4) if q.element_size() == 2 and q.shape[3] <= 32 else (64, 32, 4)


def forward(q, k, v, bias):
    q, k, v, bias = q.contiguous(), k.contiguous(), v.contiguous(), bias.contiguous()
    B, H, T, D = q.shape
    o = torch.empty_like(q)
    lse = torch.empty(B, H, T, device=q.device, dtype=torch.float32)
    own, other, warps = _blocks(q)
    _pair_fwd[(B, triton.cdiv(T, own), H)](
        q, k, v, bias, o, lse, H, T, D, D**-0.5 * 1.4426950408889634,
        BLOCK_M=own, BLOCK_N=other, BLOCK_D=max(16, triton.next_power_of_2(D)), num_warps=warps,
    )  # fmt: skip
    return o, (q, k, v, bias, o, lse)


# --- backward ---
@triton.jit
def _pair_dq(
    Q, K, V, Bias, Out, DO, LSE, Delta, DQ, H, T, D, scale, scale_log2,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    base = (tl.program_id(0).to(tl.int64) * H + tl.program_id(2)) * T
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    Bias += tl.program_id(2).to(tl.int64) * T * T
    q = _rows(Q + base * D, m, T, D, BLOCK_D)
    do = _rows(DO + base * D, m, T, D, BLOCK_D)
    o = _rows(Out + base * D, m, T, D, BLOCK_D)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(Delta + base + m, delta, mask=m < T)
    lse = tl.load(LSE + base + m, mask=m < T, other=float("inf"))
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(0, T, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        k = _rows(K + base * D, n, T, D, BLOCK_D)
        v = _rows(V + base * D, n, T, D, BLOCK_D)
        p = tl.exp2(tl.dot(q, tl.trans(k)) * scale_log2 + _log2_bias(Bias, m, n, T) - lse[:, None])
        ds = p * (tl.dot(do, tl.trans(v)) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    tl.store(DQ + (base + m[:, None]) * D + d[None, :], dq * scale, mask=(m[:, None] < T) & (d[None, :] < D))


@triton.jit
def _pair_dkdv(
    Q, K, V, Bias, DO, LSE, Delta, DK, DV, H, T, D, scale, scale_log2,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    base = (tl.program_id(0).to(tl.int64) * H + tl.program_id(2)) * T
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    Bias += tl.program_id(2).to(tl.int64) * T * T
    k = _rows(K + base * D, n, T, D, BLOCK_D)
    v = _rows(V + base * D, n, T, D, BLOCK_D)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for start in range(0, T, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        q = _rows(Q + base * D, m, T, D, BLOCK_D)
        do = _rows(DO + base * D, m, T, D, BLOCK_D)
        lse = tl.load(LSE + base + m, mask=m < T, other=float("inf"))
        delta = tl.load(Delta + base + m, mask=m < T, other=0.0)
        # Scores in the orientation of the bias, whose rows are contiguous over keys.
        p = tl.exp2(tl.dot(q, tl.trans(k)) * scale_log2 + _log2_bias(Bias, m, n, T) - lse[:, None])
        dv = tl.dot(tl.trans(p).to(do.dtype), do, dv)
        ds = p * (tl.dot(do, tl.trans(v)) - delta[:, None])
        dk = tl.dot(tl.trans(ds).to(q.dtype), q, dk)
    at = (base + n[:, None]) * D + d[None, :]
    inside = (n[:, None] < T) & (d[None, :] < D)
    tl.store(DK + at, dk * scale, mask=inside)
    tl.store(DV + at, dv, mask=inside)


@triton.jit
def _pair_dbias(
    Q, K, V, Bias, DO, LSE, Delta, DBias, B, H, T, D, scale_log2,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    bias = _log2_bias(Bias + head * T * T, m, n, T)
    dbias = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for batch in range(B):
        base = (batch * H + head) * T
        q = _rows(Q + base * D, m, T, D, BLOCK_D)
        k = _rows(K + base * D, n, T, D, BLOCK_D)
        v = _rows(V + base * D, n, T, D, BLOCK_D)
        do = _rows(DO + base * D, m, T, D, BLOCK_D)
        lse = tl.load(LSE + base + m, mask=m < T, other=float("inf"))
        delta = tl.load(Delta + base + m, mask=m < T, other=0.0)
        p = tl.exp2(tl.dot(q, tl.trans(k)) * scale_log2 + bias - lse[:, None])
        dbias += p * (tl.dot(do, tl.trans(v)) - delta[:, None])
    inside = (m[:, None] < T) & (n[None, :] < T)
    tl.store(DBias + head * T * T + m[:, None] * T + n[None, :], dbias, mask=inside)


def backward(saved, grad_o, needs=None):
    q, k, v, bias, o, lse = saved
    _, need_k, need_v, need_bias = needs or (True,) * 4
    B, H, T, D = q.shape
    # All three kernels read the cotangent tile by tile: one copy is cheaper than strided reads in all of them.
    do = grad_o.contiguous()
    scale = D**-0.5
    scale_log2 = scale * 1.4426950408889634
    BLOCK_D = max(16, triton.next_power_of_2(D))
    own, other, warps = _blocks(q)
    dq, delta = torch.empty_like(q), torch.empty_like(lse)
    _pair_dq[(B, triton.cdiv(T, own), H)](
        q, k, v, bias, o, do, lse, delta, dq, H, T, D, scale, scale_log2,
        BLOCK_M=own, BLOCK_N=other, BLOCK_D=BLOCK_D, num_warps=warps,
    )  # fmt: skip
    dk = dv = dbias = None
    if need_k or need_v:
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        _pair_dkdv[(B, triton.cdiv(T, own), H)](
            q, k, v, bias, do, lse, delta, dk, dv, H, T, D, scale, scale_log2,
            BLOCK_M=other, BLOCK_N=own, BLOCK_D=BLOCK_D, num_warps=warps,
        )  # fmt: skip
    if need_bias:
        dbias = torch.empty_like(bias)
        side = 32 if T <= 128 else 64
        _pair_dbias[(triton.cdiv(T, side), triton.cdiv(T, side), H)](
            q, k, v, bias, do, lse, delta, dbias, B, H, T, D, scale_log2,
            BLOCK_M=side, BLOCK_N=side, BLOCK_D=BLOCK_D, num_warps=4, num_stages=2,
        )  # fmt: skip
    return dq, dk, dv, dbias


# --- check ---
SWEEP = (
    {"B": 3, "H": 2, "T": 48, "D": 16},
    {"B": 2, "H": 1, "T": 45, "D": 20},
    {"B": 3, "H": 2, "T": 33, "D": 16, "dtype": "bfloat16"},
)
BENCH = ({"B": 64, "H": 8, "T": 384, "D": 32, "dtype": "bfloat16"},)


def make_args(B, H, T, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = (*((B, H, T, D),) * 3, (H, T, T))
    return tuple(torch.randn(shape, generator=g).to(device, getattr(torch, dtype)) for shape in shapes)


def reference(q, k, v, bias):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias[None])
