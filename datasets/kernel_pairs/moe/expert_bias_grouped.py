"""Bias per expert on rows sorted by expert: dx is the cotangent itself, dbias a column sum per ragged segment.

The forward finds the expert of a row by counting the segments that end before it. For dbias an owner per expert would
leave the device to the expert with most rows. Instead programs own plain tiles of rows, whatever experts they hold: a
tile adds up its rows expert by expert, by masked column sums out of registers, each added atomically to a zeroed
buffer in fp32. A tile within one expert, the usual case, issues one addition.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "expert_bias_grouped",
    "family": "moe",
    "op": "expert_bias",
    "schema": 1,
    "techniques": ("varlen", "atomics", "masking", "shared-gradient", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "bias"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _expert_of(row, Offsets, E, BLOCK_E: tl.constexpr):
    """Experts of rows: how many segments end at or before each."""
    e = tl.arange(0, BLOCK_E)
    end = tl.load(Offsets + e + 1, mask=e < E, other=2147483647)
    return tl.sum((end[None, :] <= row[:, None]).to(tl.int32), 1)


@triton.jit
def _expert_bias_fwd(X, Bias, Offsets, Y, T, D, E, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr):
    row = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    expert = _expert_of(row, Offsets, E, BLOCK_E)
    inside = (row[:, None] < T) & (d[None, :] < D)
    at = row[:, None].to(tl.int64) * D + d[None, :]
    x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(Bias + expert[:, None].to(tl.int64) * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(Y + at, x + bias, mask=inside)


def forward(x, bias, offsets):
    # Rows offsets[e] to offsets[e + 1] of x belong to expert e; offsets end with the number of rows.
    x, bias = x.contiguous(), bias.contiguous()
    (T, D), E = x.shape, bias.shape[0]
    y = torch.empty_like(x)
    BLOCK_D = max(32, min(256, triton.next_power_of_2(D)))
    _expert_bias_fwd[(triton.cdiv(D, BLOCK_D), triton.cdiv(T, 16))](
        x, bias, offsets, y, T, D, E,
        BLOCK_T=16, BLOCK_D=BLOCK_D, BLOCK_E=triton.next_power_of_2(E), num_warps=4,
    )  # fmt: skip
    return y, (bias, offsets)


# --- backward ---
@triton.jit
def _segment_sums(
    DY, Offsets, DBias, T, D, E, dy_t, dy_d, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr
):
    row = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    dy_at = DY + row[:, None].to(tl.int64) * dy_t + d[None, :].to(tl.int64) * dy_d
    dy = tl.load(dy_at, mask=(row[:, None] < T) & (d[None, :] < D), other=0.0).to(tl.float32)
    expert = _expert_of(row, Offsets, E, BLOCK_E)
    first = tl.min(expert, 0)
    last = tl.max(tl.where(row < T, expert, 0), 0)
    for e in range(first, last + 1):
        # Experts without rows in between add zeros: rare, and cheaper than a branch on a sum.
        total = tl.sum(tl.where(expert[:, None] == e, dy, 0.0), 0)
        tl.atomic_add(DBias + e.to(tl.int64) * D + d, total, mask=d < D, sem="relaxed")


def backward(saved, grad_y, needs=(True, True)):
    bias, offsets = saved
    T, D = grad_y.shape
    E = bias.shape[0]
    dbias = None
    if needs[1]:
        total = torch.zeros(E, D, device=bias.device, dtype=torch.float32)
        BLOCK_D = max(32, min(128, triton.next_power_of_2(D)))
        _segment_sums[(triton.cdiv(D, BLOCK_D), triton.cdiv(T, 64))](
            grad_y, offsets, total, T, D, E, grad_y.stride(0), grad_y.stride(1),
            BLOCK_T=64, BLOCK_D=BLOCK_D, BLOCK_E=triton.next_power_of_2(E), num_warps=4,
        )  # fmt: skip
        dbias = total.to(bias.dtype)
    return grad_y if needs[0] else None, dbias


# --- check ---
SWEEP = (
    {"T": 256, "E": 4, "D": 64},
    {"T": 171, "E": 7, "D": 75},
    {"T": 130, "E": 3, "D": 40, "dtype": "bfloat16"},
    {"T": 50, "E": 1, "D": 33, "dtype": "float16"},
)
BENCH = ({"T": 32768, "E": 64, "D": 2048, "dtype": "bfloat16"},)


def make_args(T, E, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = (torch.randn(T, D, generator=g), torch.randn(E, D, generator=g))
    cuts = torch.randint(0, T + 1, (E - 1,), generator=g).sort().values
    # With more than two, the second expert gets no rows.
    if E > 2:
        cuts[1] = cuts[0]
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), cuts, torch.tensor([T]))).to(torch.int32)
    x, bias = (t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors)
    return x, bias, offsets.to(device)


def reference(x, bias, offsets):
    row = torch.arange(x.shape[0], device=x.device, dtype=offsets.dtype)
    expert = torch.searchsorted(offsets[1:].contiguous(), row, right=True)
    return (x.float() + bias.float()[expert]).to(x.dtype)
