"""Rows scaled per column and added at indices: one pass over the gathered cotangent gives dsrc and sums dscale.

y = x, then y[index[t]] += scale src[t]. A program owns a column tile and walks a share of the rows t: dsrc leaves row
by row, the column sums of src dy[index] stay in registers and end as one partial row per share.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "scaled_index_add",
    "family": "gather_scatter",
    "op": "index_add",
    "schema": 1,
    "techniques": ("gather-form", "column-owner", "two-stage-partials", "shared-gradient", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "src", "scale"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _scaled_scatter(Sums, Src, Scale, Index, T, D, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    scale = tl.load(Scale + d, mask=d < D, other=0.0).to(tl.float32)
    row = tl.load(Index + t, mask=t < T, other=0).to(tl.int64)
    ok = (t < T) & (d < D)
    scaled = scale * tl.load(Src + t * D + d, mask=ok, other=0.0).to(tl.float32)
    tl.atomic_add(Sums + row * D + d, scaled, mask=ok, sem="relaxed")


def forward(x, src, scale, index):
    """x (V, D), src (T, D), scale (D), index (T) with repetitions."""
    src, scale, index = src.contiguous(), scale.contiguous(), index.contiguous()
    T, D = src.shape
    sums = torch.empty(x.shape, device=x.device, dtype=torch.float32)
    sums.copy_(x)
    BLOCK_D = min(256, triton.next_power_of_2(D))
    BLOCK_T = 1024 // BLOCK_D
    _scaled_scatter[(triton.cdiv(T, BLOCK_T), triton.cdiv(D, BLOCK_D))](
        sums, src, scale, index, T, D, BLOCK_T=BLOCK_T, BLOCK_D=BLOCK_D, num_warps=4
    )
    return sums.to(x.dtype), (src, scale, index)


# --- backward ---
@triton.jit
def _scaled_gather_bwd(
    DY, Src, Scale, Index, DSrc, Parts, T, D, rows_each, dy_v, dy_d, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr
):
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    share = tl.program_id(1).to(tl.int64)
    last = tl.minimum((share + 1) * rows_each, T)
    scale = tl.load(Scale + d, mask=d < D, other=0.0).to(tl.float32)
    dscale = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for start in tl.range(share * rows_each, last, BLOCK_T, num_stages=2):
        t = start + tl.arange(0, BLOCK_T)[:, None]
        row = tl.load(Index + t, mask=t < last, other=0).to(tl.int64)
        ok = (t < last) & (d < D)
        dy = tl.load(DY + row * dy_v + d.to(tl.int64) * dy_d, mask=ok, other=0.0).to(tl.float32)
        dscale += dy * tl.load(Src + t * D + d, mask=ok, other=0.0).to(tl.float32)
        tl.store(DSrc + t * D + d, scale * dy, mask=ok)
    tl.store(Parts + share * D + d, tl.sum(dscale, 0)[None, :], mask=d < D)


def backward(saved, grad_y, needs=None):
    src, scale, index = saved
    T, D = src.shape
    dsrc = torch.empty_like(src)
    BLOCK_D = min(512, triton.next_power_of_2(D))
    BLOCK_T = 2048 // BLOCK_D
    tiles = triton.cdiv(D, BLOCK_D)
    # About eight programs for each of 132 processors, but at least four tiles of rows for every partial sum.
    rows_each = max(4 * BLOCK_T, triton.cdiv(T * tiles, 1056))
    shares = triton.cdiv(T, rows_each)
    parts = torch.empty(shares, D, device=src.device, dtype=torch.float32)
    _scaled_gather_bwd[(tiles, shares)](
        grad_y, src, scale, index, dsrc, parts, T, D, rows_each, *grad_y.stride(),
        BLOCK_T=BLOCK_T, BLOCK_D=BLOCK_D, num_warps=2,
    )  # fmt: skip
    # The gradient of x is the cotangent itself: no kernel, no copy.
    return grad_y, dsrc, parts.sum(0).to(scale.dtype)


# --- check ---
SWEEP = (
    {"V": 10, "T": 24, "D": 64},
    {"V": 7, "T": 229, "D": 50},
    {"V": 16, "T": 40, "D": 300, "dtype": "bfloat16"},
)
BENCH = ({"V": 32768, "T": 524288, "D": 512, "dtype": "bfloat16"},)


def make_args(V, T, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = ((V, D), (T, D), (D,))
    floats = (torch.randn(*shape, generator=g).to(device=device, dtype=getattr(torch, dtype)) for shape in shapes)
    return *floats, torch.randint(0, V, (T,), generator=g).to(device)


def reference(x, src, scale, index):
    return x.float().index_add(0, index, scale.float() * src.float()).to(x.dtype)
