"""Few queries, many keys: splits of the keys attend side by side, a second launch combines them by their log-sum-exp.

    lse = log(sum over splits of exp(lse_s)),    o = sum over splits of exp(lse_s - lse) o_s

The backward never undoes the combination. Probabilities rebuilt from the combined lse are global ones, hence every
split is a plain sum: one program loads its keys and values once, writes their dk and dv for good, and leaves one
partial dq; no partial has to be rescaled. All queries fit one tile, which stays on the chip for the whole split.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "fa_splitkv_combine",
    "family": "attention",
    "op": "splitkv_attention",
    "schema": 1,
    "techniques": ("split-k", "two-stage-partials", "one-launch", "saved-lse", "recompute", "strided-cotangent"),
    "saves": ("o: fp32 or bf16 or fp16 (B, H, T, D)", "lse: fp32 (B, H, T), base 2"),
    "grads": ("q", "k", "v"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
    "spills": "148 bytes: on an H200 4 warps that spill take 221 us, 8 warps that do not 304 us",
}


# --- forward ---
@triton.jit
def _split_attend(
    Q, K, V, PartO, PartLSE, T, S, keys_each, scale_log2, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    t = tl.arange(0, BLOCK_T)
    d = tl.arange(0, BLOCK_D)
    in_q = (t[:, None] < T) & (d[None, :] < D)
    q = tl.load(Q + (head * T + t[:, None]) * D + d[None, :], mask=in_q, other=0.0)
    top = tl.full((BLOCK_T,), float("-inf"), tl.float32)
    norm = tl.zeros((BLOCK_T,), tl.float32)
    acc = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    end = tl.minimum((split + 1) * keys_each, S)
    for start in range(split * keys_each, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        at = (head * S + n[:, None]) * D + d[None, :]
        k = tl.load(K + at, mask=(n[:, None] < end) & (d[None, :] < D), other=0.0)
        v = tl.load(V + at, mask=(n[:, None] < end) & (d[None, :] < D), other=0.0)
        s = tl.where(n[None, :] < end, tl.dot(q, tl.trans(k)) * scale_log2, float("-inf"))
        peak = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - peak[:, None])
        norm = norm * tl.exp2(top - peak) + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * tl.exp2(top - peak)[:, None])
        top = peak
    row = (head * tl.num_programs(0) + split) * T + t
    tl.store(PartO + row[:, None] * D + d[None, :], acc / norm[:, None], mask=in_q)
    tl.store(PartLSE + row, top + tl.log2(norm), mask=t < T)


@triton.jit
def _combine_splits(PartO, PartLSE, Out, LSE, T, D, SPLITS, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr):
    # One query row a program: the splits' weights fit a register each.
    row = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    part = (row // T * SPLITS + s) * T + row % T
    lse_s = tl.load(PartLSE + part, mask=s < SPLITS, other=float("-inf"))
    top = tl.max(lse_s, 0)
    weight = tl.exp2(lse_s - top)
    norm = tl.sum(weight, 0)
    inside = (s[:, None] < SPLITS) & (d[None, :] < D)
    o_s = tl.load(PartO + part[:, None] * D + d[None, :], mask=inside, other=0.0)
    tl.store(Out + row * D + d, tl.sum(o_s * weight[:, None], 0) / norm, mask=d < D)
    tl.store(LSE + row, top + tl.log2(norm))


def _schedule(q, k):
    """(splits, keys of a split, tile sizes): about four programs for each of 132 processors, whole key tiles."""
    (B, H, T, D), S = q.shape, k.shape[2]
    block = 16 if S <= 512 else 128 // q.element_size()
    splits = max(1, min(triton.cdiv(S, 2 * block), triton.cdiv(528, B * H), 64))
    keys_each = triton.cdiv(triton.cdiv(S, splits), block) * block
    tiles = {"D": D, "BLOCK_D": max(16, triton.next_power_of_2(D))}
    tiles |= {"BLOCK_T": max(16, triton.next_power_of_2(T)), "BLOCK_N": block}
    return triton.cdiv(S, keys_each), keys_each, tiles


def forward(q, k, v):
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    B, H, T, D = q.shape
    if T > 64:
        raise ValueError(f"{T} queries do not fit the one tile of 64 rows")
    splits, keys_each, tiles = _schedule(q, k)
    part_o = torch.empty(B * H, splits, T, D, device=q.device, dtype=torch.float32)
    part_lse = torch.empty(B * H, splits, T, device=q.device, dtype=torch.float32)
    _split_attend[(splits, B * H)](
        q, k, v, part_o, part_lse, T, k.shape[2], keys_each, D**-0.5 * 1.4426950408889634, **tiles, num_warps=4
    )
    o = torch.empty_like(q)
    lse = torch.empty(B, H, T, device=q.device, dtype=torch.float32)
    _combine_splits[(B * H * T,)](
        part_o, part_lse, o, lse, T, D, splits, BLOCK_S=triton.next_power_of_2(splits), BLOCK_D=tiles["BLOCK_D"]
    )
    return o, (q, k, v, o, lse)


# --- backward ---
@triton.jit
def _split_grads(
    Q, K, V, Out, DO, LSE, PartDQ, DK, DV, H, T, S, keys_each, do_b, do_h, do_t, do_d, scale, scale_log2,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    t = tl.arange(0, BLOCK_T)
    d = tl.arange(0, BLOCK_D)
    in_q = (t[:, None] < T) & (d[None, :] < D)
    at_q = (head * T + t[:, None]) * D + d[None, :]
    q = tl.load(Q + at_q, mask=in_q, other=0.0)
    o = tl.load(Out + at_q, mask=in_q, other=0.0)
    at_do = head // H * do_b + head % H * do_h + t[:, None] * do_t + d[None, :] * do_d
    do = tl.load(DO + at_do, mask=in_q, other=0.0)
    # So few rows are cheaper summed again in every split than in a launch of their own.
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    lse = tl.load(LSE + head * T + t, mask=t < T, other=float("inf"))
    dq = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    end = tl.minimum((split + 1) * keys_each, S)
    for start in range(split * keys_each, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        at = (head * S + n[:, None]) * D + d[None, :]
        inside = (n[:, None] < end) & (d[None, :] < D)
        k = tl.load(K + at, mask=inside, other=0.0)
        v = tl.load(V + at, mask=inside, other=0.0)
        # Keys are rows: dk and dv leave with every tile, dq stays.
        s = tl.dot(k, tl.trans(q)) * scale_log2 - lse[None, :]
        p = tl.exp2(tl.where(n[:, None] < end, s, float("-inf")))
        ds = (p * (tl.dot(v, tl.trans(do)) - delta[None, :])).to(q.dtype)
        tl.store(DV + at, tl.dot(p.to(do.dtype), do), mask=inside)
        tl.store(DK + at, tl.dot(ds, q) * scale, mask=inside)
        dq = tl.dot(tl.trans(ds), k, dq)
    part = (split * tl.num_programs(1) + head) * T + t[:, None]
    tl.store(PartDQ + part * D + d[None, :], dq * scale, mask=in_q)


def backward(saved, grad_o, needs=None):
    q, k, v, o, lse = saved
    B, H, T, D = q.shape
    splits, keys_each, tiles = _schedule(q, k)
    part_dq = torch.empty(splits, B, H, T, D, device=q.device, dtype=torch.float32)
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    _split_grads[(splits, B * H)](
        q, k, v, o, grad_o, lse, part_dq, dk, dv, H, T, k.shape[2], keys_each, *grad_o.stride(),
        D**-0.5, D**-0.5 * 1.4426950408889634, **tiles, num_warps=4, num_stages=2,
    )  # fmt: skip
    return part_dq.sum(0).to(q.dtype), dk, dv


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "T": 16, "S": 128, "D": 32},
    {"B": 2, "H": 1, "T": 5, "S": 171, "D": 20, "dtype": "float16"},
    {"B": 1, "H": 3, "T": 23, "S": 100, "D": 16, "dtype": "bfloat16"},
)
BENCH = ({"B": 4, "H": 8, "T": 64, "S": 16384, "D": 128, "dtype": "bfloat16"},)


def make_args(B, H, T, S, D, dtype="float32", device="cpu", seed=0):
    if T > 64:
        raise ValueError("at most 64 queries")
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(B, H, n, D, generator=g).to(device, getattr(torch, dtype)) for n in (T, S, S))


def reference(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)
