"""RMSNorm folded into the linear layer behind it, y = (gamma * x) W^T / rms(x): a row factor in the product's epilogue.

The row's sum of squares is taken from the tiles of x as they pass. Backwards, with r = <dy, y> of a row (one thin
launch, like the delta of attention), dx = gamma * P - x * r / (rms^2 K) with P = dy W / rms: the product's epilogue
writes dx, and for each row tile a partial row of the column sums of P * x, which are dgamma.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "rmsnorm_linear_fused",
    "family": "norm_fused",
    "op": "rms_norm_linear",
    "schema": 1,
    "techniques": (
        "epilogue-fusion", "prologue-fusion", "delta-preprocess", "saved-output", "two-stage-partials",
        "strided-cotangent",
    ),
    "saves": ("y: fp32 or bf16 or fp16 (M, N)", "inv_rms: fp32 (M,)"),
    "grads": ("x", "gamma", "weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}  # fmt: skip


# --- forward ---
@triton.jit
def _rms_linear_fwd(
    X, Gamma, W, Y, InvRms, M, N, K, eps, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(X + m[:, None] * K + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
        xf = x.to(tl.float32)
        squares += tl.sum(xf * xf, 1)
        gamma = tl.load(Gamma + k, mask=k < K, other=0.0).to(tl.float32)
        w = tl.load(W + n[None, :] * K + k[:, None], mask=(n[None, :] < N) & (k[:, None] < K), other=0.0)
        acc = tl.dot((xf * gamma[None, :]).to(x.dtype), w, acc)
    inv = tl.rsqrt(squares / K + eps)
    if tl.program_id(0) == 0:
        tl.store(InvRms + m, inv, mask=m < M)
    tl.store(Y + m[:, None] * N + n[None, :], acc * inv[:, None], mask=(m[:, None] < M) & (n[None, :] < N))


def forward(x, gamma, weight, eps=1e-6):
    x, weight = x.contiguous(), weight.contiguous()
    M, K = x.shape
    N = weight.shape[0]
    y = torch.empty(M, N, device=x.device, dtype=x.dtype)
    inv_rms = torch.empty(M, device=x.device, dtype=torch.float32)
    _rms_linear_fwd[(triton.cdiv(N, 128), triton.cdiv(M, 128))](
        x, gamma, weight, y, inv_rms, M, N, K, eps,
        BLOCK_M=128, BLOCK_N=128, BLOCK_K=128 // x.element_size(), num_warps=8, num_stages=3,
    )  # fmt: skip
    return y, (x, gamma, weight, y, inv_rms)


# --- backward ---
@triton.jit
def _row_delta(DY, Y, Delta, N, dy_m, dy_n, BLOCK: tl.constexpr):
    m = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        n = start + tl.arange(0, BLOCK)
        dy = tl.load(DY + m * dy_m + n.to(tl.int64) * dy_n, mask=n < N, other=0.0).to(tl.float32)
        total += dy * tl.load(Y + m * N + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(Delta + m, tl.sum(total, 0))


@triton.jit
def _rms_linear_dx(
    DY, X, Gamma, W, InvRms, Delta, DX, Parts, M, N, K, dy_m, dy_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    k = tl.program_id(0).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    tile = tl.program_id(1).to(tl.int64)
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    acc = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for start in range(0, N, BLOCK_N):
        n = (start + tl.arange(0, BLOCK_N)).to(tl.int64)
        dy = tl.load(DY + m[:, None] * dy_m + n[None, :] * dy_n, mask=(m[:, None] < M) & (n[None, :] < N), other=0.0)
        w = tl.load(W + n[:, None] * K + k[None, :], mask=(n[:, None] < N) & (k[None, :] < K), other=0.0)
        acc = tl.dot(dy, w, acc)
    inv = tl.load(InvRms + m, mask=m < M, other=0.0)
    pull = tl.load(Delta + m, mask=m < M, other=0.0) * inv * inv / K
    ok = (m[:, None] < M) & (k[None, :] < K)
    x = tl.load(X + m[:, None] * K + k[None, :], mask=ok, other=0.0).to(tl.float32)
    p = acc * inv[:, None]
    tl.store(Parts + tile * K + k, tl.sum(p * x, 0), mask=k < K)
    gamma = tl.load(Gamma + k, mask=k < K, other=0.0).to(tl.float32)
    tl.store(DX + m[:, None] * K + k[None, :], p * gamma[None, :] - x * pull[:, None], mask=ok)


@triton.jit
def _rms_linear_dw(
    DY, X, Gamma, InvRms, DW, M, N, K, dy_m, dy_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    k = tl.program_id(0).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for start in range(0, M, BLOCK_M):
        m = (start + tl.arange(0, BLOCK_M)).to(tl.int64)
        inv = tl.load(InvRms + m, mask=m < M, other=0.0)
        x = tl.load(X + m[:, None] * K + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
        dyt = tl.load(DY + m[None, :] * dy_m + n[:, None] * dy_n, mask=(m[None, :] < M) & (n[:, None] < N), other=0.0)
        # The row factor goes with x on the way in, the column factor gamma waits for the end.
        acc = tl.dot(dyt, (x.to(tl.float32) * inv[:, None]).to(x.dtype), acc)
    gamma = tl.load(Gamma + k, mask=k < K, other=0.0).to(tl.float32)
    tl.store(DW + n[:, None] * K + k[None, :], acc * gamma[None, :], mask=(n[:, None] < N) & (k[None, :] < K))


def backward(saved, grad_y, needs=None):
    x, gamma, weight, y, inv_rms = saved
    M, K = x.shape
    N = weight.shape[0]
    need_x, need_gamma, need_w = needs or (True, True, True)
    step = 128 // x.element_size()
    dx = dgamma = dweight = None
    if need_x or need_gamma:
        delta = torch.empty_like(inv_rms)
        _row_delta[(M,)](grad_y, y, delta, N, grad_y.stride(0), grad_y.stride(1), BLOCK=1024, num_warps=4)
        tiles = triton.cdiv(M, 128)
        dx = torch.empty_like(x)
        parts = torch.empty(tiles, K, device=x.device, dtype=torch.float32)
        _rms_linear_dx[(triton.cdiv(K, 128), tiles)](
            grad_y, x, gamma, weight, inv_rms, delta, dx, parts, M, N, K, grad_y.stride(0), grad_y.stride(1),
            BLOCK_M=128, BLOCK_N=step, BLOCK_K=128, num_warps=8, num_stages=3,
        )  # fmt: skip
        dgamma = parts.sum(0).to(gamma.dtype)
    if need_w:
        dweight = torch.empty_like(weight)
        _rms_linear_dw[(triton.cdiv(K, 128), triton.cdiv(N, 128))](
            grad_y, x, gamma, inv_rms, dweight, M, N, K, grad_y.stride(0), grad_y.stride(1),
            BLOCK_M=step, BLOCK_N=128, BLOCK_K=128, num_warps=8, num_stages=3,
        )  # fmt: skip
    return dx, dgamma, dweight


# --- check ---
SWEEP = (
    {"M": 64, "N": 32, "K": 48},
    {"M": 71, "N": 45, "K": 37, "dtype": "float16"},
    {"M": 40, "N": 24, "K": 64, "dtype": "bfloat16"},
)
BENCH = ({"M": 8192, "N": 4096, "K": 2048, "dtype": "bfloat16"},)


def make_args(M, N, K, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = (
        torch.randn(M, K, generator=g) * 1.2,
        torch.rand(K, generator=g) + 0.5,
        torch.randn(N, K, generator=g) * K**-0.5,
    )
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors)


def reference(x, gamma, weight, eps=1e-6):
    normed = torch.nn.functional.rms_norm(x.float(), (x.shape[1],), gamma.float(), eps)
    return normed.to(x.dtype) @ weight.t()
