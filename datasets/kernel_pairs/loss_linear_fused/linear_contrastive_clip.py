"""CLIP's symmetric loss without the similarity matrix: row and column log-sum-exps are kept, tiles come back for both.

s = t X Y^T,    L = 1/2N sum of (row lse - s[i, i]) + (column lse - s[j, j]),
    G = (exp(s - row lse) + exp(s - column lse)) / 2N - I / N,    dX = t G Y,    dY = t G^T X,    dt = sum G (X Y^T).
One kernel serves both directions, forward and backward: with X and Y and the two sets of statistics exchanged it owns
columns instead of rows. The diagonal stays out of the loops and is taken off at the end, one row per owner. dt is what
large sums leave of each other, sum G (X Y^T): G meets the similarities of the very product that it was made of, as tf32
makes all of them smaller by half a step, and so the diagonal that is taken off.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "linear_contrastive_clip",
    "family": "loss_linear_fused",
    "op": "clip_loss",
    "schema": 1,
    "techniques": ("saved-lse", "loop-swap", "recompute", "scalar-gradient", "two-stage-partials"),
    "saves": ("lse: fp32 (2, N)",),
    "grads": ("image", "text", "scale"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _clip_side(
    Mine, Other, Scale, Lse, Parts, N, D, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64) * BLOCK_I + tl.arange(0, BLOCK_I)
    d = tl.arange(0, BLOCK_D)
    own = (i[:, None] < N) & (d[None, :] < D)
    x = tl.load(Mine + i[:, None] * D + d[None, :], mask=own, other=0.0)
    y = tl.load(Other + i[:, None] * D + d[None, :], mask=own, other=0.0)
    scale = tl.load(Scale)
    pair = scale * tl.sum(x.to(tl.float32) * y.to(tl.float32), 1)
    top = pair
    norm = tl.zeros((BLOCK_I,), tl.float32)
    for start in range(0, N, BLOCK_J):
        j = (start + tl.arange(0, BLOCK_J)).to(tl.int64)
        y = tl.load(Other + j[:, None] * D + d[None, :], mask=(j[:, None] < N) & (d[None, :] < D), other=0.0)
        s = tl.where(j[None, :] < N, scale * tl.dot(x, tl.trans(y)), -float("inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        norm = norm * tl.exp(top - higher) + tl.sum(tl.exp(s - higher[:, None]), 1)
        top = higher
    lse = top + tl.log(norm)
    tl.store(Lse + i, lse, mask=i < N)
    tl.store(Parts + tl.program_id(0), tl.sum(tl.where(i < N, lse - pair, 0.0), 0) / (2 * N))


def _wide(D):
    if D > 256:
        raise ValueError("the embedding must fit one tile: at most 256")
    return max(16, triton.next_power_of_2(D))


def forward(image, text, scale):
    image, text = image.contiguous(), text.contiguous()
    N, D = image.shape
    lse = torch.empty(2, N, device=image.device, dtype=torch.float32)
    parts = torch.empty(2, triton.cdiv(N, 64), device=image.device, dtype=torch.float32)
    for side, (mine, other) in enumerate(((image, text), (text, image))):
        _clip_side[(triton.cdiv(N, 64),)](
            mine, other, scale, lse[side], parts[side], N, D,
            BLOCK_I=64, BLOCK_J=64, BLOCK_D=_wide(D), num_warps=4, num_stages=2,
        )  # fmt: skip
    return parts.sum(), (image, text, scale, lse)


# --- backward ---
@triton.jit
def _clip_grad(
    DLoss, Mine, Other, Scale, MineLse, OtherLse, DMine, DScale, N, D,
    SCALAR: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK_I + tl.arange(0, BLOCK_I)
    d = tl.arange(0, BLOCK_D)
    at = i[:, None] * D + d[None, :]
    own = (i[:, None] < N) & (d[None, :] < D)
    x = tl.load(Mine + at, mask=own, other=0.0)
    scale = tl.load(Scale)
    lse_i = tl.load(MineLse + i, mask=i < N, other=float("inf"))
    acc = tl.zeros((BLOCK_I, BLOCK_D), tl.float32)
    likeness = tl.zeros((BLOCK_I,), tl.float32)
    for start in range(0, N, BLOCK_J):
        j = (start + tl.arange(0, BLOCK_J)).to(tl.int64)
        y = tl.load(Other + j[:, None] * D + d[None, :], mask=(j[:, None] < N) & (d[None, :] < D), other=0.0)
        lse_j = tl.load(OtherLse + j, mask=j < N, other=float("inf"))
        near = tl.dot(x, tl.trans(y))
        s = scale * near
        first = tl.where(j[None, :] < N, tl.exp(s - lse_i[:, None]), 0.0)
        both = first + tl.exp(s - lse_j[None, :])
        if SCALAR:
            likeness += tl.sum(tl.where(i[:, None] == j[None, :], both - 2.0, both) * near, 1)
        acc = tl.dot(both.to(y.dtype), y, acc)
    pair = tl.load(Other + at, mask=own, other=0.0).to(tl.float32)
    share = tl.load(DLoss) / (2 * N)
    if SCALAR:
        tl.store(DScale + tl.program_id(0), share * tl.sum(likeness, 0))
    tl.store(DMine + at, scale * share * (acc - 2.0 * pair), mask=own)


def backward(saved, grad_loss, needs=(True, True, True)):
    image, text, scale, lse = saved
    N, D = image.shape
    BLOCK_D = _wide(D)
    own = 128 if BLOCK_D <= 128 and image.element_size() == 2 else 64
    owners = triton.cdiv(N, own)
    parts = torch.empty(owners, device=image.device, dtype=torch.float32)
    grads = []
    for side, (mine, other) in enumerate(((image, text), (text, image))):
        # The scalar's gradient comes with either side; the image's has it.
        wanted = needs[side] or (side == 0 and needs[2])
        grad = torch.empty_like(mine) if wanted else None
        if wanted:
            _clip_grad[(owners,)](
                grad_loss, mine, other, scale, lse[side], lse[1 - side], grad, parts, N, D, SCALAR=side == 0,
                BLOCK_I=own, BLOCK_J=128 // image.element_size(), BLOCK_D=BLOCK_D, num_warps=8, num_stages=2,
            )  # fmt: skip
        grads.append(grad)
    return *grads, parts.sum().to(scale.dtype) if needs[2] else None


# --- check ---
SWEEP = (
    {"N": 64, "D": 32},
    {"N": 75, "D": 41},
    {"N": 130, "D": 16, "dtype": "bfloat16"},
    {"N": 50, "D": 24, "dtype": "float16"},
)
BENCH = ({"N": 16384, "D": 128, "dtype": "bfloat16"},)


def make_args(N, D, dtype="float32", device="cpu", seed=0):
    if N < 2:
        raise ValueError("a batch of one has nothing to contrast")
    g = torch.Generator().manual_seed(seed)
    image = torch.nn.functional.normalize(torch.randn(N, D, generator=g), dim=-1)
    text = torch.nn.functional.normalize(torch.randn(N, D, generator=g) + 0.5 * image, dim=-1)
    pair = (t.to(device=device, dtype=getattr(torch, dtype)) for t in (image, text))
    return *pair, torch.tensor(7.0, device=device)


def reference(image, text, scale):
    s = scale * (image @ text.T).float()
    label = torch.arange(len(s), device=s.device)
    return 0.5 * (torch.nn.functional.cross_entropy(s, label) + torch.nn.functional.cross_entropy(s.T, label))
