"""Linear layer x W^T with long x: dW splits the rows over programs, whose tiles meet by fp32 atomic additions.

Against partial buffers this saves the second launch and a buffer per split, and gives up the order of the summation:
dW differs in its last bits from run to run. The additions go to a zeroed fp32 buffer also where the weight is bf16,
since a bf16 atomic would round after every split. A split count of one stores its tile and adds nothing.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "matmul_splitk_atomic_dw",
    "family": "matmul",
    "op": "linear",
    "schema": 1,
    "techniques": ("split-k", "atomics", "owner-grid", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _linear_fwd(X, W, Y, M, N, K, x_row, w_row, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    rows = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Rows past the end repeat the last one: only the contracted axis needs a mask, and the store.
    x_at = X + tl.minimum(rows, M - 1)[:, None] * x_row + k[None, :]
    w_at = W + tl.minimum(cols, N - 1)[None, :] * w_row + k[:, None]
    y = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        x = tl.load(x_at + start, mask=k[None, :] < K - start, other=0.0)
        w = tl.load(w_at + start, mask=k[:, None] < K - start, other=0.0)
        y = tl.dot(x, w, y)
    tl.store(Y + rows[:, None] * N + cols[None, :], y, mask=(rows[:, None] < M) & (cols[None, :] < N))


def forward(x, weight):
    x, weight = x.contiguous(), weight.contiguous()
    (M, K), N = x.shape, weight.shape[0]
    y = torch.empty(M, N, device=x.device, dtype=x.dtype)
    _linear_fwd[(triton.cdiv(N, 128), triton.cdiv(M, 128))](
        x, weight, y, M, N, K, K, K,
        BLOCK_M=128, BLOCK_N=128, BLOCK_K=128 // x.element_size(), num_warps=8, num_stages=3,
    )  # fmt: skip
    return y, (x, weight)


# --- backward ---
@triton.jit
def _linear_dx(DY, W, DX, M, N, K, dy_row, dy_col, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    rows = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.program_id(0).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    n = tl.arange(0, BLOCK_N).to(tl.int64)
    dy_at = DY + rows[:, None] * dy_row + n[None, :] * dy_col
    w_at = W + n[:, None] * K + k[None, :]
    dx = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for left in range(N, 0, -BLOCK_N):
        dy = tl.load(dy_at, mask=(rows[:, None] < M) & (n[None, :] < left), other=0.0)
        w = tl.load(w_at, mask=(n[:, None] < left) & (k[None, :] < K), other=0.0)
        dx = tl.dot(dy, w, dx)
        dy_at += BLOCK_N * dy_col
        w_at += BLOCK_N * K
    tl.store(DX + rows[:, None] * K + k[None, :], dx, mask=(rows[:, None] < M) & (k[None, :] < K))


@triton.jit
def _linear_dw_atomic(
    DY, X, DW, M, N, K, dy_row, dy_col, steps,
    ALONE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # The split is the slow axis of the grid: programs that add to one tile run apart from each other.
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(0).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    first = tl.program_id(2).to(tl.int64) * steps * BLOCK_M
    rows = first + tl.arange(0, BLOCK_M)
    dy_at = DY + n[:, None] * dy_col + rows[None, :] * dy_row
    x_at = X + rows[:, None] * K + k[None, :]
    dw = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for step in range(steps):
        m = rows + step * BLOCK_M
        dy = tl.load(dy_at, mask=(n[:, None] < N) & (m[None, :] < M), other=0.0)
        x = tl.load(x_at, mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
        dw = tl.dot(dy, x, dw)
        dy_at += BLOCK_M * dy_row
        x_at += BLOCK_M * K
    out = DW + n[:, None] * K + k[None, :]
    inside = (n[:, None] < N) & (k[None, :] < K)
    if ALONE:
        tl.store(out, dw, mask=inside)
    else:
        tl.atomic_add(out, dw, mask=inside, sem="relaxed")


def backward(saved, grad_y, needs=(True, True)):
    x, weight = saved
    (M, K), N = x.shape, weight.shape[0]
    depth = 128 // x.element_size()
    dx = dw = None
    if needs[0]:
        dx = torch.empty_like(x)
        _linear_dx[(triton.cdiv(K, 128), triton.cdiv(M, 128))](
            grad_y, weight, dx, M, N, K, grad_y.stride(0), grad_y.stride(1),
            BLOCK_M=128, BLOCK_N=depth, BLOCK_K=128, num_warps=8, num_stages=3,
        )  # fmt: skip
    if needs[1]:
        # As many splits as fill two waves of 132 processors, each at least four row tiles deep.
        tiles = triton.cdiv(N, 128) * triton.cdiv(K, 128)
        splits = max(1, min(264 // tiles, M // (4 * depth)))
        steps = triton.cdiv(triton.cdiv(M, depth), splits)
        splits = triton.cdiv(M, steps * depth)
        if splits == 1:
            dw = torch.empty_like(weight)
        else:
            dw = torch.zeros(N, K, device=x.device, dtype=torch.float32)
        _linear_dw_atomic[(triton.cdiv(K, 128), triton.cdiv(N, 128), splits)](
            grad_y, x, dw, M, N, K, grad_y.stride(0), grad_y.stride(1), steps,
            ALONE=splits == 1, BLOCK_M=depth, BLOCK_N=128, BLOCK_K=128, num_warps=4, num_stages=3,
        )  # fmt: skip
        dw = dw.to(weight.dtype)
    return dx, dw


# --- check ---
SWEEP = (
    {"M": 512, "N": 32, "K": 64},
    {"M": 407, "N": 150, "K": 18},
    {"M": 640, "N": 16, "K": 24, "dtype": "bfloat16"},
    {"M": 60, "N": 40, "K": 48, "dtype": "float16"},
)
BENCH = ({"M": 65536, "N": 768, "K": 768, "dtype": "bfloat16"},)


def make_args(M, N, K, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(M, K, generator=g), torch.randn(N, K, generator=g) * K**-0.5
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, weight))


def reference(x, weight):
    return x @ weight.t()
