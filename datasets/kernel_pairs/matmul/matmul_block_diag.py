"""Product with a block diagonal weight: blocks are a grid axis, and neither gradient has a term between two of them.

x (M, G, K) times weight (G, K, N) gives (M, G, N): block g of a row sees block g of the weight alone. Rows are G K
apart, so that a tile of one block is a strided slice and no transposed copy is made. dx keeps the forward's rows; the
owner of a block's tile of dW walks over all rows, and where tiles are few they split them and add partial tiles.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "matmul_block_diag",
    "family": "matmul",
    "op": "block_diagonal_linear",
    "schema": 1,
    "techniques": ("owner-grid", "split-k", "two-stage-partials", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _block_rows(
    X, W, Y, M, N, K, x_m, x_g, x_k, w_g, w_k, w_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Blocks are the fast axis: programs that run together write neighbouring slices of the same rows.
    block = tl.program_id(0).to(tl.int64)
    m = tl.program_id(2).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = (start + tl.arange(0, BLOCK_K)).to(tl.int64)
        x_at = X + m[:, None] * x_m + block * x_g + k[None, :] * x_k
        w_at = W + block * w_g + k[:, None] * w_k + n[None, :] * w_n
        x = tl.load(x_at, mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
        w = tl.load(w_at, mask=(k[:, None] < K) & (n[None, :] < N), other=0.0)
        acc = tl.dot(x, w, acc)
    out = Y + (m[:, None] * tl.num_programs(0) + block) * N + n[None, :]
    tl.store(out, acc, mask=(m[:, None] < M) & (n[None, :] < N))


def _side(size, most=128):
    return max(16, min(most, triton.next_power_of_2(size)))


def _rows(x, weight):
    (M, G, K), N = x.shape, weight.shape[2]
    y = torch.empty(M, G, N, device=x.device, dtype=x.dtype)
    BM, BN = _side(M), _side(N)
    _block_rows[(G, triton.cdiv(N, BN), triton.cdiv(M, BM))](
        x, weight, y, M, N, K, *x.stride(), *weight.stride(),
        BLOCK_M=BM, BLOCK_N=BN, BLOCK_K=_side(K, 128 // x.element_size()), num_warps=8, num_stages=3,
    )  # fmt: skip
    return y


def forward(x, weight):
    return _rows(x, weight), (x, weight)


# --- backward ---
@triton.jit
def _block_dw(
    X, DY, Parts, M, N, K, G, rows, x_m, x_g, x_k, dy_m, dy_g, dy_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    block = (tl.program_id(2) % G).to(tl.int64)
    split = (tl.program_id(2) // G).to(tl.int64)
    k = tl.program_id(1).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    last = tl.minimum((split + 1) * rows, M)
    acc = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    for start in range(split * rows, last, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        x_at = X + m[None, :] * x_m + block * x_g + k[:, None] * x_k
        dy_at = DY + m[:, None] * dy_m + block * dy_g + n[None, :] * dy_n
        xt = tl.load(x_at, mask=(m[None, :] < last) & (k[:, None] < K), other=0.0)
        dy = tl.load(dy_at, mask=(m[:, None] < last) & (n[None, :] < N), other=0.0)
        acc = tl.dot(xt, dy, acc)
    out = Parts + ((split * G + block) * K + k[:, None]) * N + n[None, :]
    tl.store(out, acc, mask=(k[:, None] < K) & (n[None, :] < N))


def backward(saved, grad_y, needs=(True, True)):
    x, weight = saved
    M, (G, K, N) = x.shape[0], weight.shape
    dx = _rows(grad_y, weight.transpose(1, 2)) if needs[0] else None
    dw = None
    if needs[1]:
        BK, BN, step = _side(K), _side(N), 128 // x.element_size()
        tiles = G * triton.cdiv(K, BK) * triton.cdiv(N, BN)
        # Two waves on 132 processors, each split four steps deep at least.
        splits = max(1, min(264 // tiles, M // (4 * step)))
        rows = triton.cdiv(triton.cdiv(M, splits), step) * step
        splits = triton.cdiv(M, rows)
        parts = torch.empty(splits, G, K, N, device=x.device, dtype=torch.float32 if splits > 1 else weight.dtype)
        _block_dw[(triton.cdiv(N, BN), triton.cdiv(K, BK), splits * G)](
            x, grad_y, parts, M, N, K, G, rows, *x.stride(), *grad_y.stride(),
            BLOCK_M=step, BLOCK_N=BN, BLOCK_K=BK, num_warps=8, num_stages=3,
        )  # fmt: skip
        dw = parts.sum(0).to(weight.dtype) if splits > 1 else parts[0]
    return dx, dw


# --- check ---
SWEEP = (
    {"M": 512, "G": 3, "K": 16, "N": 32},
    {"M": 307, "G": 2, "K": 41, "N": 29},
    {"M": 64, "G": 4, "K": 24, "N": 20, "dtype": "bfloat16"},
    {"M": 50, "G": 5, "K": 16, "N": 17, "dtype": "float16"},
)
BENCH = ({"M": 16384, "G": 16, "K": 256, "N": 256, "dtype": "bfloat16"},)


def make_args(M, G, K, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = (torch.randn(M, G, K, generator=g), torch.randn(G, K, N, generator=g) * K**-0.5)
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors)


def reference(x, weight):
    return torch.einsum("mgk,gkn->mgn", x, weight)
