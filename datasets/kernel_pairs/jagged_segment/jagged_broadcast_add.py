"""One vector per sequence added to all of its rows: the gradient of the vectors is a sum over each ragged stretch."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "jagged_broadcast_add",
    "family": "jagged_segment",
    "op": "jagged_add",
    "schema": 1,
    "techniques": ("varlen", "broadcast-reduction", "column-owner", "shared-gradient", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "vectors"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _add_vectors(X, Vectors, Offsets, Y, D, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):
    sequence = tl.program_id(0).to(tl.int64)
    d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    vector = tl.load(Vectors + sequence * D + d, mask=d < D, other=0.0).to(tl.float32)
    begin = tl.load(Offsets + sequence).to(tl.int64)
    end = tl.load(Offsets + sequence + 1).to(tl.int64)
    # The row tiles of a sequence are dealt out among its programs.
    for start in range(begin + tl.program_id(1) * BLOCK_R, end, tl.num_programs(1) * BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        ok = (r[:, None] < end) & (d[None, :] < D)
        x = tl.load(X + r[:, None] * D + d[None, :], mask=ok, other=0.0).to(tl.float32)
        tl.store(Y + r[:, None] * D + d[None, :], x + vector[None, :], mask=ok)


def forward(x, vectors, offsets):
    """x (L, D), vectors (S, D); sequence s is rows offsets[s] to offsets[s + 1]."""
    x, vectors = x.contiguous(), vectors.contiguous()
    L, D = x.shape
    sequences = offsets.numel() - 1
    y = torch.empty_like(x)
    BLOCK_D = min(256, triton.next_power_of_2(D))
    BLOCK_R = 4096 // BLOCK_D
    share = max(1, triton.cdiv(2 * L, sequences * BLOCK_R))
    _add_vectors[(sequences, share, triton.cdiv(D, BLOCK_D))](
        x, vectors, offsets, y, D, BLOCK_R=BLOCK_R, BLOCK_D=BLOCK_D, num_warps=4
    )
    return y, (vectors, offsets)


# --- backward ---
@triton.jit
def _sum_sequences(DY, Offsets, DVectors, D, dy_r, dy_d, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):
    # Narrow column tiles instead of split sequences: enough programs, and every sum has one owner.
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D).to(tl.int64)
    sequence = tl.program_id(0).to(tl.int64)
    end = tl.load(Offsets + sequence + 1).to(tl.int64)
    acc = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    # A tile is one load for each lane: copies that run four tiles ahead keep memory busy.
    for start in tl.range(tl.load(Offsets + sequence).to(tl.int64), end, BLOCK_R, num_stages=5):
        r = start + tl.arange(0, BLOCK_R)
        ok = (r[:, None] < end) & (d[None, :] < D)
        acc += tl.load(DY + r[:, None] * dy_r + d[None, :] * dy_d, mask=ok, other=0.0).to(tl.float32)
    tl.store(DVectors + sequence * D + d, tl.sum(acc, 0), mask=d < D)


def backward(saved, grad_y, needs=None):
    vectors, offsets = saved
    sequences, D = vectors.shape
    dvectors = torch.empty_like(vectors)
    # 64 columns of two bytes are one line of the cache.
    BLOCK_D = min(64, triton.next_power_of_2(D))
    _sum_sequences[(sequences, triton.cdiv(D, BLOCK_D))](
        grad_y, offsets, dvectors, D, *grad_y.stride(), BLOCK_R=4096 // BLOCK_D, BLOCK_D=BLOCK_D, num_warps=4
    )
    # The gradient of x is the cotangent itself: no kernel, no copy.
    return grad_y, dvectors


# --- check ---
SWEEP = (
    {"S": 3, "L": 96, "D": 64},
    {"S": 6, "L": 203, "D": 21},
    {"S": 4, "L": 60, "D": 300, "dtype": "bfloat16"},
)
BENCH = ({"S": 1024, "L": 524288, "D": 512, "dtype": "bfloat16"},)


def make_args(S, L, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, vectors = torch.randn(L, D, generator=g), torch.randn(S, D, generator=g)
    # The second sequence is empty.
    cuts = torch.randint(0, L + 1, (S - 1,), generator=g).sort().values
    cuts[1:2] = cuts[:1]
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), cuts, torch.tensor([L])))
    return *(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, vectors)), offsets.to(device)


def reference(x, vectors, offsets):
    own = torch.repeat_interleave(vectors.float(), offsets.diff(), 0, output_size=x.shape[0])
    return (x.float() + own).to(x.dtype)
