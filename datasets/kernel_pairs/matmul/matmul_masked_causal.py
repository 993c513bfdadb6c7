"""tril(A) B: the mask bounds every loop, and the upper half of dA is written as zeros without a product.

Y = tril(A) B,    dB = tril(A)^T dY,    dA = tril(dY B^T).
Rows i need columns k <= i: the forward's loop ends at the diagonal. The owner of columns k for dB begins there instead.
For dA the tiles above the diagonal store zeros and leave. Only the steps that the diagonal crosses compare indices, in
a loop of their own: a comparison in a load's mask would make every load of A one of single elements. Programs with long
loops are numbered first, so that the short ones fill the end of the launch.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "matmul_masked_causal",
    "family": "matmul",
    "op": "tril_matmul",
    "schema": 1,
    "techniques": ("causal-bounds", "masking", "owner-grid", "strided-cotangent"),
    "saves": (),
    "grads": ("a", "b"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _tril_fwd(A, B, Y, T, N, a_z, a_i, a_k, BLOCK_I: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    z = tl.program_id(2).to(tl.int64)
    row = tl.num_programs(1) - 1 - tl.program_id(1)
    i = row.to(tl.int64) * BLOCK_I + tl.arange(0, BLOCK_I)
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    y = tl.zeros((BLOCK_I, BLOCK_N), tl.float32)
    # BLOCK_K divides BLOCK_I: the first loop ends where the diagonal enters the tile.
    for start in range(0, row * BLOCK_I, BLOCK_K):
        k = (start + tl.arange(0, BLOCK_K)).to(tl.int64)
        a = tl.load(A + z * a_z + i[:, None] * a_i + k[None, :] * a_k, mask=i[:, None] < T, other=0.0)
        b = tl.load(B + (z * T + k[:, None]) * N + n[None, :], mask=n[None, :] < N, other=0.0)
        y = tl.dot(a, b, y)
    for start in range(row * BLOCK_I, tl.minimum((row + 1) * BLOCK_I, T), BLOCK_K):
        k = (start + tl.arange(0, BLOCK_K)).to(tl.int64)
        a_at = A + z * a_z + i[:, None] * a_i + k[None, :] * a_k
        a = tl.load(a_at, mask=(i[:, None] < T) & (k[None, :] < T), other=0.0)
        b = tl.load(B + (z * T + k[:, None]) * N + n[None, :], mask=(k[:, None] < T) & (n[None, :] < N), other=0.0)
        y = tl.dot(tl.where(i[:, None] >= k[None, :], a, 0.0), b, y)
    tl.store(Y + (z * T + i[:, None]) * N + n[None, :], y, mask=(i[:, None] < T) & (n[None, :] < N))


def _side(size, most=128):
    return max(16, min(most, triton.next_power_of_2(size)))


def forward(a, b):
    b = b.contiguous()
    Z, T, N = b.shape
    y = torch.empty_like(b)
    BI, BN = _side(T), _side(N)
    _tril_fwd[(triton.cdiv(N, BN), triton.cdiv(T, BI), Z)](
        a, b, y, T, N, *a.stride(),
        BLOCK_I=BI, BLOCK_N=BN, BLOCK_K=_side(T, 128 // a.element_size()), num_warps=8, num_stages=3,
    )  # fmt: skip
    return y, (a, b)


# --- backward ---
@triton.jit
def _tril_db(
    DY, A, DB, T, N, a_z, a_i, a_k, dy_z, dy_i, dy_n,
    BLOCK_I: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    z = tl.program_id(2).to(tl.int64)
    first = tl.program_id(1) * BLOCK_K
    k = first.to(tl.int64) + tl.arange(0, BLOCK_K)
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    db = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    # Rows before the tile's first column hold none of it. BLOCK_I divides BLOCK_K, so the loop begins on the diagonal.
    for start in range(first, tl.minimum(first + BLOCK_K, T), BLOCK_I):
        i = (start + tl.arange(0, BLOCK_I)).to(tl.int64)
        at_at = A + z * a_z + i[None, :] * a_i + k[:, None] * a_k
        at = tl.load(at_at, mask=(i[None, :] < T) & (k[:, None] < T), other=0.0)
        dy_at = DY + z * dy_z + i[:, None] * dy_i + n[None, :] * dy_n
        dy = tl.load(dy_at, mask=(i[:, None] < T) & (n[None, :] < N), other=0.0)
        db = tl.dot(tl.where(i[None, :] >= k[:, None], at, 0.0), dy, db)
    for start in range(first + BLOCK_K, T, BLOCK_I):
        i = (start + tl.arange(0, BLOCK_I)).to(tl.int64)
        at = tl.load(A + z * a_z + i[None, :] * a_i + k[:, None] * a_k, mask=i[None, :] < T, other=0.0)
        dy_at = DY + z * dy_z + i[:, None] * dy_i + n[None, :] * dy_n
        dy = tl.load(dy_at, mask=(i[:, None] < T) & (n[None, :] < N), other=0.0)
        db = tl.dot(at, dy, db)
    tl.store(DB + (z * T + k[:, None]) * N + n[None, :], db, mask=(k[:, None] < T) & (n[None, :] < N))


@triton.jit
def _tril_da(DY, B, DA, T, N, dy_z, dy_i, dy_n, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr):
    z = tl.program_id(2).to(tl.int64)
    i = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    out = DA + (z * T + i[:, None]) * T + k[None, :]
    inside = (i[:, None] < T) & (k[None, :] < T)
    if tl.program_id(0) > tl.program_id(1):
        tl.store(out, tl.zeros((BLOCK, BLOCK), tl.float32), mask=inside)
        return
    da = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, N, BLOCK_N):
        n = (start + tl.arange(0, BLOCK_N)).to(tl.int64)
        dy_at = DY + z * dy_z + i[:, None] * dy_i + n[None, :] * dy_n
        dy = tl.load(dy_at, mask=(i[:, None] < T) & (n[None, :] < N), other=0.0)
        bt = tl.load(B + (z * T + k[None, :]) * N + n[:, None], mask=(k[None, :] < T) & (n[:, None] < N), other=0.0)
        da = tl.dot(dy, bt, da)
    if tl.program_id(0) == tl.program_id(1):
        da = tl.where(i[:, None] >= k[None, :], da, 0.0)
    tl.store(out, da, mask=inside)


def backward(saved, grad_y, needs=(True, True)):
    a, b = saved
    Z, T, N = b.shape
    BT, BN, step = _side(T), _side(N), 128 // b.element_size()
    da = db = None
    if needs[0]:
        da = torch.empty(Z, T, T, device=a.device, dtype=a.dtype)
        _tril_da[(triton.cdiv(T, BT), triton.cdiv(T, BT), Z)](
            grad_y, b, da, T, N, *grad_y.stride(), BLOCK=BT, BLOCK_N=min(BN, step), num_warps=8, num_stages=3
        )
    if needs[1]:
        db = torch.empty_like(b)
        _tril_db[(triton.cdiv(N, BN), triton.cdiv(T, BT), Z)](
            grad_y, a, db, T, N, *a.stride(), *grad_y.stride(),
            BLOCK_I=min(BT, step), BLOCK_N=BN, BLOCK_K=BT, num_warps=8, num_stages=3,
        )  # fmt: skip
    return da, db


# --- check ---
SWEEP = (
    {"Z": 2, "T": 64, "N": 32},
    {"Z": 1, "T": 201, "N": 41},
    {"Z": 2, "T": 140, "N": 24, "dtype": "bfloat16"},
    {"Z": 3, "T": 45, "N": 70, "dtype": "float16"},
)
BENCH = ({"Z": 8, "T": 4096, "N": 512, "dtype": "bfloat16"},)


def make_args(Z, T, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = (torch.randn(Z, T, T, generator=g) * T**-0.5, torch.randn(Z, T, N, generator=g))
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors)


def reference(a, b):
    return a.tril() @ b
