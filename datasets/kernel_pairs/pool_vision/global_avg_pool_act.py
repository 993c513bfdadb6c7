"""Global average of SiLU over a plane: the backward spreads dy / (H W) and computes silu' from x again, plane by plane.

Small planes share a tile with their neighbours, large ones are cut over programs. The forward owns planes and never
writes the activation; the backward has no sum at all, so it owns pieces of planes.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "global_avg_pool_act",
    "family": "pool_vision",
    "op": "global_avg_pool_silu",
    "schema": 1,
    "techniques": ("broadcast-adjoint", "recompute", "multi-row-tile", "strided-cotangent"),
    "saves": (),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _gap_silu_fwd(X, Y, planes, size, ROWS: tl.constexpr, COLS: tl.constexpr):
    plane = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((ROWS, COLS), tl.float32)
    for start in range(0, size, COLS):
        pixel = start + tl.arange(0, COLS)
        inside = (plane[:, None] < planes) & (pixel[None, :] < size)
        # SiLU of the zeros outside is zero.
        x = tl.load(X + plane[:, None] * size + pixel[None, :], mask=inside, other=0.0).to(tl.float32)
        total += x * tl.sigmoid(x)
    tl.store(Y + plane, tl.sum(total, 1) / size, mask=plane < planes)


def _tile(size):
    # About 2048 pixels: 16 for each thread of four warps.
    COLS = min(2048, triton.next_power_of_2(size))
    return 2048 // COLS, COLS


def forward(x):
    x = x.contiguous()
    B, C, H, W = x.shape
    ROWS, COLS = _tile(H * W)
    y = torch.empty(B, C, device=x.device, dtype=x.dtype)
    _gap_silu_fwd[(triton.cdiv(B * C, ROWS),)](x, y, B * C, H * W, ROWS=ROWS, COLS=COLS, num_warps=4)
    return y, (x,)


# --- backward ---
@triton.jit
def _gap_silu_bwd(DY, X, DX, planes, size, C, dy_b, dy_c, ROWS: tl.constexpr, COLS: tl.constexpr):
    plane = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    pixel = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = (plane[:, None] < planes) & (pixel[None, :] < size)
    at = plane[:, None] * size + pixel[None, :]
    share = tl.load(DY + plane // C * dy_b + plane % C * dy_c, mask=plane < planes, other=0.0).to(tl.float32) / size
    x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.sigmoid(x)
    tl.store(DX + at, share[:, None] * gate * (1.0 + x * (1.0 - gate)), mask=inside)


def backward(saved, grad_y, needs=None):
    (x,) = saved
    B, C, H, W = x.shape
    ROWS, COLS = _tile(H * W)
    dx = torch.empty_like(x)
    _gap_silu_bwd[(triton.cdiv(B * C, ROWS), triton.cdiv(H * W, COLS))](
        grad_y, x, dx, B * C, H * W, C, *grad_y.stride(), ROWS=ROWS, COLS=COLS, num_warps=4
    )
    return dx


# --- check ---
SWEEP = (
    {"B": 2, "C": 8, "H": 8, "W": 8},
    {"B": 1, "C": 3, "H": 37, "W": 61},
    {"B": 3, "C": 5, "H": 7, "W": 7, "dtype": "bfloat16"},
    {"B": 1, "C": 2, "H": 9, "W": 11, "dtype": "float16"},
)
BENCH = (
    {"B": 1024, "C": 1280, "H": 7, "W": 7, "dtype": "bfloat16"},
    {"B": 32, "C": 256, "H": 56, "W": 56, "dtype": "bfloat16"},
)


def make_args(B, C, H, W, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(B, C, H, W, generator=g).to(device=device, dtype=getattr(torch, dtype)),)


def reference(x):
    return torch.nn.functional.silu(x.float()).mean((2, 3)).to(x.dtype)
