"""Sparse (CSR) times dense: dx walks the transposed index, dvalues is a sampled product of dy and x; no atomics."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "csr_spmm",
    "family": "jagged_segment",
    "op": "spmm",
    "schema": 1,
    "techniques": ("inverse-map", "varlen", "owner-grid", "strided-cotangent"),
    "saves": (),
    "grads": ("values", "x"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _spmm_fwd(Values, X, RowPtr, Col, Y, F, BLOCK_F: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    acc = tl.zeros((BLOCK_F,), tl.float32)
    for e in range(tl.load(RowPtr + row), tl.load(RowPtr + row + 1)):
        col = tl.load(Col + e).to(tl.int64)
        value = tl.load(Values + e).to(tl.float32)
        acc += value * tl.load(X + col * F + f, mask=f < F, other=0.0).to(tl.float32)
    tl.store(Y + row * F + f, acc, mask=f < F)


def forward(values, x, row_ptr, col, col_ptr, row, entry):
    """Rows of the matrix are row_ptr, col; its columns are col_ptr, row, with entry[j] the place of j in values."""
    values, x = values.contiguous(), x.contiguous()
    R, F = row_ptr.numel() - 1, x.shape[1]
    y = torch.empty(R, F, device=x.device, dtype=x.dtype)
    BLOCK_F = min(256, triton.next_power_of_2(F))
    _spmm_fwd[(R, triton.cdiv(F, BLOCK_F))](values, x, row_ptr, col, y, F, BLOCK_F=BLOCK_F)
    return y, (values, x, row_ptr, col, col_ptr, row, entry)


# --- backward ---
@triton.jit
def _spmm_dx(DY, Values, ColPtr, Row, Entry, DX, F, dy_r, dy_f, BLOCK_F: tl.constexpr):
    # The transposed matrix is walked by its own index, built once with the graph: each row of dx has one owner.
    col = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    acc = tl.zeros((BLOCK_F,), tl.float32)
    for j in range(tl.load(ColPtr + col), tl.load(ColPtr + col + 1)):
        row = tl.load(Row + j).to(tl.int64)
        value = tl.load(Values + tl.load(Entry + j)).to(tl.float32)
        acc += value * tl.load(DY + row * dy_r + f * dy_f, mask=f < F, other=0.0).to(tl.float32)
    tl.store(DX + col * F + f, acc, mask=f < F)


@triton.jit
def _spmm_dvalues(DY, X, RowPtr, Col, DValues, F, dy_r, dy_f, BLOCK_E: tl.constexpr, BLOCK_F: tl.constexpr):
    # dvalues[e] = <dy[row], x[col]>: BLOCK_E entries of one row share its dy.
    row = tl.program_id(0).to(tl.int64)
    first = tl.load(RowPtr + row)
    last = tl.load(RowPtr + row + 1)
    for start in range(first, last, BLOCK_E):
        e = start + tl.arange(0, BLOCK_E)
        col = tl.load(Col + e, mask=e < last, other=0).to(tl.int64)
        dot = tl.zeros((BLOCK_E, BLOCK_F), tl.float32)
        for begin in range(0, F, BLOCK_F):
            f = begin + tl.arange(0, BLOCK_F)
            dy = tl.load(DY + row * dy_r + f * dy_f, mask=f < F, other=0.0).to(tl.float32)
            mask = (e[:, None] < last) & (f[None, :] < F)
            dot += dy[None, :] * tl.load(X + col[:, None] * F + f[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(DValues + e, tl.sum(dot, 1), mask=e < last)


def backward(saved, grad_y, needs=(True, True)):
    values, x, row_ptr, col, col_ptr, row, entry = saved
    R, (S, F) = row_ptr.numel() - 1, x.shape
    dy_r, dy_f = grad_y.stride()
    BLOCK_F = min(256, triton.next_power_of_2(F))
    dvalues = dx = None
    if needs[0]:
        dvalues = torch.empty_like(values)
        _spmm_dvalues[(R,)](
            grad_y, x, row_ptr, col, dvalues, F, dy_r, dy_f, BLOCK_E=8, BLOCK_F=min(128, triton.next_power_of_2(F))
        )
    if needs[1]:
        dx = torch.empty_like(x)
        _spmm_dx[(S, triton.cdiv(F, BLOCK_F))](grad_y, values, col_ptr, row, entry, dx, F, dy_r, dy_f, BLOCK_F=BLOCK_F)
    return dvalues, dx


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
    entry = torch.argsort(cols, stable=True)
    row_ptr, col_ptr = (
        torch.cat((torch.zeros(1, dtype=torch.long), torch.bincount(index, minlength=size).cumsum(0)))
        for index, size in ((rows, R), (cols, S))
    )
    values, x = torch.randn(E, generator=g).to(device, dt), torch.randn(S, F, generator=g).to(device, dt)
    return values, x, *(t.to(device) for t in (row_ptr, cols, col_ptr, rows[entry], entry))


def reference(values, x, row_ptr, col, col_ptr, row, entry):
    counts = row_ptr.diff()
    rows = torch.repeat_interleave(torch.arange(counts.numel(), device=x.device), counts)
    y = torch.zeros(counts.numel(), x.shape[1], device=x.device)
    return y.index_add(0, rows, values.float()[:, None] * x.float()[col]).to(x.dtype)
