"""Padded (segments, longest, D) rows packed into a jagged tensor: the backward writes the padding's zeros as it copies.

The forward cuts the packed rows into equal tiles and finds each row's segment by bisection: skewed lengths leave no
program idle. The backward cuts the padded tensor instead: every element is written once, no memset before.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "padded_to_jagged",
    "family": "jagged_segment",
    "op": "padded_dense_to_jagged",
    "schema": 1,
    "techniques": ("varlen", "loop-swap", "masking", "strided-cotangent"),
    "saves": (),
    "grads": ("padded",),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _pack_fwd(
    Padded, Offsets, Out, rows, segments, longest, D, steps, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    # The last segment that begins at or before row r, which is also the one that is not empty.
    low = tl.zeros((BLOCK_R,), tl.int64)
    high = low + segments
    for _ in range(steps):
        middle = (low + high) // 2
        before = tl.load(Offsets + middle) <= r
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    place = r - tl.load(Offsets + low)
    ok = (r[:, None] < rows) & (d[None, :] < D)
    source = (low * longest + place)[:, None] * D + d[None, :]
    tl.store(Out + r[:, None] * D + d[None, :], tl.load(Padded + source, mask=ok), mask=ok)


def forward(padded, offsets, rows):
    """Segment s fills rows offsets[s] to offsets[s + 1] of the `rows` packed ones; none is longer than the padding."""
    padded = padded.contiguous()
    segments, longest, D = padded.shape
    out = torch.empty(rows, D, device=padded.device, dtype=padded.dtype)
    BLOCK_D = min(256, triton.next_power_of_2(D))
    BLOCK_R = 4096 // BLOCK_D
    _pack_fwd[(triton.cdiv(rows, BLOCK_R), triton.cdiv(D, BLOCK_D))](
        padded, offsets, out, rows, segments, longest, D, segments.bit_length(),
        BLOCK_R=BLOCK_R, BLOCK_D=BLOCK_D, num_warps=4,
    )  # fmt: skip
    return out, (padded, offsets)


# --- backward ---
@triton.jit
def _pack_bwd(DOut, Offsets, DPadded, longest, D, do_r, do_d, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr):
    segment = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK_L + tl.arange(0, BLOCK_L)
    d = (tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)).to(tl.int64)
    begin = tl.load(Offsets + segment).to(tl.int64)
    end = tl.load(Offsets + segment + 1).to(tl.int64)
    row = (begin + place)[:, None]
    columns = d[None, :] < D
    # Rows behind the end belong to the next segment: the mask turns them into the zeros of the padding.
    dy = tl.load(DOut + row * do_r + d[None, :] * do_d, mask=(row < end) & columns, other=0.0)
    at = (segment * longest + place[:, None]) * D + d[None, :]
    tl.store(DPadded + at, dy, mask=(place[:, None] < longest) & columns)


def backward(saved, grad_out, needs=None):
    padded, offsets = saved
    segments, longest, D = padded.shape
    dpadded = torch.empty_like(padded)
    BLOCK_D = min(256, triton.next_power_of_2(D))
    BLOCK_L = 4096 // BLOCK_D
    _pack_bwd[(segments, triton.cdiv(longest, BLOCK_L), triton.cdiv(D, BLOCK_D))](
        grad_out, offsets, dpadded, longest, D, *grad_out.stride(), BLOCK_L=BLOCK_L, BLOCK_D=BLOCK_D, num_warps=4
    )
    return dpadded


# --- check ---
SWEEP = (
    {"segments": 4, "longest": 32, "D": 64},
    {"segments": 7, "longest": 37, "D": 21},
    {"segments": 3, "longest": 50, "D": 40, "dtype": "bfloat16"},
)
BENCH = ({"segments": 64, "longest": 2048, "D": 512, "dtype": "bfloat16"},)


def make_args(segments, longest, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    padded = torch.randn(segments, longest, D, generator=g).to(device=device, dtype=getattr(torch, dtype))
    # The first segment is full, the third empty.
    lengths = torch.randint(0, longest + 1, (segments,), generator=g)
    lengths[0] = longest
    lengths[2:3] = 0
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    return padded, offsets.to(device), int(offsets[-1])


def reference(padded, offsets, rows):
    inside = torch.arange(padded.shape[1], device=padded.device) < offsets.diff()[:, None]
    return padded[inside]
