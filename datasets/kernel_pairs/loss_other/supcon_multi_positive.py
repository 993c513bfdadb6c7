"""Supervised contrastive loss: similarity is symmetric, so one owner sums its row's and its column's share at once.

With s = Z Z^T / tau, P(i) the others of i's label, lse over all j != i:    L[i] = lse[i] - mean over P(i) of s[i, j].
    G[i, j] = g[i] (exp(s[i, j] - lse[i]) - [j in P(i)] / |P(i)|),    dZ = (G + G^T) Z / tau.
A tile of s serves G and G^T alike: only the row statistics change places. So there is a single gradient kernel without
a transpose, and equality of labels is tested per tile. A sample without positives has loss zero and only serves others.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "supcon_multi_positive",
    "family": "loss_other",
    "op": "supervised_contrastive",
    "schema": 1,
    "techniques": ("saved-lse", "saved-statistics", "masking", "recompute", "one-launch"),
    "saves": ("lse: fp32 (N,)", "share: fp32 (N,)"),
    "grads": ("features",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _supcon_fwd(
    Z, Label, Loss, Lse, Share, N, D, inv_tau, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64) * BLOCK_I + tl.arange(0, BLOCK_I)
    d = tl.arange(0, BLOCK_D)
    z_i = tl.load(Z + i[:, None] * D + d[None, :], mask=(i[:, None] < N) & (d[None, :] < D), other=0.0)
    label_i = tl.load(Label + i, mask=i < N, other=-1).to(tl.int32)
    top = tl.full((BLOCK_I,), -1.0e30, tl.float32)
    norm = tl.zeros((BLOCK_I,), tl.float32)
    near = tl.zeros((BLOCK_I,), tl.float32)
    count = tl.zeros((BLOCK_I,), tl.float32)
    for start in range(0, N, BLOCK_J):
        j = (start + tl.arange(0, BLOCK_J)).to(tl.int64)
        z_j = tl.load(Z + j[:, None] * D + d[None, :], mask=(j[:, None] < N) & (d[None, :] < D), other=0.0)
        label_j = tl.load(Label + j, mask=j < N, other=-2).to(tl.int32)
        s = tl.dot(z_i, tl.trans(z_j)) * inv_tau
        other = (i[:, None] != j[None, :]) & (j[None, :] < N)
        positive = other & (label_i[:, None] == label_j[None, :])
        near += tl.sum(tl.where(positive, s, 0.0), 1)
        count += tl.sum(tl.where(positive, 1.0, 0.0), 1)
        s = tl.where(other, s, -float("inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        norm = norm * tl.exp(top - higher) + tl.sum(tl.exp(s - higher[:, None]), 1)
        top = higher
    # The share of one positive, zero where there is none. A lone sample has nobody to be compared with: lse is unused.
    share = tl.where(count > 0.0, 1.0 / tl.maximum(count, 1.0), 0.0)
    lse = top + tl.log(tl.where(norm > 0.0, norm, 1.0))
    tl.store(Lse + i, lse, mask=i < N)
    tl.store(Share + i, share, mask=i < N)
    tl.store(Loss + i, tl.where(count > 0.0, lse - near * share, 0.0), mask=i < N)


def _wide(D):
    if D > 256:
        raise ValueError("the features must fit one tile: at most 256")
    return max(16, triton.next_power_of_2(D))


def forward(features, label, tau=0.1):
    features, label = features.contiguous(), label.contiguous()
    N, D = features.shape
    loss, lse, share = (torch.empty(N, device=features.device, dtype=torch.float32) for _ in range(3))
    _supcon_fwd[(triton.cdiv(N, 64),)](
        features, label, loss, lse, share, N, D, 1.0 / tau,
        BLOCK_I=64, BLOCK_J=64, BLOCK_D=_wide(D), num_warps=8, num_stages=2,
    )  # fmt: skip
    return loss, (features, label, lse, share, tau)


# --- backward ---
@triton.jit
def _supcon_bwd(
    DLoss, Z, Label, Lse, Share, DZ, N, D, inv_tau, stride_g,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK_I + tl.arange(0, BLOCK_I)
    d = tl.arange(0, BLOCK_D)
    at = i[:, None] * D + d[None, :]
    inside = (i[:, None] < N) & (d[None, :] < D)
    z_i = tl.load(Z + at, mask=inside, other=0.0)
    label_i = tl.load(Label + i, mask=i < N, other=-1).to(tl.int32)
    lse_i = tl.load(Lse + i, mask=i < N, other=float("inf"))
    share_i = tl.load(Share + i, mask=i < N, other=0.0)
    g_i = tl.where(share_i > 0.0, tl.load(DLoss + i * stride_g, mask=i < N, other=0.0), 0.0)
    dz = tl.zeros((BLOCK_I, BLOCK_D), tl.float32)
    own = tl.zeros((BLOCK_I, BLOCK_D), tl.float32)
    for start in range(0, N, BLOCK_J):
        j = (start + tl.arange(0, BLOCK_J)).to(tl.int64)
        z_j = tl.load(Z + j[:, None] * D + d[None, :], mask=(j[:, None] < N) & (d[None, :] < D), other=0.0)
        label_j = tl.load(Label + j, mask=j < N, other=-2).to(tl.int32)
        lse_j = tl.load(Lse + j, mask=j < N, other=float("inf"))
        share_j = tl.load(Share + j, mask=j < N, other=0.0)
        g_j = tl.where(share_j > 0.0, tl.load(DLoss + j * stride_g, mask=j < N, other=0.0), 0.0)
        s = tl.dot(z_i, tl.trans(z_j)) * inv_tau
        alike = tl.where(label_i[:, None] == label_j[None, :], 1.0, 0.0)
        there = (i[:, None] != j[None, :]) & (j[None, :] < N)
        mine = tl.where(there, tl.exp(s - lse_i[:, None]) - share_i[:, None] * alike, 0.0)
        theirs = tl.where(there, tl.exp(s - lse_j[None, :]) - share_j[None, :] * alike, 0.0)
        if Z.dtype.element_ty == tl.float16:
            # Probabilities times a mean's 1/N would flush to zero: g_i waits for the sum's end, g_j joins z_j.
            own = tl.dot(mine.to(z_j.dtype), z_j, own)
            dz = tl.dot(theirs.to(z_j.dtype), (z_j * g_j[:, None]).to(z_j.dtype), dz)
        else:
            both = g_i[:, None] * mine + g_j[None, :] * theirs
            dz = tl.dot(both.to(z_j.dtype), z_j, dz)
    tl.store(DZ + at, (dz + g_i[:, None] * own) * inv_tau, mask=inside)


def backward(saved, grad_loss, needs=None):
    features, label, lse, share, tau = saved
    N, D = features.shape
    dz = torch.empty_like(features)
    BLOCK_D = _wide(D)
    half = features.element_size() == 2
    _supcon_bwd[(triton.cdiv(N, 64),)](
        grad_loss, features, label, lse, share, dz, N, D, 1.0 / tau, grad_loss.stride(0),
        BLOCK_I=64, BLOCK_J=64 if half else 32, BLOCK_D=BLOCK_D, num_warps=8, num_stages=2,
    )  # fmt: skip
    return dz


# --- check ---
SWEEP = (
    {"N": 64, "CLASSES": 8, "D": 32},
    {"N": 75, "CLASSES": 40, "D": 41},
    {"N": 96, "CLASSES": 5, "D": 16, "dtype": "bfloat16"},
    {"N": 50, "CLASSES": 10, "D": 24, "dtype": "float16"},
)
BENCH = ({"N": 16384, "CLASSES": 1000, "D": 128, "dtype": "bfloat16"},)


def make_args(N, CLASSES, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    label = torch.randint(0, CLASSES, (N,), generator=g)
    centre = torch.randn(CLASSES, D, generator=g)
    features = torch.nn.functional.normalize(torch.randn(N, D, generator=g) + centre[label], dim=-1)
    return features.to(device=device, dtype=getattr(torch, dtype)), label.to(device), 0.2


def reference(features, label, tau=0.1):
    s = (features @ features.T).float() / tau
    self_pair = torch.eye(len(s), dtype=torch.bool, device=s.device)
    positive = (label[:, None] == label[None, :]) & ~self_pair
    count = positive.sum(-1)
    lse = torch.logsumexp(s.masked_fill(self_pair, float("-inf")), -1)
    loss = lse - torch.where(positive, s, 0.0).sum(-1) / count.clamp(min=1)
    return torch.where(count > 0, loss, 0.0)
