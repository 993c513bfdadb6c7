"""Flash attention whose one backward kernel writes dq into a partial buffer per split of the keys: no atomics.

A program owns one split of the keys and walks its key tiles; dk and dv of a tile stay in registers, its share of dq
is added to the split's own fp32 buffer, which nobody else touches. A last launch adds the few buffers in fixed order,
so that gradients are bitwise reproducible. The number of splits, not of key tiles, sets the memory.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "fa_onekernel_dq_partial",
    "family": "attention",
    "op": "attention",
    "schema": 1,
    "techniques": ("two-stage-partials", "split-k", "saved-lse", "delta-preprocess", "recompute"),
    "saves": ("out: fp32 or bf16 (B, H, T, D)", "lse: fp32 (B, H, T)"),
    "grads": ("q", "k", "v"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _attend(Q, K, V, Out, Lse, T, D, scale_log2, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    base = tl.program_id(1).to(tl.int64) * T
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    q_at = (base + m[:, None]) * D + d[None, :]
    in_q = (m[:, None] < T) & (d[None, :] < D)
    q = tl.load(Q + q_at, mask=in_q, other=0.0)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    norm = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(0, T, BLOCK_N):
        in_kv = (start + n[:, None] < T) & (d[None, :] < D)
        kv_at = (base + start + n[:, None]) * D + d[None, :]
        k = tl.load(K + kv_at, mask=in_kv, other=0.0)
        v = tl.load(V + kv_at, mask=in_kv, other=0.0)
        s = tl.where(start + n[None, :] < T, tl.dot(q, tl.trans(k)) * scale_log2, float("-inf"))
        raised = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - raised[:, None])
        fade = tl.exp2(top - raised)
        norm = norm * fade + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None])
        top = raised
    tl.store(Out + q_at, acc / norm[:, None], mask=in_q)
    tl.store(Lse + base + m, top + tl.log2(norm), mask=m < T)


def _blocks(q):
    """(rows of the outer tile, rows of the inner tile, warps)."""
    T, D = q.shape[2:]
    if T <= 256:
        return 32, 16, 4
    if q.element_size() == 4:
        return 64, 32, 8
    return (128, 64, 8) if D <= 64 else (128, 32, 8)


def forward(q, k, v):
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    B, H, T, D = q.shape
    out = torch.empty_like(q)
    lse = torch.empty(B, H, T, device=q.device, dtype=torch.float32)
    BLOCK_M, BLOCK_N, warps = _blocks(q)
    _attend[(triton.cdiv(T, BLOCK_M), B * H)](
        q, k, v, out, lse, T, D, D**-0.5 * 1.4426950408889634,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_D=max(16, triton.next_power_of_2(D)), num_warps=warps,
    )  # fmt: skip
    return out, (q, k, v, out, lse)


# --- backward ---
@triton.jit
def _row_deltas(Out, DO, Delta, rows, D, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    ok = (m[:, None] < rows) & (d[None, :] < D)
    o = tl.load(Out + m[:, None] * D + d[None, :], mask=ok, other=0.0).to(tl.float32)
    do = tl.load(DO + m[:, None] * D + d[None, :], mask=ok, other=0.0).to(tl.float32)
    tl.store(Delta + m, tl.sum(o * do, 1), mask=m < rows)


@triton.jit
def _split_grads(
    Q, K, V, DO, Lse, Delta, Parts, DK, DV, T, D, keys_each, scale, scale_log2,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    base = tl.program_id(1).to(tl.int64) * T
    begin = tl.program_id(0) * keys_each
    end = tl.minimum(begin + keys_each, T)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    # Parts is (splits, B * H, T, D).
    Parts += tl.program_id(0).to(tl.int64) * tl.num_programs(1) * T * D
    for first in range(begin, end, BLOCK_N):
        in_kv = (first + n[:, None] < end) & (d[None, :] < D)
        kv_at = (base + first + n[:, None]) * D + d[None, :]
        k = tl.load(K + kv_at, mask=in_kv, other=0.0)
        v = tl.load(V + kv_at, mask=in_kv, other=0.0)
        dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        for start in range(0, T, BLOCK_M):
            m = start + tl.arange(0, BLOCK_M)
            in_q = (m[:, None] < T) & (d[None, :] < D)
            q_at = (base + m[:, None]) * D + d[None, :]
            q = tl.load(Q + q_at, mask=in_q, other=0.0)
            do = tl.load(DO + q_at, mask=in_q, other=0.0)
            lse = tl.load(Lse + base + m, mask=m < T, other=float("inf"))
            delta = tl.load(Delta + base + m, mask=m < T, other=0.0)
            s = tl.dot(k, tl.trans(q)) * scale_log2 - lse[None, :]
            p = tl.exp2(tl.where(first + n[:, None] < end, s, float("-inf")))
            dv = tl.dot(p.to(do.dtype), do, dv)
            ds = (p * (tl.dot(v, tl.trans(do)) - delta[None, :])).to(q.dtype)
            dk = tl.dot(ds, q, dk)
            share = tl.dot(tl.trans(ds), k)
            # The first key tile writes, the later ones add: the buffer needs no zeros beforehand.
            if first > begin:
                share += tl.load(Parts + q_at, mask=in_q, other=0.0)
            tl.store(Parts + q_at, share, mask=in_q)
        tl.store(DK + kv_at, dk * scale, mask=in_kv)
        tl.store(DV + kv_at, dv, mask=in_kv)
        # The next key tile reads what other threads of this program may have stored.
        tl.debug_barrier()


@triton.jit
def _add_splits(Parts, DQ, size, splits, scale, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in range(splits):
        total += tl.load(Parts + at, mask=at < size, other=0.0)
        Parts += size
    tl.store(DQ + at, total * scale, mask=at < size)


def backward(saved, grad_out, needs=None):
    q, k, v, out, lse = saved
    B, H, T, D = q.shape
    # The cotangent is read once per key tile: one copy pays off.
    do = grad_out.contiguous()
    BLOCK_D = max(16, triton.next_power_of_2(D))
    delta = torch.empty_like(lse)
    _row_deltas[(triton.cdiv(lse.numel(), 64),)](out, do, delta, lse.numel(), D, BLOCK_M=64, BLOCK_D=BLOCK_D)
    BLOCK_N, BLOCK_M, warps = _blocks(q)
    # Enough splits for two programs per processor; each more costs an fp32 copy of dq.
    splits = max(1, min(triton.cdiv(T, BLOCK_N), triton.cdiv(264, B * H)))
    keys_each = triton.cdiv(triton.cdiv(T, splits), BLOCK_N) * BLOCK_N
    splits = triton.cdiv(T, keys_each)
    scale = D**-0.5
    parts = torch.empty(splits, B, H, T, D, device=q.device, dtype=torch.float32)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    _split_grads[(splits, B * H)](
        q, k, v, do, lse, delta, parts, dk, dv, T, D, keys_each, scale, scale * 1.4426950408889634,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_D=BLOCK_D, num_warps=warps, num_stages=3,
    )  # fmt: skip
    _add_splits[(triton.cdiv(q.numel(), 2048),)](parts, dq, q.numel(), splits, scale, BLOCK=2048)
    return dq, dk, dv


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "T": 64, "D": 32},
    {"B": 16, "H": 10, "T": 77, "D": 20},
    {"B": 1, "H": 2, "T": 50, "D": 16, "dtype": "bfloat16"},
)
BENCH = ({"B": 4, "H": 16, "T": 2048, "D": 64, "dtype": "bfloat16"},)


def make_args(B, H, T, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(B, H, T, D, generator=g).to(device=device, dtype=getattr(torch, dtype)) for _ in range(3))


def reference(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)
