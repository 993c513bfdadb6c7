"""Padding moved from one side of ragged sequences to the other: each sequence is shifted, its adjoint shifts it back.

Row p of the result is row p - shift of its sequence, where shift is the padding's length, or its negative when the
padding goes to the right. The map is one to one on the rows that are kept: forward and backward both gather.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "pack_sequence_left_right",
    "family": "jagged_segment",
    "op": "padding_side",
    "schema": 1,
    "techniques": ("inverse-map", "varlen", "masking", "strided-cotangent"),
    "saves": (),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _window(length, longest, LEFT: tl.constexpr):
    """Where a sequence begins when its padding stands on the left, or on the right."""
    if LEFT:
        begin = longest - length
    else:
        begin = length * 0
    return begin


@triton.jit
def _shift_rows(
    Source, Lengths, Target, rows, longest, D, src_b, src_l, src_d,
    TO_LEFT: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # Tiles run over the rows of all sequences alike: short sequences waste no programs.
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D).to(tl.int64)
    sequence = r // longest
    length = tl.load(Lengths + sequence, mask=r < rows, other=0).to(tl.int64)
    place = r % longest - _window(length, longest, TO_LEFT)
    inside = (place >= 0) & (place < length)
    read = (place + _window(length, longest, not TO_LEFT)) * src_l + sequence * src_b
    columns = d[None, :] < D
    # Everything outside the sequence becomes zero: the padding in the forward, its gradient in the backward.
    x = tl.load(Source + read[:, None] + d[None, :] * src_d, mask=inside[:, None] & columns, other=0.0)
    tl.store(Target + r[:, None] * D + d[None, :], x, mask=(r[:, None] < rows) & columns)


def _shifted(source, lengths, to_left):
    B, longest, D = source.shape
    target = torch.empty(B, longest, D, device=source.device, dtype=source.dtype)
    BLOCK_D = min(512, triton.next_power_of_2(D))
    BLOCK_R = 4096 // BLOCK_D
    _shift_rows[(triton.cdiv(B * longest, BLOCK_R), triton.cdiv(D, BLOCK_D))](
        source, lengths, target, B * longest, longest, D, *source.stride(),
        TO_LEFT=to_left, BLOCK_R=BLOCK_R, BLOCK_D=BLOCK_D, num_warps=4,
    )  # fmt: skip
    return target


def forward(x, lengths, to_left=True):
    """x (B, longest, D) padded on the right if `to_left`, else on the left; lengths (B)."""
    return _shifted(x, lengths, to_left), (lengths, to_left)


# --- backward ---
@triton.jit
def _unshift_rows(
    DY, Lengths, DX, longest, D, dy_b, dy_l, dy_d, FROM_LEFT: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr
):
    # One sequence a program column: the shift is a scalar, and a tile of padding alone reads nothing.
    sequence = tl.program_id(0).to(tl.int64)
    length = tl.load(Lengths + sequence).to(tl.int64)
    r = tl.program_id(1).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    place = r - _window(length, longest, not FROM_LEFT)
    inside = (place >= 0) & (place < length)
    read = DY + sequence * dy_b + (place + _window(length, longest, FROM_LEFT))[:, None] * dy_l
    write = DX + (sequence * longest + r)[:, None] * D
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D).to(tl.int64)
        columns = d[None, :] < D
        dy = tl.load(read + d[None, :] * dy_d, mask=inside[:, None] & columns, other=0.0)
        tl.store(write + d[None, :], dy, mask=(r[:, None] < longest) & columns)


def backward(saved, grad_y, needs=None):
    lengths, to_left = saved
    B, longest, D = grad_y.shape
    dx = torch.empty(B, longest, D, device=grad_y.device, dtype=grad_y.dtype)
    BLOCK_D = min(512, triton.next_power_of_2(D))
    BLOCK_R = 4096 // BLOCK_D
    _unshift_rows[(B, triton.cdiv(longest, BLOCK_R))](
        grad_y, lengths, dx, longest, D, *grad_y.stride(),
        FROM_LEFT=to_left, BLOCK_R=BLOCK_R, BLOCK_D=BLOCK_D, num_warps=4,
    )  # fmt: skip
    return dx


# --- check ---
SWEEP = (
    {"B": 3, "longest": 32, "D": 64},
    {"B": 5, "longest": 37, "D": 21, "to_left": False},
    {"B": 2, "longest": 50, "D": 40, "dtype": "bfloat16"},
)
BENCH = ({"B": 64, "longest": 2048, "D": 512, "dtype": "bfloat16"},)


def make_args(B, longest, D, to_left=True, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(B, longest, D, generator=g).to(device=device, dtype=getattr(torch, dtype))
    # The second sequence is empty.
    lengths = torch.randint(1, longest + 1, (B,), generator=g)
    lengths[1:2] = 0
    return x, lengths.to(device), to_left


def reference(x, lengths, to_left=True):
    longest = x.shape[1]
    begin = longest - lengths[:, None]
    place = torch.arange(longest, device=x.device) - (begin if to_left else 0)
    inside = (place >= 0) & (place < lengths[:, None])
    source = torch.where(inside, place + (0 if to_left else begin), 0)
    rows = x.gather(1, source[..., None].expand(-1, -1, x.shape[2]))
    return rows * inside[..., None].to(x.dtype)
