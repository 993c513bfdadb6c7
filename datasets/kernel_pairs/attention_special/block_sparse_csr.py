"""Attention over a static block-sparse layout: queries follow its rows (CSR), gradients of keys its columns (CSC).

The layout of (query block, key block) pairs belongs to the heads and comes in both orders, each as pointers and
indices. The forward and dq own a query block and walk its row of the CSR; dk and dv own a key block and walk its
column of the CSC, so that every gradient has one owner. A query block without keys gives 0.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "block_sparse_csr",
    "family": "attention_special",
    "op": "block_sparse_attention",
    "schema": 1,
    "techniques": ("inverse-map", "saved-lse", "loop-swap", "owner-grid", "recompute", "strided-cotangent"),
    "saves": ("o: fp32 or bf16 (B, H, T, D)", "lse: fp32 (B, H, T)"),
    "grads": ("q", "k", "v"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _sparse_fwd(
    Q, K, V, RowPtr, Cols, Out, LSE, H, T, D, scale_log2, SIZE: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    block = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    entry = RowPtr + head % H * tl.num_programs(0) + block
    m = block * SIZE + tl.arange(0, SIZE)
    d = tl.arange(0, BLOCK_D)
    in_q = (m[:, None] < T) & (d[None, :] < D)
    q_at = (head * T + m[:, None]) * D + d[None, :]
    q = tl.load(Q + q_at, mask=in_q, other=0.0)
    top = tl.full((SIZE,), float("-inf"), tl.float32)
    norm = tl.zeros((SIZE,), tl.float32)
    acc = tl.zeros((SIZE, BLOCK_D), tl.float32)
    for i in range(tl.load(entry), tl.load(entry + 1)):
        n = tl.load(Cols + i) * SIZE + tl.arange(0, SIZE)
        in_kv = (n[:, None] < T) & (d[None, :] < D)
        kv_at = (head * T + n[:, None]) * D + d[None, :]
        k = tl.load(K + kv_at, mask=in_kv, other=0.0)
        v = tl.load(V + kv_at, mask=in_kv, other=0.0)
        s = tl.where(n[None, :] < T, tl.dot(q, tl.trans(k)) * scale_log2, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        shrink = tl.exp2(top - new_top)
        p = tl.exp2(s - new_top[:, None])
        norm = norm * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
        top = new_top
    empty = norm == 0.0
    divisor = tl.where(empty, 1.0, norm)
    tl.store(Out + q_at, acc / divisor[:, None], mask=in_q)
    tl.store(LSE + head * T + m, tl.where(empty, float("inf"), top + tl.log2(divisor)), mask=m < T)


def forward(q, k, v, row_ptr, cols, col_ptr, rows, size):
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    B, H, T, D = q.shape
    o = torch.empty_like(q)
    lse = torch.empty(B, H, T, device=q.device, dtype=torch.float32)
    _sparse_fwd[(triton.cdiv(T, size), B * H)](
        q, k, v, row_ptr, cols, o, lse, H, T, D, D**-0.5 * 1.4426950408889634,
        SIZE=size, BLOCK_D=max(16, triton.next_power_of_2(D)), num_warps=4, num_stages=2,
    )  # fmt: skip
    return o, (q, k, v, row_ptr, cols, col_ptr, rows, o, lse, size)


# --- backward ---
@triton.jit
def _sparse_dq(
    Q, K, V, RowPtr, Cols, Out, DO, LSE, Delta, DQ, H, T, D, do_b, do_h, do_t, do_d, scale, scale_log2,
    SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    entry = RowPtr + head % H * tl.num_programs(0) + block
    m = block * SIZE + tl.arange(0, SIZE)
    d = tl.arange(0, BLOCK_D)
    in_q = (m[:, None] < T) & (d[None, :] < D)
    q_at = (head * T + m[:, None]) * D + d[None, :]
    q = tl.load(Q + q_at, mask=in_q, other=0.0)
    o = tl.load(Out + q_at, mask=in_q, other=0.0)
    do_at = head // H * do_b + head % H * do_h + m[:, None].to(tl.int64) * do_t + d[None, :] * do_d
    do = tl.load(DO + do_at, mask=in_q, other=0.0)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(Delta + head * T + m, delta, mask=m < T)
    lse = tl.load(LSE + head * T + m, mask=m < T, other=float("inf"))
    dq = tl.zeros((SIZE, BLOCK_D), tl.float32)
    for i in range(tl.load(entry), tl.load(entry + 1)):
        n = tl.load(Cols + i) * SIZE + tl.arange(0, SIZE)
        in_kv = (n[:, None] < T) & (d[None, :] < D)
        kv_at = (head * T + n[:, None]) * D + d[None, :]
        k = tl.load(K + kv_at, mask=in_kv, other=0.0)
        v = tl.load(V + kv_at, mask=in_kv, other=0.0)
        s = tl.dot(q, tl.trans(k)) * scale_log2 - lse[:, None]
        p = tl.exp2(tl.where(n[None, :] < T, s, float("-inf")))
        ds = p * (tl.dot(do, tl.trans(v)) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    tl.store(DQ + q_at, dq * scale, mask=in_q)


@triton.jit
def _sparse_dkdv(
    Q, K, V, ColPtr, Rows, DO, LSE, Delta, DK, DV, H, T, D, do_b, do_h, do_t, do_d, scale, scale_log2,
    SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    entry = ColPtr + head % H * tl.num_programs(0) + block
    n = block * SIZE + tl.arange(0, SIZE)
    d = tl.arange(0, BLOCK_D)
    in_kv = (n[:, None] < T) & (d[None, :] < D)
    kv_at = (head * T + n[:, None]) * D + d[None, :]
    k = tl.load(K + kv_at, mask=in_kv, other=0.0)
    v = tl.load(V + kv_at, mask=in_kv, other=0.0)
    DO += head // H * do_b + head % H * do_h
    dk = tl.zeros((SIZE, BLOCK_D), tl.float32)
    dv = tl.zeros((SIZE, BLOCK_D), tl.float32)
    for i in range(tl.load(entry), tl.load(entry + 1)):
        m = tl.load(Rows + i) * SIZE + tl.arange(0, SIZE)
        in_q = (m[:, None] < T) & (d[None, :] < D)
        q = tl.load(Q + (head * T + m[:, None]) * D + d[None, :], mask=in_q, other=0.0)
        do = tl.load(DO + m[:, None].to(tl.int64) * do_t + d[None, :] * do_d, mask=in_q, other=0.0)
        # Rows past T have probability exp2(-inf) = 0.
        lse = tl.load(LSE + head * T + m, mask=m < T, other=float("inf"))
        delta = tl.load(Delta + head * T + m, mask=m < T, other=0.0)
        p = tl.exp2(tl.dot(k, tl.trans(q)) * scale_log2 - lse[None, :])
        dv = tl.dot(p.to(do.dtype), do, dv)
        ds = p * (tl.dot(v, tl.trans(do)) - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk)
    tl.store(DK + kv_at, dk * scale, mask=in_kv)
    tl.store(DV + kv_at, dv, mask=in_kv)


def backward(saved, grad_o, needs=None):
    q, k, v, row_ptr, cols, col_ptr, rows, o, lse, size = saved
    _, need_k, need_v = needs or (True, True, True)
    B, H, T, D = q.shape
    grid = (triton.cdiv(T, size), B * H)
    scale = D**-0.5
    sizes = (H, T, D, *grad_o.stride(), scale, scale * 1.4426950408889634)
    BLOCK_D = max(16, triton.next_power_of_2(D))
    # The layout's block is the tile: 64 x 128 accumulators of dk and dv need eight warps.
    warps = 8 if BLOCK_D > 64 else 4
    dq, delta = torch.empty_like(q), torch.empty_like(lse)
    _sparse_dq[grid](
        q, k, v, row_ptr, cols, o, grad_o, lse, delta, dq, *sizes,
        SIZE=size, BLOCK_D=BLOCK_D, num_warps=warps, num_stages=2,
    )  # fmt: skip
    if not (need_k or need_v):
        return dq, None, None
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    _sparse_dkdv[grid](
        q, k, v, col_ptr, rows, grad_o, lse, delta, dk, dv, *sizes,
        SIZE=size, BLOCK_D=BLOCK_D, num_warps=warps, num_stages=1,
    )  # fmt: skip
    return dq, dk, dv


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "T": 64, "D": 32, "size": 16, "density": 0.5},
    {"B": 2, "H": 1, "T": 75, "D": 20, "size": 16, "density": 0.4},
    {"B": 1, "H": 2, "T": 40, "D": 16, "size": 16, "density": 0.7, "dtype": "bfloat16"},
)
BENCH = ({"B": 2, "H": 16, "T": 4096, "D": 64, "size": 64, "density": 0.125, "dtype": "bfloat16"},)


def make_args(B, H, T, D, size, density, dtype="float32", device="cpu", seed=0):
    if size < 16 or size & (size - 1):
        raise ValueError("size, the side of a block, must be a power of two of at least 16")
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, H, T, D, generator=g).to(device, getattr(torch, dtype)) for _ in range(3))
    blocks = -(-T // size)
    layout = torch.rand(H, blocks, blocks, generator=g) < density
    # Query block 0 of head 0 sees nothing, all others at least themselves.
    layout |= torch.eye(blocks, dtype=torch.bool)
    layout[0, 0] = False
    orders = []
    for order in (layout, layout.transpose(1, 2)):
        counts = order.sum(2).reshape(-1)
        pointers = torch.cat((torch.zeros(1, dtype=torch.long), counts.cumsum(0)))
        orders += [x.to(device, torch.int32) for x in (pointers, order.nonzero()[:, 2])]
    return q, k, v, *orders, size


def reference(q, k, v, row_ptr, cols, col_ptr, rows, size):
    H, T = q.shape[1:3]
    blocks = -(-T // size)
    counts = row_ptr.diff()
    row = torch.arange(H * blocks, device=q.device).repeat_interleave(counts.long(), output_size=cols.numel())
    layout = torch.zeros(H * blocks, blocks, dtype=torch.bool, device=q.device)
    layout = layout.index_put((row, cols.long()), torch.ones_like(row, dtype=torch.bool)).view(H, blocks, blocks)
    seen = layout.repeat_interleave(size, 1).repeat_interleave(size, 2)[:, :T, :T]
    # Dense under a mask, as torch has no block-sparse attention. A row without a block would have no softmax: it sees
    # everything, and is cleared afterwards.
    some = seen.any(-1, keepdim=True)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=(seen | ~some)[None])
    return torch.where(some, out, 0.0)
