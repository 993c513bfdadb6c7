"""LayerNorm, persistent rows: as many programs as multiprocessors, each keeps dweight and dbias in registers."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "layernorm_persistent",
    "family": "norm_row",
    "op": "layer_norm",
    "schema": 1,
    "techniques": ("persistent-grid", "two-stage-partials", "saved-statistics", "strided-cotangent"),
    "saves": ("stats: fp32 (M, 2)",),
    "grads": ("x", "weight", "bias"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _ln_persistent_fwd(X, W, B, Y, Stats, M, N, eps, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    inside = c < N
    w = tl.load(W + c, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(B + c, mask=inside, other=0.0).to(tl.float32)
    # A 64-bit start makes the row index, and with it every offset, 64-bit.
    for r in range(tl.program_id(0).to(tl.int64), M, tl.num_programs(0)):
        base = r * N
        x = tl.load(X + base + c, mask=inside, other=0.0).to(tl.float32)
        mu = tl.sum(x, 0) / N
        d = tl.where(inside, x - mu, 0.0)
        inv = tl.rsqrt(tl.sum(d * d, 0) / N + eps)
        tl.store(Stats + 2 * r, mu)
        tl.store(Stats + 2 * r + 1, inv)
        tl.store(Y + base + c, d * inv * w + b, mask=inside)


def _programs(x, M):
    count = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 8
    return min(triton.cdiv(M, 4), count)


def _warps(BLOCK):
    """One program has a processor to itself: four elements for each thread, as many warps as that makes."""
    return max(4, min(32, BLOCK // 128))


def forward(x, weight, bias, eps=1e-5):
    x = x.contiguous()
    M, N = x.shape
    y = torch.empty_like(x)
    stats = torch.empty(M, 2, device=x.device, dtype=torch.float32)
    BLOCK = triton.next_power_of_2(N)
    _ln_persistent_fwd[(_programs(x, M),)](x, weight, bias, y, stats, M, N, eps, BLOCK=BLOCK, num_warps=_warps(BLOCK))
    return y, (x, weight, stats)


# --- backward ---
@triton.jit
def _sum_both(a0, b0, a1, b1):
    return a0 + a1, b0 + b1


@triton.jit
def _ln_persistent_bwd(DY, X, W, Stats, DX, Parts, M, N, dy_row, dy_col, STAGES: tl.constexpr, BLOCK: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    inside = c < N
    w = tl.load(W + c, mask=inside, other=0.0).to(tl.float32)
    acc_w = tl.zeros((BLOCK,), tl.float32)
    acc_b = tl.zeros((BLOCK,), tl.float32)
    mu = tl.load(Stats + 2 * pid)
    inv = tl.load(Stats + 2 * pid + 1)
    # One program to a processor has nobody to hide behind: rows are copied two turns ahead, statistics loaded one.
    for r in tl.range(pid, M, tl.num_programs(0), num_stages=STAGES):
        after = tl.minimum(r + tl.num_programs(0), M - 1)
        next_mu = tl.load(Stats + 2 * after)
        next_inv = tl.load(Stats + 2 * after + 1)
        x = tl.load(X + r * N + c, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(DY + r * dy_row + c * dy_col, mask=inside, other=0.0).to(tl.float32)
        xh = tl.where(inside, (x - mu) * inv, 0.0)
        acc_w += dy * xh
        acc_b += dy
        wdy = w * dy
        shift, slope = tl.reduce((wdy, wdy * xh), 0, _sum_both)
        tl.store(DX + r * N + c, inv * (wdy - shift / N - slope / N * xh), mask=inside)
        mu = next_mu
        inv = next_inv
    # Row 2*pid of the buffer holds dweight, row 2*pid+1 holds dbias: one allocation and one sum for both.
    tl.store(Parts + (2 * pid) * N + c, acc_w, mask=inside)
    tl.store(Parts + (2 * pid + 1) * N + c, acc_b, mask=inside)


def backward(saved, grad_y, needs=None):
    x, weight, stats = saved
    M, N = x.shape
    programs = _programs(x, M)
    dx = torch.empty_like(x)
    parts = torch.empty(programs, 2, N, device=x.device, dtype=torch.float32)
    BLOCK = triton.next_power_of_2(N)
    _ln_persistent_bwd[(programs,)](
        grad_y, x, weight, stats, dx, parts, M, N, grad_y.stride(0), grad_y.stride(1),
        STAGES=3 if BLOCK * x.element_size() <= 32768 else 1, BLOCK=BLOCK, num_warps=max(4, min(16, BLOCK // 256)),
    )  # fmt: skip
    totals = parts.sum(0).to(weight.dtype)
    return dx, totals[0], totals[1]


# --- check ---
SWEEP = ({"M": 9, "N": 64}, {"M": 23, "N": 72, "dtype": "float16"}, {"M": 12, "N": 128, "dtype": "bfloat16"})
BENCH = ({"M": 8192, "N": 4096, "dtype": "float32"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = (torch.randn(M, N, generator=g), torch.randn(N, generator=g), torch.randn(N, generator=g))
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors)


def reference(x, weight, bias, eps=1e-5):
    y = torch.nn.functional.layer_norm(x.float(), (x.shape[1],), weight.float(), bias.float(), eps)
    return y.to(x.dtype)
