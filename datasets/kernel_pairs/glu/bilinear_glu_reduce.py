"""Grouped bilinear gate, y[m, n] = sum_k a[m, n, k] * b[m, n, k]: the cotangent of a group is spread over its members.

Gradient and operands trade places, da = dy * b and db = dy * a. A tile holds whole groups in its columns, so that dy is
read once for each group and not once for each of its K members. K is a constant of the kernel: where it is a power of
two, a group is one wide load.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "bilinear_glu_reduce",
    "family": "glu",
    "op": "bilinear_glu",
    "schema": 1,
    "techniques": ("broadcast-adjoint", "one-launch", "strided-cotangent"),
    "saves": (),
    "grads": ("a", "b"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _bilinear_fwd(A, B, Y, N, a_row, b_row, K: tl.constexpr, GROUPS: tl.constexpr, BLOCK_K: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    k = tl.arange(0, BLOCK_K)[None, :]
    mask = (n[:, None] < N) & (k < K)
    at = n[:, None] * K + k
    a = tl.load(A + row * a_row + at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(B + row * b_row + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(Y + row * N + n, tl.sum(a * b, 1), mask=n < N)


def _groups(N, K):
    """Groups in a tile of at most 2048 elements, and the tile's width."""
    BLOCK_K = triton.next_power_of_2(K)
    return max(1, min(triton.next_power_of_2(N), 2048 // BLOCK_K)), BLOCK_K


def forward(a, b, K):
    a = a if a.stride(1) == 1 else a.contiguous()
    b = b if b.stride(1) == 1 else b.contiguous()
    M, N = a.shape[0], a.shape[1] // K
    y = torch.empty(M, N, device=a.device, dtype=a.dtype)
    GROUPS, BLOCK_K = _groups(N, K)
    _bilinear_fwd[(M, triton.cdiv(N, GROUPS))](
        a, b, y, N, a.stride(0), b.stride(0), K=K, GROUPS=GROUPS, BLOCK_K=BLOCK_K
    )
    return y, (a, b, K)


# --- backward ---
@triton.jit
def _bilinear_bwd(
    DY, A, B, DA, DB, N, a_row, b_row, dy_row, dy_col,
    NEED_A: tl.constexpr, NEED_B: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    k = tl.arange(0, BLOCK_K)[None, :]
    mask = (n[:, None] < N) & (k < K)
    at = n[:, None] * K + k
    out = row * N * K + at
    dy = tl.load(DY + row * dy_row + n.to(tl.int64) * dy_col, mask=n < N, other=0.0).to(tl.float32)[:, None]
    # Each operand is read for the other's gradient alone.
    if NEED_A:
        b = tl.load(B + row * b_row + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(DA + out, dy * b, mask=mask)
    if NEED_B:
        a = tl.load(A + row * a_row + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(DB + out, dy * a, mask=mask)


def backward(saved, grad_y, needs=None):
    a, b, K = saved
    need_a, need_b = needs or (True, True)
    M, N = a.shape[0], a.shape[1] // K
    da = torch.empty(M, N * K, device=a.device, dtype=a.dtype) if need_a else None
    db = torch.empty(M, N * K, device=b.device, dtype=b.dtype) if need_b else None
    GROUPS, BLOCK_K = _groups(N, K)
    _bilinear_bwd[(M, triton.cdiv(N, GROUPS))](
        grad_y, a, b, a if da is None else da, b if db is None else db, N, a.stride(0), b.stride(0),
        grad_y.stride(0), grad_y.stride(1), NEED_A=need_a, NEED_B=need_b, K=K, GROUPS=GROUPS, BLOCK_K=BLOCK_K,
    )  # fmt: skip
    return da, db


# --- check ---
SWEEP = (
    {"M": 5, "N": 64, "K": 4, "dtype": "float16"},
    {"M": 7, "N": 37, "K": 3},
    {"M": 3, "N": 32, "K": 8, "dtype": "bfloat16"},
)
BENCH = ({"M": 8192, "N": 1024, "K": 8, "dtype": "bfloat16"},)


def make_args(M, N, K, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(M, N * K, generator=g).to(device=device, dtype=getattr(torch, dtype)) for _ in range(2))
    return a, b, K


def reference(a, b, K):
    return (a.float() * b.float()).unflatten(-1, (-1, K)).sum(-1).to(a.dtype)
