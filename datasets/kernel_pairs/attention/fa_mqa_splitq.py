"""Multi-query attention: all heads of all tokens are rows over one key head; dk and dv split those rows over programs.

In (B, T, H, D) layout the T * H query rows of a sequence lie in one matrix, and row r stands at token r // H: one
kernel without a head axis serves all heads and reads each key tile once for 128 rows of them. A single key head
leaves few key tiles to own, so that dk and dv split the rows, and fp32 partial buffers, one per split, are summed
afterwards.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "fa_mqa_splitq",
    "family": "attention",
    "op": "multi_query_attention",
    "schema": 1,
    "techniques": (
        "split-k", "two-stage-partials", "head-reduction", "saved-lse", "delta-preprocess", "loop-swap",
        "causal-bounds",
    ),
    "saves": ("o: fp32 or bf16 (B, T, H, D)", "lse: fp32 (B, T * H)"),
    "grads": ("q", "k", "v"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}  # fmt: skip


# --- forward ---
@triton.jit
def _mqa_fwd(
    Q, K, V, Out, LSE, rows, S, H, past, D, scale_log2,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_R
    batch = tl.program_id(1).to(tl.int64)
    r = first + tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    in_q = (r[:, None] < rows) & (d[None, :] < D)
    q = tl.load(Q + (batch * rows + r[:, None]) * D + d[None, :], mask=in_q, other=0.0)
    position = r // H + past
    top = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    norm = tl.zeros((BLOCK_R,), tl.float32)
    acc = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    # The tile's last row sees most: keys up to its own token.
    for start in range(0, (tl.minimum(first + BLOCK_R, rows) - 1) // H + past + 1, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        in_kv = (n[:, None] < S) & (d[None, :] < D)
        at = (batch * S + n[:, None]) * D + d[None, :]
        k = tl.load(K + at, mask=in_kv, other=0.0)
        v = tl.load(V + at, mask=in_kv, other=0.0)
        s = tl.where(position[:, None] >= n[None, :], tl.dot(q, tl.trans(k)) * scale_log2, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        shrink = tl.exp2(top - new_top)
        p = tl.exp2(s - new_top[:, None])
        norm = norm * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
        top = new_top
    tl.store(Out + (batch * rows + r[:, None]) * D + d[None, :], acc / norm[:, None], mask=in_q)
    tl.store(LSE + batch * rows + r, top + tl.log2(norm), mask=r < rows)


def _blocks(rows, q):
    """(owned rows, rows of the other side, warps)."""
    if rows <= 512:
        return 32, 16, 4
    if q.element_size() == 4:
        return 64, 32, 8
    return (128, 64, 8) if q.shape[3] <= 64 else (128, 32, 8)


def forward(q, k, v):
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    B, T, H, D = q.shape
    S = k.shape[1]
    o = torch.empty_like(q)
    lse = torch.empty(B, T * H, device=q.device, dtype=torch.float32)
    own, other, warps = _blocks(T * H, q)
    _mqa_fwd[(triton.cdiv(T * H, own), B)](
        q, k, v, o, lse, T * H, S, H, S - T, D, D**-0.5 * 1.4426950408889634,
        BLOCK_R=own, BLOCK_N=other, BLOCK_D=max(16, triton.next_power_of_2(D)), num_warps=warps,
    )  # fmt: skip
    return o, (q, k, v, o, lse)


# --- backward ---
@triton.jit
def _mqa_delta(Out, DO, Delta, rows, D, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    inside = (r[:, None] < rows) & (d[None, :] < D)
    o = tl.load(Out + r[:, None] * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
    do = tl.load(DO + r[:, None] * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(Delta + r, tl.sum(o * do, 1), mask=r < rows)


@triton.jit
def _mqa_dq(
    Q, K, V, DO, LSE, Delta, DQ, rows, S, H, past, D, scale, scale_log2,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_R
    batch = tl.program_id(1).to(tl.int64)
    r = first + tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    in_q = (r[:, None] < rows) & (d[None, :] < D)
    q_at = (batch * rows + r[:, None]) * D + d[None, :]
    q = tl.load(Q + q_at, mask=in_q, other=0.0)
    do = tl.load(DO + q_at, mask=in_q, other=0.0)
    lse = tl.load(LSE + batch * rows + r, mask=r < rows, other=float("inf"))
    delta = tl.load(Delta + batch * rows + r, mask=r < rows, other=0.0)
    position = r // H + past
    dq = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    for start in range(0, (tl.minimum(first + BLOCK_R, rows) - 1) // H + past + 1, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        in_kv = (n[:, None] < S) & (d[None, :] < D)
        at = (batch * S + n[:, None]) * D + d[None, :]
        k = tl.load(K + at, mask=in_kv, other=0.0)
        v = tl.load(V + at, mask=in_kv, other=0.0)
        s = tl.dot(q, tl.trans(k)) * scale_log2 - lse[:, None]
        p = tl.exp2(tl.where(position[:, None] >= n[None, :], s, float("-inf")))
        ds = p * (tl.dot(do, tl.trans(v)) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    tl.store(DQ + q_at, dq * scale, mask=in_q)


@triton.jit
def _mqa_dkdv(
    Q, K, V, DO, LSE, Delta, Parts, rows, S, H, past, D, scale, scale_log2, rows_each, part,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    first_key = tl.program_id(0) * BLOCK_N
    split = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    n = first_key + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    in_kv = (n[:, None] < S) & (d[None, :] < D)
    k = tl.load(K + (batch * S + n[:, None]) * D + d[None, :], mask=in_kv, other=0.0)
    v = tl.load(V + (batch * S + n[:, None]) * D + d[None, :], mask=in_kv, other=0.0)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    # Rows of tokens before the tile's first key see none of it.
    seers = tl.maximum(first_key - past, 0) * H // BLOCK_R * BLOCK_R
    end = tl.minimum((split + 1) * rows_each, rows)
    for start in range(tl.maximum(split * rows_each, seers), end, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        in_q = (r[:, None] < end) & (d[None, :] < D)
        q_at = (batch * rows + r[:, None]) * D + d[None, :]
        q = tl.load(Q + q_at, mask=in_q, other=0.0)
        do = tl.load(DO + q_at, mask=in_q, other=0.0)
        lse = tl.load(LSE + batch * rows + r, mask=r < end, other=float("inf"))
        delta = tl.load(Delta + batch * rows + r, mask=r < end, other=0.0)
        s = tl.dot(k, tl.trans(q)) * scale_log2 - lse[None, :]
        p = tl.exp2(tl.where((r // H + past)[None, :] >= n[:, None], s, float("-inf")))
        dv = tl.dot(p.to(do.dtype), do, dv)
        ds = p * (tl.dot(v, tl.trans(do)) - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk)
    # Parts is (2, splits, B, S, D), dk before dv. A split that sees nothing of the tile stores zeros.
    at = ((split * tl.num_programs(2) + batch) * S + n[:, None]) * D + d[None, :]
    tl.store(Parts + at, dk * scale, mask=in_kv)
    tl.store(Parts + part + at, dv, mask=in_kv)


def backward(saved, grad_o, needs=None):
    q, k, v, o, lse = saved
    need_q, need_k, need_v = needs or (True, True, True)
    B, T, H, D = q.shape
    S = k.shape[1]
    # The kernels see (T, H) as one axis of rows, which takes a dense cotangent.
    do = grad_o.contiguous()
    BLOCK_D = max(16, triton.next_power_of_2(D))
    scale = D**-0.5
    delta = torch.empty_like(lse)
    _mqa_delta[(triton.cdiv(lse.numel(), 64),)](o, do, delta, lse.numel(), D, BLOCK_R=64, BLOCK_D=BLOCK_D)
    own, other, warps = _blocks(T * H, q)
    sizes = (T * H, S, H, S - T, D, scale, scale * 1.4426950408889634)
    dq = dk = dv = None
    if need_q:
        dq = torch.empty_like(q)
        _mqa_dq[(triton.cdiv(T * H, own), B)](
            q, k, v, do, lse, delta, dq, *sizes, BLOCK_R=own, BLOCK_N=other, BLOCK_D=BLOCK_D, num_warps=warps
        )
    if need_k or need_v:
        tiles = triton.cdiv(S, own)
        # The causal mask leaves about half of the splits work: four programs per processor make two that run.
        splits = max(1, min(triton.cdiv(T * H, other), triton.cdiv(528, tiles * B)))
        rows_each = triton.cdiv(triton.cdiv(T * H, splits), other) * other
        splits = triton.cdiv(T * H, rows_each)
        parts = torch.empty(2, splits, *k.shape, device=k.device, dtype=torch.float32)
        _mqa_dkdv[(tiles, splits, B)](
            q, k, v, do, lse, delta, parts, *sizes, rows_each, parts.stride(0),
            BLOCK_R=other, BLOCK_N=own, BLOCK_D=BLOCK_D, num_warps=warps,
        )  # fmt: skip
        dk, dv = parts.sum(1).to(k.dtype).unbind(0)
    return dq, dk, dv


# --- check ---
SWEEP = (
    {"B": 1, "T": 32, "past": 0, "H": 4, "D": 32},
    {"B": 2, "T": 23, "past": 30, "H": 3, "D": 20},
    {"B": 1, "T": 20, "past": 13, "H": 4, "D": 16, "dtype": "bfloat16"},
)
BENCH = ({"B": 2, "T": 1024, "past": 0, "H": 32, "D": 128, "dtype": "bfloat16"},)


def make_args(B, T, past, H, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    # The queries are the last T of past + T positions.
    shapes = ((B, T, H, D), (B, past + T, D), (B, past + T, D))
    return tuple(torch.randn(shape, generator=g).to(device, getattr(torch, dtype)) for shape in shapes)


def reference(q, k, v):
    T, S = q.shape[1], k.shape[1]
    q, k, v = q.transpose(1, 2), k[:, None], v[:, None]
    # Torch's causal mask begins at the first key, this one ends at the last.
    keep = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T) if T != S else None
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep, is_causal=T == S, enable_gqa=True)
    return out.transpose(1, 2)
