"""Cubic B-spline activation with coefficients for each channel: four taps make dx, a loop over bins makes dcoef.

On a uniform grid over [-1, 1] an element meets four of the G coefficients of its channel. dx gathers those. The way
back is no scatter: a program owns some columns and rows, and for each bin sums dy times that bin's basis function,
which is zero for all elements but those near it, down its rows. Every lane keeps a sum for each bin, and lanes meet
once, after the last row. No atomics, and the order of summation is fixed.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "bspline_kan",
    "family": "activation",
    "op": "bspline_activation",
    "schema": 1,
    "techniques": ("gather-form", "two-stage-partials", "recompute", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "coef"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _cell(x, CELLS: tl.constexpr):
    """Number of x's cell, 0 to CELLS - 1, and where in the cell it lies, 0 to 1. Beyond the grid, its border."""
    # Comparisons instead of minimum and maximum: at the border itself the derivative is that of the grid.
    u = tl.where(x < -1.0, 0.0, tl.where(x > 1.0, 1.0 * CELLS, (x + 1.0) * (0.5 * CELLS)))
    cell = tl.minimum(u.to(tl.int32), CELLS - 1)
    return cell, u - cell.to(tl.float32)


@triton.jit
def _spline_fwd(X, Coef, Y, M, N, x_row, CELLS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    m = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    n = (tl.program_id(1) * COLS + tl.arange(0, COLS))[None, :]
    mask = (m < M) & (n < N)
    x = tl.load(X + m * x_row + n, mask=mask, other=0.0).to(tl.float32)
    cell, t = _cell(x, CELLS)
    tap = Coef + n * (CELLS + 3) + cell
    c0 = tl.load(tap, mask=mask, other=0.0).to(tl.float32)
    c1 = tl.load(tap + 1, mask=mask, other=0.0).to(tl.float32)
    c2 = tl.load(tap + 2, mask=mask, other=0.0).to(tl.float32)
    c3 = tl.load(tap + 3, mask=mask, other=0.0).to(tl.float32)
    r = 1.0 - t
    inner = c1 * (4.0 - 6.0 * t * t + 3.0 * t * t * t) + c2 * (4.0 - 6.0 * r * r + 3.0 * r * r * r)
    tl.store(Y + m * N + n, (c0 * r * r * r + inner + c3 * t * t * t) / 6.0, mask=mask)


def forward(x, coef):
    x = x if x.stride(1) == 1 else x.contiguous()
    coef = coef.contiguous()
    M, N = x.shape
    y = torch.empty(M, N, device=x.device, dtype=x.dtype)
    _spline_fwd[(triton.cdiv(M, 32), triton.cdiv(N, 32))](
        x, coef, y, M, N, x.stride(0), CELLS=coef.shape[1] - 3, ROWS=32, COLS=32
    )
    return y, (x, coef)


# --- backward ---
@triton.jit
def _spline_bwd(
    DY, X, Coef, DX, Parts, M, N, steps, dy_row, dy_col, x_row,
    CELLS: tl.constexpr, BINS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    n = (tl.program_id(1) * COLS + tl.arange(0, COLS))[None, :]
    bins = tl.arange(0, BINS)[:, None]
    sums = tl.zeros((BINS, ROWS, COLS), tl.float32)
    for step in range(steps):
        m = ((tl.program_id(0) * steps + step).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
        mask = (m < M) & (n < N)
        x = tl.load(X + m * x_row + n, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(DY + m * dy_row + n.to(tl.int64) * dy_col, mask=mask, other=0.0).to(tl.float32)
        cell, t = _cell(x, CELLS)
        r = 1.0 - t
        tap = Coef + n * (CELLS + 3) + cell
        c0 = tl.load(tap, mask=mask, other=0.0).to(tl.float32)
        c1 = tl.load(tap + 1, mask=mask, other=0.0).to(tl.float32)
        c2 = tl.load(tap + 2, mask=mask, other=0.0).to(tl.float32)
        c3 = tl.load(tap + 3, mask=mask, other=0.0).to(tl.float32)
        slope = (c3 * t * t - c0 * r * r + c1 * (3.0 * t * t - 4.0 * t) - c2 * (3.0 * r * r - 4.0 * r)) * 0.5
        # Beyond the grid y is constant.
        on_grid = (x >= -1.0) & (x <= 1.0)
        tl.store(DX + m * N + n, tl.where(on_grid, dy * slope * (0.5 * CELLS), 0.0), mask=mask)
        b0 = dy * r * r * r / 6.0
        b1 = dy * (4.0 - 6.0 * t * t + 3.0 * t * t * t) / 6.0
        b2 = dy * (4.0 - 6.0 * r * r + 3.0 * r * r * r) / 6.0
        b3 = dy * t * t * t / 6.0
        tap_of = bins[:, :, None] - cell[None, :, :]
        late = tl.where(tap_of == 2, b2[None, :, :], tl.where(tap_of == 3, b3[None, :, :], 0.0))
        sums += tl.where(tap_of == 0, b0[None, :, :], tl.where(tap_of == 1, b1[None, :, :], late))
    out = Parts + (tl.program_id(0).to(tl.int64) * N + n) * (CELLS + 3) + bins
    tl.store(out, tl.sum(sums, 1), mask=(n < N) & (bins < CELLS + 3))


def backward(saved, grad_y, needs=None):
    x, coef = saved
    (M, N), G = x.shape, coef.shape[1]
    # 512 elements, four of them and their bins in each lane of four warps.
    BINS, COLS = triton.next_power_of_2(G), 64
    ROWS = max(4, 256 // BINS)
    tiles, columns = triton.cdiv(M, ROWS), triton.cdiv(N, COLS)
    # About eight programs for each of 132 processors: the fewer strips, the fewer partials.
    steps = max(1, triton.cdiv(tiles * columns, 8 * 132))
    strips = triton.cdiv(tiles, steps)
    dx = torch.empty(M, N, device=x.device, dtype=x.dtype)
    parts = torch.empty(strips, N, G, device=x.device, dtype=torch.float32)
    _spline_bwd[(strips, columns)](
        grad_y, x, coef, dx, parts, M, N, steps, *grad_y.stride(), x.stride(0),
        CELLS=G - 3, BINS=BINS, ROWS=ROWS, COLS=COLS, num_warps=4,
    )  # fmt: skip
    return dx, parts.sum(0).to(coef.dtype)


# --- check ---
SWEEP = (
    {"M": 64, "N": 32, "cells": 5, "dtype": "float16"},
    {"M": 75, "N": 45, "cells": 8},
    {"M": 48, "N": 32, "cells": 4, "dtype": "bfloat16"},
)
BENCH = ({"M": 8192, "N": 1024, "cells": 8, "dtype": "bfloat16"},)


def make_args(M, N, cells, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    # One element in twenty or so lies beyond the grid.
    x, coef = torch.randn(M, N, generator=g) / 2, torch.randn(N, cells + 3, generator=g)
    return x.to(device=device, dtype=getattr(torch, dtype)), coef.to(device)


def reference(x, coef):
    cells = coef.shape[1] - 3
    u = ((x.float() + 1) * cells / 2).clamp(0, cells)
    # The cubic B-spline as a function of the distance to its centre, for all coefficients at once.
    away = (u[..., None] - torch.arange(-1, cells + 2, device=x.device)).abs()
    near = 4 - 6 * away**2 + 3 * away**3
    basis = torch.where(away < 1, near, (2 - away).clamp(min=0) ** 3) / 6
    return (basis * coef).sum(-1).to(x.dtype)
