"""Jagged rows split into the first rows of each segment and the rest: two cotangents, either absent, join in one pass.

Tiles run over the packed rows and find each row's segment by bisection of the offsets. Segments of any length load the
device evenly, in both directions.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "split_2d_jagged",
    "family": "jagged_segment",
    "op": "split_jagged",
    "schema": 1,
    "techniques": ("varlen", "one-launch", "inverse-map", "optional-cotangent", "strided-cotangent"),
    "saves": (),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _destination(r, Offsets, HeadOffsets, segments, steps):
    """For each packed row: whether it belongs to the head of its segment, and its row there or in the rest."""
    low = r * 0
    high = low + segments
    for _ in range(steps):
        middle = (low + high) // 2
        before = tl.load(Offsets + middle) <= r
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    begin = tl.load(Offsets + low)
    head_begin = tl.load(HeadOffsets + low)
    head_rows = tl.load(HeadOffsets + low + 1) - head_begin
    place = r - begin
    in_head = place < head_rows
    return in_head, tl.where(in_head, head_begin + place, begin - head_begin + place - head_rows)


@triton.jit
def _split_fwd(
    X, Offsets, HeadOffsets, Head, Rest, rows, segments, steps, D, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr
):
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    in_head, row = _destination(r, Offsets, HeadOffsets, segments, steps)
    in_head = in_head[:, None]
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)[None, :]
        ok = (r[:, None] < rows) & (d < D)
        x = tl.load(X + r[:, None] * D + d, mask=ok)
        tl.store(Head + row[:, None] * D + d, x, mask=ok & in_head)
        tl.store(Rest + row[:, None] * D + d, x, mask=ok & ~in_head)


def _tile(D):
    BLOCK_D = min(512, triton.next_power_of_2(D))
    return 4096 // BLOCK_D, BLOCK_D


def forward(x, offsets, head_offsets, head_rows):
    """Segment s is rows offsets[s] to offsets[s + 1] of x; its head takes head_offsets[s + 1] - head_offsets[s] of
    them, `head_rows` over all segments.
    """
    x = x.contiguous()
    rows, D = x.shape
    segments = offsets.numel() - 1
    head, rest = (torch.empty(part, D, device=x.device, dtype=x.dtype) for part in (head_rows, rows - head_rows))
    BLOCK_R, BLOCK_D = _tile(D)
    _split_fwd[(triton.cdiv(rows, BLOCK_R),)](
        x, offsets, head_offsets, head, rest, rows, segments, segments.bit_length(), D,
        BLOCK_R=BLOCK_R, BLOCK_D=BLOCK_D, num_warps=4,
    )  # fmt: skip
    return (head, rest), (x, offsets, head_offsets)


# --- backward ---
@triton.jit
def _split_bwd(
    DHead, DRest, Offsets, HeadOffsets, DX, rows, segments, steps, D, head_r, head_d, rest_r, rest_d,
    HAS_HEAD: tl.constexpr, HAS_REST: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    in_head, row = _destination(r, Offsets, HeadOffsets, segments, steps)
    in_head = in_head[:, None]
    row = row[:, None]
    for start in tl.range(0, D, BLOCK_D, num_stages=2):
        d = start + tl.arange(0, BLOCK_D).to(tl.int64)[None, :]
        ok = (r[:, None] < rows) & (d < D)
        dx = tl.zeros((BLOCK_R, BLOCK_D), DX.dtype.element_ty)
        # Each row is in one of the two: the other load is masked off and costs no traffic.
        if HAS_HEAD:
            dx += tl.load(DHead + row * head_r + d * head_d, mask=ok & in_head, other=0.0)
        if HAS_REST:
            dx += tl.load(DRest + row * rest_r + d * rest_d, mask=ok & ~in_head, other=0.0)
        tl.store(DX + r[:, None] * D + d, dx, mask=ok)


def backward(saved, grad_head, grad_rest, needs=None):
    x, offsets, head_offsets = saved
    rows, D = x.shape
    segments = offsets.numel() - 1
    dx = torch.empty_like(x)
    dhead, drest = (x if grad is None else grad for grad in (grad_head, grad_rest))
    BLOCK_R, BLOCK_D = _tile(D)
    _split_bwd[(triton.cdiv(rows, BLOCK_R),)](
        dhead, drest, offsets, head_offsets, dx, rows, segments, segments.bit_length(), D,
        *dhead.stride(), *drest.stride(), HAS_HEAD=grad_head is not None, HAS_REST=grad_rest is not None,
        BLOCK_R=BLOCK_R, BLOCK_D=BLOCK_D, num_warps=4,
    )  # fmt: skip
    return dx


# --- check ---
SWEEP = (
    {"segments": 3, "rows": 96, "D": 64},
    {"segments": 6, "rows": 203, "D": 21},
    {"segments": 4, "rows": 60, "D": 600, "dtype": "bfloat16"},
)
BENCH = ({"segments": 512, "rows": 262144, "D": 256, "dtype": "bfloat16"},)


def make_args(segments, rows, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, D, generator=g).to(device=device, dtype=getattr(torch, dtype))
    # The second segment is empty, the last goes whole into the head.
    cuts = torch.randint(0, rows + 1, (segments - 1,), generator=g).sort().values
    cuts[1:2] = cuts[:1]
    zero = torch.zeros(1, dtype=torch.int64)
    offsets = torch.cat((zero, cuts, torch.tensor([rows])))
    heads = (offsets.diff() * torch.rand(segments, generator=g)).long()
    heads[-1] = offsets[-1] - offsets[-2]
    head_offsets = torch.cat((zero, heads.cumsum(0)))
    return x, offsets.to(device), head_offsets.to(device), int(head_offsets[-1])


def reference(x, offsets, head_offsets, head_rows):
    rows = x.shape[0]
    segment = torch.repeat_interleave(
        torch.arange(offsets.numel() - 1, device=x.device), offsets.diff(), output_size=rows
    )
    in_head = torch.arange(rows, device=x.device) - offsets[segment] < head_offsets.diff()[segment]
    # False sorts first: a stable sort keeps the rows' order on both sides.
    order = (~in_head).to(torch.int8).argsort(stable=True)
    return x[order[:head_rows]], x[order[head_rows:]]
