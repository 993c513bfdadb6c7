"""L2 normalisation of query heads times a learned temperature per head, y = tau[h] * x / ||x||, for (B, H, S, D).

The row sum of dy * u, u the unit vector, is what the projection of dx needs; summed over a head's rows it is dtau. A
program owns a tile of tokens of one head, so one atomic for each tile carries the scalar's gradient.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "l2norm_heads_scaled",
    "family": "norm_row",
    "op": "l2_normalize",
    "schema": 1,
    "techniques": ("multi-row-tile", "recompute", "atomics", "scalar-gradient", "one-launch", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "tau"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _head_tile(P, s, d, S, D, p_b, p_h, p_s, p_d, H):
    """The tile (s, d) of the program's head in fp32, zero outside, and its mask; axis 1 of the grid is batch * head."""
    head = tl.program_id(1)
    ok = (s < S) & (d < D)
    at = (head // H).to(tl.int64) * p_b + (head % H).to(tl.int64) * p_h + s.to(tl.int64) * p_s + d.to(tl.int64) * p_d
    return tl.load(P + at, mask=ok, other=0.0).to(tl.float32), ok


@triton.jit
def _unit_heads_fwd(X, Tau, Y, H, S, D, x_b, x_h, x_s, x_d, eps, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    s = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    x, ok = _head_tile(X, s, d, S, D, x_b, x_h, x_s, x_d, H)
    inv = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) + eps)
    tau = tl.load(Tau + tl.program_id(1) % H).to(tl.float32)
    out = (tl.program_id(1).to(tl.int64) * S + s) * D + d
    tl.store(Y + out, tau * x * inv, mask=ok)


def _tile(D):
    block = triton.next_power_of_2(D)
    return {"ROWS": max(1, 4096 // block), "BLOCK_D": block, "num_warps": 8}


def forward(x, tau, eps=1e-6):
    # x keeps its layout: heads often lie inside the tokens, (B, S, H, D) in memory.
    B, H, S, D = x.shape
    y = torch.empty(B, H, S, D, device=x.device, dtype=x.dtype)
    tile = _tile(D)
    _unit_heads_fwd[(triton.cdiv(S, tile["ROWS"]), B * H)](x, tau, y, H, S, D, *x.stride(), eps, **tile)
    return y, (x, tau, eps)


# --- backward ---
@triton.jit
def _unit_heads_bwd(
    DY, X, Tau, DX, DTau, H, S, D, x_b, x_h, x_s, x_d, dy_b, dy_h, dy_s, dy_d, eps,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    x, ok = _head_tile(X, s, d, S, D, x_b, x_h, x_s, x_d, H)
    dy, _ = _head_tile(DY, s, d, S, D, dy_b, dy_h, dy_s, dy_d, H)
    inv = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) + eps)
    u = x * inv
    along = tl.sum(dy * u, 1, keep_dims=True)
    tl.atomic_add(DTau + tl.program_id(1) % H, tl.sum(along), sem="relaxed")
    tau = tl.load(Tau + tl.program_id(1) % H).to(tl.float32)
    out = (tl.program_id(1).to(tl.int64) * S + s) * D + d
    tl.store(DX + out, tau * inv * (dy - u * along), mask=ok)


def backward(saved, grad_y, needs=None):
    x, tau, eps = saved
    B, H, S, D = x.shape
    dx = torch.empty(B, H, S, D, device=x.device, dtype=x.dtype)
    dtau = torch.zeros(H, device=x.device, dtype=torch.float32)
    tile = _tile(D)
    _unit_heads_bwd[(triton.cdiv(S, tile["ROWS"]), B * H)](
        grad_y, x, tau, dx, dtau, H, S, D, *x.stride(), *grad_y.stride(), eps, **tile
    )
    return dx, dtau.to(tau.dtype)


# --- check ---
SWEEP = (
    {"B": 2, "H": 2, "S": 80, "D": 32},
    {"B": 1, "H": 3, "S": 101, "D": 21, "dtype": "float16"},
    {"B": 2, "H": 2, "S": 40, "D": 64, "dtype": "bfloat16"},
)
BENCH = ({"B": 4, "H": 32, "S": 4096, "D": 128, "dtype": "bfloat16"},)


def make_args(B, H, S, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(B, S, H, D, generator=g).to(device=device, dtype=getattr(torch, dtype)).transpose(1, 2)
    tau = (torch.rand(H, generator=g) * 5.0 + 5.0).to(device=device, dtype=getattr(torch, dtype))
    return x, tau


def reference(x, tau, eps=1e-6):
    xf = x.float()
    unit = xf * torch.rsqrt(xf.pow(2).sum(-1, keepdim=True) + eps)
    return (tau.float()[:, None, None] * unit).to(x.dtype).contiguous()
