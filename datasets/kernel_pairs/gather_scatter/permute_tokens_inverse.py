"""Rows reordered by a permutation: its inverse, written by the forward, makes the gradient's scatter a gather."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "permute_tokens_inverse",
    "family": "gather_scatter",
    "op": "permute_rows",
    "schema": 1,
    "techniques": ("inverse-map", "gather-form", "strided-cotangent"),
    "saves": ("inverse: i32 (T)",),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _permute_fwd(X, Order, Inverse, Y, T, D, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    source = tl.load(Order + t, mask=t < T, other=0).to(tl.int64)
    # The inverse is a scatter of four bytes a row, on the side of a copy of whole rows.
    tl.store(Inverse + source, t, mask=t < T)
    target = t.to(tl.int64)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        ok = (t[:, None] < T) & (d[None, :] < D)
        rows = tl.load(X + source[:, None] * D + d[None, :], mask=ok)
        tl.store(Y + target[:, None] * D + d[None, :], rows, mask=ok)


def forward(x, order):
    """x (T, D), order a permutation of the rows: y[t] = x[order[t]]."""
    x, order = x.contiguous(), order.contiguous()
    T, D = x.shape
    y = torch.empty_like(x)
    inverse = torch.empty(T, device=x.device, dtype=torch.int32)
    BLOCK_D = min(1024, triton.next_power_of_2(D))
    BLOCK_T = max(1, 2048 // BLOCK_D)
    _permute_fwd[(triton.cdiv(T, BLOCK_T),)](x, order, inverse, y, T, D, BLOCK_T=BLOCK_T, BLOCK_D=BLOCK_D, num_warps=4)
    return y, (inverse,)


# --- backward ---
@triton.jit
def _permute_bwd(DY, Inverse, DX, D, dy_t, dy_d, BLOCK_D: tl.constexpr):
    # Whole rows either way, random ones are read and neighbours are written: full sectors, and stores that merge.
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    source = tl.load(Inverse + row).to(tl.int64)
    dy = tl.load(DY + source * dy_t + d.to(tl.int64) * dy_d, mask=d < D)
    tl.store(DX + row * D + d, dy, mask=d < D)


def backward(saved, grad_y, needs=None):
    (inverse,) = saved
    T, D = grad_y.shape
    dx = torch.empty(T, D, device=grad_y.device, dtype=grad_y.dtype)
    BLOCK_D = min(4096, triton.next_power_of_2(D))
    _permute_bwd[(T, triton.cdiv(D, BLOCK_D))](
        grad_y, inverse, dx, D, *grad_y.stride(), BLOCK_D=BLOCK_D, num_warps=max(1, min(8, BLOCK_D // 256))
    )
    return dx


# --- check ---
SWEEP = ({"T": 24, "D": 64}, {"T": 29, "D": 1050}, {"T": 16, "D": 36, "dtype": "bfloat16"})
BENCH = ({"T": 32768, "D": 4096, "dtype": "bfloat16"},)


def make_args(T, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(T, D, generator=g).to(device=device, dtype=getattr(torch, dtype))
    return x, torch.randperm(T, generator=g).to(device)


def reference(x, order):
    return x[order]
