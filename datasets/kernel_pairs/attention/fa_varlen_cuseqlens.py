"""Causal flash attention over packed sequences: a map from tile to sequence makes one dense grid of ragged work.

Sequences lie end to end in (total, H, D) and cu_seqlens tells where each begins. The map is made on the device,
without asking the host for lengths: the grid has the most tiles that can occur, total / BLOCK + sequences, and the
surplus ones find no sequence and leave. Forward, dq and dk/dv use one tile size, hence one map; loops run inside a
sequence only.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "fa_varlen_cuseqlens",
    "family": "attention",
    "op": "varlen_attention",
    "schema": 1,
    "techniques": (
        "varlen", "inverse-map", "causal-bounds", "saved-lse", "delta-preprocess", "loop-swap", "owner-grid",
        "strided-cotangent",
    ),
    "saves": (
        "o: fp32 or bf16 (total, H, D)", "lse: fp32 (H, total)", "tiles: i32 (max_tiles, 3)",
    ),
    "grads": ("q", "k", "v"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}  # fmt: skip


# --- forward ---
def _tile_map(cu_seqlens, total, block):
    """(max_tiles, 3) of int32: first row of the tile, first and last row of its sequence; -1 for surplus tiles."""
    begins = cu_seqlens[:-1]
    tiles = (cu_seqlens[1:] - begins + block - 1) // block
    last = tiles.cumsum(0)
    tile = torch.arange(triton.cdiv(total, block) + begins.numel(), device=cu_seqlens.device)
    sequence = torch.searchsorted(last, tile, right=True)
    surplus = sequence == begins.numel()
    sequence = sequence.clamp(max=begins.numel() - 1)
    begin = begins[sequence]
    first = begin + (tile - (last - tiles)[sequence]) * block
    rows = torch.stack((first, begin, cu_seqlens[1:][sequence]), 1)
    return rows.masked_fill(surplus[:, None], -1).to(torch.int32)


@triton.jit
def _varlen_fwd(
    Q, K, V, Out, LSE, Tiles, total, H, scale_log2, D: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    first = tl.load(Tiles + 3 * tl.program_id(0))
    if first < 0:
        return
    begin = tl.load(Tiles + 3 * tl.program_id(0) + 1)
    end = tl.load(Tiles + 3 * tl.program_id(0) + 2)
    head = tl.program_id(1).to(tl.int64)
    m = first + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    in_q = (m[:, None] < end) & (d[None, :] < D)
    q_at = (m[:, None].to(tl.int64) * H + head) * D + d[None, :]
    q = tl.load(Q + q_at, mask=in_q, other=0.0)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    norm = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    stop = tl.minimum(first + BLOCK_M, end) if CAUSAL else end
    for start in range(begin, stop, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        in_kv = (n[:, None] < end) & (d[None, :] < D)
        kv_at = (n[:, None].to(tl.int64) * H + head) * D + d[None, :]
        k = tl.load(K + kv_at, mask=in_kv, other=0.0)
        v = tl.load(V + kv_at, mask=in_kv, other=0.0)
        seen = n[None, :] < end
        if CAUSAL:
            seen = seen & (m[:, None] >= n[None, :])
        s = tl.where(seen, tl.dot(q, tl.trans(k)) * scale_log2, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        shrink = tl.exp2(top - new_top)
        p = tl.exp2(s - new_top[:, None])
        norm = norm * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
        top = new_top
    tl.store(Out + q_at, acc / norm[:, None], mask=in_q)
    tl.store(LSE + head * total + m, top + tl.log2(norm), mask=m < end)


def _blocks(q):
    """(rows of a mapped tile, rows of the other side, warps)."""
    if q.shape[0] <= 512:
        return 32, 16, 4
    if q.element_size() == 4:
        return 64, 32, 8
    return (128, 64, 8) if q.shape[2] <= 64 else (128, 32, 8)


def forward(q, k, v, cu_seqlens, causal=True):
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    total, H, D = q.shape
    o = torch.empty_like(q)
    lse = torch.empty(H, total, device=q.device, dtype=torch.float32)
    own, other, warps = _blocks(q)
    tiles = _tile_map(cu_seqlens, total, own)
    _varlen_fwd[(tiles.shape[0], H)](
        q, k, v, o, lse, tiles, total, H, D**-0.5 * 1.4426950408889634, D=D,
        BLOCK_D=max(16, triton.next_power_of_2(D)), CAUSAL=causal, BLOCK_M=own, BLOCK_N=other, num_warps=warps,
    )  # fmt: skip
    return o, (q, k, v, o, lse, tiles, causal)


# --- backward ---
@triton.jit
def _varlen_delta(Out, DO, Delta, total, H, do_t, do_h, do_d, D, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr):
    # Rows are rows here, whatever sequence they belong to.
    head = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    inside = (m[:, None] < total) & (d[None, :] < D)
    o = tl.load(Out + (m[:, None] * H + head) * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
    do = tl.load(DO + m[:, None] * do_t + head * do_h + d[None, :] * do_d, mask=inside, other=0.0).to(tl.float32)
    tl.store(Delta + head * total + m, tl.sum(o * do, 1), mask=m < total)


@triton.jit
def _varlen_dq(
    Q, K, V, DO, LSE, Delta, DQ, Tiles, total, H, do_t, do_h, do_d, scale, scale_log2, D: tl.constexpr,
    BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    first = tl.load(Tiles + 3 * tl.program_id(0))
    if first < 0:
        return
    begin = tl.load(Tiles + 3 * tl.program_id(0) + 1)
    end = tl.load(Tiles + 3 * tl.program_id(0) + 2)
    head = tl.program_id(1).to(tl.int64)
    m = first + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    in_q = (m[:, None] < end) & (d[None, :] < D)
    q_at = (m[:, None].to(tl.int64) * H + head) * D + d[None, :]
    q = tl.load(Q + q_at, mask=in_q, other=0.0)
    do = tl.load(DO + m[:, None].to(tl.int64) * do_t + head * do_h + d[None, :] * do_d, mask=in_q, other=0.0)
    lse = tl.load(LSE + head * total + m, mask=m < end, other=float("inf"))
    delta = tl.load(Delta + head * total + m, mask=m < end, other=0.0)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    stop = tl.minimum(first + BLOCK_M, end) if CAUSAL else end
    for start in range(begin, stop, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        in_kv = (n[:, None] < end) & (d[None, :] < D)
        kv_at = (n[:, None].to(tl.int64) * H + head) * D + d[None, :]
        k = tl.load(K + kv_at, mask=in_kv, other=0.0)
        v = tl.load(V + kv_at, mask=in_kv, other=0.0)
        seen = n[None, :] < end
        if CAUSAL:
            seen = seen & (m[:, None] >= n[None, :])
        p = tl.exp2(tl.where(seen, tl.dot(q, tl.trans(k)) * scale_log2 - lse[:, None], float("-inf")))
        ds = p * (tl.dot(do, tl.trans(v)) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    tl.store(DQ + q_at, dq * scale, mask=in_q)


@triton.jit
def _varlen_dkdv(
    Q, K, V, DO, LSE, Delta, DK, DV, Tiles, total, H, do_t, do_h, do_d, scale, scale_log2, D: tl.constexpr,
    BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    first = tl.load(Tiles + 3 * tl.program_id(0))
    if first < 0:
        return
    begin = tl.load(Tiles + 3 * tl.program_id(0) + 1)
    end = tl.load(Tiles + 3 * tl.program_id(0) + 2)
    head = tl.program_id(1).to(tl.int64)
    n = first + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    in_kv = (n[:, None] < end) & (d[None, :] < D)
    kv_at = (n[:, None].to(tl.int64) * H + head) * D + d[None, :]
    k = tl.load(K + kv_at, mask=in_kv, other=0.0)
    v = tl.load(V + kv_at, mask=in_kv, other=0.0)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    # Queries and keys share the tile's own rows, which is where causal keys are seen first.
    for start in range(first if CAUSAL else begin, end, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        in_q = (m[:, None] < end) & (d[None, :] < D)
        q = tl.load(Q + (m[:, None].to(tl.int64) * H + head) * D + d[None, :], mask=in_q, other=0.0)
        do = tl.load(DO + m[:, None].to(tl.int64) * do_t + head * do_h + d[None, :] * do_d, mask=in_q, other=0.0)
        # Rows of the next sequence count as outside: exp2(-inf) = 0.
        lse = tl.load(LSE + head * total + m, mask=m < end, other=float("inf"))
        delta = tl.load(Delta + head * total + m, mask=m < end, other=0.0)
        s = tl.dot(k, tl.trans(q)) * scale_log2 - lse[None, :]
        if CAUSAL:
            s = tl.where(m[None, :] >= n[:, None], s, float("-inf"))
        p = tl.exp2(s)
        dv = tl.dot(p.to(do.dtype), do, dv)
        ds = p * (tl.dot(v, tl.trans(do)) - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk)
    tl.store(DK + kv_at, dk * scale, mask=in_kv)
    tl.store(DV + kv_at, dv, mask=in_kv)


def backward(saved, grad_o, needs=None):
    q, k, v, o, lse, tiles, causal = saved
    need_q, need_k, need_v = needs or (True, True, True)
    total, H, D = q.shape
    scale = D**-0.5
    BLOCK_D = max(16, triton.next_power_of_2(D))
    delta = torch.empty_like(lse)
    _varlen_delta[(triton.cdiv(total, 64), H)](
        o, grad_o, delta, total, H, *grad_o.stride(), D, BLOCK_D=BLOCK_D, BLOCK_M=64
    )
    own, other, warps = _blocks(q)
    sizes = (tiles, total, H, *grad_o.stride(), scale, scale * 1.4426950408889634)
    dq = dk = dv = None
    if need_q:
        dq = torch.empty_like(q)
        _varlen_dq[(tiles.shape[0], H)](
            q, k, v, grad_o, lse, delta, dq, *sizes, D=D, BLOCK_D=BLOCK_D, CAUSAL=causal,
            BLOCK_M=own, BLOCK_N=other, num_warps=warps,
        )  # fmt: skip
    if need_k or need_v:
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        _varlen_dkdv[(tiles.shape[0], H)](
            q, k, v, grad_o, lse, delta, dk, dv, *sizes, D=D, BLOCK_D=BLOCK_D, CAUSAL=causal,
            BLOCK_M=other, BLOCK_N=own, num_warps=warps,
        )  # fmt: skip
    return dq, dk, dv


# --- check ---
SWEEP = (
    {"lengths": (40, 32, 9), "H": 2, "D": 32},
    {"lengths": (1, 50, 0, 33), "H": 1, "D": 20},
    {"lengths": (35, 17), "H": 2, "D": 16, "causal": False},
    {"lengths": (64, 7), "H": 1, "D": 16, "dtype": "bfloat16"},
)
BENCH = ({"lengths": (2048, 300, 1111, 777, 1900, 64, 1024, 968), "H": 16, "D": 64, "dtype": "bfloat16"},)


def make_args(lengths, H, D, causal=True, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(sum(lengths), H, D, generator=g).to(device, getattr(torch, dtype)) for _ in range(3))
    cu_seqlens = torch.tensor((0, *lengths)).cumsum(0).to(torch.int32)
    return q, k, v, cu_seqlens.to(device), causal


def reference(q, k, v, cu_seqlens, causal=True):
    # Sequence by sequence: one masked attention over all rows would do many times the work.
    lengths = cu_seqlens.diff().tolist()
    parts = zip(*(x.transpose(0, 1)[None].split(lengths, 2) for x in (q, k, v)), strict=True)
    return torch.cat([torch.nn.functional.scaled_dot_product_attention(*part, is_causal=causal) for part in parts], 2)[
        0
    ].transpose(0, 1)
