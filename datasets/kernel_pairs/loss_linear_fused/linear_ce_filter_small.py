"""Linear cross-entropy whose backward drops tiles of tiny probabilities: most of the vocabulary multiplies nothing.

softmax - onehot is formed again per tile of tokens and words. Where every probability is below eps and no target is in
the tile, both products are left out: an intended gradient, up to eps per entry off the true one, which `surrogate`
states. After training nearly all tiles drop, so the cost falls from three products to one. Tiles that stay add to dX
and dW by atomics: so few meet that owner loops, which would form the logits twice, do not pay.
"""

import math

import torch
import triton
import triton.language as tl

META = {
    "slug": "linear_ce_filter_small",
    "family": "loss_linear_fused",
    "op": "linear_cross_entropy",
    "schema": 1,
    "techniques": ("masking", "atomics", "one-launch", "saved-lse", "recompute"),
    "saves": ("lse: fp32 (T,)",),
    "grads": ("hidden", "weight"),
    "gradient": "custom",
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _scores(X, W, t, v, T, V, H, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr):
    """Logits of a tile in fp32, minus infinity for words past the end."""
    h = tl.arange(0, BLOCK_H)
    x_at = X + t[:, None] * H + h[None, :]
    w_at = W + v[None, :] * H + h[:, None]
    z = tl.zeros((BLOCK_T, BLOCK_V), tl.float32)
    for left in range(H, 0, -BLOCK_H):
        x = tl.load(x_at, mask=(t[:, None] < T) & (h[None, :] < left), other=0.0)
        w = tl.load(w_at, mask=(v[None, :] < V) & (h[:, None] < left), other=0.0)
        z = tl.dot(x, w, z)
        x_at += BLOCK_H
        w_at += BLOCK_H
    return tl.where(v[None, :] < V, z, -float("inf"))


@triton.jit
def _filtered_ce_fwd(
    X, W, Target, PartLse, Picked, T, V, H, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr
):
    # Every tile leaves its own log-sum-exp: the grid is as wide as the vocabulary, whatever the number of tokens.
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    v = tl.program_id(1).to(tl.int64) * BLOCK_V + tl.arange(0, BLOCK_V)
    z = _scores(X, W, t, v, T, V, H, BLOCK_T, BLOCK_V, BLOCK_H)
    top = tl.max(z, 1)
    lse = top + tl.log(tl.sum(tl.exp(z - top[:, None]), 1))
    tl.store(PartLse + tl.program_id(1).to(tl.int64) * T + t, lse, mask=t < T)
    target = tl.load(Target + t, mask=t < T, other=-1)
    here = v[None, :] == target[:, None]
    found = (target >= tl.min(v, 0)) & (target <= tl.max(v, 0))
    tl.store(Picked + t, tl.sum(tl.where(here, z, 0.0), 1), mask=found)


@triton.jit
def _filtered_ce_join(PartLse, Picked, Loss, Lse, T, parts, BLOCK_T: tl.constexpr):
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    top = tl.full((BLOCK_T,), -1.0e30, tl.float32)
    total = tl.zeros((BLOCK_T,), tl.float32)
    for part in range(parts):
        lse = tl.load(PartLse + tl.cast(part, tl.int64) * T + t, mask=t < T, other=0.0)
        higher = tl.maximum(top, lse)
        total = total * tl.exp(top - higher) + tl.exp(lse - higher)
        top = higher
    lse = top + tl.log(total)
    tl.store(Lse + t, lse, mask=t < T)
    tl.store(Loss + t, lse - tl.load(Picked + t, mask=t < T, other=0.0), mask=t < T)


def _tile(T, V):
    # Tiles of the filter: large enough for the tensor cores, small enough that some hold no likely word.
    return (128, 128) if T * V >= 512 * 512 else (16, 32)


def forward(hidden, weight, target, eps=2.0**-12):
    hidden, weight, target = hidden.contiguous(), weight.contiguous(), target.contiguous()
    (T, H), V = hidden.shape, weight.shape[0]
    BLOCK_T, BLOCK_V = _tile(T, V)
    BLOCK_H = max(16, min(128 // hidden.element_size(), triton.next_power_of_2(H)))
    parts = triton.cdiv(V, BLOCK_V)
    part_lse = torch.empty(parts, T, device=hidden.device, dtype=torch.float32)
    picked, loss, lse = (torch.empty(T, device=hidden.device, dtype=torch.float32) for _ in range(3))
    warps = 8 if BLOCK_T == 128 else 4
    _filtered_ce_fwd[(triton.cdiv(T, BLOCK_T), parts)](
        hidden, weight, target, part_lse, picked, T, V, H,
        BLOCK_T=BLOCK_T, BLOCK_V=BLOCK_V, BLOCK_H=BLOCK_H, num_warps=warps, num_stages=3,
    )  # fmt: skip
    _filtered_ce_join[(triton.cdiv(T, 128),)](part_lse, picked, loss, lse, T, parts, BLOCK_T=128, num_warps=4)
    return loss, (hidden, weight, target, lse, eps)


# --- backward ---
@triton.jit
def _filtered_ce_bwd(
    DLoss, X, W, Target, Lse, DX, DW, T, V, H, stride_g, eps,
    NEED_X: tl.constexpr, NEED_W: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    v = tl.program_id(1).to(tl.int64) * BLOCK_V + tl.arange(0, BLOCK_V)
    z = _scores(X, W, t, v, T, V, H, BLOCK_T, BLOCK_V, BLOCK_H)
    lse = tl.load(Lse + t, mask=t < T, other=float("inf"))
    target = tl.load(Target + t, mask=t < T, other=-1)
    p = tl.exp(z - lse[:, None])
    here = v[None, :] == target[:, None]
    # A target counts as one: its entry p - 1 is large just when p is small.
    if tl.max(tl.max(tl.where(here, 1.0, p), 1), 0) >= eps:
        g = tl.load(DLoss + t * stride_g, mask=t < T, other=0.0)
        # The cotangent waits for the products: times 1/T, probabilities would flush to zero in fp16.
        dz = tl.where(here, p - 1.0, p).to(X.dtype.element_ty)
        for start in range(0, H, BLOCK_H):
            h = start + tl.arange(0, BLOCK_H)
            x_in = (t[:, None] < T) & (h[None, :] < H)
            w_in = (v[:, None] < V) & (h[None, :] < H)
            if NEED_X:
                w = tl.load(W + v[:, None] * H + h[None, :], mask=w_in, other=0.0)
                dx = g[:, None] * tl.dot(dz, w)
                tl.atomic_add(DX + t[:, None] * H + h[None, :], dx, mask=x_in, sem="relaxed")
            if NEED_W:
                x = tl.load(X + t[:, None] * H + h[None, :], mask=x_in, other=0.0)
                dw = tl.dot(tl.trans(dz), (x * g[:, None]).to(x.dtype))
                tl.atomic_add(DW + v[:, None] * H + h[None, :], dw, mask=w_in, sem="relaxed")


def backward(saved, grad_loss, needs=(True, True)):
    hidden, weight, target, lse, eps = saved
    (T, H), V = hidden.shape, weight.shape[0]
    dx, dw = (
        torch.zeros(x.shape, device=x.device, dtype=torch.float32) if need else None
        for x, need in zip((hidden, weight), needs, strict=True)
    )
    BLOCK_T, BLOCK_V = _tile(T, V)
    BLOCK_H = max(16, min(128 // hidden.element_size(), triton.next_power_of_2(H)))
    _filtered_ce_bwd[(triton.cdiv(T, BLOCK_T), triton.cdiv(V, BLOCK_V))](
        grad_loss, hidden, weight, target, lse, dx, dw, T, V, H, grad_loss.stride(0), eps,
        NEED_X=needs[0], NEED_W=needs[1],
        BLOCK_T=BLOCK_T, BLOCK_V=BLOCK_V, BLOCK_H=BLOCK_H, num_warps=16 if BLOCK_T == 128 else 4, num_stages=4,
    )  # fmt: skip
    return dx.to(hidden.dtype) if needs[0] else None, dw.to(weight.dtype) if needs[1] else None


# --- check ---
SWEEP = (
    {"T": 32, "V": 256, "H": 32, "eps": 0.01},
    {"T": 37, "V": 203, "H": 41, "eps": 0.01},
    {"T": 16, "V": 160, "H": 16, "eps": 0.01, "dtype": "float16"},
    {"T": 20, "V": 128, "H": 24, "eps": 0.01, "dtype": "bfloat16"},
)
BENCH = ({"T": 8192, "V": 32768, "H": 2048, "eps": 0.000244140625, "dtype": "bfloat16"},)


def make_args(T, V, H, eps, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    dt = getattr(torch, dtype)
    hidden, weight = torch.randn(T, H, generator=g), torch.randn(V, H, generator=g) / H**0.5
    # The first feature acts as a bias that makes words rarer by rank, as in text: exp(-20 rank). Targets follow it.
    hidden[:, 0] = 4.0
    weight[:, 0] = -5.0 * torch.arange(V) / V
    rank = -torch.log(1.0 - torch.rand(T, generator=g) * (1.0 - math.exp(-20.0))) / 20.0
    target = (V * rank).long().clamp(max=V - 1)
    return hidden.to(device, dt), weight.to(device, dt), target.to(device), eps


def reference(hidden, weight, target, eps=2.0**-12):
    logits = (hidden @ weight.T).float()
    return torch.nn.functional.cross_entropy(logits, target, reduction="none")


def surrogate(hidden, weight, target, eps=2.0**-12):
    """The loss with dlogits zeroed in the tiles that the filter drops."""
    logits = hidden @ weight.T
    T, V = logits.shape
    BLOCK_T, BLOCK_V = _tile(T, V)
    loss = torch.nn.functional.cross_entropy(logits, target, reduction="none").detach()
    p = logits.detach().softmax(-1)
    onehot = torch.nn.functional.one_hot(target, V).to(p.dtype)
    pad = (0, -V % BLOCK_V, 0, -T % BLOCK_T)
    largest = torch.nn.functional.pad(torch.maximum(p, onehot), pad)
    tiles = largest.unflatten(0, (-1, BLOCK_T)).unflatten(2, (-1, BLOCK_V))
    kept = (tiles.amax((1, 3)) >= eps).repeat_interleave(BLOCK_T, 0).repeat_interleave(BLOCK_V, 1)[:T, :V]
    linear = (logits * (p - onehot) * kept).sum(-1)
    return loss + linear - linear.detach()
