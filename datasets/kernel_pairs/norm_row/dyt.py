"""Dynamic Tanh, y = w * tanh(a * x) + b: an elementwise core and three parameter sums out of one column-grid launch.

A program owns a column tile and a share of the rows: dw and db are sums down its columns, and the scalar da, the sum of
x * dx / a over everything, is a third sum down the same columns until the very end. tanh is rebuilt from x.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "dyt",
    "family": "norm_row",
    "op": "dynamic_tanh",
    "schema": 1,
    "techniques": (
        "elementwise", "recompute", "two-stage-partials", "scalar-gradient", "one-launch", "strided-cotangent",
    ),
    "saves": (),
    "grads": ("x", "a", "weight", "bias"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}  # fmt: skip


# --- forward ---
@triton.jit
def _tanh(z):
    # Through the logistic function: it saturates at both ends and never divides two infinities.
    return 2.0 * tl.sigmoid(2.0 * z) - 1.0


@triton.jit
def _dyt_fwd(X, A, W, B, Y, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    ok = (m[:, None] < M) & (n[None, :] < N)
    x = tl.load(X + m[:, None] * N + n[None, :], mask=ok, other=0.0).to(tl.float32)
    w = tl.load(W + n, mask=n < N, other=0.0).to(tl.float32)
    b = tl.load(B + n, mask=n < N, other=0.0).to(tl.float32)
    y = _tanh(tl.load(A).to(tl.float32) * x) * w[None, :] + b[None, :]
    tl.store(Y + m[:, None] * N + n[None, :], y, mask=ok)


def _tile(N):
    block_n = max(16, min(128, triton.next_power_of_2(N)))
    return {"BLOCK_M": 2048 // block_n, "BLOCK_N": block_n}


def forward(x, a, weight, bias):
    x = x.contiguous()
    M, N = x.shape
    y = torch.empty_like(x)
    tile = _tile(N)
    grid = (triton.cdiv(N, tile["BLOCK_N"]), triton.cdiv(M, tile["BLOCK_M"]))
    _dyt_fwd[grid](x, a, weight, bias, y, M, N, **tile)
    return y, (x, a, weight)


# --- backward ---
@triton.jit
def _dyt_bwd(
    DY, X, A, W, DX, Parts, M, N, dy_m, dy_n, rows_each, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1).to(tl.int64)
    a = tl.load(A).to(tl.float32)
    w = tl.load(W + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    dw = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    db = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    da = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    last = tl.minimum((split + 1) * rows_each, M)
    for start in tl.range(split * rows_each, last, BLOCK_M, num_stages=3):
        m = start + tl.arange(0, BLOCK_M)
        ok = (m[:, None] < last) & (n[None, :] < N)
        x = tl.load(X + m[:, None] * N + n[None, :], mask=ok, other=0.0).to(tl.float32)
        dy_at = m[:, None] * dy_m + n[None, :].to(tl.int64) * dy_n
        dy = tl.load(DY + dy_at, mask=ok, other=0.0).to(tl.float32)
        t = _tanh(a * x)
        # The gradient of z = a * x.
        dz = dy * w * (1.0 - t * t)
        tl.store(DX + m[:, None] * N + n[None, :], a * dz, mask=ok)
        dw += dy * t
        db += dy
        da += dz * x
    out = Parts + split * 3 * N + n
    tl.store(out, tl.sum(dw, 0), mask=n < N)
    tl.store(out + N, tl.sum(db, 0), mask=n < N)
    tl.store(out + 2 * N, tl.sum(da, 0), mask=n < N)


def backward(saved, grad_y, needs=None):
    x, a, weight = saved
    M, N = x.shape
    tile = _tile(N)
    columns = triton.cdiv(N, tile["BLOCK_N"])
    # About eight programs of four warps for each of 132 processors.
    rows_each = triton.cdiv(triton.cdiv(M, max(1, 1056 // columns)), tile["BLOCK_M"]) * tile["BLOCK_M"]
    splits = triton.cdiv(M, rows_each)
    dx = torch.empty_like(x)
    parts = torch.empty(splits, 3, N, device=x.device, dtype=torch.float32)
    _dyt_bwd[(columns, splits)](
        grad_y, x, a, weight, dx, parts, M, N, grad_y.stride(0), grad_y.stride(1), rows_each, **tile, num_warps=2
    )
    sums = parts.sum(0)
    dweight, dbias = sums[:2].to(weight.dtype)
    return dx, sums[2].sum().to(a.dtype).view(1), dweight, dbias


# --- check ---
SWEEP = (
    {"M": 40, "N": 64},
    {"M": 37, "N": 83, "dtype": "float16"},
    {"M": 33, "N": 128, "dtype": "bfloat16"},
)
BENCH = ({"M": 16384, "N": 4096, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = (
        torch.randn(M, N, generator=g) * 1.5,
        torch.full((1,), 0.5),
        torch.rand(N, generator=g) + 0.5,
        torch.randn(N, generator=g),
    )
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors)


def reference(x, a, weight, bias):
    return (torch.tanh(a.float() * x.float()) * weight.float() + bias.float()).to(x.dtype)
