"""y = x (A kron B)^T without the large matrix: row m of x is read as a matrix X, and Y = A X B^T.

The reshapes are index maps of one tile. The backward needs five small products for each row, two of them shared:
with T = X B^T and U = A^T dY, dX = U B, dA += dY T^T and dB += U^T X. A program walks rows with A and B at hand and
keeps dA and dB in registers; one partial of each leaves it.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "kronecker_linear",
    "family": "low_rank",
    "op": "kronecker_linear",
    "schema": 1,
    "techniques": ("recompute", "persistent-grid", "two-stage-partials", "one-launch", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "a", "b"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _matrix(P, rows, cols, row_stride, col_stride, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """A (rows, cols) matrix as one tile, zero outside."""
    r = tl.arange(0, BLOCK_R)[:, None]
    c = tl.arange(0, BLOCK_C)[None, :]
    return tl.load(P + r * row_stride + c * col_stride, mask=(r < rows) & (c < cols), other=0.0)


@triton.jit
def _store_matrix(P, value, rows, cols, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    r = tl.arange(0, BLOCK_R)[:, None]
    c = tl.arange(0, BLOCK_C)[None, :]
    tl.store(P + r * cols + c, value, mask=(r < rows) & (c < cols))


@triton.jit
def _kron_fwd(
    X, A, B, Y, M, P1, Q1, P2, Q2,
    BLOCK_P1: tl.constexpr, BLOCK_Q1: tl.constexpr, BLOCK_P2: tl.constexpr, BLOCK_Q2: tl.constexpr,
):  # fmt: skip
    a = _matrix(A, P1, Q1, Q1, 1, BLOCK_P1, BLOCK_Q1)
    bt = _matrix(B, Q2, P2, 1, Q2, BLOCK_Q2, BLOCK_P2)
    for m in range(tl.program_id(0).to(tl.int64), M, tl.num_programs(0)):
        x = _matrix(X + m * Q1 * Q2, Q1, Q2, Q2, 1, BLOCK_Q1, BLOCK_Q2)
        t = tl.dot(x, bt).to(x.dtype)
        _store_matrix(Y + m * P1 * P2, tl.dot(a, t), P1, P2, BLOCK_P1, BLOCK_P2)


def _blocks(a, b):
    names = ("BLOCK_P1", "BLOCK_Q1", "BLOCK_P2", "BLOCK_Q2")
    return {name: max(16, triton.next_power_of_2(size)) for name, size in zip(names, (*a.shape, *b.shape), strict=True)}


def forward(x, a, b):
    x, a, b = x.contiguous(), a.contiguous(), b.contiguous()
    M = x.shape[0]
    (P1, Q1), (P2, Q2) = a.shape, b.shape
    y = torch.empty(M, P1 * P2, device=x.device, dtype=x.dtype)
    _kron_fwd[(min(M, 528),)](x, a, b, y, M, P1, Q1, P2, Q2, **_blocks(a, b), num_warps=4)
    return y, (x, a, b)


# --- backward ---
@triton.jit
def _kron_bwd(
    DY, X, A, B, DX, DAParts, DBParts, M, P1, Q1, P2, Q2, dy_m, dy_n,
    BLOCK_P1: tl.constexpr, BLOCK_Q1: tl.constexpr, BLOCK_P2: tl.constexpr, BLOCK_Q2: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    at = _matrix(A, Q1, P1, 1, Q1, BLOCK_Q1, BLOCK_P1)
    b = _matrix(B, P2, Q2, Q2, 1, BLOCK_P2, BLOCK_Q2)
    da = tl.zeros((BLOCK_P1, BLOCK_Q1), tl.float32)
    db = tl.zeros((BLOCK_P2, BLOCK_Q2), tl.float32)
    for m in range(pid, M, tl.num_programs(0)):
        x = _matrix(X + m * Q1 * Q2, Q1, Q2, Q2, 1, BLOCK_Q1, BLOCK_Q2)
        # Row m of dy as a (P1, P2) matrix, whatever its strides are.
        dy = _matrix(DY + m * dy_m, P1, P2, P2 * dy_n, dy_n, BLOCK_P1, BLOCK_P2)
        t = tl.dot(x, tl.trans(b)).to(x.dtype)
        u = tl.dot(at, dy).to(x.dtype)
        _store_matrix(DX + m * Q1 * Q2, tl.dot(u, b), Q1, Q2, BLOCK_Q1, BLOCK_Q2)
        da = tl.dot(dy, tl.trans(t), da)
        db = tl.dot(tl.trans(u), x, db)
    _store_matrix(DAParts + pid * P1 * Q1, da, P1, Q1, BLOCK_P1, BLOCK_Q1)
    _store_matrix(DBParts + pid * P2 * Q2, db, P2, Q2, BLOCK_P2, BLOCK_Q2)


def backward(saved, grad_y, needs=None):
    x, a, b = saved
    M = x.shape[0]
    (P1, Q1), (P2, Q2) = a.shape, b.shape
    # Two programs for each of 132 processors: the partials stay small beside x.
    programs = min(264, triton.cdiv(M, 2))
    dx = torch.empty_like(x)
    da_parts = torch.empty(programs, P1, Q1, device=x.device, dtype=torch.float32)
    db_parts = torch.empty(programs, P2, Q2, device=x.device, dtype=torch.float32)
    _kron_bwd[(programs,)](
        grad_y, x, a, b, dx, da_parts, db_parts, M, P1, Q1, P2, Q2, *grad_y.stride(), **_blocks(a, b), num_warps=4
    )
    return dx, da_parts.sum(0).to(a.dtype), db_parts.sum(0).to(b.dtype)


# --- check ---
SWEEP = (
    {"M": 5, "P1": 16, "Q1": 16, "P2": 32, "Q2": 16},
    {"M": 7, "P1": 19, "Q1": 11, "P2": 13, "Q2": 21, "dtype": "float16"},
    {"M": 4, "P1": 8, "Q1": 16, "P2": 24, "Q2": 32, "dtype": "bfloat16"},
)
BENCH = ({"M": 32768, "P1": 64, "Q1": 64, "P2": 64, "Q2": 64, "dtype": "bfloat16"},)


def make_args(M, P1, Q1, P2, Q2, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = (
        torch.randn(M, Q1 * Q2, generator=g),
        torch.randn(P1, Q1, generator=g) * Q1**-0.5,
        torch.randn(P2, Q2, generator=g) * Q2**-0.5,
    )
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors)


def reference(x, a, b):
    X = x.view(-1, a.shape[1], b.shape[1])
    return (a @ (X @ b.t())).flatten(1)
