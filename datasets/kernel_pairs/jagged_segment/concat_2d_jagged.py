"""Two jagged tensors joined segment by segment: the backward deals each cotangent row back to the side it came from."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "concat_2d_jagged",
    "family": "jagged_segment",
    "op": "concat_jagged",
    "schema": 1,
    "techniques": ("varlen", "one-launch", "inverse-map", "strided-cotangent"),
    "saves": (),
    "grads": ("a", "b"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _join_fwd(A, B, AOffsets, BOffsets, Out, D, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr):
    # Segment s of the result starts where the segments before it end on both sides together: its offsets are sums.
    segment = tl.program_id(0)
    d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    a_begin = tl.load(AOffsets + segment).to(tl.int64)
    b_begin = tl.load(BOffsets + segment).to(tl.int64)
    from_a = tl.load(AOffsets + segment + 1) - a_begin
    length = from_a + tl.load(BOffsets + segment + 1) - b_begin
    # A fixed number of programs shares the tiles of a segment in turn, so that its length is not needed on the host.
    for start in range(tl.program_id(1) * BLOCK_L, length, tl.num_programs(1) * BLOCK_L):
        place = start + tl.arange(0, BLOCK_L)[:, None]
        columns = d[None, :] < D
        a = tl.load(A + (a_begin + place) * D + d[None, :], mask=(place < from_a) & columns, other=0.0)
        in_b = (place >= from_a) & (place < length) & columns
        b = tl.load(B + (b_begin + place - from_a) * D + d[None, :], mask=in_b, other=0.0)
        joined = tl.where(place < from_a, a, b)
        tl.store(Out + (a_begin + b_begin + place) * D + d[None, :], joined, mask=(place < length) & columns)


def _grid(rows, segments, D):
    BLOCK_D = min(256, triton.next_power_of_2(D))
    BLOCK_L = 4096 // BLOCK_D
    # Twice as many programs as a segment of average length has tiles.
    share = max(1, triton.cdiv(2 * rows, segments * BLOCK_L))
    return (segments, share, triton.cdiv(D, BLOCK_D)), BLOCK_L, BLOCK_D


def forward(a, b, a_offsets, b_offsets):
    """a (La, D), b (Lb, D); segment s of each is rows offsets[s] to offsets[s + 1]."""
    a, b = a.contiguous(), b.contiguous()
    rows, D = a.shape[0] + b.shape[0], a.shape[1]
    out = torch.empty(rows, D, device=a.device, dtype=a.dtype)
    grid, BLOCK_L, BLOCK_D = _grid(rows, a_offsets.numel() - 1, D)
    _join_fwd[grid](a, b, a_offsets, b_offsets, out, D, BLOCK_L=BLOCK_L, BLOCK_D=BLOCK_D, num_warps=4)
    return out, (a, b, a_offsets, b_offsets)


# --- backward ---
@triton.jit
def _part_bwd(
    DOut, DA, DB, AOffsets, BOffsets, D, do_r, do_d,
    NEED_A: tl.constexpr, NEED_B: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    segment = tl.program_id(0)
    d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D).to(tl.int64)
    a_begin = tl.load(AOffsets + segment).to(tl.int64)
    b_begin = tl.load(BOffsets + segment).to(tl.int64)
    from_a = tl.load(AOffsets + segment + 1) - a_begin
    length = from_a + tl.load(BOffsets + segment + 1) - b_begin
    for start in range(tl.program_id(1) * BLOCK_L, length, tl.num_programs(1) * BLOCK_L):
        place = start + tl.arange(0, BLOCK_L)[:, None]
        ok = (place < length) & (d[None, :] < D)
        dout = tl.load(DOut + (a_begin + b_begin + place) * do_r + d[None, :] * do_d, mask=ok, other=0.0)
        # Every row goes to exactly one of the two: no zero fill, no second reading.
        if NEED_A:
            tl.store(DA + (a_begin + place) * D + d[None, :], dout, mask=ok & (place < from_a))
        if NEED_B:
            tl.store(DB + (b_begin + place - from_a) * D + d[None, :], dout, mask=ok & (place >= from_a))


def backward(saved, grad_out, needs=(True, True)):
    a, b, a_offsets, b_offsets = saved
    need_a, need_b = needs
    da, db = (torch.empty_like(side) if need else None for side, need in ((a, need_a), (b, need_b)))
    grid, BLOCK_L, BLOCK_D = _grid(grad_out.shape[0], a_offsets.numel() - 1, a.shape[1])
    _part_bwd[grid](
        grad_out, da if need_a else grad_out, db if need_b else grad_out, a_offsets, b_offsets, a.shape[1],
        *grad_out.stride(), NEED_A=need_a, NEED_B=need_b, BLOCK_L=BLOCK_L, BLOCK_D=BLOCK_D, num_warps=2,
    )  # fmt: skip
    return da, db


# --- check ---
SWEEP = (
    {"segments": 3, "La": 64, "Lb": 96, "D": 64},
    {"segments": 6, "La": 203, "Lb": 37, "D": 21},
    {"segments": 4, "La": 30, "Lb": 50, "D": 40, "dtype": "bfloat16"},
)
BENCH = ({"segments": 256, "La": 65536, "Lb": 131072, "D": 256, "dtype": "bfloat16"},)


def make_args(segments, La, Lb, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    a, b = torch.randn(La, D, generator=g), torch.randn(Lb, D, generator=g)

    def cut(rows):
        cuts = torch.randint(0, rows + 1, (segments - 1,), generator=g).sort().values
        # The second segment is empty.
        cuts[1:2] = cuts[:1]
        return torch.cat((torch.zeros(1, dtype=torch.int64), cuts, torch.tensor([rows]))).to(device)

    floats = (t.to(device=device, dtype=getattr(torch, dtype)) for t in (a, b))
    return *floats, cut(La), cut(Lb)


def reference(a, b, a_offsets, b_offsets):
    # Sorted by segment with a stable sort, rows of a stand before rows of b.
    segments = a_offsets.numel() - 1
    number = torch.arange(segments, device=a.device)
    sides = ((a_offsets, a.shape[0]), (b_offsets, b.shape[0]))
    owner = torch.cat([torch.repeat_interleave(number, o.diff(), output_size=rows) for o, rows in sides])
    return torch.cat((a, b))[owner.argsort(stable=True)]
