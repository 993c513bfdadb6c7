"""GroupNorm whose group is far larger than a block: one program walks the group twice in each direction.

The first walk of the backward leaves per-channel sums of dy and dy * xhat. They are this sample's share of dweight and
dbias, and weighted by w they add up to the two group sums, so the group's projection costs no reduction of its own.
What the first walk reads last stays in registers for the second.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "groupnorm_large",
    "family": "norm_channel",
    "op": "group_norm",
    "schema": 1,
    "techniques": ("two-pass", "saved-statistics", "two-stage-partials", "strided-cotangent"),
    "saves": ("mean: fp32 (N, G)", "rstd: fp32 (N, G)"),
    "grads": ("x", "weight", "bias"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _gn_long_fwd(X, W, B, Y, Mean, Rstd, G, K, L, eps, BLOCK_K: tl.constexpr, BLOCK_L: tl.constexpr):
    # Program: sample and group. K channels of L positions lie in one piece of memory.
    pid = tl.program_id(0)
    k = tl.arange(0, BLOCK_K)
    base = X + pid.to(tl.int64) * K * L
    size = K * L
    flat = tl.arange(0, BLOCK_K * BLOCK_L)
    # For the statistics channels do not matter: the group is one long row. Its first element is the pivot.
    pivot = tl.load(base).to(tl.float32)
    first = tl.zeros((BLOCK_K * BLOCK_L,), tl.float32)
    second = tl.zeros((BLOCK_K * BLOCK_L,), tl.float32)
    for start in range(0, size, BLOCK_K * BLOCK_L):
        x = tl.load(base + start + flat, mask=start + flat < size, other=0.0).to(tl.float32)
        d = tl.where(start + flat < size, x - pivot, 0.0)
        first += d
        second += d * d
    shift = tl.sum(first, 0) / size
    mean = pivot + shift
    rstd = tl.rsqrt(tl.maximum(tl.sum(second, 0) / size - shift * shift, 0.0) + eps)
    tl.store(Mean + pid, mean)
    tl.store(Rstd + pid, rstd)
    c = (pid % G) * K + k
    scale = tl.load(W + c, mask=k < K, other=0.0).to(tl.float32) * rstd
    b = tl.load(B + c, mask=k < K, other=0.0).to(tl.float32)
    out = Y + pid.to(tl.int64) * K * L
    for start in range(0, L, BLOCK_L):
        at = start + tl.arange(0, BLOCK_L)
        ok = (k[:, None] < K) & (at[None, :] < L)
        x = tl.load(base + k[:, None] * L + at[None, :], mask=ok, other=0.0).to(tl.float32)
        tl.store(out + k[:, None] * L + at[None, :], (x - mean) * scale[:, None] + b[:, None], mask=ok)


def _blocks(K, L):
    """Channels and positions of a tile: 4096 elements, 16 for each of 256 threads."""
    block_k = triton.next_power_of_2(K)
    return {"BLOCK_K": block_k, "BLOCK_L": max(16, min(triton.next_power_of_2(L), 4096 // block_k)), "num_warps": 8}


def forward(x, weight, bias, groups, eps=1e-5):
    x = x.contiguous()
    N, C = x.shape[:2]
    K, L = C // groups, x[0, 0].numel()
    y = torch.empty_like(x)
    mean = torch.empty(N, groups, device=x.device, dtype=torch.float32)
    rstd = torch.empty_like(mean)
    _gn_long_fwd[(N * groups,)](x, weight, bias, y, mean, rstd, groups, K, L, eps, **_blocks(K, L))
    return y, (x, weight, mean, rstd)


# --- backward ---
def _wide_blocks(K, L, size):
    """Tiles of 16 KiB, a multiple of which is in flight, 16 elements for each thread; and the tail, of two tiles."""
    block_k = triton.next_power_of_2(K)
    block_l = max(16, min(triton.next_power_of_2(L), 16384 // size // block_k))
    tail = 2 * block_l
    warps = max(4, min(16, block_k * block_l // 512))
    return {"BLOCK_K": block_k, "BLOCK_L": block_l, "TAIL": tail, "num_warps": warps}


@triton.jit
def _add_both(a0, b0, a1, b1):
    return a0 + a1, b0 + b1


@triton.jit
def _gn_long_bwd(
    DY, X, W, Mean, Rstd, DX, PartsW, PartsB, G, K, L, head, dy_n, dy_c, dy_l,
    BLOCK_K: tl.constexpr, BLOCK_L: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    k = tl.arange(0, BLOCK_K)
    c = (pid % G) * K + k
    x_at = pid.to(tl.int64) * K * L + k * L
    dy_at = (pid // G).to(tl.int64) * dy_n + c.to(tl.int64) * dy_c
    mean = tl.load(Mean + pid)
    rstd = tl.load(Rstd + pid)
    w = tl.load(W + c, mask=k < K, other=0.0).to(tl.float32)
    gx = tl.zeros((BLOCK_K, BLOCK_L), tl.float32)
    gs = tl.zeros((BLOCK_K, BLOCK_L), tl.float32)
    for start in tl.range(0, head, BLOCK_L, num_stages=5):
        at = start + tl.arange(0, BLOCK_L)
        ok = (k[:, None] < K) & (at[None, :] < head)
        x = tl.load(X + x_at[:, None] + at[None, :], mask=ok, other=0.0).to(tl.float32)
        dy = tl.load(DY + dy_at[:, None] + at[None, :].to(tl.int64) * dy_l, mask=ok, other=0.0).to(tl.float32)
        gx += dy * (x - mean)
        gs += dy
    # The tail is read once: the second walk finds it in registers.
    end = head + tl.arange(0, TAIL)
    inside = (k[:, None] < K) & (end[None, :] < L)
    away = tl.load(X + x_at[:, None] + end[None, :], mask=inside, other=0.0).to(tl.float32) - mean
    dy_end = tl.load(DY + dy_at[:, None] + end[None, :].to(tl.int64) * dy_l, mask=inside, other=0.0).to(tl.float32)
    head_w, head_b = tl.reduce((gx, gs), 1, _add_both)
    tail_w, tail_b = tl.reduce((dy_end * away, dy_end), 1, _add_both)
    dw = (head_w + tail_w) * rstd
    db = head_b + tail_b
    tl.store(PartsW + pid * K + k, dw, mask=k < K)
    tl.store(PartsB + pid * K + k, db, mask=k < K)
    slope = tl.sum(w * dw, 0) / (K * L) * rstd
    shift = tl.sum(w * db, 0) / (K * L)
    tl.store(DX + x_at[:, None] + end[None, :], rstd * (dy_end * w[:, None] - shift - away * slope), mask=inside)
    # Back from the end, which L2 holds: copies of four tiles ahead leave room for one group on a processor.
    last = (tl.cdiv(head, BLOCK_L) - 1) * BLOCK_L
    for back in tl.range(0, head, BLOCK_L, num_stages=5):
        at = last - back + tl.arange(0, BLOCK_L)
        ok = (k[:, None] < K) & (at[None, :] < head)
        x = tl.load(X + x_at[:, None] + at[None, :], mask=ok, other=0.0).to(tl.float32)
        dy = tl.load(DY + dy_at[:, None] + at[None, :].to(tl.int64) * dy_l, mask=ok, other=0.0).to(tl.float32)
        tl.store(DX + x_at[:, None] + at[None, :], rstd * (dy * w[:, None] - shift - (x - mean) * slope), mask=ok)


def backward(saved, grad_y, needs=None):
    x, weight, mean, rstd = saved
    N, C = x.shape[:2]
    groups = mean.shape[1]
    K, L = C // groups, x[0, 0].numel()
    # A view wherever the positions of a plane lie at one distance, else a copy.
    dy = grad_y.flatten(2)
    dx = torch.empty_like(x)
    parts = torch.empty(2, N, C, device=x.device, dtype=torch.float32)
    blocks = _wide_blocks(K, L, x.element_size())
    _gn_long_bwd[(N * groups,)](
        dy, x, weight, mean, rstd, dx, parts[0], parts[1], groups, K, L, max(0, L - blocks["TAIL"]), *dy.stride(),
        **blocks,
    )  # fmt: skip
    dweight, dbias = parts.sum(1).to(weight.dtype)
    return dx, dweight, dbias


# --- check ---
SWEEP = (
    {"N": 2, "G": 2, "K": 4, "H": 32, "W": 16},
    {"N": 2, "G": 3, "K": 3, "H": 41, "W": 37, "dtype": "float16"},
    {"N": 1, "G": 2, "K": 8, "H": 25, "W": 30, "dtype": "bfloat16"},
)
BENCH = ({"N": 96, "G": 32, "K": 16, "H": 64, "W": 64, "dtype": "bfloat16"},)


def make_args(N, G, K, H, W, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    C = G * K
    x = torch.randn(N, C, H, W, generator=g) + 0.4
    weight, bias = torch.rand(C, generator=g) + 0.5, torch.randn(C, generator=g)
    return (*(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, weight, bias)), G)


def reference(x, weight, bias, groups, eps=1e-5):
    return torch.nn.functional.group_norm(x.float(), groups, weight.float(), bias.float(), eps).to(x.dtype)
