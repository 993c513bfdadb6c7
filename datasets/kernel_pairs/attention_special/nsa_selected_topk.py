"""Attention on a few selected key blocks per token and query group: dk and dv walk inverted lists of selectors.

A program of the forward, and of dq, owns one token: the group's query heads are the rows of its tiles and share the
selected blocks. For dk and dv the selection is inverted on the device by one stable sort: each key block gets the
list of tokens that chose it, and its owner gathers those tokens' heads, several tokens to a tile. Selections of -1
are empty slots.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "nsa_selected_topk",
    "family": "attention_special",
    "op": "selected_block_attention",
    "schema": 1,
    "techniques": ("inverse-map", "sorted-segments", "head-reduction", "saved-lse", "loop-swap", "owner-grid"),
    "saves": (
        "o: fp32 or bf16 (B, T, HQ, D)", "lse: fp32 (B, T, HQ)", "order: i64 (B * T * HK * K,)",
        "bounds: i64 (B * HK * blocks + 1,)",
    ),
    "grads": ("q", "k", "v"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}  # fmt: skip


# --- forward ---
@triton.jit
def _selected_fwd(
    Q, K, V, Selected, Out, LSE, T, HK, SLOTS, D, scale_log2, GROUP: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0)
    batch = (tl.program_id(1) // HK).to(tl.int64)
    kv_head = tl.program_id(1) % HK
    token = batch * T + t
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    in_q = (g[:, None] < GROUP) & (d[None, :] < D)
    row = token * HK * GROUP + kv_head * GROUP + g
    q = tl.load(Q + row[:, None] * D + d[None, :], mask=in_q, other=0.0)
    top = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    norm = tl.zeros((BLOCK_G,), tl.float32)
    acc = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    for slot in range(SLOTS):
        block = tl.load(Selected + (token * HK + kv_head) * SLOTS + slot)
        # A block that lies ahead of the token has no key to offer either.
        if (block >= 0) & (block * SIZE <= t):
            n = block * SIZE + tl.arange(0, SIZE)
            in_kv = (n[:, None] <= t) & (d[None, :] < D)
            at = ((batch * T + n[:, None]) * HK + kv_head) * D + d[None, :]
            k = tl.load(K + at, mask=in_kv, other=0.0)
            v = tl.load(V + at, mask=in_kv, other=0.0)
            s = tl.where(n[None, :] <= t, tl.dot(q, tl.trans(k)) * scale_log2, float("-inf"))
            new_top = tl.maximum(top, tl.max(s, 1))
            shrink = tl.exp2(top - new_top)
            p = tl.exp2(s - new_top[:, None])
            norm = norm * shrink + tl.sum(p, 1)
            acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
            top = new_top
    empty = norm == 0.0
    divisor = tl.where(empty, 1.0, norm)
    tl.store(Out + row[:, None] * D + d[None, :], acc / divisor[:, None], mask=in_q)
    tl.store(LSE + row, tl.where(empty, float("inf"), top + tl.log2(divisor)), mask=g < GROUP)


def _selectors(selected, blocks):
    """(order, bounds): positions in `selected` sorted by the block they chose, and where each block's list begins."""
    B, _, HK, _ = selected.shape
    heads = torch.arange(B * HK, device=selected.device).view(B, 1, HK, 1)
    # Empty slots sort behind all lists.
    owner = torch.where(selected >= 0, heads * blocks + selected, B * HK * blocks).reshape(-1)
    owner, order = torch.sort(owner, stable=True)
    return order, torch.searchsorted(owner, torch.arange(B * HK * blocks + 1, device=selected.device))


def forward(q, k, v, selected, size):
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    selected = selected.contiguous()
    B, T, HQ, D = q.shape
    HK, SLOTS = selected.shape[2:]
    o = torch.empty_like(q)
    lse = torch.empty(B, T, HQ, device=q.device, dtype=torch.float32)
    GROUP = HQ // HK
    _selected_fwd[(T, B * HK)](
        q, k, v, selected, o, lse, T, HK, SLOTS, D, D**-0.5 * 1.4426950408889634, GROUP=GROUP, SIZE=size,
        BLOCK_G=max(16, triton.next_power_of_2(GROUP)), BLOCK_D=max(16, triton.next_power_of_2(D)), num_warps=4,
    )  # fmt: skip
    order, bounds = _selectors(selected, triton.cdiv(T, size))
    return o, (q, k, v, selected, o, lse, order, bounds, size)


# --- backward ---
@triton.jit
def _selected_dq(
    Q, K, V, Selected, Out, DO, LSE, Delta, DQ, T, HK, SLOTS, D, do_b, do_t, do_h, do_d, scale, scale_log2,
    GROUP: tl.constexpr, SIZE: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0)
    batch = (tl.program_id(1) // HK).to(tl.int64)
    kv_head = tl.program_id(1) % HK
    token = batch * T + t
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    in_q = (g[:, None] < GROUP) & (d[None, :] < D)
    row = token * HK * GROUP + kv_head * GROUP + g
    q = tl.load(Q + row[:, None] * D + d[None, :], mask=in_q, other=0.0)
    o = tl.load(Out + row[:, None] * D + d[None, :], mask=in_q, other=0.0)
    do_at = (
        batch * do_b + t.to(tl.int64) * do_t + (kv_head * GROUP + g[:, None]).to(tl.int64) * do_h + d[None, :] * do_d
    )
    do = tl.load(DO + do_at, mask=in_q, other=0.0)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(Delta + row, delta, mask=g < GROUP)
    lse = tl.load(LSE + row, mask=g < GROUP, other=float("inf"))
    dq = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    for slot in range(SLOTS):
        block = tl.load(Selected + (token * HK + kv_head) * SLOTS + slot)
        if (block >= 0) & (block * SIZE <= t):
            n = block * SIZE + tl.arange(0, SIZE)
            in_kv = (n[:, None] <= t) & (d[None, :] < D)
            at = ((batch * T + n[:, None]) * HK + kv_head) * D + d[None, :]
            k = tl.load(K + at, mask=in_kv, other=0.0)
            v = tl.load(V + at, mask=in_kv, other=0.0)
            s = tl.where(n[None, :] <= t, tl.dot(q, tl.trans(k)) * scale_log2 - lse[:, None], float("-inf"))
            ds = tl.exp2(s) * (tl.dot(do, tl.trans(v)) - delta[:, None])
            dq = tl.dot(ds.to(k.dtype), k, dq)
    tl.store(DQ + row[:, None] * D + d[None, :], dq * scale, mask=in_q)


@triton.jit
def _selected_dkdv(
    Q, K, V, DO, LSE, Delta, Order, Bounds, DK, DV, T, HK, SLOTS, D, do_b, do_t, do_h, do_d, scale, scale_log2,
    GROUP: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # Early blocks have the longest lists: with the heads as the fast axis, those of all heads start first.
    block = tl.program_id(1)
    batch = (tl.program_id(0) // HK).to(tl.int64)
    kv_head = tl.program_id(0) % HK
    n = block * SIZE + tl.arange(0, SIZE)
    d = tl.arange(0, BLOCK_D)
    in_kv = (n[:, None] < T) & (d[None, :] < D)
    at = ((batch * T + n[:, None]) * HK + kv_head) * D + d[None, :]
    k = tl.load(K + at, mask=in_kv, other=0.0)
    v = tl.load(V + at, mask=in_kv, other=0.0)
    dk = tl.zeros((SIZE, BLOCK_D), tl.float32)
    dv = tl.zeros((SIZE, BLOCK_D), tl.float32)
    listed = tl.load(Bounds + tl.program_id(0) * tl.num_programs(1) + block)
    end = tl.load(Bounds + tl.program_id(0) * tl.num_programs(1) + block + 1)
    # Rows of a tile: all heads of the group for TOKENS selectors at a time.
    TOKENS: tl.constexpr = ROWS // GROUP
    r = tl.arange(0, ROWS)
    for start in range(listed, end, TOKENS):
        member = start + r // GROUP
        inside = (member < end) & (r < TOKENS * GROUP)
        position = tl.load(Order + member, mask=inside, other=0)
        token = position // (SLOTS * HK)
        t = token % T
        head = kv_head * GROUP + r % GROUP
        row = token * HK * GROUP + head
        in_q = inside[:, None] & (d[None, :] < D)
        q = tl.load(Q + row[:, None] * D + d[None, :], mask=in_q, other=0.0)
        do_at = batch * do_b + t[:, None] * do_t + head[:, None].to(tl.int64) * do_h + d[None, :] * do_d
        do = tl.load(DO + do_at, mask=in_q, other=0.0)
        lse = tl.load(LSE + row, mask=inside, other=float("inf"))
        delta = tl.load(Delta + row, mask=inside, other=0.0)
        s = tl.dot(k, tl.trans(q)) * scale_log2 - lse[None, :]
        p = tl.exp2(tl.where(n[:, None] <= t[None, :], s, float("-inf")))
        dv = tl.dot(p.to(do.dtype), do, dv)
        ds = p * (tl.dot(v, tl.trans(do)) - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk)
    tl.store(DK + at, dk * scale, mask=in_kv)
    tl.store(DV + at, dv, mask=in_kv)


def backward(saved, grad_o, needs=None):
    q, k, v, selected, o, lse, order, bounds, size = saved
    _, need_k, need_v = needs or (True, True, True)
    B, T, HQ, D = q.shape
    HK, SLOTS = selected.shape[2:]
    GROUP = HQ // HK
    scale = D**-0.5
    BLOCK_D = max(16, triton.next_power_of_2(D))
    dq, delta = torch.empty_like(q), torch.empty_like(lse)
    sizes = (T, HK, SLOTS, D, *grad_o.stride(), scale, scale * 1.4426950408889634)
    _selected_dq[(T, B * HK)](
        q, k, v, selected, o, grad_o, lse, delta, dq, *sizes, GROUP=GROUP, SIZE=size,
        BLOCK_G=max(16, triton.next_power_of_2(GROUP)), BLOCK_D=BLOCK_D, num_warps=4,
    )  # fmt: skip
    if not (need_k or need_v):
        return dq, None, None
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    _selected_dkdv[(B * HK, triton.cdiv(T, size))](
        q, k, v, grad_o, lse, delta, order, bounds, dk, dv, *sizes, GROUP=GROUP, SIZE=size,
        ROWS=max(32 if D > 64 else 64, triton.next_power_of_2(GROUP)), BLOCK_D=BLOCK_D, num_warps=4, num_stages=2,
    )  # fmt: skip
    return dq, dk, dv


# --- check ---
SWEEP = (
    {"B": 1, "T": 64, "HK": 2, "group": 2, "D": 16, "slots": 3, "size": 16},
    {"B": 2, "T": 53, "HK": 1, "group": 3, "D": 20, "slots": 2, "size": 16},
    {"B": 1, "T": 40, "HK": 1, "group": 4, "D": 16, "slots": 2, "size": 16, "dtype": "bfloat16"},
)
BENCH = ({"B": 2, "T": 4096, "HK": 4, "group": 16, "D": 64, "slots": 16, "size": 64, "dtype": "bfloat16"},)


def make_args(B, T, HK, group, D, slots, size, dtype="float32", device="cpu", seed=0):
    if size < 16 or size & (size - 1):
        raise ValueError("size, the tokens of a block, must be a power of two of at least 16")
    g = torch.Generator().manual_seed(seed)
    heads = (HK * group, HK, HK)
    q, k, v = (torch.randn(B, T, h, D, generator=g).to(device, getattr(torch, dtype)) for h in heads)
    # Each token selects at random among the blocks that begin at or before it, its own block always.
    blocks = -(-T // size)
    own = torch.arange(T)[:, None] // size
    score = torch.rand(B, T, HK, blocks, generator=g)
    at = torch.arange(blocks)[None, :]
    score = score.masked_fill((at > own)[None, :, None], -1.0).masked_fill((at == own)[None, :, None], 2.0)
    best = score.topk(min(slots, blocks), -1)
    selected = best.indices.masked_fill(best.values < 0, -1).to(torch.int32)
    return q, k, v, selected.to(device), size


def reference(q, k, v, selected, size):
    B, T, HQ = q.shape[:3]
    HK = k.shape[2]
    blocks = -(-T // size)
    chosen = torch.zeros(B, T, HK, blocks + 1, device=q.device, dtype=torch.bool)
    chosen = chosen.scatter(3, torch.where(selected < 0, blocks, selected).long(), True)[..., :blocks]
    seen = chosen.repeat_interleave(size, 3)[..., :T].permute(0, 2, 1, 3).flatten(0, 1)
    seen = (seen & torch.ones(T, T, dtype=torch.bool, device=q.device).tril())[:, None]
    # Dense under a mask, one for all heads of a group. The token's own block is selected, so that no row is empty.
    q = q.unflatten(2, (HK, HQ // HK)).permute(0, 2, 3, 1, 4).flatten(0, 1)
    k, v = (x.transpose(1, 2).flatten(0, 1)[:, None].expand(-1, HQ // HK, -1, -1) for x in (k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    return out.unflatten(0, (B, HK)).permute(0, 3, 1, 2, 4).flatten(2, 3)
