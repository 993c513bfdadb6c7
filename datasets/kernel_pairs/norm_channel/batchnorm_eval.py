"""BatchNorm with running statistics: an affine map per channel, so dx needs no sums and everything is one pass.

dx = dy * w * rstd. Only dweight and dbias are sums over the batch; the pass that writes dx has dy and x in registers,
adds them up for its chunk of a channel, and leaves one partial sum of each.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "batchnorm_eval",
    "family": "norm_channel",
    "op": "batch_norm",
    "schema": 1,
    "techniques": ("elementwise", "two-stage-partials", "partial-gradient", "one-launch"),
    "saves": (),
    "grads": ("x", "weight", "bias"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _bn_eval_fwd(X, W, B, RunMean, RunVar, Y, C, L, eps, BLOCK: tl.constexpr):
    # One plane (sample, channel) for each program of axis 0: its four parameters are scalars.
    plane = tl.program_id(0).to(tl.int64)
    c = plane % C
    scale = tl.load(W + c).to(tl.float32) * tl.rsqrt(tl.load(RunVar + c).to(tl.float32) + eps)
    mean = tl.load(RunMean + c).to(tl.float32)
    b = tl.load(B + c).to(tl.float32)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + plane * L + at, mask=at < L, other=0.0).to(tl.float32)
    tl.store(Y + plane * L + at, (x - mean) * scale + b, mask=at < L)


def forward(x, weight, bias, running_mean, running_var, eps=1e-5):
    x = x.contiguous()
    N, C, L = x.shape
    y = torch.empty_like(x)
    BLOCK = min(2048, triton.next_power_of_2(L))
    _bn_eval_fwd[(N * C, triton.cdiv(L, BLOCK))](
        x, weight, bias, running_mean, running_var, y, C, L, eps, BLOCK=BLOCK, num_warps=max(1, BLOCK // 512)
    )
    return y, (x, weight, running_mean, running_var, eps)


# --- backward ---
@triton.jit
def _bn_eval_bwd(
    DY, X, W, RunMean, RunVar, DX, Parts, N, C, L, dy_n, dy_c, dy_l, eps, samples_each,
    NEED_X: tl.constexpr, NEED_W: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(0)
    chunk = tl.program_id(1)
    mean = tl.load(RunMean + c).to(tl.float32)
    rstd = tl.rsqrt(tl.load(RunVar + c).to(tl.float32) + eps)
    scale = tl.load(W + c).to(tl.float32) * rstd
    sum_gx = tl.zeros((BLOCK_N, BLOCK_L), tl.float32)
    sum_g = tl.zeros((BLOCK_N, BLOCK_L), tl.float32)
    stop = tl.minimum((chunk + 1) * samples_each, N)
    for first in range(chunk * samples_each, stop, BLOCK_N):
        n = (first + tl.arange(0, BLOCK_N)).to(tl.int64)
        x_at = (n * C + c) * L
        dy_at = n * dy_n + c.to(tl.int64) * dy_c
        for start in tl.range(0, L, BLOCK_L, num_stages=2):
            at = start + tl.arange(0, BLOCK_L)
            ok = (n[:, None] < stop) & (at[None, :] < L)
            dy = tl.load(DY + dy_at[:, None] + at[None, :].to(tl.int64) * dy_l, mask=ok, other=0.0).to(tl.float32)
            if NEED_X:
                tl.store(DX + x_at[:, None] + at[None, :], dy * scale, mask=ok)
            if NEED_W:
                # x is only read for dweight.
                x = tl.load(X + x_at[:, None] + at[None, :], mask=ok, other=0.0).to(tl.float32)
                sum_gx += dy * (x - mean)
                sum_g += dy
    if NEED_W:
        out = Parts + (c * tl.num_programs(1) + chunk) * 2
        tl.store(out, tl.sum(sum_gx) * rstd)
        tl.store(out + 1, tl.sum(sum_g))


def backward(saved, grad_y, needs=None):
    x, weight, running_mean, running_var, eps = saved
    N, C, L = x.shape
    need_x, need_w, need_b = needs or (True, True, True)
    block_l = min(2048, triton.next_power_of_2(L))
    block_n = max(1, min(4096 // block_l, triton.next_power_of_2(N)))
    # About eight programs for each of 132 processors, and whole blocks of samples for each.
    samples_each = triton.cdiv(triton.cdiv(N, max(1, 1056 // C)), block_n) * block_n
    chunks = triton.cdiv(N, samples_each)
    dx = torch.empty_like(x) if need_x else None
    parts = torch.empty(C, chunks, 2, device=x.device, dtype=torch.float32)
    _bn_eval_bwd[(C, chunks)](
        grad_y, x, weight, running_mean, running_var, dx, parts, N, C, L, *grad_y.stride(), eps, samples_each,
        NEED_X=need_x, NEED_W=need_w or need_b, BLOCK_N=block_n, BLOCK_L=block_l, num_warps=4,
    )  # fmt: skip
    if not (need_w or need_b):
        return dx, None, None
    sums = parts.sum(1).to(weight.dtype)
    return dx, sums[:, 0], sums[:, 1]


# --- check ---
SWEEP = (
    {"N": 6, "C": 5, "L": 64},
    {"N": 5, "C": 3, "L": 147, "dtype": "float16"},
    {"N": 9, "C": 4, "L": 49, "dtype": "bfloat16"},
)
BENCH = ({"N": 64, "C": 256, "L": 3136, "dtype": "bfloat16"},)


def make_args(N, C, L, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(N, C, L, generator=g)
    weight, bias = torch.rand(C, generator=g) + 0.5, torch.randn(C, generator=g)
    # Running statistics are kept in fp32 and are no function of this batch.
    mean, var = torch.randn(C, generator=g) * 0.3, torch.rand(C, generator=g) + 0.5
    tensors = (t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, weight, bias))
    return (*tensors, mean.to(device), var.to(device))


def reference(x, weight, bias, running_mean, running_var, eps=1e-5):
    y = torch.nn.functional.batch_norm(x.float(), running_mean, running_var, weight.float(), bias.float(), eps=eps)
    return y.to(x.dtype)
