"""GroupNorm with a group that fits one block: dx stays in the group, weight gradients pass through (N, C) partials."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "groupnorm_small",
    "family": "norm_channel",
    "op": "group_norm",
    "schema": 1,
    "techniques": ("row-local", "saved-statistics", "two-stage-partials", "multi-row-tile"),
    "saves": ("mean: fp32 (N, G)", "rstd: fp32 (N, G)"),
    "grads": ("x", "weight", "bias"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _groupnorm_fwd(X, W, B, Y, Mean, Rstd, G, K, L, eps, BLOCK_K: tl.constexpr, BLOCK_L: tl.constexpr):
    # One program: sample n, group g; the group is a tile of K channels by L positions.
    pid = tl.program_id(0).to(tl.int64)
    group = pid % G
    k = tl.arange(0, BLOCK_K)
    t = tl.arange(0, BLOCK_L)
    mask = (k[:, None] < K) & (t[None, :] < L)
    at = pid * K * L + k[:, None] * L + t[None, :]
    x = tl.load(X + at, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(x) / (K * L)
    centred = tl.where(mask, x - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred) / (K * L) + eps)
    w = tl.load(W + group * K + k, mask=k < K, other=0.0).to(tl.float32)
    b = tl.load(B + group * K + k, mask=k < K, other=0.0).to(tl.float32)
    tl.store(Mean + pid, mean)
    tl.store(Rstd + pid, rstd)
    tl.store(Y + at, centred * rstd * w[:, None] + b[:, None], mask=mask)


def forward(x, weight, bias, groups, eps=1e-5):
    x = x.contiguous()
    N, C, L = x.shape
    K = C // groups
    y = torch.empty_like(x)
    mean = torch.empty(N, groups, device=x.device, dtype=torch.float32)
    rstd = torch.empty_like(mean)
    _groupnorm_fwd[(N * groups,)](
        x, weight, bias, y, mean, rstd, groups, K, L, eps,
        BLOCK_K=triton.next_power_of_2(K), BLOCK_L=triton.next_power_of_2(L), num_warps=8 if K * L > 4096 else 4,
    )  # fmt: skip
    return y, (x, weight, mean, rstd)


# --- backward ---
@triton.jit
def _add_both(a0, b0, a1, b1):
    return a0 + a1, b0 + b1


@triton.jit
def _groupnorm_bwd(DY, X, W, Mean, Rstd, DX, DWP, DBP, G, K, L, BLOCK_K: tl.constexpr, BLOCK_L: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    group = pid % G
    k = tl.arange(0, BLOCK_K)
    t = tl.arange(0, BLOCK_L)
    mask = (k[:, None] < K) & (t[None, :] < L)
    at = pid * K * L + k[:, None] * L + t[None, :]
    x = tl.load(X + at, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(DY + at, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(W + group * K + k, mask=k < K, other=0.0).to(tl.float32)
    mean = tl.load(Mean + pid)
    rstd = tl.load(Rstd + pid)
    # g is zero outside the group, where xhat may be anything finite.
    xhat = (x - mean) * rstd
    # Sums over positions give this sample's share of dweight and dbias; weighted by w they give the group sums of dx.
    dw, db = tl.reduce((g * xhat, g), 1, _add_both)
    tl.store(DWP + pid * K + k, dw, mask=k < K)
    tl.store(DBP + pid * K + k, db, mask=k < K)
    along_xhat = tl.sum(dw * w, 0) / (K * L)
    along_one = tl.sum(db * w, 0) / (K * L)
    tl.store(DX + at, rstd * (g * w[:, None] - along_one - xhat * along_xhat), mask=mask)


def backward(saved, grad_y, needs=None):
    x, weight, mean, rstd = saved
    N, C, L = x.shape
    groups = mean.shape[1]
    K = C // groups
    grad_y = grad_y.contiguous()
    dx = torch.empty_like(x)
    parts = torch.empty(2, N, C, device=x.device, dtype=torch.float32)
    _groupnorm_bwd[(N * groups,)](
        grad_y, x, weight, mean, rstd, dx, parts[0], parts[1], groups, K, L,
        BLOCK_K=triton.next_power_of_2(K), BLOCK_L=triton.next_power_of_2(L), num_warps=8 if K * L > 4096 else 4,
    )  # fmt: skip
    totals = parts.sum(1).to(weight.dtype)
    return dx, totals[0], totals[1]


# --- check ---
SWEEP = (
    {"N": 3, "G": 2, "K": 4, "L": 16},
    {"N": 2, "G": 3, "K": 3, "L": 21, "dtype": "float16"},
    {"N": 2, "G": 4, "K": 2, "L": 32, "dtype": "bfloat16"},
)
BENCH = ({"N": 512, "G": 32, "K": 8, "L": 1024, "dtype": "bfloat16"},)


def make_args(N, G, K, L, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    C = G * K
    tensors = (torch.randn(N, C, L, generator=g), torch.rand(C, generator=g) + 0.5, torch.randn(C, generator=g))
    return (*(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors), G)


def reference(x, weight, bias, groups, eps=1e-5):
    y = torch.nn.functional.group_norm(x.float(), groups, weight.float(), bias.float(), eps)
    return y.to(x.dtype)
