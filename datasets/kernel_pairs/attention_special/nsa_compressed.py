"""Attention over compressed keys, one mean key and value per block of tokens, as in native sparse attention.

Query t sees the blocks that end at or before t; queries before the first block's end give 0. The forward saves the
block means. Means are few while queries and heads are many, so dk and dv split the queries of every head over
programs; a last launch adds splits and heads of a group and gives each token of a block its 1/block of the gradient
of the mean.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "nsa_compressed",
    "family": "attention_special",
    "op": "compressed_block_attention",
    "schema": 1,
    "techniques": (
        "saved-lse", "loop-swap", "causal-bounds", "split-k", "two-stage-partials", "head-reduction",
        "broadcast-adjoint", "strided-cotangent",
    ),
    "saves": (
        "k_mean: fp32 or bf16 (B, HK, NB, D)", "v_mean: fp32 or bf16 (B, HK, NB, D)",
        "o: fp32 or bf16 (B, HQ, T, D)", "lse: fp32 (B, HQ, T)",
    ),
    "grads": ("q", "k", "v"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}  # fmt: skip


# --- forward ---
@triton.jit
def _block_means(K, V, KMean, VMean, T, NB, SIZE, D, BLOCK_D: tl.constexpr):
    head = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0)
    d = tl.arange(0, BLOCK_D)
    k_sum = tl.zeros((BLOCK_D,), tl.float32)
    v_sum = tl.zeros((BLOCK_D,), tl.float32)
    for i in range(SIZE):
        at = (head * T + block * SIZE + i) * D + d
        k_sum += tl.load(K + at, mask=d < D, other=0.0).to(tl.float32)
        v_sum += tl.load(V + at, mask=d < D, other=0.0).to(tl.float32)
    tl.store(KMean + (head * NB + block) * D + d, k_sum / SIZE, mask=d < D)
    tl.store(VMean + (head * NB + block) * D + d, v_sum / SIZE, mask=d < D)


@triton.jit
def _compressed_fwd(
    Q, KMean, VMean, Out, LSE, T, NB, SIZE, GROUP, D, scale_log2,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # A query sees T / SIZE means at most: the long tiles are few, and start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    in_q = (m[:, None] < T) & (d[None, :] < D)
    q = tl.load(Q + (head * T + m[:, None]) * D + d[None, :], mask=in_q, other=0.0)
    complete = (m + 1) // SIZE
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    norm = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(0, tl.minimum((tile + 1) * BLOCK_M // SIZE, NB), BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        in_n = (n[:, None] < NB) & (d[None, :] < D)
        at = (head // GROUP * NB + n[:, None]) * D + d[None, :]
        k = tl.load(KMean + at, mask=in_n, other=0.0)
        v = tl.load(VMean + at, mask=in_n, other=0.0)
        seen = (n[None, :] < complete[:, None]) & (n[None, :] < NB)
        s = tl.where(seen, tl.dot(q, tl.trans(k)) * scale_log2, float("-inf"))
        # Rows that have seen nothing keep -inf: 0 in its place keeps -inf - -inf out.
        new_top = tl.maximum(top, tl.max(s, 1))
        origin = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(s - origin[:, None])
        shrink = tl.exp2(top - origin)
        norm = norm * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
        top = new_top
    empty = norm == 0.0
    divisor = tl.where(empty, 1.0, norm)
    tl.store(Out + (head * T + m[:, None]) * D + d[None, :], acc / divisor[:, None], mask=in_q)
    # Infinity makes every probability of an empty row an exact zero in the backward.
    lse = tl.where(empty, float("inf"), top + tl.log2(divisor))
    tl.store(LSE + head * T + m, lse, mask=m < T)


def _blocks(q):
    """(queries, means, warps) of a tile."""
    if q.shape[2] <= 512:
        return 32, 16, 4
    return (128, 32, 8) if q.element_size() == 2 else (64, 16, 4)


def forward(q, k, v, block=32):
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    B, HQ, T, D = q.shape
    HK, NB = k.shape[1], T // block
    BLOCK_M, BLOCK_N, warps = _blocks(q)
    BLOCK_D = max(16, triton.next_power_of_2(D))
    k_mean, v_mean = (torch.empty(B, HK, NB, D, device=q.device, dtype=q.dtype) for _ in range(2))
    if NB:
        _block_means[(NB, B * HK)](k, v, k_mean, v_mean, T, NB, block, D, BLOCK_D=BLOCK_D, num_warps=1)
    o = torch.empty_like(q)
    lse = torch.empty(B, HQ, T, device=q.device, dtype=torch.float32)
    _compressed_fwd[(triton.cdiv(T, BLOCK_M), B * HQ)](
        q, k_mean, v_mean, o, lse, T, NB, block, HQ // HK, D, D**-0.5 * 1.4426950408889634,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_D=BLOCK_D, num_warps=warps,
    )  # fmt: skip
    return o, (q, k_mean, v_mean, o, lse, block)


# --- backward ---
@triton.jit
def _compressed_dq(
    Q, KMean, VMean, Out, DO, LSE, Delta, DQ, H, T, NB, SIZE, GROUP, D, do_b, do_h, do_t, do_d, scale, scale_log2,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    in_q = (m[:, None] < T) & (d[None, :] < D)
    at_q = (head * T + m[:, None]) * D + d[None, :]
    q = tl.load(Q + at_q, mask=in_q, other=0.0)
    o = tl.load(Out + at_q, mask=in_q, other=0.0)
    do_at = head // H * do_b + head % H * do_h + m[:, None].to(tl.int64) * do_t + d[None, :] * do_d
    do = tl.load(DO + do_at, mask=in_q, other=0.0)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(Delta + head * T + m, delta, mask=m < T)
    lse = tl.load(LSE + head * T + m, mask=m < T, other=float("inf"))
    complete = (m + 1) // SIZE
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(0, tl.minimum((tile + 1) * BLOCK_M // SIZE, NB), BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        in_n = (n[:, None] < NB) & (d[None, :] < D)
        at = (head // GROUP * NB + n[:, None]) * D + d[None, :]
        k = tl.load(KMean + at, mask=in_n, other=0.0)
        v = tl.load(VMean + at, mask=in_n, other=0.0)
        seen = (n[None, :] < complete[:, None]) & (n[None, :] < NB)
        s = tl.where(seen, tl.dot(q, tl.trans(k)) * scale_log2 - lse[:, None], float("-inf"))
        ds = tl.exp2(s) * (tl.dot(do, tl.trans(v)) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    tl.store(DQ + at_q, dq * scale, mask=in_q)


@triton.jit
def _compressed_dkdv(
    Q, KMean, VMean, DO, LSE, Delta, Parts, H, T, NB, SIZE, GROUP, D, do_b, do_h, do_t, do_d, scale, scale_log2,
    rows_each, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # Gradients of a tile of means from one split of one head's queries.
    split = tl.program_id(1)
    head = tl.program_id(2).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    in_n = (n[:, None] < NB) & (d[None, :] < D)
    k = tl.load(KMean + (head // GROUP * NB + n[:, None]) * D + d[None, :], mask=in_n, other=0.0)
    v = tl.load(VMean + (head // GROUP * NB + n[:, None]) * D + d[None, :], mask=in_n, other=0.0)
    DO += head // H * do_b + head % H * do_h
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    # The first query that sees the first of these blocks is its last token.
    seer = ((tl.program_id(0) * BLOCK_N + 1) * SIZE - 1) // BLOCK_M * BLOCK_M
    end = tl.minimum((split + 1) * rows_each, T)
    for start in range(tl.maximum(split * rows_each, seer), end, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        in_q = (m[:, None] < end) & (d[None, :] < D)
        q = tl.load(Q + (head * T + m[:, None]) * D + d[None, :], mask=in_q, other=0.0)
        do = tl.load(DO + m[:, None].to(tl.int64) * do_t + d[None, :] * do_d, mask=in_q, other=0.0)
        lse = tl.load(LSE + head * T + m, mask=m < end, other=float("inf"))
        delta = tl.load(Delta + head * T + m, mask=m < end, other=0.0)
        seen = n[:, None] < (m[None, :] + 1) // SIZE
        p = tl.exp2(tl.where(seen, tl.dot(k, tl.trans(q)) * scale_log2 - lse[None, :], float("-inf")))
        dv = tl.dot(p.to(do.dtype), do, dv)
        ds = p * (tl.dot(v, tl.trans(do)) - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk)
    # Parts is (2, B * HQ, splits, NB, D), dk before dv.
    heads = tl.num_programs(2).to(tl.int64)
    at = ((head * tl.num_programs(1) + split) * NB + n[:, None]) * D + d[None, :]
    tl.store(Parts + at, dk * scale, mask=in_n)
    tl.store(Parts + heads * tl.num_programs(1) * NB * D + at, dv, mask=in_n)


@triton.jit
def _spread_means(Parts, DK, DV, T, NB, SIZE, D, sources, parts_each, BLOCK_D: tl.constexpr):
    # All splits of all heads of a group lie side by side: `sources` rows, NB * D apart.
    block = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    dk = tl.zeros((BLOCK_D,), tl.float32)
    dv = tl.zeros((BLOCK_D,), tl.float32)
    for i in range(sources):
        at = ((kv_head * sources + i) * NB + block) * D + d
        dk += tl.load(Parts + at, mask=(block < NB) & (d < D), other=0.0)
        dv += tl.load(Parts + parts_each + at, mask=(block < NB) & (d < D), other=0.0)
    # The tokens of an unfinished last block belong to no mean: they get the zeros.
    for i in range(SIZE):
        t = block * SIZE + i
        tl.store(DK + (kv_head * T + t) * D + d, dk / SIZE, mask=(t < T) & (d < D))
        tl.store(DV + (kv_head * T + t) * D + d, dv / SIZE, mask=(t < T) & (d < D))


def backward(saved, grad_o, needs=None):
    q, k_mean, v_mean, o, lse, block = saved
    B, HQ, T, D = q.shape
    HK, NB = k_mean.shape[1:3]
    _, need_k, need_v = needs or (True, True, True)
    scale = D**-0.5
    scale_log2 = scale * 1.4426950408889634
    BLOCK_M, BLOCK_N, warps = _blocks(q)
    BLOCK_D = max(16, triton.next_power_of_2(D))
    dq, delta = torch.empty_like(q), torch.empty_like(lse)
    sizes = (T, NB, block, HQ // HK, D, *grad_o.stride(), scale, scale_log2)
    _compressed_dq[(triton.cdiv(T, BLOCK_M), B * HQ)](
        q, k_mean, v_mean, o, grad_o, lse, delta, dq, HQ, *sizes,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_D=BLOCK_D, num_warps=warps, num_stages=3,
    )  # fmt: skip
    if not (need_k or need_v):
        return dq, None, None
    own, other = (16, 16) if T <= 512 else (64, 32) if q.element_size() == 2 else (32, 32)
    tiles = triton.cdiv(NB, own)
    # About four programs per processor: those of early splits and late means have nothing to do.
    splits = max(1, min(triton.cdiv(T, other), triton.cdiv(528, max(1, tiles) * B * HQ)))
    rows_each = triton.cdiv(triton.cdiv(T, splits), other) * other
    splits = triton.cdiv(T, rows_each)
    parts = torch.empty(2, B, HQ, splits, NB, D, device=q.device, dtype=torch.float32)
    if NB:
        _compressed_dkdv[(tiles, splits, B * HQ)](
            q, k_mean, v_mean, grad_o, lse, delta, parts, HQ, *sizes, rows_each,
            BLOCK_M=other, BLOCK_N=own, BLOCK_D=BLOCK_D, num_warps=4, num_stages=2,
        )  # fmt: skip
    dk, dv = (torch.empty(B, HK, T, D, device=q.device, dtype=q.dtype) for _ in range(2))
    _spread_means[(triton.cdiv(T, block), B * HK)](
        parts, dk, dv, T, NB, block, D, HQ // HK * splits, parts.stride(0), BLOCK_D=BLOCK_D, num_warps=1
    )
    return dq, dk, dv


# --- check ---
SWEEP = (
    {"B": 1, "HK": 1, "group": 2, "T": 64, "D": 32, "block": 4},
    {"B": 2, "HK": 2, "group": 1, "T": 83, "D": 20, "block": 3},
    {"B": 1, "HK": 2, "group": 2, "T": 75, "D": 16, "block": 8, "dtype": "bfloat16"},
)
BENCH = ({"B": 1, "HK": 4, "group": 8, "T": 8192, "D": 128, "block": 32, "dtype": "bfloat16"},)


def make_args(B, HK, group, T, D, block, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    heads = (HK * group, HK, HK)
    return (*(torch.randn(B, h, T, D, generator=g).to(device, getattr(torch, dtype)) for h in heads), block)


def reference(q, k, v, block=32):
    B, HQ, T, D = q.shape
    HK, NB = k.shape[1], T // block
    means = (x[:, :, : NB * block].float().reshape(B, HK, NB, block, D).mean(3).to(q.dtype) for x in (k, v))
    km, vm = (x.repeat_interleave(HQ // HK, 1) for x in means)
    ends = (torch.arange(NB, device=q.device) + 1) * block - 1
    seen = torch.arange(T, device=q.device)[:, None] >= ends[None, :]
    # Rows without a finished block have no softmax: they see everything, and are cleared afterwards.
    some = seen.any(-1, keepdim=True)
    return torch.where(some, torch.nn.functional.scaled_dot_product_attention(q, km, vm, attn_mask=seen | ~some), 0.0)
