"""x W with at most 16 inner features, as sums of outer products: too thin for a matmul's schedule, bound by dY alone.

y[m, n] = sum over k of x[m, k] w[k, n]. The forward adds K rank-one tiles by fused multiply-add. The backward reads dY
once for both gradients: a program owns a tile of columns within a band of rows, and each piece of dY meets w in one
product, the piece's share of dx, and x in another, which adds to the tile's dW in registers. Features are padded to
sixteen for it: half idle, the tensor cores take less time than 2 K multiply-adds for each element of dY. What leaves is
one column of dx per column tile and one dW per band, a fraction K / 64 of dY at most.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "matmul_small_k",
    "family": "matmul",
    "op": "matmul",
    "schema": 1,
    "techniques": ("one-launch", "two-stage-partials", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": False,
}


# --- forward ---
@triton.jit
def _thin_fwd(X, W, Y, M, N, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    m = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    y = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in tl.static_range(K):
        x = tl.load(X + m * K + k, mask=m < M, other=0.0).to(tl.float32)
        w = tl.load(W + k * N + n, mask=n < N, other=0.0).to(tl.float32)
        y += x[:, None] * w[None, :]
    tl.store(Y + m[:, None] * N + n[None, :], y, mask=(m[:, None] < M) & (n[None, :] < N))


def forward(x, weight):
    x, weight = x.contiguous(), weight.contiguous()
    (M, K), N = x.shape, weight.shape[1]
    if K > 16:
        raise ValueError("for more than 16 inner features use a product with tl.dot")
    y = torch.empty(M, N, device=x.device, dtype=x.dtype)
    BLOCK_N = max(16, min(256, triton.next_power_of_2(N)))
    _thin_fwd[(triton.cdiv(N, BLOCK_N), triton.cdiv(M, 16))](
        x, weight, y, M, N, K=K, BLOCK_M=16, BLOCK_N=BLOCK_N, num_warps=4
    )
    return y, (x, weight)


# --- backward ---
@triton.jit
def _thin_bwd(
    DY, X, W, DXParts, DWParts, M, N, dy_m, dy_n, band, K: tl.constexpr,
    NEED_X: tl.constexpr, NEED_W: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0).to(tl.int64)
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    first = tl.program_id(1).to(tl.int64) * band
    last = tl.minimum(first + band, M)
    w = tl.load(W + k[None, :] * N + n[:, None], mask=(k[None, :] < K) & (n[:, None] < N), other=0.0)
    dw = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    for start in tl.range(first, last, BLOCK_M, num_stages=3):
        m = start + tl.arange(0, BLOCK_M)
        dy_at = DY + m[:, None] * dy_m + n[None, :] * dy_n
        dy = tl.load(dy_at, mask=(m[:, None] < last) & (n[None, :] < N), other=0.0)
        rows = m[:, None] * K + k[None, :]
        live = (m[:, None] < last) & (k[None, :] < K)
        if NEED_X:
            dx = tl.dot(dy, w, input_precision="ieee")
            tl.store(DXParts + column * M * K + rows, dx, mask=live)
        if NEED_W:
            x = tl.load(X + rows, mask=live, other=0.0)
            dw = tl.dot(tl.trans(x), dy, dw, input_precision="ieee")
    if NEED_W:
        out = DWParts + (tl.program_id(1).to(tl.int64) * K + k[:, None]) * N + n[None, :]
        tl.store(out, dw, mask=(k[:, None] < K) & (n[None, :] < N))


def backward(saved, grad_y, needs=(True, True)):
    x, weight = saved
    (M, K), N = x.shape, weight.shape[1]
    # A product has sixteen features at least: those beyond K are zeros.
    BLOCK_K = 16
    BLOCK_N = max(16, min(128, triton.next_power_of_2(N)))
    BLOCK_M = 64 if x.element_size() == 2 else 16
    columns = triton.cdiv(N, BLOCK_N)
    bands = max(1, min(triton.cdiv(M, 4 * BLOCK_M), 528 // columns))
    band = triton.cdiv(M, bands)
    bands = triton.cdiv(M, band)
    dx = torch.empty(columns, M, K, device=x.device, dtype=torch.float32) if needs[0] else None
    dw = torch.empty(bands, K, N, device=x.device, dtype=torch.float32) if needs[1] else None
    _thin_bwd[(columns, bands)](
        grad_y, x, weight, dx, dw, M, N, grad_y.stride(0), grad_y.stride(1), band, K=K,
        NEED_X=needs[0], NEED_W=needs[1], BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, num_warps=4,
    )  # fmt: skip
    return dx.sum(0).to(x.dtype) if needs[0] else None, dw.sum(0).to(weight.dtype) if needs[1] else None


# --- check ---
SWEEP = (
    {"M": 64, "N": 128, "K": 8},
    {"M": 75, "N": 301, "K": 3},
    {"M": 130, "N": 40, "K": 16, "dtype": "bfloat16"},
    {"M": 33, "N": 72, "K": 5, "dtype": "float16"},
)
BENCH = ({"M": 524288, "N": 512, "K": 8, "dtype": "bfloat16"},)


def make_args(M, N, K, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(M, K, generator=g), torch.randn(K, N, generator=g) * K**-0.5
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, weight))


def reference(x, weight):
    return x @ weight
