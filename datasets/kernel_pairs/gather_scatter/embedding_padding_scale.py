"""Embedding with padding_idx and scale_grad_by_freq: a counting pass, then a scatter that averages instead of sums.

The lookup is an ordinary one; the two options change the gradient alone. The row of `padding_idx` is not trained, and
every other row gets the mean, not the sum, of the cotangents of its occurrences.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "embedding_padding_scale",
    "family": "gather_scatter",
    "op": "embedding",
    "schema": 1,
    "techniques": ("atomics", "masking", "multi-row-tile", "strided-cotangent"),
    "saves": (),
    "grads": ("weight",),
    "gradient": "custom",
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _table_rows_fwd(Weight, Ids, Y, T, D, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    source = tl.load(Ids + t, mask=t < T, other=0).to(tl.int64) * D
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        ok = (t[:, None] < T) & (d[None, :] < D)
        tl.store(Y + t[:, None] * D + d[None, :], tl.load(Weight + source[:, None] + d[None, :], mask=ok), mask=ok)


def forward(weight, ids, padding_idx):
    weight, ids = weight.contiguous(), ids.contiguous()
    T, D = ids.numel(), weight.shape[1]
    y = torch.empty(T, D, device=weight.device, dtype=weight.dtype)
    BLOCK_D = min(512, triton.next_power_of_2(D))
    _table_rows_fwd[(triton.cdiv(T, 4),)](weight, ids, y, T, D, BLOCK_T=4, BLOCK_D=BLOCK_D, num_warps=4)
    return y, (weight, ids, padding_idx)


# --- backward ---
@triton.jit
def _count_ids(Ids, Counts, T, padding_idx, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(Ids + t, mask=t < T, other=0).to(tl.int64)
    # Padding is the most frequent id: counting it would queue a whole batch on one address.
    tl.atomic_add(Counts + ids, 1, mask=(t < T) & (ids != padding_idx), sem="relaxed")


@triton.jit
def _mean_scatter(
    DY, Ids, Counts, DW, T, D, padding_idx, dy_t, dy_d, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = (tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)).to(tl.int64)
    ids = tl.load(Ids + t, mask=t < T, other=0).to(tl.int64)
    trained = (t < T) & (ids != padding_idx)
    # A trained id has been counted at least once: no division by zero, and padded lanes divide by one.
    share = 1.0 / tl.load(Counts + ids, mask=trained, other=1).to(tl.float32)
    ok = trained[:, None] & (d[None, :] < D)
    dy = tl.load(DY + t[:, None] * dy_t + d[None, :] * dy_d, mask=ok, other=0.0).to(tl.float32)
    # Dividing each summand keeps the running sum of a frequent row at the size of its result.
    tl.atomic_add(DW + ids[:, None] * D + d[None, :], dy * share[:, None], mask=ok, sem="relaxed")


def backward(saved, grad_y, needs=None):
    weight, ids, padding_idx = saved
    V, D = weight.shape
    T = ids.numel()
    counts = torch.zeros(V, device=weight.device, dtype=torch.int32)
    dw = torch.zeros(V, D, device=weight.device, dtype=torch.float32)
    _count_ids[(triton.cdiv(T, 1024),)](ids, counts, T, padding_idx, BLOCK=1024)
    BLOCK_D = min(512, triton.next_power_of_2(D))
    _mean_scatter[(triton.cdiv(T, 4), triton.cdiv(D, BLOCK_D))](
        grad_y, ids, counts, dw, T, D, padding_idx, *grad_y.stride(), BLOCK_T=4, BLOCK_D=BLOCK_D, num_warps=4
    )
    return dw.to(weight.dtype)


# --- check ---
SWEEP = ({"V": 10, "T": 40, "D": 64}, {"V": 7, "T": 29, "D": 50}, {"V": 16, "T": 24, "D": 32, "dtype": "bfloat16"})
BENCH = ({"V": 128256, "T": 16384, "D": 2048, "dtype": "bfloat16"},)


def make_args(V, T, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(V, D, generator=g).to(device=device, dtype=getattr(torch, dtype))
    padding_idx = V // 2
    ids = torch.randint(0, V, (T,), generator=g)
    # A third of the batch is padding.
    ids[torch.rand(T, generator=g) < 0.3] = padding_idx
    return weight, ids.to(device), padding_idx


def reference(weight, ids, padding_idx):
    return torch.nn.functional.embedding(ids, weight, padding_idx, scale_grad_by_freq=True)


def surrogate(weight, ids, padding_idx):
    return torch.nn.functional.embedding(ids, weight, padding_idx, scale_grad_by_freq=True)
