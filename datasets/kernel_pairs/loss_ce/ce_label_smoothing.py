"""Mean cross-entropy with label smoothing and ignored targets: smoothing moves both the loss and the gradient's target.

Against the target distribution (1 - s) onehot + s / V:
    L[row] = lse - (1 - s) x[target] - s mean(x),    dx = (p - (1 - s) onehot - s / V) g / count.
The forward carries the plain sum of the logits along with the running maximum and sum. The backward's program owns a
tile of several rows when V is short, and a piece of one row when V is long.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "ce_label_smoothing",
    "family": "loss_ce",
    "op": "cross_entropy",
    "schema": 1,
    "techniques": ("saved-lse", "recompute", "broadcast-adjoint", "multi-row-tile", "masking"),
    "saves": ("lse: fp32 (M,)", "count: fp32 ()"),
    "grads": ("logits",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _smooth_ce_rows(Logits, Target, Loss, Lse, M, V, smoothing, ignore, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    target = tl.load(Target + m, mask=m < M, other=ignore)
    top = tl.full((BLOCK_M,), -1.0e30, tl.float32)
    norm = tl.zeros((BLOCK_M,), tl.float32)
    plain = tl.zeros((BLOCK_M,), tl.float32)
    picked = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, V, BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)
        inside = (m[:, None] < M) & (v[None, :] < V)
        x = tl.load(Logits + m[:, None] * V + v[None, :], mask=inside, other=0.0).to(tl.float32)
        plain += tl.sum(x, 1)
        picked += tl.sum(tl.where(v[None, :] == target[:, None], x, 0.0), 1)
        x = tl.where(v[None, :] < V, x, -float("inf"))
        higher = tl.maximum(top, tl.max(x, 1))
        norm = norm * tl.exp(top - higher) + tl.sum(tl.exp(x - higher[:, None]), 1)
        top = higher
    lse = top + tl.log(norm)
    loss = lse - (1.0 - smoothing) * picked - smoothing / V * plain
    tl.store(Lse + m, lse, mask=m < M)
    tl.store(Loss + m, tl.where(target != ignore, loss, 0.0), mask=m < M)


@triton.jit
def _mean_of_kept(RowLoss, Target, Loss, Count, M, ignore, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    kept = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, M, BLOCK):
        live = lane < M - start
        total += tl.load(RowLoss + start + lane, mask=live, other=0.0)
        kept += (tl.load(Target + start + lane, mask=live, other=ignore) != ignore).to(tl.int32)
    count = tl.maximum(tl.sum(kept, 0), 1).to(tl.float32)
    tl.store(Count, count)
    tl.store(Loss, tl.sum(total, 0) / count)


def _tile(V):
    BLOCK_V = max(32, min(2048, triton.next_power_of_2(V)))
    return 2048 // BLOCK_V, BLOCK_V


def forward(logits, target, smoothing=0.1, ignore_index=-100):
    logits, target = logits.contiguous(), target.contiguous()
    M, V = logits.shape
    row_loss, lse = (torch.empty(M, device=logits.device, dtype=torch.float32) for _ in range(2))
    loss, count = (torch.empty((), device=logits.device, dtype=torch.float32) for _ in range(2))
    BLOCK_M, BLOCK_V = _tile(V)
    _smooth_ce_rows[(triton.cdiv(M, BLOCK_M),)](
        logits, target, row_loss, lse, M, V, smoothing, ignore_index, BLOCK_M=BLOCK_M, BLOCK_V=BLOCK_V, num_warps=4
    )
    _mean_of_kept[(1,)](row_loss, target, loss, count, M, ignore_index, BLOCK=2048, num_warps=8)
    return loss, (logits, target, lse, count, smoothing, ignore_index)


# --- backward ---
@triton.jit
def _smooth_ce_bwd(
    DLoss, Logits, Target, Lse, Count, DLogits, M, V, smoothing, ignore, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr
):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (m[:, None] < M) & (v[None, :] < V)
    at = m[:, None] * V + v[None, :]
    target = tl.load(Target + m, mask=m < M, other=ignore)
    g = tl.where(target != ignore, tl.load(DLoss) / tl.load(Count), 0.0)
    lse = tl.load(Lse + m, mask=m < M, other=0.0)
    p = tl.exp(tl.load(Logits + at, mask=inside, other=0.0).to(tl.float32) - lse[:, None])
    wanted = tl.where(v[None, :] == target[:, None], 1.0 - smoothing, 0.0) + smoothing / V
    tl.store(DLogits + at, g[:, None] * (p - wanted), mask=inside)


def backward(saved, grad_loss, needs=None):
    logits, target, lse, count, smoothing, ignore_index = saved
    M, V = logits.shape
    dlogits = torch.empty_like(logits)
    BLOCK_M, BLOCK_V = _tile(V)
    _smooth_ce_bwd[(triton.cdiv(M, BLOCK_M), triton.cdiv(V, BLOCK_V))](
        grad_loss, logits, target, lse, count, dlogits, M, V, smoothing, ignore_index,
        BLOCK_M=BLOCK_M, BLOCK_V=BLOCK_V, num_warps=8,
    )  # fmt: skip
    return dlogits


# --- check ---
SWEEP = (
    {"M": 40, "V": 64, "smoothing": 0.125},
    {"M": 37, "V": 75, "smoothing": 0.25},
    {"M": 3, "V": 2500, "smoothing": 0.125, "dtype": "bfloat16"},
    {"M": 20, "V": 100, "smoothing": 0.0, "dtype": "float16"},
)
BENCH = (
    {"M": 4096, "V": 32000, "smoothing": 0.1, "dtype": "bfloat16"},
    {"M": 65536, "V": 1000, "smoothing": 0.1, "dtype": "float32"},
)


def make_args(M, V, smoothing, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    logits = (2 * torch.randn(M, V, generator=g)).to(device=device, dtype=getattr(torch, dtype))
    target = torch.randint(0, V, (M,), generator=g)
    target[1::3] = -100
    return logits, target.to(device), smoothing


def reference(logits, target, smoothing=0.1, ignore_index=-100):
    return torch.nn.functional.cross_entropy(
        logits.float(), target, ignore_index=ignore_index, label_smoothing=smoothing
    )
