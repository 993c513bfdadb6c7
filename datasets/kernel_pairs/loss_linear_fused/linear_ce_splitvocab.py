"""Linear cross-entropy of few tokens against a huge vocabulary: splits of the vocabulary work side by side and merge.

With a few hundred tokens their tiles cannot fill a device, so a program takes a tile of tokens and one split of the
words. Forward: each split leaves its log-sum-exp, a merge kernel joins them. Backward: each split leaves the dX of its
words, added in fixed order by a second kernel; dW needs no split, since the words that own it are many. The hidden axis
is narrow enough to lie in one tile.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "linear_ce_splitvocab",
    "family": "loss_linear_fused",
    "op": "linear_cross_entropy",
    "schema": 1,
    "techniques": ("split-k", "two-stage-partials", "loop-swap", "saved-lse", "recompute"),
    "saves": ("lse: fp32 (T,)",),
    "grads": ("hidden", "weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _split_ce_fwd(
    X, W, Target, PartLse, Picked, T, V, H, words,
    BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    split = tl.program_id(1)
    h = tl.arange(0, BLOCK_H)
    x = tl.load(X + t[:, None] * H + h[None, :], mask=(t[:, None] < T) & (h[None, :] < H), other=0.0)
    target = tl.load(Target + t, mask=t < T, other=-1)
    first = split * words
    last = tl.minimum(first + words, V)
    top = tl.full((BLOCK_T,), -1.0e30, tl.float32)
    norm = tl.zeros((BLOCK_T,), tl.float32)
    picked = tl.zeros((BLOCK_T,), tl.float32)
    for start in range(first, last, BLOCK_V):
        v = (start + tl.arange(0, BLOCK_V)).to(tl.int64)
        w = tl.load(W + v[:, None] * H + h[None, :], mask=(v[:, None] < V) & (h[None, :] < H), other=0.0)
        z = tl.dot(x, tl.trans(w))
        picked += tl.sum(tl.where(v[None, :] == target[:, None], z, 0.0), 1)
        z = tl.where(v[None, :] < last, z, -float("inf"))
        higher = tl.maximum(top, tl.max(z, 1))
        norm = norm * tl.exp(top - higher) + tl.sum(tl.exp(z - higher[:, None]), 1)
        top = higher
    tl.store(PartLse + split.to(tl.int64) * T + t, top + tl.log(norm), mask=t < T)
    # Exactly one split holds a token's target.
    tl.store(Picked + t, picked, mask=(t < T) & (target >= first) & (target < last))


@triton.jit
def _split_ce_merge(PartLse, Picked, Loss, Lse, T, splits, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr):
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    s = tl.arange(0, BLOCK_S)
    inside = (s[:, None] < splits) & (t[None, :] < T)
    part = tl.load(PartLse + s[:, None] * T + t[None, :], mask=inside, other=-1.0e30)
    top = tl.max(part, 0)
    lse = top + tl.log(tl.sum(tl.exp(part - top[None, :]), 0))
    tl.store(Lse + t, lse, mask=t < T)
    tl.store(Loss + t, lse - tl.load(Picked + t, mask=t < T, other=0.0), mask=t < T)


def _splits(T, V, BLOCK_T):
    """Number of splits that fills two waves of 132 processors, and the words of each: whole tiles of 64."""
    wanted = max(1, min(264 // triton.cdiv(T, BLOCK_T), triton.cdiv(V, 64)))
    words = triton.cdiv(triton.cdiv(V, wanted), 64) * 64
    return triton.cdiv(V, words), words


def _wide(H):
    if H > 256:
        raise ValueError("the hidden axis must fit one tile: at most 256")
    return max(16, triton.next_power_of_2(H))


def forward(hidden, weight, target):
    hidden, weight, target = hidden.contiguous(), weight.contiguous(), target.contiguous()
    (T, H), V = hidden.shape, weight.shape[0]
    BLOCK_T, BLOCK_H = 64, _wide(H)
    splits, words = _splits(T, V, BLOCK_T)
    part_lse = torch.empty(splits, T, device=hidden.device, dtype=torch.float32)
    picked, loss, lse = (torch.empty(T, device=hidden.device, dtype=torch.float32) for _ in range(3))
    _split_ce_fwd[(triton.cdiv(T, BLOCK_T), splits)](
        hidden, weight, target, part_lse, picked, T, V, H, words,
        BLOCK_T=BLOCK_T, BLOCK_V=64, BLOCK_H=BLOCK_H, num_warps=4, num_stages=3,
    )  # fmt: skip
    _split_ce_merge[(triton.cdiv(T, 16),)](
        part_lse, picked, loss, lse, T, splits, BLOCK_T=16, BLOCK_S=triton.next_power_of_2(splits), num_warps=4
    )
    return loss, (hidden, weight, target, lse)


# --- backward ---
@triton.jit
def _split_ce_dx(
    X, W, Target, Lse, Parts, T, V, H, words, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    split = tl.program_id(1)
    h = tl.arange(0, BLOCK_H)
    at = t[:, None] * H + h[None, :]
    inside = (t[:, None] < T) & (h[None, :] < H)
    x = tl.load(X + at, mask=inside, other=0.0)
    target = tl.load(Target + t, mask=t < T, other=-1)
    lse = tl.load(Lse + t, mask=t < T, other=float("inf"))
    last = tl.minimum((split + 1) * words, V)
    dx = tl.zeros((BLOCK_T, BLOCK_H), tl.float32)
    for start in range(split * words, last, BLOCK_V):
        v = (start + tl.arange(0, BLOCK_V)).to(tl.int64)
        w = tl.load(W + v[:, None] * H + h[None, :], mask=(v[:, None] < last) & (h[None, :] < H), other=0.0)
        z = tl.where(v[None, :] < last, tl.dot(x, tl.trans(w)), -float("inf"))
        p = tl.exp(z - lse[:, None])
        dz = tl.where(v[None, :] == target[:, None], p - 1.0, p)
        dx = tl.dot(dz.to(w.dtype), w, dx)
    tl.store(Parts + split.to(tl.int64) * T * H + at, dx, mask=inside)


@triton.jit
def _split_ce_add(Parts, DLoss, DX, H, numel, splits, stride_g, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for split in range(splits):
        total += tl.load(Parts + tl.cast(split, tl.int64) * numel + at, mask=at < numel, other=0.0)
    g = tl.load(DLoss + at // H * stride_g, mask=at < numel, other=0.0)
    tl.store(DX + at, g * total, mask=at < numel)


@triton.jit
def _word_ce_dw(
    DLoss, X, W, Target, Lse, DW, T, V, H, stride_g,
    BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    v = tl.program_id(0).to(tl.int64) * BLOCK_V + tl.arange(0, BLOCK_V)
    h = tl.arange(0, BLOCK_H)
    at = v[:, None] * H + h[None, :]
    inside = (v[:, None] < V) & (h[None, :] < H)
    w = tl.load(W + at, mask=inside, other=0.0)
    dw = tl.zeros((BLOCK_V, BLOCK_H), tl.float32)
    for start in range(0, T, BLOCK_T):
        t = (start + tl.arange(0, BLOCK_T)).to(tl.int64)
        x = tl.load(X + t[:, None] * H + h[None, :], mask=(t[:, None] < T) & (h[None, :] < H), other=0.0)
        target = tl.load(Target + t, mask=t < T, other=-1)
        lse = tl.load(Lse + t, mask=t < T, other=float("inf"))
        g = tl.load(DLoss + t * stride_g, mask=t < T, other=0.0)
        p = tl.exp(tl.dot(w, tl.trans(x)) - lse[None, :])
        dz = tl.where(v[:, None] == target[None, :], p - 1.0, p)
        # Rows of x carry the cotangent: times 1/T, probabilities would flush to zero in fp16.
        dw = tl.dot(dz.to(x.dtype), (x * g[:, None]).to(x.dtype), dw)
    tl.store(DW + at, dw, mask=inside)


def backward(saved, grad_loss, needs=(True, True)):
    hidden, weight, target, lse = saved
    (T, H), V = hidden.shape, weight.shape[0]
    BLOCK_H = _wide(H)
    dx = dw = None
    if needs[0]:
        splits, words = _splits(T, V, 64)
        parts = torch.empty(splits, T, H, device=hidden.device, dtype=torch.float32)
        _split_ce_dx[(triton.cdiv(T, 64), splits)](
            hidden, weight, target, lse, parts, T, V, H, words,
            BLOCK_T=64, BLOCK_V=64, BLOCK_H=BLOCK_H, num_warps=4 if BLOCK_H <= 128 else 8, num_stages=4,
        )  # fmt: skip
        dx = torch.empty_like(hidden)
        _split_ce_add[(triton.cdiv(T * H, 512),)](
            parts, grad_loss, dx, H, T * H, splits, grad_loss.stride(0), BLOCK=512, num_warps=4
        )
    if needs[1]:
        dw = torch.empty_like(weight)
        _word_ce_dw[(triton.cdiv(V, 128),)](
            grad_loss, hidden, weight, target, lse, dw, T, V, H, grad_loss.stride(0),
            BLOCK_T=32, BLOCK_V=128, BLOCK_H=BLOCK_H, num_warps=8, num_stages=2,
        )  # fmt: skip
    return dx, dw


# --- check ---
SWEEP = (
    {"T": 32, "V": 256, "H": 32},
    {"T": 75, "V": 203, "H": 41},
    {"T": 20, "V": 192, "H": 16, "dtype": "bfloat16"},
    {"T": 40, "V": 72, "H": 24, "dtype": "float16"},
)
BENCH = ({"T": 512, "V": 262144, "H": 128, "dtype": "bfloat16"},)


def make_args(T, V, H, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    dt = getattr(torch, dtype)
    hidden, weight = torch.randn(T, H, generator=g), torch.randn(V, H, generator=g) / H**0.5
    target = torch.randint(0, V, (T,), generator=g)
    return hidden.to(device, dt), weight.to(device, dt), target.to(device)


def reference(hidden, weight, target):
    logits = (hidden @ weight.T).float()
    return torch.nn.functional.cross_entropy(logits, target, reduction="none")
