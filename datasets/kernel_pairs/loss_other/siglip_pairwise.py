"""Pairwise sigmoid loss of images and texts with learned temperature and bias: two owners, and scalars on the way.

s = t X Y^T + b,  z = +1 on the diagonal and -1 elsewhere:    L = 1/N sum of log(1 + exp(-z s)),
    G = -z sigmoid(-z s) / N,    dX = t G Y,    dY = t G^T X,    dt = sum G (X Y^T),    db = sum G.
No row statistic couples the pairs, so nothing is saved. The owner of image rows forms each tile of G once and takes
both scalar sums from it before it multiplies; the owner of text rows forms it again, transposed, for dY alone.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "siglip_pairwise",
    "family": "loss_other",
    "op": "sigmoid_contrastive",
    "schema": 1,
    "techniques": ("loop-swap", "owner-grid", "scalar-gradient", "two-stage-partials", "recompute"),
    "saves": (),
    "grads": ("image", "text", "scale", "bias"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _siglip_fwd(X, Y, Scale, Bias, Parts, N, D, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK_I + tl.arange(0, BLOCK_I)
    d = tl.arange(0, BLOCK_D)
    x = tl.load(X + i[:, None] * D + d[None, :], mask=(i[:, None] < N) & (d[None, :] < D), other=0.0)
    scale = tl.load(Scale)
    bias = tl.load(Bias)
    total = tl.zeros((BLOCK_I,), tl.float32)
    for start in range(0, N, BLOCK_J):
        j = (start + tl.arange(0, BLOCK_J)).to(tl.int64)
        y = tl.load(Y + j[:, None] * D + d[None, :], mask=(j[:, None] < N) & (d[None, :] < D), other=0.0)
        s = scale * tl.dot(x, tl.trans(y)) + bias
        s = tl.where(i[:, None] == j[None, :], -s, s)
        # log(1 + exp(s)) without overflow.
        term = tl.where(s > 0.0, s, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(s)))
        total += tl.sum(tl.where((i[:, None] < N) & (j[None, :] < N), term, 0.0), 1)
    tl.store(Parts + tl.program_id(0), tl.sum(total, 0) / N)


def _wide(D):
    if D > 256:
        raise ValueError("the embedding must fit one tile: at most 256")
    return max(16, triton.next_power_of_2(D))


def forward(image, text, scale, bias):
    image, text = image.contiguous(), text.contiguous()
    N, D = image.shape
    parts = torch.empty(triton.cdiv(N, 64), device=image.device, dtype=torch.float32)
    _siglip_fwd[(parts.numel(),)](
        image, text, scale, bias, parts, N, D,
        BLOCK_I=64, BLOCK_J=64, BLOCK_D=_wide(D), num_warps=4, num_stages=2,
    )  # fmt: skip
    return parts.sum(), (image, text, scale, bias)


# --- backward ---
@triton.jit
def _siglip_slope(s, positive):
    """-z sigmoid(-z s): minus the chance that a pair is judged wrongly, with the sign of the pair."""
    return tl.where(positive, -tl.sigmoid(-s), tl.sigmoid(s))


@triton.jit
def _siglip_dx(
    DLoss, X, Y, Scale, Bias, DX, Parts, N, D, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64) * BLOCK_I + tl.arange(0, BLOCK_I)
    d = tl.arange(0, BLOCK_D)
    at = i[:, None] * D + d[None, :]
    inside = (i[:, None] < N) & (d[None, :] < D)
    x = tl.load(X + at, mask=inside, other=0.0)
    scale = tl.load(Scale)
    bias = tl.load(Bias)
    dx = tl.zeros((BLOCK_I, BLOCK_D), tl.float32)
    dscale = tl.zeros((BLOCK_I,), tl.float32)
    dbias = tl.zeros((BLOCK_I,), tl.float32)
    for start in range(0, N, BLOCK_J):
        j = (start + tl.arange(0, BLOCK_J)).to(tl.int64)
        y = tl.load(Y + j[:, None] * D + d[None, :], mask=(j[:, None] < N) & (d[None, :] < D), other=0.0)
        alike = tl.dot(x, tl.trans(y))
        slope = _siglip_slope(scale * alike + bias, i[:, None] == j[None, :])
        slope = tl.where((i[:, None] < N) & (j[None, :] < N), slope, 0.0)
        dscale += tl.sum(slope * alike, 1)
        dbias += tl.sum(slope, 1)
        dx = tl.dot(slope.to(y.dtype), y, dx)
    g = tl.load(DLoss) / N
    tl.store(DX + at, g * scale * dx, mask=inside)
    tl.store(Parts + 2 * tl.program_id(0), g * tl.sum(dscale, 0))
    tl.store(Parts + 2 * tl.program_id(0) + 1, g * tl.sum(dbias, 0))


@triton.jit
def _siglip_dy(DLoss, X, Y, Scale, Bias, DY, N, D, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr):
    j = tl.program_id(0).to(tl.int64) * BLOCK_J + tl.arange(0, BLOCK_J)
    d = tl.arange(0, BLOCK_D)
    at = j[:, None] * D + d[None, :]
    inside = (j[:, None] < N) & (d[None, :] < D)
    y = tl.load(Y + at, mask=inside, other=0.0)
    scale = tl.load(Scale)
    bias = tl.load(Bias)
    dy = tl.zeros((BLOCK_J, BLOCK_D), tl.float32)
    for start in range(0, N, BLOCK_I):
        i = (start + tl.arange(0, BLOCK_I)).to(tl.int64)
        # Image rows past the end are zero: whatever their slope, they add nothing.
        x = tl.load(X + i[:, None] * D + d[None, :], mask=(i[:, None] < N) & (d[None, :] < D), other=0.0)
        slope = _siglip_slope(scale * tl.dot(y, tl.trans(x)) + bias, j[:, None] == i[None, :])
        dy = tl.dot(slope.to(x.dtype), x, dy)
    tl.store(DY + at, tl.load(DLoss) / N * scale * dy, mask=inside)


def backward(saved, grad_loss, needs=(True,) * 4):
    image, text, scale, bias = saved
    N, D = image.shape
    BLOCK_D = _wide(D)
    own = 128 if BLOCK_D <= 128 and image.element_size() == 2 else 64
    other = 128 // image.element_size()
    owners = triton.cdiv(N, own)
    dx = dy = dscale = dbias = None
    if needs[0] or needs[2] or needs[3]:
        dx = torch.empty_like(image)
        parts = torch.empty(owners, 2, device=image.device, dtype=torch.float32)
        _siglip_dx[(owners,)](
            grad_loss, image, text, scale, bias, dx, parts, N, D,
            BLOCK_I=own, BLOCK_J=other, BLOCK_D=BLOCK_D, num_warps=8, num_stages=2,
        )  # fmt: skip
        dscale, dbias = parts.sum(0).unbind()
    if needs[1]:
        dy = torch.empty_like(text)
        _siglip_dy[(owners,)](
            grad_loss, image, text, scale, bias, dy, N, D,
            BLOCK_I=other, BLOCK_J=own, BLOCK_D=BLOCK_D, num_warps=8, num_stages=2,
        )  # fmt: skip
    return dx, dy, dscale, dbias


# --- check ---
SWEEP = (
    {"N": 64, "D": 32},
    {"N": 75, "D": 41},
    {"N": 130, "D": 16, "dtype": "bfloat16"},
    {"N": 50, "D": 24, "dtype": "float16"},
)
BENCH = ({"N": 16384, "D": 128, "dtype": "bfloat16"},)


def make_args(N, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    image, text = (torch.nn.functional.normalize(torch.randn(N, D, generator=g), dim=-1) for _ in range(2))
    pair = (t.to(device=device, dtype=getattr(torch, dtype)) for t in (image, text))
    # The loss's usual start, nearer to zero, so that no pair is saturated.
    return *pair, torch.tensor(5.0, device=device), torch.tensor(-2.0, device=device)


def reference(image, text, scale, bias):
    s = scale * (image @ text.T).float() + bias
    z = 2.0 * torch.eye(len(s), device=s.device) - 1.0
    return torch.nn.functional.softplus(-z * s).sum() / len(s)
