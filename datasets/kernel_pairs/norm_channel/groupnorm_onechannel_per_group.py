"""GroupNorm with one channel per group over (N, C, T): every plane is on its own, and the affine sums are the plane's.

With one channel in a group, sum(dy) and sum(dy * xhat) of a plane are at once the share of dbias and dweight and, up to
the weight, the two sums of dx: no weighted sum across channels is left. A program owns one channel and runs through the
samples, so dweight and dbias are finished in registers and nothing is reduced afterwards.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "groupnorm_onechannel_per_group",
    "family": "norm_channel",
    "op": "group_norm",
    "schema": 1,
    "techniques": ("column-owner", "two-pass", "one-launch", "saved-statistics", "strided-cotangent"),
    "saves": ("mean: fp32 (C, N)", "rstd: fp32 (C, N)"),
    "grads": ("x", "weight", "bias"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _gn_single_fwd(X, W, B, Y, Mean, Rstd, N, C, T, eps, BLOCK: tl.constexpr):
    c = tl.program_id(0)
    n = tl.program_id(1)
    X += (n.to(tl.int64) * C + c) * T
    Y += (n.to(tl.int64) * C + c) * T
    lane = tl.arange(0, BLOCK)
    mean_lane = tl.zeros((BLOCK,), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    count = tl.zeros((BLOCK,), tl.float32)
    # Every lane runs its own mean and centred squares along the signal (Welford); lanes meet once, after the loop.
    for start in range(0, T, BLOCK):
        live = start + lane < T
        x = tl.load(X + start + lane, mask=live, other=0.0).to(tl.float32)
        count += live.to(tl.float32)
        delta = tl.where(live, x - mean_lane, 0.0)
        mean_lane += delta / tl.maximum(count, 1.0)
        squares += tl.where(live, delta * (x - mean_lane), 0.0)
    mean = tl.sum(mean_lane * count, 0) / T
    away = mean_lane - mean
    rstd = tl.rsqrt(tl.sum(squares + count * away * away, 0) / T + eps)
    tl.store(Mean + c * N + n, mean)
    tl.store(Rstd + c * N + n, rstd)
    scale = tl.load(W + c).to(tl.float32) * rstd
    b = tl.load(B + c).to(tl.float32)
    for start in range(0, T, BLOCK):
        live = start + lane < T
        x = tl.load(X + start + lane, mask=live, other=0.0).to(tl.float32)
        tl.store(Y + start + lane, (x - mean) * scale + b, mask=live)


def _block(T):
    block = min(2048, triton.next_power_of_2(T))
    return {"BLOCK": block, "num_warps": max(1, block // 256)}


def forward(x, weight, bias, eps=1e-5):
    x = x.contiguous()
    N, C, T = x.shape
    y = torch.empty_like(x)
    mean = torch.empty(C, N, device=x.device, dtype=torch.float32)
    rstd = torch.empty_like(mean)
    _gn_single_fwd[(C, N)](x, weight, bias, y, mean, rstd, N, C, T, eps, **_block(T))
    return y, (x, weight, mean, rstd)


# --- backward ---
@triton.jit
def _gn_single_bwd(DY, X, W, Mean, Rstd, DX, DW, DB, N, C, T, dy_n, dy_c, dy_t, BLOCK: tl.constexpr):
    c = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    w = tl.load(W + c).to(tl.float32)
    dw = 0.0
    db = 0.0
    for n in range(N):
        x_at = (tl.cast(n, tl.int64) * C + c) * T
        dy_at = tl.cast(n, tl.int64) * dy_n + c * dy_c
        mean = tl.load(Mean + c * N + n)
        rstd = tl.load(Rstd + c * N + n)
        gx = tl.zeros((BLOCK,), tl.float32)
        gs = tl.zeros((BLOCK,), tl.float32)
        for start in tl.range(0, T, BLOCK, num_stages=3):
            t = start + lane
            x = tl.load(X + x_at + t, mask=t < T, other=0.0).to(tl.float32)
            dy = tl.load(DY + dy_at + t.to(tl.int64) * dy_t, mask=t < T, other=0.0).to(tl.float32)
            gx += dy * (x - mean)
            gs += dy
        plane_dw = tl.sum(gx, 0) * rstd
        plane_db = tl.sum(gs, 0)
        dw += plane_dw
        db += plane_db
        slope = plane_dw * rstd / T
        shift = plane_db / T
        # The plane was read a moment ago: the second walk finds it in L2.
        for start in tl.range(0, T, BLOCK, num_stages=4):
            t = start + lane
            x = tl.load(X + x_at + t, mask=t < T, other=0.0).to(tl.float32)
            dy = tl.load(DY + dy_at + t.to(tl.int64) * dy_t, mask=t < T, other=0.0).to(tl.float32)
            tl.store(DX + x_at + t, w * rstd * (dy - shift - (x - mean) * slope), mask=t < T)
    tl.store(DW + c, dw)
    tl.store(DB + c, db)


def backward(saved, grad_y, needs=None):
    x, weight, mean, rstd = saved
    N, C, T = x.shape
    dx = torch.empty_like(x)
    dweight, dbias = torch.empty_like(weight), torch.empty_like(weight)
    _gn_single_bwd[(C,)](
        grad_y, x, weight, mean, rstd, dx, dweight, dbias, N, C, T, *grad_y.stride(), **_block(T)
    )  # fmt: skip
    return dx, dweight, dbias


# --- check ---
SWEEP = (
    {"N": 2, "C": 4, "T": 256},
    {"N": 3, "C": 3, "T": 347, "dtype": "float16"},
    {"N": 2, "C": 5, "T": 100, "dtype": "bfloat16"},
)
BENCH = ({"N": 8, "C": 512, "T": 16000, "dtype": "bfloat16"},)


def make_args(N, C, T, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(N, C, T, generator=g) * 0.6 + 0.8
    weight, bias = torch.rand(C, generator=g) + 0.5, torch.randn(C, generator=g)
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, weight, bias))


def reference(x, weight, bias, eps=1e-5):
    return torch.nn.functional.group_norm(x.float(), x.shape[1], weight.float(), bias.float(), eps).to(x.dtype)
