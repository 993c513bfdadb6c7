"""Sparse (CSR) times dense without a transposed index: one walk over the rows gives dvalues, and adds to dx atomically.

y[r] = sum of values[e] x[c[e]] over the entries e of row r,    dvalues[e] = <dy[r], x[c[e]]>,
    dx[c[e]] += values[e] dy[r].
A program owns a row. A tile of its entries meets the row of dy in registers: reduced against the gathered rows of x it
is dvalues, scaled by the values it is what the entries' columns receive. Patterns that change with every step, for
which nobody builds a transposed index, take this form; additions to dx meet in fp32, in no fixed order.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "csr_spmm",
    "family": "jagged_segment",
    "op": "spmm",
    "schema": 1,
    "techniques": ("atomics", "one-launch", "varlen", "strided-cotangent"),
    "saves": (),
    "grads": ("values", "x"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _spmm_fwd(Values, X, RowPtr, Col, Y, F, BLOCK_E: tl.constexpr, BLOCK_F: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    end = tl.load(RowPtr + row + 1)
    # Lanes of BLOCK_E entries each keep a sum; they meet once, at the row's end.
    lanes = tl.zeros((BLOCK_E, BLOCK_F), tl.float32)
    for e in range(tl.load(RowPtr + row), end, BLOCK_E):
        here = e + tl.arange(0, BLOCK_E)
        value = tl.load(Values + here, mask=here < end, other=0.0).to(tl.float32)
        at = tl.load(Col + here, mask=here < end, other=0).to(tl.int64)[:, None] * F + f[None, :]
        lanes += value[:, None] * tl.load(X + at, mask=(here[:, None] < end) & (f[None, :] < F), other=0.0).to(
            tl.float32
        )
    tl.store(Y + row * F + f, tl.sum(lanes, 0), mask=f < F)


def _tile(F):
    """(BLOCK_F, warps): eight entries in flight, four features and more for each lane."""
    BLOCK_F = min(256, triton.next_power_of_2(F))
    return BLOCK_F, 2 if BLOCK_F >= 128 else 1


def forward(values, x, row_ptr, col):
    """Row r of the matrix has the entries row_ptr[r] to row_ptr[r + 1], in the columns col; x is (columns, F)."""
    values, x = values.contiguous(), x.contiguous()
    R, F = row_ptr.numel() - 1, x.shape[1]
    y = torch.empty(R, F, device=x.device, dtype=x.dtype)
    BLOCK_F, warps = _tile(F)
    _spmm_fwd[(R, triton.cdiv(F, BLOCK_F))](values, x, row_ptr, col, y, F, BLOCK_E=8, BLOCK_F=BLOCK_F, num_warps=warps)
    return y, (values, x, row_ptr, col)


# --- backward ---
@triton.jit
def _spmm_bwd(
    DY, Values, X, RowPtr, Col, DValues, DX, F, dy_r, dy_f,
    NEED_V: tl.constexpr, NEED_X: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    end = tl.load(RowPtr + row + 1)
    for first in range(tl.load(RowPtr + row), end, BLOCK_E):
        e = first + tl.arange(0, BLOCK_E)
        col = tl.load(Col + e, mask=e < end, other=0).to(tl.int64)
        value = tl.load(Values + e, mask=e < end, other=0.0).to(tl.float32)
        products = tl.zeros((BLOCK_E, BLOCK_F), tl.float32)
        for begin in range(0, F, BLOCK_F):
            f = begin + tl.arange(0, BLOCK_F)
            dy = tl.load(DY + row * dy_r + f.to(tl.int64) * dy_f, mask=f < F, other=0.0).to(tl.float32)
            at = col[:, None] * F + f[None, :]
            inside = (e[:, None] < end) & (f[None, :] < F)
            if NEED_V:
                products += dy[None, :] * tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
            if NEED_X:
                tl.atomic_add(DX + at, value[:, None] * dy[None, :], mask=inside, sem="relaxed")
        if NEED_V:
            tl.store(DValues + e, tl.sum(products, 1), mask=e < end)


def backward(saved, grad_y, needs=(True, True)):
    values, x, row_ptr, col = saved
    F = x.shape[1]
    dvalues = torch.empty_like(values) if needs[0] else None
    dx = torch.zeros(x.shape, device=x.device, dtype=torch.float32) if needs[1] else None
    BLOCK_F, warps = _tile(F)
    _spmm_bwd[(row_ptr.numel() - 1,)](
        grad_y, values, x, row_ptr, col, dvalues, dx, F, *grad_y.stride(),
        NEED_V=needs[0], NEED_X=needs[1], BLOCK_E=8, BLOCK_F=BLOCK_F, num_warps=warps,
    )  # fmt: skip
    return dvalues, dx.to(x.dtype) if needs[1] else None


# --- check ---
SWEEP = (
    {"R": 9, "S": 7, "E": 30, "F": 32},
    {"R": 12, "S": 15, "E": 41, "F": 19, "dtype": "float16"},
    {"R": 5, "S": 6, "E": 12, "F": 16, "dtype": "bfloat16"},
)
BENCH = ({"R": 65536, "S": 65536, "E": 1048576, "F": 128, "dtype": "float32"},)


def make_args(R, S, E, F, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    dt = getattr(torch, dtype)
    # Entries drawn at random: rows and columns without any occur, and so do double entries.
    rows = torch.sort(torch.randint(0, R, (E,), generator=g)).values
    cols = torch.randint(0, S, (E,), generator=g)
    row_ptr = torch.cat((torch.zeros(1, dtype=torch.long), torch.bincount(rows, minlength=R).cumsum(0)))
    values, x = torch.randn(E, generator=g).to(device, dt), torch.randn(S, F, generator=g).to(device, dt)
    return values, x, row_ptr.to(device), cols.to(device)


def reference(values, x, row_ptr, col):
    counts = row_ptr.diff()
    rows = torch.repeat_interleave(torch.arange(counts.numel(), device=x.device), counts)
    y = torch.zeros(counts.numel(), x.shape[1], device=x.device)
    return y.index_add(0, rows, values.float()[:, None] * x.float()[col]).to(x.dtype)
