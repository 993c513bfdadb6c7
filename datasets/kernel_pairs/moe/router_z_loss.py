"""Router z-loss: the mean of squared log-sum-exps, whose gradient is the softmax times one number per token.

L = mean over tokens of lse^2,    dlogits = p 2 lse g / T = exp(x - lse) 2 lse g / T.
The forward saves the log-sum-exp, so that the backward is elementwise: it flattens tokens and experts into one long
array, and no power of two above the number of experts leaves lanes idle.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "router_z_loss",
    "family": "moe",
    "op": "router_z_loss",
    "schema": 1,
    "techniques": ("saved-lse", "elementwise", "recompute", "broadcast-adjoint"),
    "saves": ("lse: fp32 (T,)",),
    "grads": ("logits",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _z_loss_rows(Logits, Lse, Parts, T, E, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr):
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_E)
    inside = (t[:, None] < T) & (e[None, :] < E)
    x = tl.load(Logits + t[:, None] * E + e[None, :], mask=inside, other=0.0).to(tl.float32)
    x = tl.where(e[None, :] < E, x, -float("inf"))
    top = tl.max(x, 1)
    lse = top + tl.log(tl.sum(tl.exp(x - top[:, None]), 1))
    tl.store(Lse + t, lse, mask=t < T)
    tl.store(Parts + tl.program_id(0), tl.sum(tl.where(t < T, lse * lse, 0.0), 0))


@triton.jit
def _z_loss_mean(Parts, Loss, parts, T, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, parts, BLOCK):
        total += tl.load(Parts + start + lane, mask=lane < parts - start, other=0.0)
    tl.store(Loss, tl.sum(total, 0) / T)


def forward(logits):
    logits = logits.contiguous()
    T, E = logits.shape
    BLOCK_E = max(16, triton.next_power_of_2(E))
    BLOCK_T = max(1, 4096 // BLOCK_E)
    programs = triton.cdiv(T, BLOCK_T)
    lse = torch.empty(T, device=logits.device, dtype=torch.float32)
    parts = torch.empty(programs, device=logits.device, dtype=torch.float32)
    loss = torch.empty((), device=logits.device, dtype=torch.float32)
    _z_loss_rows[(programs,)](logits, lse, parts, T, E, BLOCK_T=BLOCK_T, BLOCK_E=BLOCK_E, num_warps=4)
    _z_loss_mean[(1,)](parts, loss, programs, T, BLOCK=1024, num_warps=4)
    return loss, (logits, lse)


# --- backward ---
@triton.jit
def _z_loss_bwd(DLoss, Logits, Lse, DLogits, T, numel, E: tl.constexpr, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    lane = tl.arange(0, BLOCK)
    at = first + lane
    live = at < numel
    # One long division per program; per lane a 32-bit one by a constant, which is a multiplication. Neighbouring lanes
    # share a token, whose log-sum-exp comes out of the cache.
    token = first // E
    lse = tl.load(Lse + token + ((first - token * E).to(tl.int32) + lane) // E, mask=live, other=0.0)
    x = tl.load(Logits + at, mask=live, other=0.0).to(tl.float32)
    factor = 2.0 * tl.load(DLoss) / T
    tl.store(DLogits + at, factor * lse * tl.exp(x - lse), mask=live)


def backward(saved, grad_loss, needs=None):
    logits, lse = saved
    T, E = logits.shape
    dlogits = torch.empty_like(logits)
    _z_loss_bwd[(triton.cdiv(T * E, 2048),)](grad_loss, logits, lse, dlogits, T, T * E, E=E, BLOCK=2048, num_warps=8)
    return dlogits


# --- check ---
SWEEP = (
    {"T": 64, "E": 64},
    {"T": 203, "E": 37},
    {"T": 40, "E": 160, "dtype": "bfloat16"},
    {"T": 300, "E": 8, "dtype": "float16"},
)
BENCH = ({"T": 262144, "E": 160, "dtype": "float32"},)


def make_args(T, E, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return ((2 * torch.randn(T, E, generator=g)).to(device=device, dtype=getattr(torch, dtype)),)


def reference(logits):
    return torch.logsumexp(logits.float(), -1).square().mean()
