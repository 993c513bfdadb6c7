"""Grouped GEMM over experts with row offsets: dx keeps the grouping, a program of dw walks the rows of its expert."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "grouped_gemm_offsets",
    "family": "moe",
    "op": "grouped_gemm",
    "schema": 1,
    "techniques": ("grouped-ownership", "varlen-bounds", "tensor-core", "strided-cotangent"),
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
    X, W, Offsets, Y, N, K, x_m, x_k, w_e, w_k, w_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Axis 1 enumerates row tiles of the longest possible group; those beyond this expert's rows leave at once.
    expert = tl.program_id(0).to(tl.int64)
    first = tl.load(Offsets + expert)
    last = tl.load(Offsets + expert + 1)
    m = first + tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
    n = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    if first + tl.program_id(1) * BLOCK_M < last:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, K, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            in_x = (m[:, None] < last) & (k[None, :] < K)
            x = tl.load(X + m[:, None] * x_m + k[None, :] * x_k, mask=in_x, other=0.0)
            in_w = (k[:, None] < K) & (n[None, :] < N)
            w = tl.load(W + expert * w_e + k[:, None] * w_k + n[None, :] * w_n, mask=in_w, other=0.0)
            acc = tl.dot(x, w, acc)
        tl.store(Y + m[:, None] * N + n[None, :], acc, mask=(m[:, None] < last) & (n[None, :] < N))


def _tile(size, most):
    return max(16, min(most, triton.next_power_of_2(size)))


def _multiply_groups(x, weight, offsets):
    """Row group e of x (rows offsets[e] to offsets[e+1]) times weight[e]; any strides."""
    (T, K), (E, _, N) = x.shape, weight.shape
    y = torch.empty(T, N, device=x.device, dtype=x.dtype)
    BM, BN = _tile(T, 64), _tile(N, 128)
    _grouped_rows[(E, triton.cdiv(T, BM), triton.cdiv(N, BN))](
        x, weight, offsets, y, N, K, *x.stride(), *weight.stride(), BLOCK_M=BM, BLOCK_N=BN, BLOCK_K=_tile(K, 32)
    )
    return y


def forward(x, weight, offsets):
    return _multiply_groups(x, weight, offsets), (x, weight, offsets)


# --- backward ---
@triton.jit
def _grouped_dweight(
    X, DY, Offsets, DW, N, K, x_m, x_k, dy_m, dy_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # An expert's rows are consecutive, so one program can walk them all: no atomics, and an idle expert stores zeros.
    expert = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    n = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.load(Offsets + expert).to(tl.int64)
    last = tl.load(Offsets + expert + 1).to(tl.int64)
    acc = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    for start in range(first, last, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        x = tl.load(X + m[None, :] * x_m + k[:, None] * x_k, mask=(m[None, :] < last) & (k[:, None] < K), other=0.0)
        dy = tl.load(DY + m[:, None] * dy_m + n[None, :] * dy_n, mask=(m[:, None] < last) & (n[None, :] < N), other=0.0)
        acc = tl.dot(x, dy, acc)
    at = DW + (expert * K + k[:, None]) * N + n[None, :]
    tl.store(at, acc, mask=(k[:, None] < K) & (n[None, :] < N))


def backward(saved, grad_y, needs=(True, True)):
    x, weight, offsets = saved
    E, K, N = weight.shape
    dx = _multiply_groups(grad_y, weight.transpose(1, 2), offsets) if needs[0] else None
    if not needs[1]:
        return dx, None
    dw = torch.empty(E, K, N, device=weight.device, dtype=weight.dtype)
    BK, BN = _tile(K, 128), _tile(N, 64)
    _grouped_dweight[(E, triton.cdiv(K, BK), triton.cdiv(N, BN))](
        x, grad_y, offsets, dw, N, K, *x.stride(), *grad_y.stride(), BLOCK_M=32, BLOCK_N=BN, BLOCK_K=BK
    )
    return dx, dw


# --- check ---
SWEEP = (
    {"T": 48, "E": 3, "K": 32, "N": 16},
    {"T": 77, "E": 5, "K": 19, "N": 37},
    {"T": 32, "E": 2, "K": 32, "N": 32, "dtype": "float16"},
)


def make_args(T, E, K, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    dt = getattr(torch, dtype)
    x, weight = torch.randn(T, K, generator=g), torch.randn(E, K, N, generator=g) / K**0.5
    # Cut points drawn at random: uneven groups, some of them empty.
    cuts = torch.sort(torch.randint(0, T + 1, (E - 1,), generator=g)).values
    offsets = torch.cat((torch.zeros(1, dtype=torch.long), cuts, torch.full((1,), T))).to(torch.int32)
    return x.to(device, dt), weight.to(device, dt), offsets.to(device)


def reference(x, weight, offsets):
    ends = offsets.tolist()
    groups = [x[a:b].float() @ w.float() for a, b, w in zip(ends[:-1], ends[1:], weight, strict=True)]
    return torch.cat(groups).to(x.dtype)
