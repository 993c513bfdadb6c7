"""Grouped product over rows sorted by expert: dX keeps the forward's row tiles, dW lets one program own each tile."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "grouped_gemm_offsets",
    "family": "moe",
    "op": "grouped_gemm",
    "schema": 1,
    "techniques": ("varlen", "owner-grid", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _grouped_rows(
    L, W, Offsets, OUT, N, K, E, l_m, l_k, w_e, w_k, w_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    # Row tiles never straddle experts. Each program finds its expert by counting tiles, without a table from the host.
    tile = tl.program_id(0)
    e = tl.arange(0, BLOCK_E)
    begin = tl.load(Offsets + e, mask=e < E, other=0)
    end = tl.load(Offsets + e + 1, mask=e < E, other=0)
    tiles = (end - begin + BLOCK_M - 1) // BLOCK_M
    after = tl.cumsum(tiles, 0)
    if tile >= tl.sum(tiles, 0):
        return
    expert = tl.sum((after <= tile).to(tl.int32), 0)
    mine = e == expert
    tile -= tl.sum(tl.where(mine, after - tiles, 0), 0)
    last = tl.sum(tl.where(mine, end, 0), 0)
    m = tl.sum(tl.where(mine, begin, 0), 0).to(tl.int64) + tile * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    W += expert.to(tl.int64) * w_e
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        kk = start + k
        left = tl.load(
            L + m[:, None] * l_m + kk[None, :] * l_k, mask=(m[:, None] < last) & (kk[None, :] < K), other=0.0
        )
        w = tl.load(W + kk[:, None] * w_k + n[None, :] * w_n, mask=(kk[:, None] < K) & (n[None, :] < N), other=0.0)
        acc = tl.dot(left, w, acc)
    tl.store(OUT + m[:, None] * N + n[None, :], acc, mask=(m[:, None] < last) & (n[None, :] < N))


def _rows(left, weight, offsets):
    T, K = left.shape
    E, _, N = weight.shape
    out = torch.empty(T, N, device=left.device, dtype=weight.dtype)
    # At most one tile per expert is partly filled; superfluous programs leave at once.
    _grouped_rows[(triton.cdiv(T, 64) + E, triton.cdiv(N, 128))](
        left, weight, offsets, out, N, K, E, left.stride(0), left.stride(1), *weight.stride(),
        BLOCK_M=64, BLOCK_N=128, BLOCK_K=128 // weight.element_size(), BLOCK_E=triton.next_power_of_2(E),
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


def forward(x, weight, offsets):
    # Rows offsets[e] to offsets[e + 1] of x belong to expert e; offsets begin with 0 and end with the number of rows.
    return _rows(x, weight, offsets), (x, weight, offsets)


# --- backward ---
@triton.jit
def _grouped_dw(
    X, DY, Offsets, DW, N, K, x_m, x_k, dy_m, dy_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Tile (k, n) of one expert's x^T dy: its rows are contiguous, so the owner walks them and no partial sums leave it.
    k = tl.program_id(0).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    expert = tl.program_id(2).to(tl.int64)
    first = tl.load(Offsets + expert).to(tl.int64)
    last = tl.load(Offsets + expert + 1).to(tl.int64)
    acc = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    for start in range(first, last, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        xt = tl.load(X + k[:, None] * x_k + m[None, :] * x_m, mask=(k[:, None] < K) & (m[None, :] < last), other=0.0)
        dy = tl.load(DY + m[:, None] * dy_m + n[None, :] * dy_n, mask=(m[:, None] < last) & (n[None, :] < N), other=0.0)
        acc = tl.dot(xt, dy, acc)
    # An expert without rows stores its zeros like any other.
    at = expert * K * N + k[:, None] * N + n[None, :]
    tl.store(DW + at, acc, mask=(k[:, None] < K) & (n[None, :] < N))


def backward(saved, grad_y, needs=None):
    x, weight, offsets = saved
    need_x, need_w = needs or (True, True)
    E, K, N = weight.shape
    dx = _rows(grad_y, weight.transpose(1, 2), offsets) if need_x else None
    dw = None
    if need_w:
        dw = torch.empty(E, K, N, device=weight.device, dtype=weight.dtype)
        _grouped_dw[(triton.cdiv(K, 128), triton.cdiv(N, 128), E)](
            x, grad_y, offsets, dw, N, K, x.stride(0), x.stride(1), grad_y.stride(0), grad_y.stride(1),
            BLOCK_M=256 // x.element_size(), BLOCK_N=128, BLOCK_K=128, num_warps=8, num_stages=3,
        )  # fmt: skip
    return dx, dw


# --- check ---
SWEEP = (
    {"T": 128, "E": 2, "K": 32, "N": 64},
    {"T": 171, "E": 5, "K": 24, "N": 35, "dtype": "float16"},
    {"T": 60, "E": 3, "K": 16, "N": 40, "dtype": "bfloat16"},
)
BENCH = ({"T": 16384, "E": 8, "K": 1024, "N": 2048, "dtype": "bfloat16"},)


def make_args(T, E, K, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = (torch.randn(T, K, generator=g), torch.randn(E, K, N, generator=g))
    # The first expert gets most rows and, with more than two, the second none.
    cuts = torch.randint(T // 2, T + 1, (E - 1,), generator=g).sort().values
    if E > 2:
        cuts[1] = cuts[0]
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), cuts, torch.tensor([T]))).to(torch.int32)
    x, weight = (t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors)
    return x, weight, offsets.to(device)


def reference(x, weight, offsets):
    cuts = offsets.tolist()
    return torch.cat([x[a:b] @ w for a, b, w in zip(cuts[:-1], cuts[1:], weight, strict=True)])
