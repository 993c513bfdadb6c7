"""Per-tensor int8 fake quantisation: rounding passes the gradient straight through, clipping stops it."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "fakequant_per_tensor_ste",
    "family": "quant",
    "op": "fake_quantize",
    "schema": 1,
    "techniques": ("straight-through", "elementwise", "recompute", "strided-cotangent"),
    "saves": (),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "gradient": "custom",
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _fakequant_fwd(X, Scale, Y, numel, low, high, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + i, mask=i < numel, other=0.0).to(tl.float32)
    scale = tl.load(Scale)
    level = tl.floor(x / scale + 0.5)
    level = tl.minimum(tl.maximum(level, low), high)
    tl.store(Y + i, level * scale, mask=i < numel)


def forward(x, scale, low=-128.0, high=127.0):
    x = x.contiguous()
    y = torch.empty_like(x)
    _fakequant_fwd[(triton.cdiv(x.numel(), 1024),)](x, scale, y, x.numel(), low, high, BLOCK=1024)
    return y, (x, scale, low, high)


# --- backward ---
@triton.jit
def _fakequant_bwd(DY, X, Scale, DX, M, N, stride_m, stride_n, low, high, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    live = (m < M) & (n < N)
    level = tl.load(X + m * N + n, mask=live, other=0.0).to(tl.float32) / tl.load(Scale)
    dy = tl.load(DY + m * stride_m + n * stride_n, mask=live, other=0.0).to(tl.float32)
    # The mask costs two comparisons of a value that is read anyway: cheaper than storing a bit for each element.
    tl.store(DX + m * N + n, tl.where((level >= low) & (level <= high), dy, 0.0), mask=live)


def backward(saved, grad_y, needs=None):
    x, scale, low, high = saved
    M, N = x.shape
    dx = torch.empty_like(x)
    _fakequant_bwd[(triton.cdiv(M, 8), triton.cdiv(N, 128))](
        grad_y, x, scale, dx, M, N, grad_y.stride(0), grad_y.stride(1), low, high, BLOCK_M=8, BLOCK_N=128
    )
    return dx


# --- check ---
SWEEP = ({"M": 16, "N": 128}, {"M": 13, "N": 77}, {"M": 8, "N": 256, "dtype": "bfloat16"})


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(M, N, generator=g).to(device=device, dtype=getattr(torch, dtype))
    # The scale clips the tails, so that both sides of the mask occur.
    return x, torch.full((1,), 0.012, device=device)


def reference(x, scale, low=-128.0, high=127.0):
    return (torch.clamp(torch.floor(x.float() / scale + 0.5), low, high) * scale).to(x.dtype)


def surrogate(x, scale, low=-128.0, high=127.0):
    inside = torch.clamp(x / scale, low, high)
    level = inside + (torch.clamp(torch.floor(x / scale + 0.5), low, high) - inside).detach()
    return (level * scale.detach()).to(x.dtype)
