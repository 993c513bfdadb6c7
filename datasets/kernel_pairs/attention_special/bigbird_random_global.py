"""Block-sparse attention of global, window and random blocks: global ones run densely, the rest walk a list.

Query block i sees the first G blocks, the blocks i - w to i + w, and R random ones; the first G blocks see all.
Nothing of this is stored but the random choice: a program counts through its pattern and computes which block comes
next. The pattern of global and window blocks is its own transpose; for dk and dv only the random choice is inverted,
by one sort. Programs of global blocks, whose loops are the long ones, have the lowest ids and start first.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "bigbird_random_global",
    "family": "attention_special",
    "op": "bigbird_attention",
    "schema": 1,
    "techniques": ("inverse-map", "sorted-segments", "saved-lse", "loop-swap", "owner-grid", "halo"),
    "saves": (
        "o: fp32 or bf16 (B, H, T, D)", "lse: fp32 (B, H, T)", "order: i64 (H * blocks * R,)",
        "bounds: i64 (H * blocks + 1,)",
    ),
    "grads": ("q", "k", "v"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}  # fmt: skip


# --- forward ---
@triton.jit
def _rows_at(X, row, T, s_t, s_d, D, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    inside = (row[:, None] < T) & (d[None, :] < D)
    return tl.load(X + row[:, None].to(tl.int64) * s_t + d[None, :] * s_d, mask=inside, other=0.0)


@triton.jit
def _visits(block, blocks, GLOBAL, WINDOW, chosen):
    # (begin of the window, blocks to visit before the list, all visits); global blocks visit all and have no list.
    begin = tl.maximum(block - WINDOW, GLOBAL)
    listed = GLOBAL + tl.maximum(tl.minimum(block + WINDOW + 1, blocks) - begin, 0)
    dense = block < GLOBAL
    return begin, tl.where(dense, blocks, listed), tl.where(dense, blocks, listed + chosen)


@triton.jit
def _visited(visit, dense, begin, GLOBAL):
    return tl.where(dense | (visit < GLOBAL), visit, begin + visit - GLOBAL)


@triton.jit
def _bigbird_fwd(
    Q, K, V, Random, Out, LSE, H, T, D, R, GLOBAL, WINDOW, scale_log2, SIZE: tl.constexpr, BLOCK_D: tl.constexpr
):
    block = tl.program_id(1)
    blocks = tl.num_programs(1)
    bh = tl.program_id(0).to(tl.int64)
    row = bh * T
    m = block * SIZE + tl.arange(0, SIZE)
    d = tl.arange(0, BLOCK_D)
    q = _rows_at(Q + row * D, m, T, D, 1, D, BLOCK_D)
    begin, listed, visits = _visits(block, blocks, GLOBAL, WINDOW, R)
    top = tl.full((SIZE,), float("-inf"), tl.float32)
    norm = tl.zeros((SIZE,), tl.float32)
    acc = tl.zeros((SIZE, BLOCK_D), tl.float32)
    for visit in range(visits):
        other = _visited(visit, block < GLOBAL, begin, GLOBAL)
        # No branch stands between the loop's counter and the addresses, so that loads can run ahead.
        chosen = tl.load(Random + (bh % H * blocks + block) * R + visit - listed, mask=visit >= listed, other=0)
        other = tl.where(visit >= listed, chosen, other)
        n = other * SIZE + tl.arange(0, SIZE)
        k = _rows_at(K + row * D, n, T, D, 1, D, BLOCK_D)
        v = _rows_at(V + row * D, n, T, D, 1, D, BLOCK_D)
        s = tl.where(n[None, :] < T, tl.dot(q, tl.trans(k)) * scale_log2, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        shrink = tl.exp2(top - new_top)
        p = tl.exp2(s - new_top[:, None])
        norm = norm * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
        top = new_top
    inside = (m[:, None] < T) & (d[None, :] < D)
    tl.store(Out + (row + m[:, None]) * D + d[None, :], acc / norm[:, None], mask=inside)
    tl.store(LSE + row + m, top + tl.log2(norm), mask=m < T)


def _choosers(random, blocks):
    """(order, bounds): positions in `random` sorted by the block they chose, and where each block's list begins."""
    owner = torch.arange(random.shape[0], device=random.device)[:, None, None] * blocks + random
    owner, order = torch.sort(owner.reshape(-1), stable=True)
    return order, torch.searchsorted(owner, torch.arange(random.shape[0] * blocks + 1, device=random.device))


def forward(q, k, v, random, global_blocks, window, size):
    q, k, v, random = q.contiguous(), k.contiguous(), v.contiguous(), random.contiguous()
    B, H, T, D = q.shape
    blocks = triton.cdiv(T, size)
    o = torch.empty_like(q)
    lse = torch.empty(B, H, T, device=q.device, dtype=torch.float32)
    _bigbird_fwd[(B * H, blocks)](
        q, k, v, random, o, lse, H, T, D, random.shape[2], global_blocks, window, D**-0.5 * 1.4426950408889634,
        SIZE=size, BLOCK_D=max(16, triton.next_power_of_2(D)), num_warps=4, num_stages=2,
    )  # fmt: skip
    # Choices of global blocks are not walked: they see everything as it is.
    order, bounds = _choosers(random[:, global_blocks:], blocks)
    return o, (q, k, v, random, o, lse, order, bounds, global_blocks, window, size)


# --- backward ---
@triton.jit
def _bigbird_dq(
    Q, K, V, Random, Out, DO, LSE, Delta, DQ, H, T, D, R, GLOBAL, WINDOW, do_b, do_h, do_t, do_d, scale, scale_log2,
    SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(1)
    blocks = tl.num_programs(1)
    bh = tl.program_id(0).to(tl.int64)
    row = bh * T
    m = block * SIZE + tl.arange(0, SIZE)
    d = tl.arange(0, BLOCK_D)
    q = _rows_at(Q + row * D, m, T, D, 1, D, BLOCK_D)
    o = _rows_at(Out + row * D, m, T, D, 1, D, BLOCK_D)
    do = _rows_at(DO + bh // H * do_b + bh % H * do_h, m, T, do_t, do_d, D, BLOCK_D)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(Delta + row + m, delta, mask=m < T)
    lse = tl.load(LSE + row + m, mask=m < T, other=float("inf"))
    begin, listed, visits = _visits(block, blocks, GLOBAL, WINDOW, R)
    dq = tl.zeros((SIZE, BLOCK_D), tl.float32)
    for visit in range(visits):
        other = _visited(visit, block < GLOBAL, begin, GLOBAL)
        # No branch stands between the loop's counter and the addresses, so that loads can run ahead.
        chosen = tl.load(Random + (bh % H * blocks + block) * R + visit - listed, mask=visit >= listed, other=0)
        other = tl.where(visit >= listed, chosen, other)
        n = other * SIZE + tl.arange(0, SIZE)
        k = _rows_at(K + row * D, n, T, D, 1, D, BLOCK_D)
        v = _rows_at(V + row * D, n, T, D, 1, D, BLOCK_D)
        s = tl.dot(q, tl.trans(k)) * scale_log2 - lse[:, None]
        p = tl.exp2(tl.where(n[None, :] < T, s, float("-inf")))
        ds = p * (tl.dot(do, tl.trans(v)) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    inside = (m[:, None] < T) & (d[None, :] < D)
    tl.store(DQ + (row + m[:, None]) * D + d[None, :], dq * scale, mask=inside)


@triton.jit
def _bigbird_dkdv(
    Q, K, V, Order, Bounds, DO, LSE, Delta, DK, DV, H, T, D, R, GLOBAL, WINDOW, do_b, do_h, do_t, do_d,
    scale, scale_log2, SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(1)
    blocks = tl.num_programs(1)
    bh = tl.program_id(0).to(tl.int64)
    row = bh * T
    DO += bh // H * do_b + bh % H * do_h
    n = block * SIZE + tl.arange(0, SIZE)
    d = tl.arange(0, BLOCK_D)
    k = _rows_at(K + row * D, n, T, D, 1, D, BLOCK_D)
    v = _rows_at(V + row * D, n, T, D, 1, D, BLOCK_D)
    first = tl.load(Bounds + bh % H * blocks + block)
    chosen = tl.load(Bounds + bh % H * blocks + block + 1) - first
    begin, listed, visits = _visits(block, blocks, GLOBAL, WINDOW, chosen.to(tl.int32))
    dk = tl.zeros((SIZE, BLOCK_D), tl.float32)
    dv = tl.zeros((SIZE, BLOCK_D), tl.float32)
    for visit in range(visits):
        other = _visited(visit, block < GLOBAL, begin, GLOBAL)
        # A position in (H, blocks - GLOBAL, R) tells which query block made the choice.
        position = tl.load(Order + first + visit - listed, mask=visit >= listed, other=0)
        chooser = (position // R % tl.maximum(blocks - GLOBAL, 1) + GLOBAL).to(tl.int32)
        other = tl.where(visit >= listed, chooser, other)
        m = other * SIZE + tl.arange(0, SIZE)
        q = _rows_at(Q + row * D, m, T, D, 1, D, BLOCK_D)
        do = _rows_at(DO, m, T, do_t, do_d, D, BLOCK_D)
        lse = tl.load(LSE + row + m, mask=m < T, other=float("inf"))
        delta = tl.load(Delta + row + m, mask=m < T, other=0.0)
        p = tl.exp2(tl.dot(k, tl.trans(q)) * scale_log2 - lse[None, :])
        dv = tl.dot(p.to(do.dtype), do, dv)
        ds = p * (tl.dot(v, tl.trans(do)) - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk)
    at = (row + n[:, None]) * D + d[None, :]
    inside = (n[:, None] < T) & (d[None, :] < D)
    tl.store(DK + at, dk * scale, mask=inside)
    tl.store(DV + at, dv, mask=inside)


def backward(saved, grad_o, needs=None):
    q, k, v, random, o, lse, order, bounds, global_blocks, window, size = saved
    _, need_k, need_v = needs or (True, True, True)
    B, H, T, D = q.shape
    grid = (B * H, triton.cdiv(T, size))
    scale = D**-0.5
    sizes = (H, T, D, random.shape[2], global_blocks, window, *grad_o.stride(), scale, scale * 1.4426950408889634)
    tiles = {"SIZE": size, "BLOCK_D": max(16, triton.next_power_of_2(D)), "num_warps": 4 if D <= 64 else 8}
    dq, delta = torch.empty_like(q), torch.empty_like(lse)
    _bigbird_dq[grid](q, k, v, random, o, grad_o, lse, delta, dq, *sizes, **tiles, num_stages=3)
    if not (need_k or need_v):
        return dq, None, None
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    _bigbird_dkdv[grid](q, k, v, order, bounds, grad_o, lse, delta, dk, dv, *sizes, **tiles, num_stages=2)
    return dq, dk, dv


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "T": 112, "D": 16, "global_blocks": 1, "window": 1, "chosen": 2, "size": 16},
    {"B": 2, "H": 1, "T": 139, "D": 20, "global_blocks": 2, "window": 1, "chosen": 1, "size": 16},
    {"B": 1, "H": 2, "T": 90, "D": 16, "global_blocks": 1, "window": 0, "chosen": 2, "size": 16, "dtype": "bfloat16"},
)
BENCH = (
    {
        "B": 2, "H": 16, "T": 4096, "D": 64, "global_blocks": 2, "window": 1, "chosen": 3, "size": 64,
        "dtype": "bfloat16",
    },
)  # fmt: skip


def make_args(B, H, T, D, global_blocks, window, chosen, size, dtype="float32", device="cpu", seed=0):
    blocks = -(-T // size)
    if size < 16 or size & (size - 1) or blocks < global_blocks + 2 * window + 1 + chosen:
        raise ValueError("size must be a power of two of at least 16, and T long enough for all chosen blocks")
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, H, T, D, generator=g).to(device, getattr(torch, dtype)) for _ in range(3))
    # Each block chooses among those that it does not see anyway.
    at = torch.arange(blocks)
    seen = ((at[:, None] - at[None, :]).abs() <= window) | (at[None, :] < global_blocks)
    random = torch.rand(H, blocks, blocks, generator=g).masked_fill(seen, -1.0).topk(chosen, -1).indices
    return q, k, v, random.to(device, torch.int32), global_blocks, window, size


def reference(q, k, v, random, global_blocks, window, size):
    H, T = q.shape[1:3]
    blocks = -(-T // size)
    at = torch.arange(blocks, device=q.device)
    seen = ((at[:, None] - at[None, :]).abs() <= window) | (torch.minimum(at[:, None], at[None, :]) < global_blocks)
    layout = seen.expand(H, blocks, blocks).scatter(2, random.long(), True)
    seen = layout.repeat_interleave(size, 1).repeat_interleave(size, 2)[:, :T, :T]
    # Dense: torch has no block-sparse attention.
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen[None])
