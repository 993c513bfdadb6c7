"""Linear head and cross-entropy without a logit matrix, in any direction: tokens own dX, words own dW, in one launch.

The log-sum-exp is all that the forward keeps. Going back, dX = g (softmax - onehot) W and dW = (softmax - onehot)^T g x
are one loop with its roles swapped: the owner keeps its rows of x (or W) and their gradient over the whole hidden axis,
the rows of W (or x) stream past, and a tile of logits is formed again, used and dropped. The few token owners, whose
loops over the vocabulary are long, are launched before the many word owners, which fill the processors left over.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "linear_ce_lse_recompute",
    "family": "loss_linear_fused",
    "op": "linear_cross_entropy",
    "schema": 1,
    "techniques": ("one-launch", "loop-swap", "column-owner", "saved-lse", "recompute"),
    "saves": ("lse: fp32 (T,)",),
    "grads": ("hidden", "weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "spills": "an owner's gradient over 512 hidden units takes 128 registers a thread, and a dozen words do not fit",
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _linear_ce_fwd(
    X, W, Target, PartLse, Picked, T, V, H, words,
    BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    target = tl.load(Target + t, mask=t < T, other=-1)
    first = tl.program_id(1) * words
    last = tl.minimum(first + words, V)
    top = tl.full((BLOCK_T,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_T,), tl.float32)
    picked = tl.zeros((BLOCK_T,), tl.float32)
    for start in range(first, last, BLOCK_V):
        v = (start + tl.arange(0, BLOCK_V)).to(tl.int64)
        logits = tl.zeros((BLOCK_T, BLOCK_V), tl.float32)
        for begin in range(0, H, BLOCK_H):
            h = begin + tl.arange(0, BLOCK_H)
            x = tl.load(X + t[:, None] * H + h[None, :], mask=(t[:, None] < T) & (h[None, :] < H), other=0.0)
            w = tl.load(W + v[None, :] * H + h[:, None], mask=(v[None, :] < V) & (h[:, None] < H), other=0.0)
            logits = tl.dot(x, w, logits)
        logits = tl.where(v[None, :] < last, logits, -float("inf"))
        higher = tl.maximum(top, tl.max(logits, 1))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(logits - higher[:, None]), 1)
        top = higher
        picked += tl.sum(tl.where(v[None, :] == target[:, None], logits, 0.0), 1)
    tl.store(PartLse + tl.program_id(1).to(tl.int64) * T + t, top + tl.log(total), mask=t < T)
    # Exactly one split of the vocabulary holds a token's target.
    tl.store(Picked + t, picked, mask=(t < T) & (target >= first) & (target < last))


def _side(n, most):
    return max(16, min(most, triton.next_power_of_2(n)))


def forward(hidden, weight, target):
    """hidden (T, H) and weight (V, H), with H up to 512, or 256 in fp32; target (T)."""
    hidden, weight, target = hidden.contiguous(), weight.contiguous(), target.contiguous()
    (T, H), V = hidden.shape, weight.shape[0]
    if H * hidden.element_size() > 1024:
        raise ValueError("an owner keeps its rows over the whole hidden axis: at most 1024 bytes each")
    BLOCK_T, BLOCK_V = _side(T, 128), _side(V, 128)
    # Token tiles times splits of the vocabulary: two programs for each of 132 processors.
    words = triton.cdiv(triton.cdiv(V, max(1, 264 // triton.cdiv(T, BLOCK_T))), BLOCK_V) * BLOCK_V
    picked = torch.empty(T, device=hidden.device, dtype=torch.float32)
    part_lse = torch.empty(triton.cdiv(V, words), T, device=hidden.device, dtype=torch.float32)
    _linear_ce_fwd[(triton.cdiv(T, BLOCK_T), triton.cdiv(V, words))](
        hidden, weight, target, part_lse, picked, T, V, H, words,
        BLOCK_T=BLOCK_T, BLOCK_V=BLOCK_V, BLOCK_H=_side(H, 128 // hidden.element_size()), num_warps=8, num_stages=3,
    )  # fmt: skip
    lse = part_lse.logsumexp(0)
    return lse - picked, (hidden, weight, target, lse)


# --- backward ---
@triton.jit
def _weighted_rows(X, DLoss, GX, T, H, stride_g, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr):
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    h = tl.arange(0, BLOCK_H)
    inside = (t[:, None] < T) & (h[None, :] < H)
    g = tl.load(DLoss + t * stride_g, mask=t < T, other=0.0)
    x = tl.load(X + t[:, None] * H + h[None, :], mask=inside, other=0.0)
    tl.store(GX + t[:, None] * H + h[None, :], g[:, None] * x, mask=inside)


@triton.jit
def _owner_grad(
    Mine, Other, Weighted, Target, Lse, DLoss, DMine, tile, mine, others, H, stride_g,
    TOKENS: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    # TOKENS: rows i are tokens and j words; otherwise the other way round.
    i = tile.to(tl.int64) * BLOCK_I + tl.arange(0, BLOCK_I)
    h = tl.arange(0, BLOCK_H)
    at = i[:, None] * H + h[None, :]
    inside = (i[:, None] < mine) & (h[None, :] < H)
    a = tl.load(Mine + at, mask=inside, other=0.0)
    if TOKENS:
        target = tl.load(Target + i, mask=i < mine, other=-1)
        lse = tl.load(Lse + i, mask=i < mine, other=float("inf"))
        g = tl.load(DLoss + i * stride_g, mask=i < mine, other=0.0)
    grad = tl.zeros((BLOCK_I, BLOCK_H), tl.float32)
    for start in range(0, others, BLOCK_J):
        j = (start + tl.arange(0, BLOCK_J)).to(tl.int64)
        there = j[:, None] * H + h[None, :]
        b = tl.load(Other + there, mask=(j[:, None] < others) & (h[None, :] < H), other=0.0)
        z = tl.dot(a, tl.trans(b))
        # Rows of `b` past the end are zero, and add nothing whatever stands against them. The cotangent stays out of
        # the tile: small as 1/T, it would flush probabilities to zero in fp16.
        if TOKENS:
            dz = tl.exp(z - lse[:, None]) - tl.where(j[None, :] == target[:, None], 1.0, 0.0)
        else:
            their_target = tl.load(Target + j, mask=j < others, other=-1)
            their_lse = tl.load(Lse + j, mask=j < others, other=float("inf"))
            dz = tl.exp(z - their_lse[None, :]) - tl.where(i[:, None] == their_target[None, :], 1.0, 0.0)
            b = tl.load(Weighted + there, mask=(j[:, None] < others) & (h[None, :] < H), other=0.0)
        grad = tl.dot(dz.to(b.dtype), b, grad)
    if TOKENS:
        grad *= g[:, None]
    tl.store(DMine + at, grad, mask=inside)


@triton.jit
def _owners(
    X, GX, W, Target, Lse, DLoss, DX, DW, T, V, H, token_tiles, stride_g,
    NEED_X: tl.constexpr, NEED_W: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    if NEED_X:
        owns_tokens = tile < token_tiles
        if owns_tokens:
            _owner_grad(X, W, W, Target, Lse, DLoss, DX, tile, T, V, H, stride_g, True, BLOCK_I, BLOCK_J, BLOCK_H)
    if NEED_W:
        word_tile = tile - token_tiles
        if word_tile >= 0:
            _owner_grad(
                W, X, GX, Target, Lse, DLoss, DW, word_tile, V, T, H, stride_g, False, BLOCK_I, BLOCK_J, BLOCK_H
            )


def backward(saved, grad_loss, needs=(True, True)):
    hidden, weight, target, lse = saved
    (T, H), V = hidden.shape, weight.shape[0]
    need_x, need_w = needs
    dx = torch.empty_like(hidden) if need_x else None
    dw = torch.empty_like(weight) if need_w else None
    BLOCK_H = max(16, triton.next_power_of_2(H))
    gx = torch.empty_like(hidden) if need_w else None
    if need_w:
        _weighted_rows[(triton.cdiv(T, 16),)](
            hidden, grad_loss, gx, T, H, grad_loss.stride(0), BLOCK_T=16, BLOCK_H=BLOCK_H, num_warps=4
        )
    token_tiles, word_tiles = need_x * triton.cdiv(T, 64), need_w * triton.cdiv(V, 64)
    _owners[(token_tiles + word_tiles,)](
        hidden, gx, weight, target, lse, grad_loss, dx, dw, T, V, H, token_tiles, grad_loss.stride(0),
        NEED_X=need_x, NEED_W=need_w,
        BLOCK_I=64, BLOCK_J=16, BLOCK_H=BLOCK_H, num_warps=8, num_stages=3,
    )  # fmt: skip
    return dx, dw


# --- check ---
SWEEP = (
    {"T": 64, "V": 96, "H": 32},
    {"T": 21, "V": 75, "H": 40, "dtype": "bfloat16"},
    {"T": 70, "V": 48, "H": 16, "dtype": "float16"},
)
BENCH = ({"T": 8192, "V": 32000, "H": 512, "dtype": "float16"},)


def make_args(T, V, H, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    dt = getattr(torch, dtype)
    hidden, weight = torch.randn(T, H, generator=g), torch.randn(V, H, generator=g) / H**0.5
    target = torch.randint(0, V, (T,), generator=g)
    return hidden.to(device, dt), weight.to(device, dt), target.to(device)


def reference(hidden, weight, target):
    logits = (hidden @ weight.T).float()
    return torch.nn.functional.cross_entropy(logits, target, reduction="none")
