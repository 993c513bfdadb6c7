"""Power-average pooling along time: dx takes the power rule as a ratio to the saved output, which never overflows.

y[o] = (sum over the window of |x|^p)^(1/p), and dy[o]/dx[t] = sign(x) (|x| / y)^(p - 1). As |x| <= y the ratio lies in
[0, 1], where x^(p-1) and y^(1-p) alone would leave the range of fp32. Windows overlap: a lane owns the steps between
two beginnings of windows, over which the same few windows lie, and takes each window and each logarithm once. A window
of zeros passes no gradient.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

META = {
    "slug": "lp_pool",
    "family": "pool_vision",
    "op": "lp_pool1d",
    "schema": 1,
    "techniques": ("gather-form", "saved-output", "halo", "strided-cotangent"),
    "saves": ("y: fp32 (B, C, T_OUT)",),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": False,
}


# --- forward ---
@triton.jit
def _lp_pool_fwd(X, Y, Root, T, T_OUT, power, K: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for tap in tl.static_range(K):
        # Ones keep the logarithm finite in lanes without a window.
        x = tl.load(X + row * T + o * STRIDE + tap, mask=o < T_OUT, other=1.0).to(tl.float32)
        total += tl.exp2(power * tl.log2(tl.abs(x)))
    y = tl.exp2(tl.log2(total) / power)
    tl.store(Y + row * T_OUT + o, y, mask=o < T_OUT)
    # The ratio needs more digits than a narrow output keeps.
    tl.store(Root + row * T_OUT + o, y, mask=o < T_OUT)


def forward(x, kernel, stride, power):
    x = x.contiguous()
    B, C, T = x.shape
    T_OUT = (T - kernel) // stride + 1
    y = torch.empty(B, C, T_OUT, device=x.device, dtype=x.dtype)
    root = torch.empty(B, C, T_OUT, device=x.device, dtype=torch.float32)
    BLOCK = min(512, max(32, triton.next_power_of_2(T_OUT)))
    _lp_pool_fwd[(B * C, triton.cdiv(T_OUT, BLOCK))](
        x, y, root, T, T_OUT, power, K=kernel, STRIDE=stride, BLOCK=BLOCK, num_warps=4
    )
    return y, (x, root, kernel, stride, power)


# --- backward ---
@triton.jit
def _lp_pool_bwd(
    DY, X, Root, DX, C, T, T_OUT, power, dy_b, dy_c, dy_t,
    K: tl.constexpr, STRIDE: tl.constexpr, REACH: tl.constexpr, BLOCK: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    # Step r behind the beginning of window a; SIDE is STRIDE or the power of two above it.
    a = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[:, None]
    r = tl.arange(0, SIDE)[None, :]
    t = a * STRIDE + r
    own = (r < STRIDE) & (t < T)
    DY += row // C * dy_b + row % C * dy_c
    x = tl.load(X + row * T + t, mask=own, other=1.0).to(tl.float32)
    log_x = libdevice.fast_log2f(tl.abs(x))
    total = tl.zeros((BLOCK, SIDE), tl.float32)
    # At most REACH windows lie over a step: the last that begins at or before it, and those before that one.
    for back in tl.static_range(REACH):
        o = a - back
        exists = (o >= 0) & (o < T_OUT)
        y = tl.load(Root + row * T_OUT + o, mask=exists, other=0.0)
        dy = tl.load(DY + o.to(tl.int64) * dy_t, mask=exists, other=0.0).to(tl.float32)
        share = tl.exp2((power - 1.0) * (log_x - libdevice.fast_log2f(y)))
        total += tl.where((y > 0.0) & (r + back * STRIDE < K), dy * share, 0.0)
    tl.store(DX + row * T + t, tl.where(x < 0.0, -total, total), mask=own)


def backward(saved, grad_y, needs=None):
    x, root, kernel, stride, power = saved
    B, C, T = x.shape
    dx = torch.empty_like(x)
    cells = triton.cdiv(T, stride)
    BLOCK = min(2048, max(32, triton.next_power_of_2(cells)))
    _lp_pool_bwd[(B * C, triton.cdiv(cells, BLOCK))](
        grad_y, x, root, dx, C, T, root.shape[2], power, *grad_y.stride(),
        K=kernel, STRIDE=stride, REACH=triton.cdiv(kernel, stride), BLOCK=BLOCK, SIDE=triton.next_power_of_2(stride),
        num_warps=4,
    )  # fmt: skip
    return dx


# --- check ---
SWEEP = (
    {"B": 1, "C": 2, "T": 128, "kernel": 4, "stride": 2, "power": 3.0},
    {"B": 2, "C": 1, "T": 141, "kernel": 5, "stride": 3, "power": 2.5},
    {"B": 1, "C": 2, "T": 64, "kernel": 2, "stride": 3, "power": 2.0, "dtype": "bfloat16"},
    {"B": 1, "C": 1, "T": 50, "kernel": 3, "stride": 1, "power": 4.0, "dtype": "float16"},
)
BENCH = ({"B": 32, "C": 512, "T": 4096, "kernel": 4, "stride": 2, "power": 3.0, "dtype": "float32"},)


def make_args(B, C, T, kernel, stride, power, dtype="float32", device="cpu", seed=0):
    if kernel > T:
        raise ValueError("the window must fit into the sequence")
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(B, C, T, generator=g).to(device=device, dtype=getattr(torch, dtype))
    return x, kernel, stride, power


def reference(x, kernel, stride, power):
    return (x.float().unfold(2, kernel, stride).abs() ** power).sum(3).pow(1.0 / power).to(x.dtype)
