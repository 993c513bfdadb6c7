"""Max pooling over disjoint windows: nothing is saved, each window's program finds its winner again.

Every pixel lies in at most one window, so a backward program owns whole windows: it stores dy at the first maximum and
zeros elsewhere, rows and columns left over at the border included. Each element of dx is written once, without a fill.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "maxpool2d_nonoverlap",
    "family": "pool_vision",
    "op": "max_pool2d",
    "schema": 1,
    "techniques": ("argmax-routing", "recompute", "row-local", "strided-cotangent"),
    "saves": (),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _disjoint_max_fwd(X, Y, H, W, HO, WO, K: tl.constexpr, BLOCK: tl.constexpr):
    plane = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    corner = X + plane * H * W + (o // WO * K) * W + o % WO * K
    best = tl.load(corner, mask=o < HO * WO, other=0.0)
    for tap in tl.static_range(1, K * K):
        x = tl.load(corner + tap // K * W + tap % K, mask=o < HO * WO, other=0.0)
        best = tl.where(x > best, x, best)
    tl.store(Y + plane * HO * WO + o, best, mask=o < HO * WO)


def forward(x, kernel):
    x = x.contiguous()
    B, C, H, W = x.shape
    HO, WO = H // kernel, W // kernel
    y = torch.empty(B, C, HO, WO, device=x.device, dtype=x.dtype)
    _disjoint_max_fwd[(B * C, triton.cdiv(HO * WO, 512))](x, y, H, W, HO, WO, K=kernel, BLOCK=512, num_warps=4)
    return y, (x, kernel)


# --- backward ---
@triton.jit
def _disjoint_max_bwd(
    DY, X, DX, C, H, W, HO, WO, dy_b, dy_c, dy_h, dy_w,
    K: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    plane = tl.program_id(0).to(tl.int64)
    # Windows are counted in whole or in part. A tile is (window, column in it): one row of all its windows is
    # contiguous in memory, for the load as for the store.
    wide = (W + K - 1) // K
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    oh = o // wide
    ow = o % wide
    whole = (oh < HO) & (ow < WO)
    kw = tl.arange(0, COLS)
    w = ow[:, None] * K + kw[None, :]
    in_row = (kw[None, :] < K) & (w < W)
    base = plane * H * W + w
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    winner = tl.zeros((BLOCK,), tl.int32)
    for kh in tl.static_range(K):
        h = oh * K + kh
        x = tl.load(X + base + h[:, None] * W, mask=in_row & whole[:, None], other=float("-inf")).to(tl.float32)
        row_best = tl.max(x, 1)
        row_first = tl.min(tl.where(x == row_best[:, None], kw[None, :], COLS), 1)
        # Strictly greater: the first of equals wins, as in the forward.
        better = row_best > best
        best = tl.where(better, row_best, best)
        winner = tl.where(better, kh * K + row_first, winner)
    source = DY + (plane // C) * dy_b + (plane % C) * dy_c + oh.to(tl.int64) * dy_h + ow.to(tl.int64) * dy_w
    dy = tl.load(source, mask=whole, other=0.0)
    for kh in tl.static_range(K):
        h = oh * K + kh
        won = winner[:, None] == kh * K + kw[None, :]
        tl.store(DX + base + h[:, None] * W, tl.where(won, dy[:, None], 0.0), mask=in_row & (h < H)[:, None])


def backward(saved, grad_y, needs=None):
    x, kernel = saved
    B, C, H, W = x.shape
    HO, WO = H // kernel, W // kernel
    dx = torch.empty_like(x)
    windows = triton.cdiv(H, kernel) * triton.cdiv(W, kernel)
    _disjoint_max_bwd[(B * C, triton.cdiv(windows, 256))](
        grad_y, x, dx, C, H, W, HO, WO, *grad_y.stride(),
        K=kernel, COLS=triton.next_power_of_2(kernel), BLOCK=256, num_warps=4,
    )  # fmt: skip
    return dx


# --- check ---
SWEEP = (
    {"B": 1, "C": 2, "H": 16, "W": 32, "kernel": 2},
    {"B": 2, "C": 1, "H": 17, "W": 22, "kernel": 3},
    {"B": 1, "C": 2, "H": 12, "W": 21, "kernel": 4, "dtype": "bfloat16"},
    {"B": 1, "C": 1, "H": 9, "W": 12, "kernel": 2, "dtype": "float16"},
)
BENCH = ({"B": 32, "C": 64, "H": 112, "W": 112, "kernel": 2, "dtype": "float32"},)


def make_args(B, C, H, W, kernel, dtype="float32", device="cpu", seed=0):
    if kernel > min(H, W):
        raise ValueError("the window must fit into the image")
    g = torch.Generator().manual_seed(seed)
    return torch.randn(B, C, H, W, generator=g).to(device=device, dtype=getattr(torch, dtype)), kernel


def reference(x, kernel):
    return torch.nn.functional.max_pool2d(x.float(), kernel).to(x.dtype)
