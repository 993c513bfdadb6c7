"""Pinball loss of several quantile forecasts of one target: dpred is local, dtarget sums over the quantiles of a row.

With e = target - pred[q]:    L = mean over q of e (tau[q] - [e < 0]),    dpred[q] = -s[q],    dtarget = sum of s[q],
s[q] = g / Q (tau[q] - [e < 0]). A tile holds whole rows of quantiles, so the sum over q never leaves the program. At
e = 0 the side of e > 0 is taken.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "quantile_pinball",
    "family": "loss_other",
    "op": "pinball_loss",
    "schema": 1,
    "techniques": ("broadcast-reduction", "multi-row-tile", "row-local", "one-launch"),
    "saves": (),
    "grads": ("pred", "target"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _pinball_fwd(Pred, Target, Taus, Loss, rows, Q: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_Q: tl.constexpr):
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    q = tl.arange(0, BLOCK_Q)
    live = (r[:, None] < rows) & (q[None, :] < Q)
    tau = tl.load(Taus + q, mask=q < Q, other=0.0)[None, :]
    target = tl.load(Target + r, mask=r < rows, other=0.0).to(tl.float32)
    pred = tl.load(Pred + r[:, None] * Q + q[None, :], mask=live, other=0.0).to(tl.float32)
    e = target[:, None] - pred
    loss = tl.where(q[None, :] < Q, e * tl.where(e < 0.0, tau - 1.0, tau), 0.0)
    tl.store(Loss + r, tl.sum(loss, 1) / Q, mask=r < rows)


def _tile(Q):
    BLOCK_Q = triton.next_power_of_2(Q)
    return max(1, 2048 // BLOCK_Q), BLOCK_Q


def forward(pred, target, taus):
    pred, target, taus = pred.contiguous(), target.contiguous(), taus.contiguous()
    Q, rows = pred.shape[-1], target.numel()
    loss = torch.empty(target.shape, device=pred.device, dtype=torch.float32)
    BLOCK_R, BLOCK_Q = _tile(Q)
    _pinball_fwd[(triton.cdiv(rows, BLOCK_R),)](
        pred, target, taus, loss, rows, Q=Q, BLOCK_R=BLOCK_R, BLOCK_Q=BLOCK_Q, num_warps=4
    )
    return loss, (pred, target, taus)


# --- backward ---
@triton.jit
def _pinball_bwd(
    DLoss, Pred, Target, Taus, DPred, DTarget, rows, steps, g_series, g_step,
    NEED_P: tl.constexpr, NEED_T: tl.constexpr, Q: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    q = tl.arange(0, BLOCK_Q)
    live = (r[:, None] < rows) & (q[None, :] < Q)
    tau = tl.load(Taus + q, mask=q < Q, other=0.0)[None, :]
    g = tl.load(DLoss + r // steps * g_series + r % steps * g_step, mask=r < rows, other=0.0) / Q
    target = tl.load(Target + r, mask=r < rows, other=0.0).to(tl.float32)
    pred = tl.load(Pred + r[:, None] * Q + q[None, :], mask=live, other=0.0).to(tl.float32)
    slope = g[:, None] * tl.where(target[:, None] < pred, tau - 1.0, tau)
    if NEED_P:
        tl.store(DPred + r[:, None] * Q + q[None, :], -slope, mask=live)
    if NEED_T:
        tl.store(DTarget + r, tl.sum(tl.where(q[None, :] < Q, slope, 0.0), 1), mask=r < rows)


def backward(saved, grad_loss, needs=(True, True)):
    pred, target, taus = saved
    Q, rows = pred.shape[-1], target.numel()
    dp = torch.empty_like(pred) if needs[0] else None
    dt = torch.empty_like(target) if needs[1] else None
    BLOCK_R, BLOCK_Q = _tile(Q)
    _pinball_bwd[(triton.cdiv(rows, BLOCK_R),)](
        grad_loss, pred, target, taus, dp, dt, rows, target.shape[1], grad_loss.stride(0), grad_loss.stride(1),
        NEED_P=needs[0], NEED_T=needs[1], Q=Q, BLOCK_R=BLOCK_R, BLOCK_Q=BLOCK_Q, num_warps=4,
    )  # fmt: skip
    return dp, dt


# --- check ---
SWEEP = (
    {"SERIES": 16, "STEPS": 24, "Q": 8},
    {"SERIES": 7, "STEPS": 37, "Q": 9},
    {"SERIES": 5, "STEPS": 50, "Q": 3, "dtype": "bfloat16"},
    {"SERIES": 11, "STEPS": 13, "Q": 19, "dtype": "float16"},
)
BENCH = ({"SERIES": 65536, "STEPS": 96, "Q": 9, "dtype": "float32"},)


def make_args(SERIES, STEPS, Q, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    pred = torch.randn(SERIES, STEPS, Q, generator=g).to(device=device, dtype=getattr(torch, dtype))
    target = torch.randn(SERIES, STEPS, generator=g).to(device=device, dtype=getattr(torch, dtype))
    # Some forecasts are exact, so that the kink is met.
    pred[..., 0][:, ::4] = target[:, ::4]
    return pred, target, ((torch.arange(Q) + 1.0) / (Q + 1.0)).to(device)


def reference(pred, target, taus):
    e = target.float()[..., None] - pred.float()
    return (e * torch.where(e < 0, taus - 1.0, taus)).mean(-1)
