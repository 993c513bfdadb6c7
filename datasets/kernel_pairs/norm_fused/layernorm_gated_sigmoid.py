"""LayerNorm times a sigmoid gate, y = LayerNorm(x) * sigmoid(z), for many short rows (pair features, 64 to 256 wide).

A program walks tiles of rows in strides of the grid and keeps the sums for dweight and dbias as a whole tile in
registers: they are reduced over its rows once, at the end. dz needs the normalised value, which is rebuilt from x and
the saved statistics.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "layernorm_gated_sigmoid",
    "family": "norm_fused",
    "op": "gated_layer_norm",
    "schema": 1,
    "techniques": (
        "persistent-grid", "multi-row-tile", "recompute", "saved-statistics", "two-stage-partials", "strided-cotangent",
    ),
    "saves": ("mean: fp32 (M,)", "rstd: fp32 (M,)"),
    "grads": ("x", "z", "weight", "bias"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}  # fmt: skip


# --- forward ---
@triton.jit
def _ln_sigmoid_fwd(X, Z, W, B, Y, Mean, Rstd, M, D, eps, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    ok = (m[:, None] < M) & (d[None, :] < D)
    at = m[:, None] * D + d[None, :]
    x = tl.load(X + at, mask=ok, other=0.0).to(tl.float32)
    z = tl.load(Z + at, mask=ok, other=0.0).to(tl.float32)
    w = tl.load(W + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    b = tl.load(B + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    mean = tl.sum(x, 1) / D
    centred = tl.where(ok, x - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, 1) / D + eps)
    tl.store(Mean + m, mean, mask=m < M)
    tl.store(Rstd + m, rstd, mask=m < M)
    tl.store(Y + at, (centred * rstd[:, None] * w + b) * tl.sigmoid(z), mask=ok)


def _tile(D):
    """Rows and columns of a tile with 2048 elements, 16 for each thread."""
    block = triton.next_power_of_2(D)
    return {"ROWS": max(1, 2048 // block), "BLOCK_D": block, "num_warps": max(4, min(16, block // 256))}


def forward(x, z, weight, bias, eps=1e-5):
    x, z = x.contiguous(), z.contiguous()
    M, D = x.shape
    y = torch.empty_like(x)
    mean = torch.empty(M, device=x.device, dtype=torch.float32)
    rstd = torch.empty_like(mean)
    tile = _tile(D)
    _ln_sigmoid_fwd[(triton.cdiv(M, tile["ROWS"]),)](x, z, weight, bias, y, mean, rstd, M, D, eps, **tile)
    return y, (x, z, weight, bias, mean, rstd)


# --- backward ---
@triton.jit
def _ln_sigmoid_bwd(
    DY, X, Z, W, B, Mean, Rstd, DX, DZ, Parts, M, D, dy_m, dy_d, ROWS: tl.constexpr, BLOCK_D: tl.constexpr
):
    pid = tl.program_id(0)
    d = tl.arange(0, BLOCK_D)
    w = tl.load(W + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    b = tl.load(B + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    dw = tl.zeros((ROWS, BLOCK_D), tl.float32)
    db = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for tile in range(pid, tl.cdiv(M, ROWS), tl.num_programs(0)):
        m = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        ok = (m[:, None] < M) & (d[None, :] < D)
        at = m[:, None] * D + d[None, :]
        x = tl.load(X + at, mask=ok, other=0.0).to(tl.float32)
        z = tl.load(Z + at, mask=ok, other=0.0).to(tl.float32)
        dy = tl.load(DY + m[:, None] * dy_m + d[None, :] * dy_d, mask=ok, other=0.0).to(tl.float32)
        mean = tl.load(Mean + m, mask=m < M, other=0.0)[:, None]
        rstd = tl.load(Rstd + m, mask=m < M, other=0.0)[:, None]
        xhat = (x - mean) * rstd
        gate = tl.sigmoid(z)
        dnormed = dy * gate
        tl.store(DZ + at, dnormed * (xhat * w + b) * (1.0 - gate), mask=ok)
        dw += dnormed * xhat
        db += dnormed
        dxhat = dnormed * w
        c1 = tl.sum(dxhat * xhat, 1) / D
        c2 = tl.sum(dxhat, 1) / D
        tl.store(DX + at, rstd * (dxhat - c2[:, None] - xhat * c1[:, None]), mask=ok)
    tl.store(Parts + (2 * pid) * D + d, tl.sum(dw, 0), mask=d < D)
    tl.store(Parts + (2 * pid + 1) * D + d, tl.sum(db, 0), mask=d < D)


def backward(saved, grad_y, needs=None):
    x, z, weight, bias, mean, rstd = saved
    M, D = x.shape
    tile = _tile(D)
    # Four programs of four warps for each of 132 processors, and at least two tiles for each.
    programs = max(1, min(528 * 4 // tile["num_warps"], triton.cdiv(M, 2 * tile["ROWS"])))
    dx, dz = torch.empty_like(x), torch.empty_like(z)
    parts = torch.empty(programs, 2, D, device=x.device, dtype=torch.float32)
    _ln_sigmoid_bwd[(programs,)](
        grad_y, x, z, weight, bias, mean, rstd, dx, dz, parts, M, D, grad_y.stride(0), grad_y.stride(1), **tile
    )
    dweight, dbias = parts.sum(0).to(weight.dtype)
    return dx, dz, dweight, dbias


# --- check ---
SWEEP = ({"M": 90, "D": 64}, {"M": 101, "D": 75, "dtype": "float16"}, {"M": 70, "D": 128, "dtype": "bfloat16"})
BENCH = ({"M": 262144, "D": 128, "dtype": "bfloat16"},)


def make_args(M, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, z = torch.randn(M, D, generator=g), torch.randn(M, D, generator=g)
    weight, bias = torch.rand(D, generator=g) + 0.5, torch.randn(D, generator=g)
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, z, weight, bias))


def reference(x, z, weight, bias, eps=1e-5):
    normed = torch.nn.functional.layer_norm(x.float(), (x.shape[1],), weight.float(), bias.float(), eps)
    return (normed * torch.sigmoid(z.float())).to(x.dtype)
