"""Dynamic causal convolution: a softmax kernel of its own for every position and head, shared by the head's channels.

y[t, c] = sum over k of p[t, k] x[t - (K - 1) + k, c], p[t] = softmax(logits[t]). One launch gives both gradients. For
the position's own kernel, dp[t, k] is a local correlation, dy[t] with the window of x before it, followed by the
softmax's derivative in registers; dx[t] adds up to K later positions of dy, each by the weight that *its* kernel gave
to t, rebuilt from its logit and the saved log-sum-exp.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "dynamic_conv_lightweight",
    "family": "conv",
    "op": "dynamic_conv",
    "schema": 1,
    "techniques": ("one-launch", "saved-lse", "recompute", "gather-form", "halo", "strided-cotangent"),
    "saves": ("lse: fp32 (B, T, H)",),
    "grads": ("x", "logits"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _dynamic_conv_fwd(
    X, Logits, Y, LSE, T, R, K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(T, BLOCK_T)
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    t = tl.program_id(0) % tiles * BLOCK_T + tl.arange(0, BLOCK_T)
    r = tl.arange(0, BLOCK_R)
    k = tl.arange(0, BLOCK_K)
    # Places of the positions in the statistics; logits have K, channels R numbers at each.
    row = (batch * T + t) * heads + head
    z_ok = (t[:, None] < T) & (k[None, :] < K)
    z = tl.load(Logits + row[:, None] * K + k[None, :], mask=z_ok, other=float("-inf")).to(tl.float32)
    top = tl.where(t < T, tl.max(z, 1), 0.0)
    lse = top + tl.log(tl.sum(tl.exp(z - top[:, None]), 1))
    tl.store(LSE + row, lse, mask=t < T)
    y = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
    for tap in range(K):
        p = tl.exp(tl.load(Logits + row * K + tap, mask=t < T, other=0.0).to(tl.float32) - lse)
        s = t - (K - 1) + tap
        there = ((s >= 0) & (s < T))[:, None] & (r[None, :] < R)
        x_at = (row + (s - t) * heads)[:, None] * R + r[None, :]
        y += p[:, None] * tl.load(X + x_at, mask=there, other=0.0).to(tl.float32)
    tl.store(Y + row[:, None] * R + r[None, :], y, mask=(t[:, None] < T) & (r[None, :] < R))


def _tiles(T, R, K):
    BLOCK_R = triton.next_power_of_2(R)
    BLOCK_T = min(triton.next_power_of_2(T), max(1, 2048 // BLOCK_R))
    return {"BLOCK_T": BLOCK_T, "BLOCK_R": BLOCK_R, "BLOCK_K": triton.next_power_of_2(K)}


def forward(x, logits):
    x, logits = x.contiguous(), logits.contiguous()
    B, T, H, K = logits.shape
    y = torch.empty_like(x)
    lse = torch.empty(B, T, H, device=x.device, dtype=torch.float32)
    R = x.shape[2] // H
    blocks = _tiles(T, R, K)
    _dynamic_conv_fwd[(B * triton.cdiv(T, blocks["BLOCK_T"]), H)](x, logits, y, lse, T, R, K=K, **blocks, num_warps=4)
    return y, (x, logits, lse)


# --- backward ---
@triton.jit
def _dynamic_conv_bwd(
    DY, X, Logits, LSE, DX, DLogits, T, R, dy_b, dy_t, dy_c,
    K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(T, BLOCK_T)
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    t = tl.program_id(0) % tiles * BLOCK_T + tl.arange(0, BLOCK_T)
    r = tl.arange(0, BLOCK_R)
    k = tl.arange(0, BLOCK_K)
    row = (batch * T + t) * heads + head
    dy_row = DY + batch * dy_b + (head * R + r).to(tl.int64)[None, :] * dy_c
    own = (t[:, None] < T) & (r[None, :] < R)
    dy = tl.load(dy_row + t.to(tl.int64)[:, None] * dy_t, mask=own, other=0.0).to(tl.float32)
    dp = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    dx = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
    for tap in range(K):
        reach = K - 1 - tap
        # What this position's kernel saw with this tap.
        there = ((t >= reach) & (t - reach < T))[:, None] & (r[None, :] < R)
        x = tl.load(X + (row - reach * heads)[:, None] * R + r[None, :], mask=there, other=0.0).to(tl.float32)
        dp += tl.where(k[None, :] == tap, tl.sum(dy * x, 1)[:, None], 0.0)
        # The later position whose kernel saw this one with this tap.
        later = t + reach < T
        later_row = row + reach * heads
        z = tl.load(Logits + later_row * K + tap, mask=later, other=0.0).to(tl.float32)
        p = tl.exp(z - tl.load(LSE + later_row, mask=later, other=0.0))
        dy_at = dy_row + (t + reach).to(tl.int64)[:, None] * dy_t
        dx += p[:, None] * tl.load(dy_at, mask=later[:, None] & (r[None, :] < R), other=0.0).to(tl.float32)
    tl.store(DX + row[:, None] * R + r[None, :], dx, mask=own)
    z_ok = (t[:, None] < T) & (k[None, :] < K)
    z = tl.load(Logits + row[:, None] * K + k[None, :], mask=z_ok, other=float("-inf")).to(tl.float32)
    p = tl.exp(z - tl.load(LSE + row, mask=t < T, other=0.0)[:, None])
    dz = p * (dp - tl.sum(p * dp, 1)[:, None])
    tl.store(DLogits + row[:, None] * K + k[None, :], dz, mask=z_ok)


def backward(saved, grad_y, needs=None):
    x, logits, lse = saved
    B, T, H, K = logits.shape
    dx, dlogits = torch.empty_like(x), torch.empty_like(logits)
    R = x.shape[2] // H
    blocks = _tiles(T, R, K)
    _dynamic_conv_bwd[(B * triton.cdiv(T, blocks["BLOCK_T"]), H)](
        grad_y, x, logits, lse, dx, dlogits, T, R, *grad_y.stride(), K=K, **blocks, num_warps=4
    )
    return dx, dlogits


# --- check ---
SWEEP = (
    {"B": 2, "T": 32, "H": 2, "R": 16, "K": 4},
    {"B": 1, "T": 45, "H": 3, "R": 11, "K": 7},
    {"B": 2, "T": 19, "H": 1, "R": 8, "K": 3, "dtype": "bfloat16"},
    {"B": 1, "T": 5, "H": 2, "R": 8, "K": 9, "dtype": "float16"},
)
BENCH = ({"B": 16, "T": 2048, "H": 16, "R": 64, "K": 15, "dtype": "bfloat16"},)


def make_args(B, T, H, R, K, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = (torch.randn(B, T, H * R, generator=g), torch.randn(B, T, H, K, generator=g))
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors)


def reference(x, logits):
    B, T, H, K = logits.shape
    past = torch.nn.functional.pad(x.float(), (0, 0, K - 1, 0)).view(B, T + K - 1, H, -1)
    p = logits.float().softmax(-1)
    return sum(p[..., tap, None] * past[:, tap : tap + T] for tap in range(K)).view(x.shape).to(x.dtype)
