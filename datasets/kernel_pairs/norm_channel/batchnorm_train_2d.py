"""BatchNorm in training over (N, C): a program owns a tile of channels and walks the batch twice in each direction.

No partial sum leaves a program, and no second launch waits for one: made for many channels, as projection heads have.
With few of them the grid cannot fill a device, and the batch has to be split (batchnorm_nhwc does).
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "batchnorm_train_2d",
    "family": "norm_channel",
    "op": "batch_norm",
    "schema": 1,
    "techniques": ("column-owner", "saved-statistics", "two-pass", "strided-cotangent"),
    "saves": ("mean: fp32 (C,)", "rstd: fp32 (C,)"),
    "grads": ("x", "weight", "bias"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _batchnorm_fwd(X, W, B, Y, Mean, Rstd, N, C, eps, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr):
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    live_c = c < C
    # Running mean and centred sum of squares, merged tile by tile (Chan's update): one read of x, no cancellation.
    mean = tl.zeros((BLOCK_C,), tl.float32)
    m2 = tl.zeros((BLOCK_C,), tl.float32)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        mask = (n[:, None] < N) & live_c[None, :]
        x = tl.load(X + n[:, None].to(tl.int64) * C + c[None, :], mask=mask, other=0.0).to(tl.float32)
        here = tl.minimum(N - start, BLOCK_N).to(tl.float32)
        tile_mean = tl.sum(x, 0) / here
        centred = tl.where(mask, x - tile_mean[None, :], 0.0)
        delta = tile_mean - mean
        m2 += tl.sum(centred * centred, 0) + delta * delta * (start * here / (start + here))
        mean += delta * (here / (start + here))
    rstd = tl.rsqrt(m2 / N + eps)
    tl.store(Mean + c, mean, mask=live_c)
    tl.store(Rstd + c, rstd, mask=live_c)
    w = tl.load(W + c, mask=live_c, other=0.0).to(tl.float32) * rstd
    b = tl.load(B + c, mask=live_c, other=0.0).to(tl.float32)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        mask = (n[:, None] < N) & live_c[None, :]
        at = n[:, None].to(tl.int64) * C + c[None, :]
        x = tl.load(X + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(Y + at, (x - mean[None, :]) * w[None, :] + b[None, :], mask=mask)


def _tile(N, C):
    """Channels of a tile: 32 bytes of a 16-bit row at least, more where that still leaves 256 programs."""
    BLOCK_C = max(16, min(64, triton.next_power_of_2(C) // 256))
    return {"BLOCK_N": max(16, min(4096 // BLOCK_C, triton.next_power_of_2(N))), "BLOCK_C": BLOCK_C, "num_warps": 8}


def forward(x, weight, bias, eps=1e-5):
    x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
    N, C = x.shape
    y = torch.empty_like(x)
    mean = torch.empty(C, device=x.device, dtype=torch.float32)
    rstd = torch.empty_like(mean)
    tile = _tile(N, C)
    _batchnorm_fwd[(triton.cdiv(C, tile["BLOCK_C"]),)](x, weight, bias, y, mean, rstd, N, C, eps, **tile)
    return y, (x, weight, mean, rstd)


# --- backward ---
@triton.jit
def _batchnorm_bwd(
    DY, X, W, Mean, Rstd, DX, DW, DB, N, C, stride_n, stride_c, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr
):
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    live_c = c < C
    mean = tl.load(Mean + c, mask=live_c, other=0.0)
    rstd = tl.load(Rstd + c, mask=live_c, other=0.0)
    sum_g = tl.zeros((BLOCK_N, BLOCK_C), tl.float32)
    sum_gx = tl.zeros((BLOCK_N, BLOCK_C), tl.float32)
    # Copies run four tiles ahead. They fill the shared memory of a processor: one tile of channels at a time is under
    # way on it, so that what all of them read fits L2 until their second walk.
    for start in tl.range(0, N, BLOCK_N, num_stages=5):
        n = (start + tl.arange(0, BLOCK_N)).to(tl.int64)
        mask = (n[:, None] < N) & live_c[None, :]
        x = tl.load(X + n[:, None] * C + c[None, :], mask=mask, other=0.0).to(tl.float32)
        g = tl.load(DY + n[:, None] * stride_n + c[None, :] * stride_c, mask=mask, other=0.0).to(tl.float32)
        sum_g += g
        sum_gx += g * (x - mean[None, :])
    db = tl.sum(sum_g, 0)
    dw = tl.sum(sum_gx, 0) * rstd
    tl.store(DB + c, db, mask=live_c)
    tl.store(DW + c, dw, mask=live_c)
    # The two sums are also the mean and the projection that dx needs: a second walk over x and g, back from the end,
    # which is what L2 still holds.
    w = tl.load(W + c, mask=live_c, other=0.0).to(tl.float32) * rstd
    last = (tl.cdiv(N, BLOCK_N) - 1) * BLOCK_N
    for back in tl.range(0, N, BLOCK_N, num_stages=5):
        n = (last - back + tl.arange(0, BLOCK_N)).to(tl.int64)
        mask = (n[:, None] < N) & live_c[None, :]
        x = tl.load(X + n[:, None] * C + c[None, :], mask=mask, other=0.0).to(tl.float32)
        g = tl.load(DY + n[:, None] * stride_n + c[None, :] * stride_c, mask=mask, other=0.0).to(tl.float32)
        xhat = (x - mean[None, :]) * rstd[None, :]
        dx = w[None, :] * (g - (db / N)[None, :] - xhat * (dw / N)[None, :])
        tl.store(DX + n[:, None] * C + c[None, :], dx, mask=mask)


def backward(saved, grad_y, needs=None):
    x, weight, mean, rstd = saved
    N, C = x.shape
    dx = torch.empty_like(x)
    dw, db = torch.empty_like(weight), torch.empty_like(weight)
    # 64 bytes of a 16-bit row, and tiles of 16 KiB.
    tile = {"BLOCK_C": 32, "BLOCK_N": max(16, min(256, triton.next_power_of_2(N))), "num_warps": 16}
    _batchnorm_bwd[(triton.cdiv(C, tile["BLOCK_C"]),)](
        grad_y, x, weight, mean, rstd, dx, dw, db, N, C, grad_y.stride(0), grad_y.stride(1), **tile
    )
    return dx, dw, db


# --- check ---
SWEEP = ({"N": 64, "C": 32}, {"N": 70, "C": 37, "dtype": "float16"}, {"N": 130, "C": 16, "dtype": "bfloat16"})
BENCH = ({"N": 4096, "C": 8192, "dtype": "bfloat16"},)


def make_args(N, C, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = (torch.randn(N, C, generator=g) + 1.0, torch.rand(C, generator=g) + 0.5, torch.randn(C, generator=g))
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors)


def reference(x, weight, bias, eps=1e-5):
    xf = x.float()
    centred = xf - xf.mean(0)
    y = centred * torch.rsqrt(centred.pow(2).mean(0) + eps)
    return (y * weight.float() + bias.float()).to(x.dtype)
