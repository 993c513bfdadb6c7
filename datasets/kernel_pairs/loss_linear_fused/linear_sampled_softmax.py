"""Sampled softmax with shared negatives: rows of W are gathered, and only those that took part receive a gradient.

Each token meets its target's row and S rows drawn for the whole batch; a negative that is the token's own target is
left out. z[0] = x w[target], z[s] = x w[neg[s]] - correction[s]:    L = lse(z) - z[0],    dz = g (softmax - onehot).
Tokens own dX: the negatives go by in tiles, and their target's row adds to dX and receives g (p - 1) x atomically.
Negatives own their share of dW: a tile of them sums over all tokens, then adds to dW once, atomically, since a word may
be drawn twice or be a target too. dW starts as zeros, and rows of W that nobody met stay that way.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "linear_sampled_softmax",
    "family": "loss_linear_fused",
    "op": "sampled_softmax",
    "schema": 1,
    "techniques": ("inverse-map", "atomics", "loop-swap", "saved-lse", "recompute"),
    "saves": ("lse: fp32 (T,)",),
    "grads": ("hidden", "weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
    "spills": "128 x 256 logits do not fit, and are a third faster than the tiles that do",
}


# --- forward ---
@triton.jit
def _sampled_fwd(
    X, W, Target, Negative, Correction, Loss, Lse, T, S, H,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    h = tl.arange(0, BLOCK_H)
    own = (t[:, None] < T) & (h[None, :] < H)
    x = tl.load(X + t[:, None] * H + h[None, :], mask=own, other=0.0)
    target = tl.load(Target + t, mask=t < T, other=0).to(tl.int64)
    w = tl.load(W + target[:, None] * H + h[None, :], mask=own, other=0.0)
    hit = tl.sum(x.to(tl.float32) * w.to(tl.float32), 1)
    # The target's logit is where maximum and sum begin.
    top = hit
    norm = tl.full((BLOCK_T,), 1.0, tl.float32)
    for start in range(0, S, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        word = tl.load(Negative + s, mask=s < S, other=0).to(tl.int64)
        w = tl.load(W + word[:, None] * H + h[None, :], mask=(s[:, None] < S) & (h[None, :] < H), other=0.0)
        z = tl.dot(x, tl.trans(w)) - tl.load(Correction + s, mask=s < S, other=0.0)[None, :]
        z = tl.where((s[None, :] < S) & (word[None, :] != target[:, None]), z, -float("inf"))
        higher = tl.maximum(top, tl.max(z, 1))
        norm = norm * tl.exp(top - higher) + tl.sum(tl.exp(z - higher[:, None]), 1)
        top = higher
    lse = top + tl.log(norm)
    tl.store(Lse + t, lse, mask=t < T)
    tl.store(Loss + t, lse - hit, mask=t < T)


def _wide(H):
    if H > 256:
        raise ValueError("the hidden axis must fit one tile: at most 256")
    return max(16, triton.next_power_of_2(H))


def forward(hidden, weight, target, negative, correction):
    hidden, weight = hidden.contiguous(), weight.contiguous()
    (T, H), S = hidden.shape, negative.numel()
    loss, lse = (torch.empty(T, device=hidden.device, dtype=torch.float32) for _ in range(2))
    _sampled_fwd[(triton.cdiv(T, 64),)](
        hidden, weight, target, negative, correction, loss, lse, T, S, H,
        BLOCK_T=64, BLOCK_S=64, BLOCK_H=_wide(H), num_warps=4, num_stages=2,
    )  # fmt: skip
    return loss, (hidden, weight, target, negative, correction, lse)


# --- backward ---
@triton.jit
def _sampled_dx(
    DLoss, X, W, Target, Negative, Correction, Lse, DX, DW, T, S, H, stride_g, NEED_W: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    h = tl.arange(0, BLOCK_H)
    own = (t[:, None] < T) & (h[None, :] < H)
    x = tl.load(X + t[:, None] * H + h[None, :], mask=own, other=0.0)
    target = tl.load(Target + t, mask=t < T, other=0).to(tl.int64)
    lse = tl.load(Lse + t, mask=t < T, other=float("inf"))
    dx = tl.zeros((BLOCK_T, BLOCK_H), tl.float32)
    for start in range(0, S, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        word = tl.load(Negative + s, mask=s < S, other=0).to(tl.int64)
        w = tl.load(W + word[:, None] * H + h[None, :], mask=(s[:, None] < S) & (h[None, :] < H), other=0.0)
        z = tl.dot(x, tl.trans(w)) - tl.load(Correction + s, mask=s < S, other=0.0)[None, :]
        z = tl.where((s[None, :] < S) & (word[None, :] != target[:, None]), z, -float("inf"))
        dx = tl.dot(tl.exp(z - lse[:, None]).to(w.dtype), w, dx)
    row = target[:, None] * H + h[None, :]
    w = tl.load(W + row, mask=own, other=0.0).to(tl.float32)
    x = x.to(tl.float32)
    g = tl.load(DLoss + t * stride_g, mask=t < T, other=0.0)
    miss = tl.exp(tl.sum(x * w, 1) - lse) - 1.0
    tl.store(DX + t[:, None] * H + h[None, :], g[:, None] * (dx + miss[:, None] * w), mask=own)
    if NEED_W:
        tl.atomic_add(DW + row, (g * miss)[:, None] * x, mask=own, sem="relaxed")


@triton.jit
def _sampled_dw(
    DLoss, X, W, Target, Negative, Correction, Lse, DW, T, S, H, stride_g,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    h = tl.arange(0, BLOCK_H)
    word = tl.load(Negative + s, mask=s < S, other=0).to(tl.int64)
    row = word[:, None] * H + h[None, :]
    drawn = (s[:, None] < S) & (h[None, :] < H)
    w = tl.load(W + row, mask=drawn, other=0.0)
    correction = tl.load(Correction + s, mask=s < S, other=0.0)
    dw = tl.zeros((BLOCK_S, BLOCK_H), tl.float32)
    for start in range(0, T, BLOCK_T):
        t = (start + tl.arange(0, BLOCK_T)).to(tl.int64)
        x = tl.load(X + t[:, None] * H + h[None, :], mask=(t[:, None] < T) & (h[None, :] < H), other=0.0)
        target = tl.load(Target + t, mask=t < T, other=0).to(tl.int64)
        lse = tl.load(Lse + t, mask=t < T, other=float("inf"))
        g = tl.load(DLoss + t * stride_g, mask=t < T, other=0.0)
        p = tl.exp(tl.dot(w, tl.trans(x)) - correction[:, None] - lse[None, :])
        p = tl.where(word[:, None] != target[None, :], p, 0.0)
        # The cotangent joins x: probabilities times a mean's 1/T would flush to zero in fp16.
        dw = tl.dot(p.to(x.dtype), (x * g[:, None]).to(x.dtype), dw)
    tl.atomic_add(DW + row, dw, mask=drawn, sem="relaxed")


def backward(saved, grad_loss, needs=(True, True)):
    hidden, weight, target, negative, correction, lse = saved
    (T, H), S = hidden.shape, negative.numel()
    BLOCK_H, half = _wide(H), hidden.element_size() == 2
    inputs = grad_loss, hidden, weight, target, negative, correction, lse
    dx = torch.empty_like(hidden)
    dw = torch.zeros(weight.shape, device=weight.device, dtype=torch.float32) if needs[1] else None
    # The targets' rows of dW come out of the tokens' kernel, which therefore always runs.
    _sampled_dx[(triton.cdiv(T, 128),)](
        *inputs, dx, dw, T, S, H, grad_loss.stride(0), NEED_W=needs[1],
        BLOCK_T=128, BLOCK_S=256 if half else 32, BLOCK_H=BLOCK_H, num_warps=8, num_stages=2,
    )  # fmt: skip
    if needs[1]:
        _sampled_dw[(triton.cdiv(S, 128),)](
            *inputs, dw, T, S, H, grad_loss.stride(0),
            BLOCK_T=64 if half else 32, BLOCK_S=128, BLOCK_H=BLOCK_H, num_warps=8, num_stages=2,
        )  # fmt: skip
        dw = dw.to(weight.dtype)
    return dx, dw


# --- check ---
SWEEP = (
    {"T": 64, "V": 100, "S": 64, "H": 32},
    {"T": 75, "V": 60, "S": 41, "H": 24},
    {"T": 40, "V": 50, "S": 33, "H": 16, "dtype": "bfloat16"},
    {"T": 33, "V": 80, "S": 70, "H": 41, "dtype": "float16"},
)
BENCH = ({"T": 16384, "V": 500000, "S": 8192, "H": 128, "dtype": "bfloat16"},)


def make_args(T, V, S, H, dtype="float32", device="cpu", seed=0):
    if V < 3 or S < 2:
        raise ValueError("a target needs negatives that differ from it")
    g = torch.Generator().manual_seed(seed)
    dt = getattr(torch, dtype)
    hidden, weight = torch.randn(T, H, generator=g), torch.randn(V, H, generator=g) / H**0.5
    target = torch.randint(0, V, (T,), generator=g)
    # Drawn with repetition; the correction is log of the expected count.
    negative = torch.randint(0, V, (S,), generator=g)
    correction = 0.3 * torch.randn(S, generator=g)
    return hidden.to(device, dt), weight.to(device, dt), target.to(device), negative.to(device), correction.to(device)


def reference(hidden, weight, target, negative, correction):
    hit = (hidden.float() * weight[target].float()).sum(-1, keepdim=True)
    z = (hidden @ weight[negative].T).float() - correction
    z = z.masked_fill(negative == target[:, None], float("-inf"))
    return torch.logsumexp(torch.cat((hit, z), 1), 1) - hit[:, 0]
