"""Smooth minimum of rows with a learned temperature: the softmax weights are rebuilt from the saved result.

    y = -t log sum exp(-x / t),    dx = dy p,    dt = sum of dy (y - <p, x>) / t,    p = exp((y - x) / t)

The result is its own normaliser. While a row's gradient is written, its mean <p, x - y> is collected: a fixed grid
walks the rows and every program leaves one number for t.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "softmin_pool_lse",
    "family": "reduction_stat",
    "op": "softmin_pool",
    "schema": 1,
    "techniques": ("saved-lse", "persistent-grid", "scalar-gradient", "recompute", "strided-cotangent"),
    "saves": ("smooth: fp32 (M)",),
    "grads": ("x", "temperature"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _softmin_fwd(X, T, Y, Smooth, N, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK_N)
    t = tl.load(T).to(tl.float32)
    # In every lane the least value so far and the sum relative to it; beyond the row everything is far above.
    least = tl.full((BLOCK_N,), 1.0e30, tl.float32)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, N, BLOCK_N):
        n = start + lane
        x = tl.load(X + row * N + n, mask=n < N, other=float("inf")).to(tl.float32)
        lower = tl.minimum(least, x)
        total = total * tl.exp((lower - least) / t) + tl.exp((lower - x) / t)
        least = lower
    low = tl.min(least, 0)
    total = tl.sum(total * tl.exp((low - least) / t), 0)
    smooth = low - t * tl.log(total)
    tl.store(Y + row, smooth)
    tl.store(Smooth + row, smooth)


def forward(x, temperature):
    """x (M, N), temperature (1), positive."""
    x = x.contiguous()
    M, N = x.shape
    y = torch.empty(M, device=x.device, dtype=x.dtype)
    smooth = torch.empty(M, device=x.device, dtype=torch.float32)
    BLOCK_N = min(2048, triton.next_power_of_2(N))
    _softmin_fwd[(M,)](x, temperature, y, smooth, N, BLOCK_N=BLOCK_N, num_warps=max(1, min(8, BLOCK_N // 256)))
    return y, (x, temperature, smooth)


# --- backward ---
@triton.jit
def _softmin_bwd(DY, X, T, Smooth, DX, Parts, M, N, dy_m, BLOCK_N: tl.constexpr):
    first = tl.program_id(0)
    t = tl.load(T).to(tl.float32)
    dt = 0.0
    for row in range(first.to(tl.int64), M, tl.num_programs(0)):
        dy = tl.load(DY + row * dy_m).to(tl.float32)
        smooth = tl.load(Smooth + row)
        drift = tl.zeros((BLOCK_N,), tl.float32)
        for start in range(0, N, BLOCK_N):
            n = start + tl.arange(0, BLOCK_N)
            # Beyond the row a gap of zero, which neither counts nor is stored.
            gap = tl.load(X + row * N + n, mask=n < N, other=0.0).to(tl.float32) - smooth
            gap = tl.where(n < N, gap, 0.0)
            p = tl.exp(-gap / t)
            tl.store(DX + row * N + n, dy * p, mask=n < N)
            drift += p * gap
        dt -= dy * tl.sum(drift, 0)
    tl.store(Parts + first, dt / t)


def backward(saved, grad_y, needs=None):
    x, temperature, smooth = saved
    M, N = x.shape
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 4
    programs = min(M, 8 * processors)
    dx = torch.empty_like(x)
    parts = torch.empty(programs, device=x.device, dtype=torch.float32)
    BLOCK_N = min(2048, triton.next_power_of_2(N))
    _softmin_bwd[(programs,)](
        grad_y, x, temperature, smooth, dx, parts, M, N, grad_y.stride(0),
        BLOCK_N=BLOCK_N, num_warps=max(1, min(8, BLOCK_N // 256)),
    )  # fmt: skip
    return dx, parts.sum().to(temperature.dtype).view(1)


# --- check ---
SWEEP = ({"M": 12, "N": 64}, {"M": 5, "N": 2603}, {"M": 21, "N": 72, "dtype": "bfloat16"})
BENCH = ({"M": 16384, "N": 4096, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(M, N, generator=g)
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, torch.tensor([0.7])))


def reference(x, temperature):
    t = temperature.float()
    return (-t * torch.logsumexp(-x.float() / t, -1)).to(x.dtype)
