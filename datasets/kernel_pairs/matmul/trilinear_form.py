"""Trilinear form y[i, j] = sum over k of a[i, k] b[j, k] c[k], batched: three contractions, each with its own owner.

    da = (dY b) diag(c),    db = (dY^T a) diag(c),    dc[k] = sum over i of a[i, k] (dY b)[i, k].
The owner of rows i walks over j; when its sum is done it multiplies by a for dc before c scales it for da, so that the
third contraction costs a column sum of a tile, left as one partial row per tile of rows. The owner of rows j walks
over i. c enters the forward while a is loaded, and both gradients after their loops, where it is applied once.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "trilinear_form",
    "family": "matmul",
    "op": "trilinear",
    "schema": 1,
    "techniques": ("epilogue-fusion", "loop-swap", "owner-grid", "two-stage-partials", "strided-cotangent"),
    "saves": (),
    "grads": ("a", "b", "c"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _trilinear_fwd(A, B, C, Y, M, N, K, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr):
    z = tl.program_id(2).to(tl.int64)
    i = tl.program_id(0).to(tl.int64) * BLOCK_I + tl.arange(0, BLOCK_I)
    j = tl.program_id(1).to(tl.int64) * BLOCK_J + tl.arange(0, BLOCK_J)
    y = tl.zeros((BLOCK_I, BLOCK_J), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a = tl.load(A + (z * M + i[:, None]) * K + k[None, :], mask=(i[:, None] < M) & (k[None, :] < K), other=0.0)
        b = tl.load(B + (z * N + j[None, :]) * K + k[:, None], mask=(j[None, :] < N) & (k[:, None] < K), other=0.0)
        c = tl.load(C + k, mask=k < K, other=0.0)
        y = tl.dot((a.to(tl.float32) * c[None, :]).to(a.dtype), b, y)
    tl.store(Y + (z * M + i[:, None]) * N + j[None, :], y, mask=(i[:, None] < M) & (j[None, :] < N))


def _side(size, most=128):
    return max(16, min(most, triton.next_power_of_2(size)))


def forward(a, b, c):
    a, b, c = a.contiguous(), b.contiguous(), c.contiguous()
    (Z, M, K), N = a.shape, b.shape[1]
    y = torch.empty(Z, M, N, device=a.device, dtype=a.dtype)
    BI, BJ = _side(M), _side(N)
    _trilinear_fwd[(triton.cdiv(M, BI), triton.cdiv(N, BJ), Z)](
        a, b, c, y, M, N, K,
        BLOCK_I=BI, BLOCK_J=BJ, BLOCK_K=_side(K, 128 // a.element_size()), num_warps=8, num_stages=3,
    )  # fmt: skip
    return y, (a, b, c)


# --- backward ---
@triton.jit
def _trilinear_da_dc(
    DY, A, B, C, DA, DCParts, M, N, K, dy_z, dy_i, dy_j,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    z = tl.program_id(2).to(tl.int64)
    i = tl.program_id(0).to(tl.int64) * BLOCK_I + tl.arange(0, BLOCK_I)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_I, BLOCK_K), tl.float32)
    for start in range(0, N, BLOCK_J):
        j = (start + tl.arange(0, BLOCK_J)).to(tl.int64)
        dy_at = DY + z * dy_z + i[:, None] * dy_i + j[None, :] * dy_j
        dy = tl.load(dy_at, mask=(i[:, None] < M) & (j[None, :] < N), other=0.0)
        b = tl.load(B + (z * N + j[:, None]) * K + k[None, :], mask=(j[:, None] < N) & (k[None, :] < K), other=0.0)
        acc = tl.dot(dy, b, acc)
    at = (z * M + i[:, None]) * K + k[None, :]
    inside = (i[:, None] < M) & (k[None, :] < K)
    a = tl.load(A + at, mask=inside, other=0.0).to(tl.float32)
    part = z * tl.num_programs(0) + tl.program_id(0)
    tl.store(DCParts + part * K + k, tl.sum(a * acc, 0), mask=k < K)
    c = tl.load(C + k, mask=k < K, other=0.0)
    tl.store(DA + at, acc * c[None, :], mask=inside)


@triton.jit
def _trilinear_db(
    DY, A, C, DB, M, N, K, dy_z, dy_i, dy_j, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr
):
    z = tl.program_id(2).to(tl.int64)
    j = tl.program_id(0).to(tl.int64) * BLOCK_J + tl.arange(0, BLOCK_J)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_J, BLOCK_K), tl.float32)
    for start in range(0, M, BLOCK_I):
        i = (start + tl.arange(0, BLOCK_I)).to(tl.int64)
        dy_at = DY + z * dy_z + i[None, :] * dy_i + j[:, None] * dy_j
        dyt = tl.load(dy_at, mask=(i[None, :] < M) & (j[:, None] < N), other=0.0)
        a = tl.load(A + (z * M + i[:, None]) * K + k[None, :], mask=(i[:, None] < M) & (k[None, :] < K), other=0.0)
        acc = tl.dot(dyt, a, acc)
    c = tl.load(C + k, mask=k < K, other=0.0)
    out = DB + (z * N + j[:, None]) * K + k[None, :]
    tl.store(out, acc * c[None, :], mask=(j[:, None] < N) & (k[None, :] < K))


def backward(saved, grad_y, needs=(True, True, True)):
    a, b, c = saved
    (Z, M, K), N = a.shape, b.shape[1]
    BI, BJ, BK = _side(M), _side(N), _side(K)
    step = 256 // a.element_size()
    da = db = dc = None
    if needs[0] or needs[2]:
        da = torch.empty_like(a)
        parts = torch.empty(Z * triton.cdiv(M, BI), K, device=a.device, dtype=torch.float32)
        _trilinear_da_dc[(triton.cdiv(M, BI), triton.cdiv(K, BK), Z)](
            grad_y, a, b, c, da, parts, M, N, K, *grad_y.stride(),
            BLOCK_I=BI, BLOCK_J=min(BJ, step), BLOCK_K=BK, num_warps=8, num_stages=3,
        )  # fmt: skip
        dc = parts.sum(0).to(c.dtype)
    if needs[1]:
        db = torch.empty_like(b)
        _trilinear_db[(triton.cdiv(N, BJ), triton.cdiv(K, BK), Z)](
            grad_y, a, c, db, M, N, K, *grad_y.stride(),
            BLOCK_I=min(BI, step), BLOCK_J=BJ, BLOCK_K=BK, num_warps=8, num_stages=3,
        )  # fmt: skip
    return da, db, dc


# --- check ---
SWEEP = (
    {"Z": 2, "M": 32, "N": 48, "K": 16},
    {"Z": 1, "M": 75, "N": 41, "K": 29},
    {"Z": 2, "M": 20, "N": 150, "K": 40, "dtype": "bfloat16"},
    {"Z": 1, "M": 140, "N": 17, "K": 24, "dtype": "float16"},
)
BENCH = ({"Z": 8, "M": 2048, "N": 2048, "K": 128, "dtype": "bfloat16"},)


def make_args(Z, M, N, K, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    a, b = torch.randn(Z, M, K, generator=g), torch.randn(Z, N, K, generator=g) * K**-0.5
    pair = (t.to(device=device, dtype=getattr(torch, dtype)) for t in (a, b))
    return *pair, (0.5 + torch.rand(K, generator=g)).to(device)


def reference(a, b, c):
    return (a.float() * c).to(a.dtype) @ b.transpose(1, 2)
