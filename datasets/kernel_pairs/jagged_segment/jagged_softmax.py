"""Softmax over the rows of each jagged segment, column by column: the owner of a segment sums y dy, then writes dx."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "jagged_softmax",
    "family": "jagged_segment",
    "op": "segment_softmax",
    "schema": 1,
    "techniques": ("varlen", "saved-output", "two-pass", "multi-row-tile", "strided-cotangent"),
    "saves": ("y: fp32 or bf16 or fp16 (L, C)",),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _jagged_softmax_fwd(X, Offsets, Y, C, BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr):
    segment = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    # 64-bit bounds make every row index of the loops 64-bit.
    begin = tl.load(Offsets + segment).to(tl.int64)
    end = tl.load(Offsets + segment + 1).to(tl.int64)
    top = tl.full((BLOCK_C,), float("-inf"), tl.float32)
    norm = tl.zeros((BLOCK_C,), tl.float32)
    for start in range(begin, end, BLOCK_L):
        row = start + tl.arange(0, BLOCK_L)
        ok = (row[:, None] < end) & (c[None, :] < C)
        x = tl.load(X + row[:, None] * C + c[None, :], mask=ok, other=float("-inf")).to(tl.float32)
        # Columns past C hold nothing but -inf; a finite maximum keeps them free of NaN.
        new_top = tl.maximum(top, tl.where(c < C, tl.max(x, 0), 0.0))
        norm = norm * tl.exp(top - new_top) + tl.sum(tl.exp(x - new_top[None, :]), 0)
        top = new_top
    for start in range(begin, end, BLOCK_L):
        row = start + tl.arange(0, BLOCK_L)
        ok = (row[:, None] < end) & (c[None, :] < C)
        x = tl.load(X + row[:, None] * C + c[None, :], mask=ok, other=float("-inf")).to(tl.float32)
        tl.store(Y + row[:, None] * C + c[None, :], tl.exp(x - top[None, :]) / norm[None, :], mask=ok)


def forward(x, offsets):
    # Rows offsets[s] to offsets[s + 1] are segment s; offsets begin with 0 and end with the number of rows.
    x = x.contiguous()
    C = x.shape[1]
    y = torch.empty_like(x)
    BLOCK_C = min(64, triton.next_power_of_2(C))
    _jagged_softmax_fwd[(offsets.numel() - 1, triton.cdiv(C, BLOCK_C))](
        x, offsets, y, C, BLOCK_L=2048 // BLOCK_C, BLOCK_C=BLOCK_C, num_warps=4
    )
    return y, (y, offsets)


# --- backward ---
@triton.jit
def _jagged_softmax_bwd(DY, Y, Offsets, DX, C, dy_row, dy_col, BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr):
    segment = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    begin = tl.load(Offsets + segment).to(tl.int64)
    end = tl.load(Offsets + segment + 1).to(tl.int64)
    # Lanes keep sums of their own and meet behind the loop; copies run four tiles ahead of it.
    dots = tl.zeros((BLOCK_L, BLOCK_C), tl.float32)
    for start in tl.range(begin, end, BLOCK_L, num_stages=5):
        row = start + tl.arange(0, BLOCK_L)
        ok = (row[:, None] < end) & (c[None, :] < C)
        y = tl.load(Y + row[:, None] * C + c[None, :], mask=ok, other=0.0).to(tl.float32)
        dy = tl.load(DY + row[:, None] * dy_row + c[None, :] * dy_col, mask=ok, other=0.0).to(tl.float32)
        dots += y * dy
    dot = tl.sum(dots, 0)
    # The second reading of a short segment comes out of L2, as does that of a long one's end, where it begins.
    last = begin + (tl.cdiv(end - begin, BLOCK_L) - 1) * BLOCK_L
    for back in tl.range(0, end - begin, BLOCK_L, num_stages=5):
        row = last - back + tl.arange(0, BLOCK_L)
        ok = (row[:, None] < end) & (c[None, :] < C)
        y = tl.load(Y + row[:, None] * C + c[None, :], mask=ok, other=0.0).to(tl.float32)
        dy = tl.load(DY + row[:, None] * dy_row + c[None, :] * dy_col, mask=ok, other=0.0).to(tl.float32)
        tl.store(DX + row[:, None] * C + c[None, :], y * (dy - dot[None, :]), mask=ok)


def backward(saved, grad_y, needs=None):
    y, offsets = saved
    C = y.shape[1]
    dx = torch.empty_like(y)
    BLOCK_C = min(64, triton.next_power_of_2(C))
    _jagged_softmax_bwd[(offsets.numel() - 1, triton.cdiv(C, BLOCK_C))](
        grad_y, y, offsets, dx, C, grad_y.stride(0), grad_y.stride(1),
        BLOCK_L=4096 // BLOCK_C, BLOCK_C=BLOCK_C, num_warps=4,
    )  # fmt: skip
    return dx


# --- check ---
SWEEP = (
    {"S": 3, "L": 96, "C": 64},
    {"S": 6, "L": 437, "C": 11, "dtype": "float16"},
    {"S": 4, "L": 60, "C": 70, "dtype": "bfloat16"},
)
BENCH = ({"S": 1024, "L": 262144, "C": 256, "dtype": "bfloat16"},)


def make_args(S, L, C, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(L, C, generator=g) * 2
    # The second segment is empty.
    cuts = torch.randint(0, L + 1, (S - 1,), generator=g).sort().values
    cuts[1:2] = cuts[:1]
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), cuts, torch.tensor([L]))).to(torch.int32)
    return x.to(device=device, dtype=getattr(torch, dtype)), offsets.to(device)


def reference(x, offsets):
    segments = offsets.numel() - 1
    own = torch.repeat_interleave(torch.arange(segments, device=x.device), offsets.diff(), output_size=x.shape[0])
    zeros = torch.zeros(segments, x.shape[1], device=x.device)
    top = zeros.scatter_reduce(0, own[:, None].expand_as(x), x.detach().float(), "amax", include_self=False)
    e = (x.float() - top[own]).exp()
    return (e / zeros.index_add(0, own, e)[own]).to(x.dtype)
