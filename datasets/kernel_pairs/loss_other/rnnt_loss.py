"""Transducer loss from joint logits: both lattice recursions walk anti-diagonals, laid out so that lanes lie together.

Node (t, u) has emitted u labels before frame t is done; it leaves by a blank to (t + 1, u) or by label u to (t, u + 1).
Nodes of one anti-diagonal d = t + u are independent: they are the lanes of a sequence's program, which walks d upwards
for alpha and, in the backward, downwards for beta. Log-probabilities, alpha and posteriors are stored as (B, d, u), so
that a step reads neighbouring words, the next one's ahead of their use. The downward walk leaves the probabilities of
leaving each node by blank and by label, its loads copied ahead of the steps, whose chain is all that it waits for;
owners of logit rows make of them, with softmax p,

    dlogits[k] = dloss (p[k] (blank + label) - [k is blank] blank - [k is the label] label).
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

META = {
    "slug": "rnnt_loss",
    "family": "loss_other",
    "op": "rnnt_loss",
    "schema": 1,
    "techniques": ("reverse-scan", "saved-lse", "varlen", "recompute"),
    "saves": (
        "lse: fp32 (B, T, U + 1)",
        "leaving: fp32 (2, B, T + U, U + 1)",
        "alpha: fp32 (B, T + U, U + 1)",
        "log_z: fp32 (B)",
    ),
    "grads": ("logits",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": False,
}


# --- forward ---
@triton.jit
def _log_add(a, b):
    top = tl.maximum(a, b)
    return top + tl.log(tl.exp(a - top) + tl.exp(b - top))


@triton.jit
def _node(row, T, U1):
    """Batch, frame and labels so far of a row of logits."""
    return row // (T * U1), row // U1 % T, row % U1


@triton.jit
def _rnnt_rows(Logits, Target, Lse, Blank, Label, T, U1, V, BLOCK_V: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    b, t, u = _node(row, T, U1)
    top = tl.full((BLOCK_V,), -1.0e30, tl.float32)
    norm = tl.zeros((BLOCK_V,), tl.float32)
    for start in range(0, V, BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)
        z = tl.load(Logits + row * V + v, mask=v < V, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, z)
        norm = norm * tl.exp(top - higher) + tl.exp(z - higher)
        top = higher
    best = tl.max(top, 0)
    lse = best + tl.log(tl.sum(norm * tl.exp(top - best), 0))
    tl.store(Lse + row, lse)
    # Straight to the anti-diagonal.
    at = (b * (T + U1 - 1) + t + u) * U1 + u
    tl.store(Blank + at, tl.load(Logits + row * V).to(tl.float32) - lse)
    label = tl.load(Target + b * (U1 - 1) + u, mask=u < U1 - 1, other=0)
    tl.store(Label + at, tl.load(Logits + row * V + label).to(tl.float32) - lse)


@triton.jit
def _diagonal(Blank, Label, at, d, u, frames, length):
    """Log-probabilities of leaving the nodes of a diagonal; what does not exist is left at FAR."""
    real = (d >= u) & (d - u < frames) & (u <= length)
    blank = tl.load(Blank + at, mask=real, other=-1.0e30)
    label = tl.load(Label + at, mask=real & (u < length), other=-1.0e30)
    return real, blank, label


@triton.jit
def _rnnt_alpha(Blank, Label, Frames, Lengths, Alpha, LogZ, Loss, D, U1, BLOCK_U: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    u = tl.arange(0, BLOCK_U)
    frames = tl.load(Frames + b)
    length = tl.load(Lengths + b)
    at = b * D * U1 + u
    _, blank, label = _diagonal(Blank, Label, at, 0, u, frames, length)
    alpha = tl.where(u == 0, 0.0, -1.0e30)
    tl.store(Alpha + at, alpha, mask=u < U1)
    for d in range(1, frames + length):
        real, next_blank, next_label = _diagonal(Blank, Label, at + U1, d, u, frames, length)
        # By label from the lane before, by blank in the same lane.
        moved = tl.gather(alpha + label, tl.maximum(u - 1, 0), 0)
        alpha = tl.where(real, _log_add(alpha + blank, tl.where(u > 0, moved, -1.0e30)), -1.0e30)
        at += U1
        tl.store(Alpha + at, alpha, mask=u < U1)
        blank = next_blank
        label = next_label
    # The last node is left by a blank.
    log_z = tl.sum(tl.where(u == length, alpha + blank, 0.0), 0)
    tl.store(LogZ + b, log_z)
    tl.store(Loss + b, -log_z)


def _lanes(U1):
    BLOCK_U = max(16, triton.next_power_of_2(U1))
    return {"BLOCK_U": BLOCK_U, "num_warps": max(1, min(8, BLOCK_U // 64))}


def forward(logits, target, frames, lengths):
    # logits (B, T, U + 1, V), class 0 is the blank; target (B, U); frames and lengths (B) as many as are used.
    logits, target = logits.contiguous(), target.contiguous()
    B, T, U1, V = logits.shape
    D = T + U1 - 1
    fp32 = {"device": logits.device, "dtype": torch.float32}
    # Places that no node has stay zero: what is saved is defined throughout.
    leaving, alpha = torch.zeros(2, B, D, U1, **fp32), torch.zeros(B, D, U1, **fp32)
    lse, log_z, loss = torch.empty(B, T, U1, **fp32), torch.empty(B, **fp32), torch.empty(B, **fp32)
    BLOCK_V = max(16, min(1024, triton.next_power_of_2(V)))
    _rnnt_rows[(B * T * U1,)](
        logits, target, lse, leaving[0], leaving[1], T, U1, V, BLOCK_V=BLOCK_V, num_warps=max(1, BLOCK_V // 256)
    )
    _rnnt_alpha[(B,)](leaving[0], leaving[1], frames, lengths, alpha, log_z, loss, D, U1, **_lanes(U1))
    return loss, (logits, target, frames, lengths, lse, leaving, alpha, log_z)


# --- backward ---
@triton.jit
def _rnnt_beta(Blank, Label, Frames, Lengths, Alpha, LogZ, ByBlank, ByLabel, D, U1, BLOCK_U: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    u = tl.arange(0, BLOCK_U)
    frames = tl.load(Frames + b)
    length = tl.load(Lengths + b)
    log_z = tl.load(LogZ + b)
    last = frames + length - 1
    # What lies behind the last node costs nothing.
    beta = tl.where(u == length, 0.0, -1.0e30)
    # A step takes less than a word from memory needs: eight steps are on their way.
    for back in tl.range(0, frames + length, num_stages=8):
        d = last - back
        at = (b * D + d) * U1 + u
        real, blank, label = _diagonal(Blank, Label, at, d, u, frames, length)
        alpha = tl.load(Alpha + at, mask=real, other=-1.0e30)
        on_blank = blank + beta
        on_label = label + tl.gather(beta, tl.minimum(u + 1, BLOCK_U - 1), 0)
        tl.store(ByBlank + at, tl.exp(alpha + on_blank - log_z), mask=real)
        tl.store(ByLabel + at, tl.exp(alpha + on_label - log_z), mask=real)
        # log(exp(a) + exp(b)) in units of log 2, where both functions are single instructions.
        apart = tl.exp2(-1.4426950408889634 * tl.abs(on_blank - on_label))
        joined = tl.maximum(on_blank, on_label) + 0.6931471805599453 * libdevice.fast_log2f(1.0 + apart)
        beta = tl.where(real, joined, -1.0e30)


@triton.jit
def _rnnt_dlogits(DLoss, Logits, Target, Lse, ByBlank, ByLabel, DLogits, T, U1, V, dl_b, BLOCK_V: tl.constexpr):
    # The node is the program's place in the grid: nothing is divided.
    u, t, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    row = (b * T + t) * U1 + u
    g = tl.load(DLoss + b * dl_b)
    at = (b * (T + U1 - 1) + t + u) * U1 + u
    by_blank = tl.load(ByBlank + at)
    by_label = tl.load(ByLabel + at)
    label = tl.load(Target + b * (U1 - 1) + u, mask=u < U1 - 1, other=0)
    lse = tl.load(Lse + row) * 1.4426950408889634
    for start in tl.range(0, V, BLOCK_V, num_stages=2):
        v = start + tl.arange(0, BLOCK_V)
        z = tl.load(Logits + row * V + v, mask=v < V, other=float("-inf")).to(tl.float32)
        dz = tl.exp2(z * 1.4426950408889634 - lse) * (by_blank + by_label)
        dz -= tl.where(v == 0, by_blank, 0.0) + tl.where(v == label, by_label, 0.0)
        tl.store(DLogits + row * V + v, g * dz, mask=v < V)


def backward(saved, grad_loss, needs=None):
    logits, target, frames, lengths, lse, leaving, alpha, log_z = saved
    B, T, U1, V = logits.shape
    D = T + U1 - 1
    # Nodes beyond a sequence's end are left by nobody: zeros, and a zero row of the gradient.
    posterior = torch.zeros(2, B, D, U1, device=logits.device, dtype=torch.float32)
    _rnnt_beta[(B,)](
        leaving[0], leaving[1], frames, lengths, alpha, log_z, posterior[0], posterior[1], D, U1, **_lanes(U1)
    )
    dlogits = torch.empty_like(logits)
    BLOCK_V = max(16, min(512, triton.next_power_of_2(V)))
    _rnnt_dlogits[(U1, T, B)](
        grad_loss, logits, target, lse, posterior[0], posterior[1], dlogits, T, U1, V, grad_loss.stride(0),
        BLOCK_V=BLOCK_V, num_warps=max(1, BLOCK_V // 256),
    )  # fmt: skip
    return dlogits


# --- check ---
SWEEP = (
    {"B": 2, "T": 8, "U": 5, "V": 16},
    {"B": 3, "T": 5, "U": 9, "V": 11, "dtype": "float16"},
    {"B": 2, "T": 7, "U": 3, "V": 20, "dtype": "bfloat16"},
)
BENCH = ({"B": 32, "T": 128, "U": 48, "V": 1024, "dtype": "bfloat16"},)


def make_args(B, T, U, V, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(B, T, U + 1, V, generator=g).to(device=device, dtype=getattr(torch, dtype))
    target = torch.randint(1, max(V, 2), (B, U), generator=g).clamp(max=V - 1)
    frames = torch.randint(max(1, T // 2), T + 1, (B,), generator=g)
    lengths = torch.randint(U // 2, U + 1, (B,), generator=g)
    # One sequence fills the lattice.
    frames[0], lengths[0] = T, U
    return logits, *(t.to(device=device, dtype=torch.int32) for t in (target, frames, lengths))


def reference(logits, target, frames, lengths):
    B, T, U1, _ = logits.shape
    logp = logits.float().log_softmax(3)
    blank = logp[..., 0]
    index = target.long()[:, None, :, None].expand(B, T, U1 - 1, 1)
    label = logp[:, :, :-1].gather(3, index)[..., 0]
    # Along a frame, labels add up: with E their running sum, alpha - E is a running log-sum-exp of what came in.
    running = torch.nn.functional.pad(label.cumsum(2), (1, 0))
    alphas = [running[:, 0]]
    for t in range(1, T):
        came = alphas[-1] + blank[:, t - 1]
        alphas.append((came - running[:, t]).logcumsumexp(1) + running[:, t])
    final = torch.stack(alphas, 1) + blank
    return -final[torch.arange(B, device=logits.device), frames.long() - 1, lengths.long()]
