"""Total variation distance of two tables of probabilities: the gradient is a sign times the row's cotangent.

L[row] = 1/2 sum |p - q|. Where p equals q the subgradient 0 is taken, for p and q alike. The backward keeps several
rows in one tile, so that a tile reads few cotangents, and writes dq as the negative of dp without computing it.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "tv_distance",
    "family": "loss_other",
    "op": "tv_distance",
    "schema": 1,
    "techniques": ("elementwise", "multi-row-tile", "shared-gradient", "one-launch"),
    "saves": (),
    "grads": ("p", "q"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _tv_fwd(P, Q, Loss, rows, cols, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    gap = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for start in range(0, cols, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        at = r[:, None] * cols + c[None, :]
        inside = (r[:, None] < rows) & (c[None, :] < cols)
        p = tl.load(P + at, mask=inside, other=0.0).to(tl.float32)
        q = tl.load(Q + at, mask=inside, other=0.0).to(tl.float32)
        gap += tl.abs(p - q)
    tl.store(Loss + r, 0.5 * tl.sum(gap, 1), mask=r < rows)


def _tile(cols):
    BLOCK_C = max(32, min(512, triton.next_power_of_2(cols)))
    return 2048 // BLOCK_C, BLOCK_C


def forward(p, q):
    p, q = p.contiguous(), q.contiguous()
    rows, cols = p.shape
    loss = torch.empty(rows, device=p.device, dtype=torch.float32)
    BLOCK_R, BLOCK_C = _tile(cols)
    _tv_fwd[(triton.cdiv(rows, BLOCK_R),)](p, q, loss, rows, cols, BLOCK_R=BLOCK_R, BLOCK_C=BLOCK_C, num_warps=4)
    return loss, (p, q)


# --- backward ---
@triton.jit
def _tv_bwd(
    DLoss, P, Q, DP, DQ, rows, cols, stride_g,
    NEED_P: tl.constexpr, NEED_Q: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    at = r[:, None] * cols + c[None, :]
    inside = (r[:, None] < rows) & (c[None, :] < cols)
    half = 0.5 * tl.load(DLoss + r * stride_g, mask=r < rows, other=0.0)[:, None]
    p = tl.load(P + at, mask=inside, other=0.0).to(tl.float32)
    q = tl.load(Q + at, mask=inside, other=0.0).to(tl.float32)
    # Two comparisons rather than one: a tie belongs to neither side.
    dp = tl.where(p > q, half, tl.where(p < q, -half, 0.0))
    if NEED_P:
        tl.store(DP + at, dp, mask=inside)
    if NEED_Q:
        tl.store(DQ + at, -dp, mask=inside)


def backward(saved, grad_loss, needs=(True, True)):
    p, q = saved
    rows, cols = p.shape
    dp = torch.empty_like(p) if needs[0] else None
    dq = torch.empty_like(q) if needs[1] else None
    BLOCK_R, BLOCK_C = _tile(cols)
    _tv_bwd[(triton.cdiv(rows, BLOCK_R), triton.cdiv(cols, BLOCK_C))](
        grad_loss, p, q, dp, dq, rows, cols, grad_loss.stride(0),
        NEED_P=needs[0], NEED_Q=needs[1], BLOCK_R=BLOCK_R, BLOCK_C=BLOCK_C, num_warps=4,
    )  # fmt: skip
    return dp, dq


# --- check ---
SWEEP = (
    {"M": 8, "N": 256},
    {"M": 37, "N": 75},
    {"M": 5, "N": 600, "dtype": "bfloat16"},
    {"M": 16, "N": 64, "dtype": "float16"},
)
BENCH = ({"M": 8192, "N": 8192, "dtype": "bfloat16"}, {"M": 262144, "N": 128, "dtype": "float32"})


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    p, q = (torch.softmax(torch.randn(M, N, generator=g), -1) for _ in range(2))
    # Every fifth column agrees, so that ties are met.
    q[:, ::5] = p[:, ::5]
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (p, q))


def reference(p, q):
    return 0.5 * (p.float() - q.float()).abs().sum(-1)
