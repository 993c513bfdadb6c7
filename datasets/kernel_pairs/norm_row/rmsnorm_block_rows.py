"""RMSNorm of short rows, a block of rows to each program, with a row mask and a column mask together.

The backward's program owns a run of row blocks. The rows of a block are folded onto eight rows of sums in registers;
those eight are added once for each program, not once for each block.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "rmsnorm_block_rows",
    "family": "norm_row",
    "op": "rms_norm",
    "schema": 1,
    "techniques": ("multi-row-tile", "saved-statistics", "two-stage-partials", "strided-cotangent"),
    "saves": ("inv_rms: fp32 (M,)",),
    "grads": ("x", "weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _rms_rows_fwd(X, W, Y, InvRms, M, N, x_row, eps, BLOCK_ROW: tl.constexpr, BLOCK_COL: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROW + tl.arange(0, BLOCK_ROW)
    cols = tl.arange(0, BLOCK_COL)
    row_ok = rows < M
    ok = row_ok[:, None] & (cols < N)[None, :]
    x = tl.load(X + rows[:, None] * x_row + cols[None, :], mask=ok, other=0.0).to(tl.float32)
    inv_rms = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / N + eps)
    tl.store(InvRms + rows, inv_rms, mask=row_ok)
    w = tl.load(W + cols, mask=cols < N, other=0.0).to(tl.float32)
    tl.store(Y + rows[:, None] * N + cols[None, :], x * inv_rms[:, None] * w[None, :], mask=ok)


def _blocks(N):
    """Rows and columns of a tile: 16 elements for each thread of four warps, whole rows."""
    cols = triton.next_power_of_2(N)
    return {"BLOCK_ROW": max(8, 2048 // cols), "BLOCK_COL": cols, "num_warps": max(4, min(16, cols // 64))}


def forward(x, weight, eps=1e-6):
    if x.stride(1) != 1:
        x = x.contiguous()
    M, N = x.shape
    y = torch.empty(M, N, device=x.device, dtype=x.dtype)
    inv_rms = torch.empty(M, device=x.device, dtype=torch.float32)
    blocks = _blocks(N)
    grid = (triton.cdiv(M, blocks["BLOCK_ROW"]),)
    _rms_rows_fwd[grid](x, weight, y, inv_rms, M, N, x.stride(0), eps, **blocks)
    return y, (x, weight, inv_rms)


# --- backward ---
@triton.jit
def _rms_rows_bwd(
    DY, X, W, InvRms, DX, Parts, M, N, x_row, dy_row, dy_col, blocks_each,
    BLOCK_ROW: tl.constexpr, BLOCK_COL: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_COL)
    w = tl.load(W + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    dw = tl.zeros((8, BLOCK_COL), tl.float32)
    # Two blocks ahead are copied while this one is reduced.
    for block in tl.range(blocks_each, num_stages=3):
        rows = (pid * blocks_each + block) * BLOCK_ROW + tl.arange(0, BLOCK_ROW)
        row_ok = rows < M
        ok = row_ok[:, None] & (cols < N)[None, :]
        x = tl.load(X + rows[:, None] * x_row + cols[None, :], mask=ok, other=0.0).to(tl.float32)
        dy_at = rows[:, None] * dy_row + cols[None, :].to(tl.int64) * dy_col
        dy = tl.load(DY + dy_at, mask=ok, other=0.0).to(tl.float32)
        inv_rms = tl.load(InvRms + rows, mask=row_ok, other=0.0)[:, None]
        unit = x * inv_rms
        dunit = dy * w
        radial = tl.sum(dunit * unit, axis=1)[:, None] / N
        tl.store(DX + rows[:, None] * N + cols[None, :], (dunit - unit * radial) * inv_rms, mask=ok)
        dw += tl.sum(tl.reshape(dy * unit, (BLOCK_ROW // 8, 8, BLOCK_COL)), axis=0)
    tl.store(Parts + pid * N + cols, tl.sum(dw, axis=0), mask=cols < N)


def backward(saved, grad_y, needs=None):
    x, weight, inv_rms = saved
    M, N = x.shape
    blocks = _blocks(N)
    count = triton.cdiv(M, blocks["BLOCK_ROW"])
    # One wave of 640 threads for each of 132 processors, as the registers allow.
    blocks_each = triton.cdiv(count, 132 * max(1, 20 // blocks["num_warps"]))
    programs = triton.cdiv(count, blocks_each)
    dx = torch.empty(M, N, device=x.device, dtype=x.dtype)
    parts = torch.empty(programs, N, device=x.device, dtype=torch.float32)
    _rms_rows_bwd[(programs,)](
        grad_y, x, weight, inv_rms, dx, parts, M, N, x.stride(0), grad_y.stride(0), grad_y.stride(1), blocks_each,
        **blocks,
    )  # fmt: skip
    return dx, parts.sum(0).to(weight.dtype)


# --- check ---
SWEEP = ({"M": 70, "N": 64}, {"M": 101, "N": 41, "dtype": "float16"}, {"M": 60, "N": 96, "dtype": "bfloat16"})
BENCH = ({"M": 1048576, "N": 128, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    # The first columns of wider rows, as a slice of a fused projection comes.
    x = torch.randn(M, 2 * N, generator=g).to(device=device, dtype=getattr(torch, dtype))[:, :N]
    weight = (torch.rand(N, generator=g) + 0.5).to(device=device, dtype=getattr(torch, dtype))
    return x, weight


def reference(x, weight, eps=1e-6):
    return torch.nn.functional.rms_norm(x.float(), (x.shape[1],), weight.float(), eps).to(x.dtype)
