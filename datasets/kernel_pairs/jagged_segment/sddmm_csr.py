"""Sampled dense-dense product, dots of rows at the entries of a sparse matrix: both gradients are sparse times dense.

value[e] = <a[row], b[column]> at every entry. da is the cotangent as a sparse matrix times b, db its transpose times a:
one kernel walks the entries of a row, or by the transposed index those of a column, with a tile of entries in flight.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "sddmm_csr",
    "family": "jagged_segment",
    "op": "sddmm",
    "schema": 1,
    "techniques": ("inverse-map", "owner-grid", "varlen", "strided-cotangent"),
    "saves": (),
    "grads": ("a", "b"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _sampled_fwd(A, B, RowPtr, Column, Value, F, BLOCK_E: tl.constexpr, BLOCK_F: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    end = tl.load(RowPtr + row + 1).to(tl.int64)
    for start in range(tl.load(RowPtr + row).to(tl.int64), end, BLOCK_E):
        e = start + tl.arange(0, BLOCK_E)
        column = tl.load(Column + e, mask=e < end, other=0).to(tl.int64)
        lanes = tl.zeros((BLOCK_E, BLOCK_F), tl.float32)
        for first in range(0, F, BLOCK_F):
            f = first + tl.arange(0, BLOCK_F)
            a = tl.load(A + row * F + f, mask=f < F, other=0.0).to(tl.float32)
            ok = (e[:, None] < end) & (f[None, :] < F)
            lanes += a[None, :] * tl.load(B + column[:, None] * F + f[None, :], mask=ok, other=0.0).to(tl.float32)
        tl.store(Value + e, tl.sum(lanes, 1), mask=e < end)


def forward(a, b, row_ptr, column, column_ptr, row, entry):
    """a (R, F), b (S, F). Rows of the pattern are row_ptr, column; its columns are column_ptr, row, and entry[j] is the
    place of their j-th entry in the order of the rows.
    """
    a, b = a.contiguous(), b.contiguous()
    F = a.shape[1]
    value = torch.empty(column.numel(), device=a.device, dtype=a.dtype)
    BLOCK_F = min(128, triton.next_power_of_2(F))
    _sampled_fwd[(a.shape[0],)](a, b, row_ptr, column, value, F, BLOCK_E=8, BLOCK_F=BLOCK_F, num_warps=2)
    return value, (a, b, row_ptr, column, column_ptr, row, entry)


# --- backward ---
@triton.jit
def _sparse_times_dense(
    G, Dense, Ptr, Neighbour, Entry, Out, F, stride,
    TRANSPOSED: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    owner = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    end = tl.load(Ptr + owner + 1).to(tl.int64)
    acc = tl.zeros((BLOCK_E, BLOCK_F), tl.float32)
    for start in range(tl.load(Ptr + owner).to(tl.int64), end, BLOCK_E):
        place = start + tl.arange(0, BLOCK_E)
        neighbour = tl.load(Neighbour + place, mask=place < end, other=0).to(tl.int64)
        # In row order the cotangent lies as it is walked; by columns every entry is looked up.
        entry = place
        if TRANSPOSED:
            entry = tl.load(Entry + place, mask=place < end, other=0).to(tl.int64)
        g = tl.load(G + entry * stride, mask=place < end, other=0.0).to(tl.float32)
        ok = (place[:, None] < end) & (f[None, :] < F)
        acc += g[:, None] * tl.load(Dense + neighbour[:, None] * F + f[None, :], mask=ok, other=0.0).to(tl.float32)
    tl.store(Out + owner * F + f, tl.sum(acc, 0), mask=f < F)


def backward(saved, grad_value, needs=(True, True)):
    a, b, row_ptr, column, column_ptr, row, entry = saved
    F = a.shape[1]
    BLOCK_F = min(128, triton.next_power_of_2(F))
    tiles = triton.cdiv(F, BLOCK_F)
    da = db = None
    if needs[0]:
        da = torch.empty_like(a)
        _sparse_times_dense[(a.shape[0], tiles)](
            grad_value, b, row_ptr, column, entry, da, F, grad_value.stride(0),
            TRANSPOSED=False, BLOCK_E=8, BLOCK_F=BLOCK_F, num_warps=2,
        )  # fmt: skip
    if needs[1]:
        db = torch.empty_like(b)
        _sparse_times_dense[(b.shape[0], tiles)](
            grad_value, a, column_ptr, row, entry, db, F, grad_value.stride(0),
            TRANSPOSED=True, BLOCK_E=8, BLOCK_F=BLOCK_F, num_warps=2,
        )  # fmt: skip
    return da, db


# --- check ---
SWEEP = (
    {"R": 9, "S": 7, "E": 60, "F": 32},
    {"R": 12, "S": 15, "E": 141, "F": 151},
    {"R": 5, "S": 6, "E": 40, "F": 20, "dtype": "bfloat16"},
)
BENCH = ({"R": 32768, "S": 32768, "E": 1048576, "F": 128, "dtype": "bfloat16"},)


def make_args(R, S, E, F, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    a, b = torch.randn(R, F, generator=g), torch.randn(S, F, generator=g)
    # Entries drawn at random: rows and columns without any occur.
    rows = torch.randint(0, R, (E,), generator=g).sort().values
    columns = torch.randint(0, S, (E,), generator=g)
    entry = columns.argsort(stable=True)

    def pointers(ids, size):
        return torch.cat((torch.zeros(1, dtype=torch.int64), ids.bincount(minlength=size).cumsum(0)))

    pattern = (pointers(rows, R), columns, pointers(columns, S), rows[entry], entry)
    floats = (t.to(device=device, dtype=getattr(torch, dtype)) for t in (a, b))
    return *floats, *(t.to(device=device, dtype=torch.int32) for t in pattern)


def reference(a, b, row_ptr, column, column_ptr, row, entry):
    number = torch.arange(a.shape[0], device=a.device)
    rows = torch.repeat_interleave(number, row_ptr.diff(), output_size=column.numel())
    return (a.float()[rows] * b.float()[column]).sum(-1).to(a.dtype)
