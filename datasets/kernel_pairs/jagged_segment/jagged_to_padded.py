"""Jagged rows copied into a padded (segments, longest, D) tensor: the backward copies back and drops the padding.

Rows of a segment beyond `longest` are cut off by the forward: their gradient is an explicit zero.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "jagged_to_padded",
    "family": "jagged_segment",
    "op": "jagged_to_padded_dense",
    "schema": 1,
    "techniques": ("varlen", "inverse-map", "masking", "strided-cotangent"),
    "saves": (),
    "grads": ("values",),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _pad_fwd(Values, Offsets, Out, longest, D, fill, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr):
    # Programs own tiles of the padded tensor: whatever lies behind the end of the segment is filled.
    segment = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK_L + tl.arange(0, BLOCK_L)
    d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    begin = tl.load(Offsets + segment).to(tl.int64)
    length = tl.load(Offsets + segment + 1).to(tl.int64) - begin
    inside = (place[:, None] < tl.minimum(length, longest)) & (d[None, :] < D)
    rows = tl.load(Values + (begin + place[:, None]) * D + d[None, :], mask=inside, other=fill)
    ok = (place[:, None] < longest) & (d[None, :] < D)
    tl.store(Out + (segment * longest + place[:, None]) * D + d[None, :], rows, mask=ok)


def forward(values, offsets, longest, fill=0.0):
    """Segment s is rows offsets[s] to offsets[s + 1]; offsets (int32 or int64) begin with 0 and end with the rows."""
    values = values.contiguous()
    D, segments = values.shape[1], offsets.numel() - 1
    out = torch.empty(segments, longest, D, device=values.device, dtype=values.dtype)
    BLOCK_D = min(256, triton.next_power_of_2(D))
    BLOCK_L = 4096 // BLOCK_D
    _pad_fwd[(segments, triton.cdiv(longest, BLOCK_L), triton.cdiv(D, BLOCK_D))](
        values, offsets, out, longest, D, fill, BLOCK_L=BLOCK_L, BLOCK_D=BLOCK_D, num_warps=4
    )
    return out, (values, offsets, longest)


# --- backward ---
@triton.jit
def _unpad_bwd(
    DOut, Offsets, DValues, longest, D, do_s, do_l, do_d, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    segment = tl.program_id(0).to(tl.int64)
    d = (tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)).to(tl.int64)
    begin = tl.load(Offsets + segment).to(tl.int64)
    length = tl.load(Offsets + segment + 1).to(tl.int64) - begin
    # The tiles of this segment are dealt out in turn, so that rows past `longest`, too, find an owner for their zero.
    for start in range(tl.program_id(1) * BLOCK_L, length, tl.num_programs(1) * BLOCK_L):
        place = start + tl.arange(0, BLOCK_L).to(tl.int64)
        mine = (place[:, None] < length) & (d[None, :] < D)
        at = segment * do_s + place[:, None] * do_l + d[None, :] * do_d
        kept = tl.load(DOut + at, mask=mine & (place[:, None] < longest), other=0.0)
        tl.store(DValues + (begin + place[:, None]) * D + d[None, :], kept, mask=mine)


def backward(saved, grad_out, needs=None):
    values, offsets, longest = saved
    D, segments = values.shape[1], offsets.numel() - 1
    dvalues = torch.empty_like(values)
    BLOCK_D = min(256, triton.next_power_of_2(D))
    BLOCK_L = 4096 // BLOCK_D
    _unpad_bwd[(segments, triton.cdiv(longest, BLOCK_L), triton.cdiv(D, BLOCK_D))](
        grad_out, offsets, dvalues, longest, D, *grad_out.stride(), BLOCK_L=BLOCK_L, BLOCK_D=BLOCK_D, num_warps=4
    )
    return dvalues


# --- check ---
SWEEP = (
    {"segments": 4, "rows": 96, "longest": 32, "D": 64},
    {"segments": 6, "rows": 203, "longest": 37, "D": 21},
    {"segments": 3, "rows": 50, "longest": 70, "D": 40, "dtype": "bfloat16"},
)
BENCH = ({"segments": 64, "rows": 65536, "longest": 2048, "D": 512, "dtype": "bfloat16"},)


def make_args(segments, rows, longest, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, D, generator=g).to(device=device, dtype=getattr(torch, dtype))
    # Random cuts: some segments are longer than `longest`, and the second is empty.
    cuts = torch.randint(0, rows + 1, (segments - 1,), generator=g).sort().values
    cuts[1:2] = cuts[:1]
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), cuts, torch.tensor([rows])))
    return values, offsets.to(device), longest, 0.5


def reference(values, offsets, longest, fill=0.0):
    lengths = offsets.diff()
    place = torch.arange(longest, device=values.device)
    inside = place < lengths[:, None]
    row = torch.where(inside, offsets[:-1, None] + place, 0)
    return torch.where(inside[..., None], values[row], fill).to(values.dtype)
