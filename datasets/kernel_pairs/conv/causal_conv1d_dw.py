"""Depthwise causal convolution with SiLU over (B, C, L): dx looks K-1 steps ahead, dweight is summed from chunks."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "causal_conv1d_dw",
    "family": "conv",
    "op": "causal_conv1d",
    "schema": 1,
    "techniques": ("halo", "recompute", "two-stage-partials", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "weight", "bias"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _conv_at(x_row, w_row, bias, t, L, K: tl.constexpr):
    """bias + sum_j w[j] x[t - K + 1 + j] for a tile of times t, zero before the sequence."""
    z = tl.zeros(t.shape, tl.float32) + bias
    for j in tl.static_range(K):
        s = t - (K - 1) + j
        x = tl.load(x_row + s, mask=(s >= 0) & (s < L), other=0.0).to(tl.float32)
        z += tl.load(w_row + j).to(tl.float32) * x
    return z


@triton.jit
def _conv_fwd(X, W, Bias, Y, C, L, K: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = row % C
    t = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    z = _conv_at(X + row * L, W + c * K, tl.load(Bias + c).to(tl.float32), t, L, K)
    tl.store(Y + row * L + t, z * tl.sigmoid(z), mask=t < L)


def forward(x, weight, bias):
    x, weight = x.contiguous(), weight.contiguous()
    B, C, L = x.shape
    y = torch.empty_like(x)
    BLOCK = max(32, min(1024, triton.next_power_of_2(L)))
    _conv_fwd[(B * C, triton.cdiv(L, BLOCK))](x, weight, bias, y, C, L, K=weight.shape[1], BLOCK=BLOCK)
    return y, (x, weight, bias)


# --- backward ---
@triton.jit
def _dz_at(dy_row, dy_t, x_row, w_row, bias, t, L, K: tl.constexpr):
    """Gradient of the pre-activation at times t, recomputed where it is needed; zero after the sequence."""
    z = _conv_at(x_row, w_row, bias, t, L, K)
    s = tl.sigmoid(z)
    dy = tl.load(dy_row + t * dy_t, mask=t < L, other=0.0).to(tl.float32)
    return dy * s * (1.0 + z * (1.0 - s))


@triton.jit
def _conv_bwd(
    DY, X, W, Bias, DX, DWP, DBP, B, C, L, dy_b, dy_c, dy_t, K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    b = row // C
    c = row % C
    chunk = tl.program_id(1)
    t = chunk * BLOCK + tl.arange(0, BLOCK)
    dy_row = DY + b * dy_b + c * dy_c
    bias = tl.load(Bias + c).to(tl.float32)
    dx = tl.zeros((BLOCK,), tl.float32)
    dz = _dz_at(dy_row, dy_t, X + row * L, W + c * K, bias, t, L, K)
    k = tl.arange(0, BLOCK_K)
    dw = tl.zeros((BLOCK_K,), tl.float32)
    for j in tl.static_range(K):
        # Tap j of output t read x[t-K+1+j]; so x[t] was read by output t+K-1-j, up to K-1 steps beyond this chunk.
        ahead = dz
        if j < K - 1:
            ahead = _dz_at(dy_row, dy_t, X + row * L, W + c * K, bias, t + (K - 1 - j), L, K)
        dx += tl.load(W + c * K + j).to(tl.float32) * ahead
        s = t - (K - 1) + j
        x = tl.load(X + row * L + s, mask=(s >= 0) & (s < L), other=0.0).to(tl.float32)
        dw += tl.where(k == j, tl.sum(dz * x, 0), 0.0)
    tl.store(DX + row * L + t, dx, mask=t < L)
    # Partials ordered (chunk, batch, channel): the final sum runs over one leading axis.
    part = (chunk * B + b) * C + c
    tl.store(DWP + part * K + k, dw, mask=k < K)
    tl.store(DBP + part, tl.sum(dz, 0))


def backward(saved, grad_y, needs=None):
    x, weight, bias = saved
    (B, C, L), K = x.shape, weight.shape[1]
    BLOCK = max(32, min(512, triton.next_power_of_2(L)))
    chunks = triton.cdiv(L, BLOCK)
    dx = torch.empty_like(x)
    dw_parts = torch.empty(chunks * B, C, K, device=x.device, dtype=torch.float32)
    db_parts = torch.empty(chunks * B, C, device=x.device, dtype=torch.float32)
    _conv_bwd[(B * C, chunks)](
        grad_y, x, weight, bias, dx, dw_parts, db_parts, B, C, L, *grad_y.stride(),
        K=K, BLOCK_K=triton.next_power_of_2(K), BLOCK=BLOCK,
    )  # fmt: skip
    return dx, dw_parts.sum(0).to(weight.dtype), db_parts.sum(0).to(bias.dtype)


# --- check ---
SWEEP = (
    {"B": 2, "C": 3, "L": 64, "K": 4},
    {"B": 1, "C": 5, "L": 75, "K": 3},
    {"B": 2, "C": 2, "L": 32, "K": 4, "dtype": "bfloat16"},
)


def make_args(B, C, L, K, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = (torch.randn(B, C, L, generator=g), torch.randn(C, K, generator=g) / 2, torch.randn(C, generator=g) / 2)
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors)


def reference(x, weight, bias):
    C, K = weight.shape
    padded = torch.nn.functional.pad(x.float(), (K - 1, 0))
    z = torch.nn.functional.conv1d(padded, weight.float()[:, None], bias.float(), groups=C)
    return torch.nn.functional.silu(z).to(x.dtype)
