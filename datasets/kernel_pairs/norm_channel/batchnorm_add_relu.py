"""BatchNorm in training, residual add and ReLU, channels last: the cut gradient is the residual's, and is stored first.

g = dy where y > 0. The pass that sums g and g * xhat stores g, which is the whole gradient of the residual; the pass
that writes dx reads g instead of dy and y.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "batchnorm_add_relu",
    "family": "norm_channel",
    "op": "batch_norm_add_relu",
    "schema": 1,
    "techniques": ("two-pass", "two-stage-partials", "saved-output", "saved-statistics", "strided-cotangent"),
    "saves": ("y: fp32 or bf16 or fp16 (N, H, W, C)", "stats: fp32 (2, C)"),
    "grads": ("x", "residual", "weight", "bias"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _pixel_moments(X, Parts, R, C, rows_each, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    split = tl.program_id(0).to(tl.int64)
    # Moments about the first pixel are additive over splits and free of a common offset.
    pivot = tl.load(X + c, mask=c < C, other=0.0).to(tl.float32)
    s1 = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    s2 = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    last = tl.minimum((split + 1) * rows_each, R)
    for start in range(split * rows_each, last, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        ok = (r[:, None] < last) & (c[None, :] < C)
        x = tl.load(X + r[:, None] * C + c[None, :], mask=ok, other=0.0).to(tl.float32)
        d = tl.where(ok, x - pivot[None, :], 0.0)
        s1 += d
        s2 += d * d
    tl.store(Parts + split * 2 * C + c, tl.sum(s1, 0), mask=c < C)
    tl.store(Parts + split * 2 * C + C + c, tl.sum(s2, 0), mask=c < C)


@triton.jit
def _bn_add_relu_fwd(X, Res, W, B, Sums, Y, Stats, R, C, rows_each, eps, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    split = tl.program_id(0).to(tl.int64)
    shift = tl.load(Sums + c, mask=c < C, other=0.0) / R
    var = tl.maximum(tl.load(Sums + C + c, mask=c < C, other=0.0) / R - shift * shift, 0.0)
    mean = tl.load(X + c, mask=c < C, other=0.0).to(tl.float32) + shift
    rstd = tl.rsqrt(var + eps)
    if split == 0:
        tl.store(Stats + c, mean, mask=c < C)
        tl.store(Stats + C + c, rstd, mask=c < C)
    scale = tl.load(W + c, mask=c < C, other=0.0).to(tl.float32) * rstd
    b = tl.load(B + c, mask=c < C, other=0.0).to(tl.float32)
    last = tl.minimum((split + 1) * rows_each, R)
    for start in range(split * rows_each, last, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        ok = (r[:, None] < last) & (c[None, :] < C)
        at = r[:, None] * C + c[None, :]
        x = tl.load(X + at, mask=ok, other=0.0).to(tl.float32)
        res = tl.load(Res + at, mask=ok, other=0.0).to(tl.float32)
        tl.store(Y + at, tl.maximum((x - mean[None, :]) * scale[None, :] + b[None, :] + res, 0.0), mask=ok)


def _schedule(R, C):
    """Grid over (splits of the pixels, column tiles), pixels of a split, block sizes."""
    block_c = min(128, max(8, triton.next_power_of_2(C)))
    block_r = 2048 // block_c
    tiles = triton.cdiv(C, block_c)
    rows_each = triton.cdiv(triton.cdiv(R, max(1, 528 // tiles)), block_r) * block_r
    return (triton.cdiv(R, rows_each), tiles), rows_each, {"BLOCK_R": block_r, "BLOCK_C": block_c}


def forward(x, residual, weight, bias, eps=1e-5):
    x, residual = x.contiguous(), residual.contiguous()
    C = x.shape[-1]
    R = x.numel() // C
    grid, each, blocks = _schedule(R, C)
    parts = torch.empty(grid[0], 2, C, device=x.device, dtype=torch.float32)
    stats = torch.empty(2, C, device=x.device, dtype=torch.float32)
    y = torch.empty_like(x)
    _pixel_moments[grid](x, parts, R, C, each, **blocks)
    _bn_add_relu_fwd[grid](x, residual, weight, bias, parts.sum(0), y, stats, R, C, each, eps, **blocks)
    return y, (x, y, weight, stats)


# --- backward ---
@triton.jit
def _cut_and_sum(DY, X, Y, Stats, G, Parts, R, C, dy_r, dy_c, rows_each, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    split = tl.program_id(0).to(tl.int64)
    mean = tl.load(Stats + c, mask=c < C, other=0.0)
    rstd = tl.load(Stats + C + c, mask=c < C, other=0.0)
    dw = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    db = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    last = tl.minimum((split + 1) * rows_each, R)
    for start in range(split * rows_each, last, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        ok = (r[:, None] < last) & (c[None, :] < C)
        at = r[:, None] * C + c[None, :]
        dy = tl.load(DY + r[:, None] * dy_r + c[None, :] * dy_c, mask=ok, other=0.0)
        y = tl.load(Y + at, mask=ok, other=0.0)
        x = tl.load(X + at, mask=ok, other=0.0).to(tl.float32)
        g = tl.where(y > 0.0, dy, 0.0)
        # A choice between dy and zero is exact in the storage dtype: nothing is lost by reading g back.
        tl.store(G + at, g, mask=ok)
        g = g.to(tl.float32)
        dw += g * (x - mean[None, :])
        db += g
    tl.store(Parts + split * 2 * C + c, tl.sum(dw, 0) * rstd, mask=c < C)
    tl.store(Parts + split * 2 * C + C + c, tl.sum(db, 0), mask=c < C)


@triton.jit
def _bn_dx_of_cut(G, X, W, Stats, Sums, DX, R, C, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    live = c < C
    mean = tl.load(Stats + c, mask=live, other=0.0)
    rstd = tl.load(Stats + C + c, mask=live, other=0.0)
    scale = tl.load(W + c, mask=live, other=0.0).to(tl.float32) * rstd
    slope = tl.load(Sums + c, mask=live, other=0.0) * rstd / R
    shift = tl.load(Sums + C + c, mask=live, other=0.0) / R
    ok = (r[:, None] < R) & live[None, :]
    at = r[:, None] * C + c[None, :]
    g = tl.load(G + at, mask=ok, other=0.0).to(tl.float32)
    x = tl.load(X + at, mask=ok, other=0.0).to(tl.float32)
    tl.store(DX + at, scale[None, :] * (g - shift[None, :] - (x - mean[None, :]) * slope[None, :]), mask=ok)


def backward(saved, grad_y, needs=None):
    x, y, weight, stats = saved
    C = x.shape[-1]
    R = x.numel() // C
    dy = grad_y.reshape(R, C)
    grid, each, blocks = _schedule(R, C)
    dresidual = torch.empty_like(x)
    parts = torch.empty(grid[0], 2, C, device=x.device, dtype=torch.float32)
    _cut_and_sum[grid](dy, x, y, stats, dresidual, parts, R, C, dy.stride(0), dy.stride(1), each, **blocks)
    sums = parts.sum(0)
    dweight, dbias = sums.to(weight.dtype)
    if needs is not None and not needs[0]:
        return None, dresidual, dweight, dbias
    dx = torch.empty_like(x)
    _bn_dx_of_cut[(triton.cdiv(R, blocks["BLOCK_R"]), grid[1])](
        dresidual, x, weight, stats, sums, dx, R, C, **blocks
    )  # fmt: skip
    return dx, dresidual, dweight, dbias


# --- check ---
SWEEP = (
    {"N": 2, "H": 8, "W": 8, "C": 16},
    {"N": 3, "H": 9, "W": 7, "C": 37, "dtype": "float16"},
    {"N": 2, "H": 6, "W": 6, "C": 24, "dtype": "bfloat16"},
)
BENCH = ({"N": 64, "H": 56, "W": 56, "C": 256, "dtype": "bfloat16"},)


def make_args(N, H, W, C, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, residual = torch.randn(N, H, W, C, generator=g) - 0.5, torch.randn(N, H, W, C, generator=g)
    weight, bias = torch.rand(C, generator=g) + 0.5, torch.randn(C, generator=g) * 0.3
    x, residual, weight, bias = (t.to(getattr(torch, dtype)) for t in (x, residual, weight, bias))
    # What lies at the ReLU's edge is moved: there rounding decides whether an element has a gradient at all.
    at_edge = _uncut(x, residual, weight, bias, 1e-5).abs() < 1e-4
    residual = torch.where(at_edge, residual + 0.125, residual)
    return tuple(t.to(device) for t in (x, residual, weight, bias))


def _uncut(x, residual, weight, bias, eps):
    xf = x.float()
    centred = xf - xf.mean((0, 1, 2))
    normed = centred * torch.rsqrt(centred.pow(2).mean((0, 1, 2)) + eps)
    return normed * weight.float() + bias.float() + residual.float()


def reference(x, residual, weight, bias, eps=1e-5):
    return torch.relu(_uncut(x, residual, weight, bias, eps)).to(x.dtype)
