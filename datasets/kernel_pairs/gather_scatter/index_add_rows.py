"""y = x with alpha src added at indexed rows: the scatter's adjoint is a gather, and x gets the cotangent unchanged."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "index_add_rows",
    "family": "gather_scatter",
    "op": "index_add",
    "schema": 1,
    "techniques": ("gather-form", "shared-gradient", "multi-row-tile", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "src"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _add_rows(Sums, Src, Index, T, D, alpha, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    row = tl.load(Index + t, mask=t < T, other=0).to(tl.int64)
    ok = (t[:, None] < T) & (d[None, :] < D)
    src = tl.load(Src + t[:, None] * D + d[None, :], mask=ok, other=0.0).to(tl.float32)
    tl.atomic_add(Sums + row[:, None] * D + d[None, :], alpha * src, mask=ok, sem="relaxed")


def forward(x, src, index, alpha=1.0):
    """x (V, D), src (T, D), index (T) with repetitions."""
    src, index = src.contiguous(), index.contiguous()
    T, D = src.shape
    # Repeated rows are summed in fp32 and rounded once.
    sums = torch.empty(x.shape, device=x.device, dtype=torch.float32)
    sums.copy_(x)
    BLOCK_D = min(256, triton.next_power_of_2(D))
    BLOCK_T = 1024 // BLOCK_D
    _add_rows[(triton.cdiv(T, BLOCK_T), triton.cdiv(D, BLOCK_D))](
        sums, src, index, T, D, alpha, BLOCK_T=BLOCK_T, BLOCK_D=BLOCK_D, num_warps=4
    )
    return sums.to(x.dtype), (index, alpha)


# --- backward ---
@triton.jit
def _gather_rows(DY, Index, DSrc, T, D, alpha, dy_v, dy_d, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    row = tl.load(Index + t, mask=t < T, other=0).to(tl.int64)[:, None]
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D).to(tl.int64)[None, :]
        ok = (t[:, None] < T) & (d < D)
        dy = tl.load(DY + row * dy_v + d * dy_d, mask=ok, other=0.0, eviction_policy="evict_last").to(tl.float32)
        # Rows of dy are read again and again, those of dsrc never: L2 is for the former.
        tl.store(DSrc + t[:, None] * D + d, alpha * dy, mask=ok, eviction_policy="evict_first")


def backward(saved, grad_y, needs=None):
    index, alpha = saved
    T, D = index.numel(), grad_y.shape[1]
    dsrc = torch.empty(T, D, device=grad_y.device, dtype=grad_y.dtype)
    BLOCK_D = min(512, triton.next_power_of_2(D))
    BLOCK_T = max(1, 2048 // BLOCK_D)
    _gather_rows[(triton.cdiv(T, BLOCK_T),)](
        grad_y, index, dsrc, T, D, alpha, *grad_y.stride(), BLOCK_T=BLOCK_T, BLOCK_D=BLOCK_D, num_warps=4
    )
    # The gradient of x is the cotangent itself: no kernel, no copy.
    return grad_y, dsrc


# --- check ---
SWEEP = (
    {"V": 10, "T": 24, "D": 64},
    {"V": 7, "T": 29, "D": 50},
    {"V": 16, "T": 40, "D": 600, "dtype": "bfloat16"},
)
BENCH = ({"V": 32768, "T": 131072, "D": 512, "dtype": "bfloat16"},)


def make_args(V, T, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, src = (torch.randn(rows, D, generator=g).to(device=device, dtype=getattr(torch, dtype)) for rows in (V, T))
    return x, src, torch.randint(0, V, (T,), generator=g).to(device), -0.5


def reference(x, src, index, alpha=1.0):
    return x.float().index_add(0, index, src.float(), alpha=alpha).to(x.dtype)
