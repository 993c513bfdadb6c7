"""Mean over the rows of each sequence: long sequences are split in the forward, the backward writes equal tiles.

Backward tiles run over the packed rows whatever their sequences; a row finds its sequence by bisection of the offsets
and takes dy / length from it. One sequence of half the batch costs no more than many short ones.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "varlen_mean_pool",
    "family": "jagged_segment",
    "op": "mean_pool",
    "schema": 1,
    "techniques": ("varlen", "broadcast-adjoint", "gather-form", "strided-cotangent"),
    "saves": (),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _part_sums(X, Offsets, Parts, D, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):
    sequence = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    begin = tl.load(Offsets + sequence).to(tl.int64)
    end = tl.load(Offsets + sequence + 1).to(tl.int64)
    lanes = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    for start in range(begin + part * BLOCK_R, end, tl.num_programs(1) * BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        ok = (r[:, None] < end) & (d[None, :] < D)
        lanes += tl.load(X + r[:, None] * D + d[None, :], mask=ok, other=0.0).to(tl.float32)
    tl.store(Parts + (sequence * tl.num_programs(1) + part) * D + d, tl.sum(lanes, 0), mask=d < D)


@triton.jit
def _mean_of_parts(Parts, Offsets, Y, D, parts, BLOCK_D: tl.constexpr):
    sequence = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    length = tl.load(Offsets + sequence + 1) - tl.load(Offsets + sequence)
    total = tl.zeros((BLOCK_D,), tl.float32)
    for part in range(parts):
        total += tl.load(Parts + (sequence * parts + part) * D + d, mask=d < D, other=0.0)
    # An empty sequence is zero, not 0/0.
    tl.store(Y + sequence * D + d, total / tl.maximum(length, 1).to(tl.float32), mask=d < D)


def forward(x, offsets):
    """x (L, D); sequence s is rows offsets[s] to offsets[s + 1]."""
    x = x.contiguous()
    (L, D), sequences = x.shape, offsets.numel() - 1
    y = torch.empty(sequences, D, device=x.device, dtype=x.dtype)
    BLOCK_D = min(128, triton.next_power_of_2(D))
    BLOCK_R = 2048 // BLOCK_D
    columns = triton.cdiv(D, BLOCK_D)
    # Four programs for each of 132 processors, each with four tiles of an average sequence or more.
    parts = max(1, min(528 // (sequences * columns), L // (4 * BLOCK_R * sequences)))
    partial = torch.empty(sequences, parts, D, device=x.device, dtype=torch.float32)
    _part_sums[(sequences, parts, columns)](
        x, offsets, partial, D, BLOCK_R=BLOCK_R, BLOCK_D=BLOCK_D, num_warps=4
    )  # fmt: skip
    _mean_of_parts[(sequences, columns)](partial, offsets, y, D, parts, BLOCK_D=BLOCK_D, num_warps=1)
    return y, (x, offsets)


# --- backward ---
@triton.jit
def _mean_pool_bwd(
    DY, Offsets, DX, L, D, sequences, steps, dy_s, dy_d, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    # The last sequence that begins at or before the row.
    own = tl.zeros((BLOCK_R,), tl.int64)
    beyond = own + sequences
    for _ in range(steps):
        probe = (own + beyond) // 2
        begun = tl.load(Offsets + probe) <= r
        own = tl.where(begun, probe, own)
        beyond = tl.where(begun, beyond, probe)
    share = 1.0 / tl.maximum(tl.load(Offsets + own + 1) - tl.load(Offsets + own), 1).to(tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)[None, :]
        ok = (r[:, None] < L) & (d < D)
        dy = tl.load(DY + own[:, None] * dy_s + d.to(tl.int64) * dy_d, mask=ok, other=0.0).to(tl.float32)
        tl.store(DX + r[:, None] * D + d, share[:, None] * dy, mask=ok)


def backward(saved, grad_y, needs=None):
    x, offsets = saved
    (L, D), sequences = x.shape, offsets.numel() - 1
    dx = torch.empty_like(x)
    BLOCK_D = min(256, triton.next_power_of_2(D))
    BLOCK_R = 4096 // BLOCK_D
    _mean_pool_bwd[(triton.cdiv(L, BLOCK_R),)](
        grad_y, offsets, dx, L, D, sequences, sequences.bit_length(), *grad_y.stride(),
        BLOCK_R=BLOCK_R, BLOCK_D=BLOCK_D, num_warps=4,
    )  # fmt: skip
    return dx


# --- check ---
SWEEP = (
    {"S": 3, "L": 512, "D": 64},
    {"S": 6, "L": 403, "D": 21},
    {"S": 4, "L": 60, "D": 300, "dtype": "bfloat16"},
)
BENCH = ({"S": 64, "L": 131072, "D": 1024, "dtype": "bfloat16"},)


def make_args(S, L, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(L, D, generator=g).to(device=device, dtype=getattr(torch, dtype))
    # The second sequence is empty.
    cuts = torch.randint(0, L + 1, (S - 1,), generator=g).sort().values
    cuts[1:2] = cuts[:1]
    return x, torch.cat((torch.zeros(1, dtype=torch.int64), cuts, torch.tensor([L]))).to(device)


def reference(x, offsets):
    lengths = offsets.diff()
    own = torch.repeat_interleave(torch.arange(lengths.numel(), device=x.device), lengths, output_size=x.shape[0])
    total = torch.zeros(lengths.numel(), x.shape[1], device=x.device).index_add(0, own, x.float())
    return (total / lengths.clamp(min=1)[:, None]).to(x.dtype)
