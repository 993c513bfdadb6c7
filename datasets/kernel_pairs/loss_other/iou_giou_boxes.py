"""Generalised IoU loss of box pairs: minima and maxima say, side by side, which box's edge receives the gradient.

For boxes (x1, y1, x2, y2), I the intersection, U the union, C the smallest enclosing box:    L = 2 - I / U - U / C.
With U = A + A' - I:    dL/dU = I / U^2 - 1 / C,    dL/dI = -1 / U - dL/dU,    dL/dC = U / C^2,    dL/dA = dL/dU.
An edge of the prediction moves I if it is the inner one (and the boxes overlap), C if it is the outer one, and always
its own area. The same four comparisons, negated, serve the target: where edges agree, both belong to the target.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "iou_giou_boxes",
    "family": "loss_other",
    "op": "giou_loss",
    "schema": 1,
    "techniques": ("elementwise", "argmax-routing", "recompute", "one-launch"),
    "saves": (),
    "grads": ("pred", "target"),
    "dtypes": ("float32",),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _corners(Boxes, n, live):
    """Edges of BLOCK boxes, loaded as whole rows of four and taken apart. Lanes past the end get the unit box."""
    corner = tl.arange(0, 2)
    at = 4 * n[:, None, None] + 2 * corner[None, :, None] + corner[None, None, :]
    rows = tl.load(Boxes + at, mask=live[:, None, None], other=0.0).to(tl.float32)
    x, y = tl.split(rows)
    x1, x2 = tl.split(x)
    y1, y2 = tl.split(y)
    return x1, y1, tl.where(live, x2, 1.0), tl.where(live, y2, 1.0)


@triton.jit
def _store_corners(Boxes, n, live, x1, y1, x2, y2):
    corner = tl.arange(0, 2)
    at = 4 * n[:, None, None] + 2 * corner[None, :, None] + corner[None, None, :]
    tl.store(Boxes + at, tl.join(tl.join(x1, x2), tl.join(y1, y2)), mask=live[:, None, None])


@triton.jit
def _overlap(low, high, target_low, target_high):
    """Length of the common part and of the hull of two intervals; of equal edges the target's counts."""
    inner = tl.where(high < target_high, high, target_high) - tl.where(low > target_low, low, target_low)
    outer = tl.where(high > target_high, high, target_high) - tl.where(low < target_low, low, target_low)
    return tl.where(inner > 0.0, inner, 0.0), outer


@triton.jit
def _giou_fwd(Pred, Target, Loss, N, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = n < N
    x1, y1, x2, y2 = _corners(Pred, n, live)
    u1, v1, u2, v2 = _corners(Target, n, live)
    w, cw = _overlap(x1, x2, u1, u2)
    h, ch = _overlap(y1, y2, v1, v2)
    common = w * h
    union = (x2 - x1) * (y2 - y1) + (u2 - u1) * (v2 - v1) - common
    tl.store(Loss + n, 2.0 - common / union - union / (cw * ch), mask=live)


def forward(pred, target):
    pred, target = pred.contiguous(), target.contiguous()
    N = pred.shape[0]
    loss = torch.empty(N, device=pred.device, dtype=torch.float32)
    _giou_fwd[(triton.cdiv(N, 256),)](pred, target, loss, N, BLOCK=256, num_warps=4)
    return loss, (pred, target)


# --- backward ---
@triton.jit
def _edge_gradients(low, high, target_low, target_high, d_inner, d_outer, d_own, d_target):
    """Gradients of both intervals' edges from those of the common part, the hull, and either own length."""
    overlaps = tl.where(high < target_high, high, target_high) > tl.where(low > target_low, low, target_low)
    d_inner = tl.where(overlaps, d_inner, 0.0)
    low_inner, high_inner = low > target_low, high < target_high
    low_outer, high_outer = low < target_low, high > target_high
    d_low = -tl.where(low_inner, d_inner, 0.0) - tl.where(low_outer, d_outer, 0.0) - d_own
    d_high = tl.where(high_inner, d_inner, 0.0) + tl.where(high_outer, d_outer, 0.0) + d_own
    t_low = -tl.where(low_inner, 0.0, d_inner) - tl.where(low_outer, 0.0, d_outer) - d_target
    t_high = tl.where(high_inner, 0.0, d_inner) + tl.where(high_outer, 0.0, d_outer) + d_target
    return d_low, d_high, t_low, t_high


@triton.jit
def _giou_bwd(
    DLoss, Pred, Target, DPred, DTarget, N, stride_g, NEED_P: tl.constexpr, NEED_T: tl.constexpr, BLOCK: tl.constexpr
):
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = n < N
    g = tl.load(DLoss + n * stride_g, mask=live, other=0.0)
    x1, y1, x2, y2 = _corners(Pred, n, live)
    u1, v1, u2, v2 = _corners(Target, n, live)
    w, cw = _overlap(x1, x2, u1, u2)
    h, ch = _overlap(y1, y2, v1, v2)
    common = w * h
    union = (x2 - x1) * (y2 - y1) + (u2 - u1) * (v2 - v1) - common
    hull = cw * ch
    d_union = g * (common / (union * union) - 1.0 / hull)
    d_common = -g / union - d_union
    d_hull = g * union / (hull * hull)
    # A side's length enters each area times the other side.
    px1, px2, tx1, tx2 = _edge_gradients(
        x1, x2, u1, u2, d_common * h, d_hull * ch, d_union * (y2 - y1), d_union * (v2 - v1)
    )
    py1, py2, ty1, ty2 = _edge_gradients(
        y1, y2, v1, v2, d_common * w, d_hull * cw, d_union * (x2 - x1), d_union * (u2 - u1)
    )
    if NEED_P:
        _store_corners(DPred, n, live, px1, py1, px2, py2)
    if NEED_T:
        _store_corners(DTarget, n, live, tx1, ty1, tx2, ty2)


def backward(saved, grad_loss, needs=(True, True)):
    pred, target = saved
    N = pred.shape[0]
    dp = torch.empty_like(pred) if needs[0] else None
    dt = torch.empty_like(target) if needs[1] else None
    _giou_bwd[(triton.cdiv(N, 256),)](
        grad_loss, pred, target, dp, dt, N, grad_loss.stride(0),
        NEED_P=needs[0], NEED_T=needs[1], BLOCK=256, num_warps=4,
    )  # fmt: skip
    return dp, dt


# --- check ---
SWEEP = ({"N": 256}, {"N": 301}, {"N": 37})
BENCH = ({"N": 4194304, "dtype": "float32"},)


def make_args(N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    centre, size = torch.rand(2, N, 2, generator=g) * 2.0, 0.3 + torch.rand(2, N, 2, generator=g)
    # Disjoint, crossing and nested pairs; in every seventh the lower edges agree.
    centre[1, ::3] = centre[0, ::3]
    boxes = torch.cat((centre - size / 2, centre + size / 2), -1)
    boxes[1, ::7, :2] = boxes[0, ::7, :2]
    boxes[1, ::7, 2:] = boxes[1, ::7, :2] + size[1, ::7]
    return tuple(b.contiguous().to(device=device, dtype=getattr(torch, dtype)) for b in boxes)


def reference(pred, target):
    (p1, p2), (t1, t2) = pred.split(2, -1), target.split(2, -1)
    # Of equal edges the target's counts: torch.maximum would deal the gradient out in halves.
    inner = torch.where(p2 < t2, p2, t2) - torch.where(p1 > t1, p1, t1)
    outer = torch.where(p2 > t2, p2, t2) - torch.where(p1 < t1, p1, t1)
    common = inner.clamp(min=0).prod(-1)
    area = (p2 - p1).prod(-1) + (t2 - t1).prod(-1)
    hull = outer.prod(-1)
    union = area - common
    return 2.0 - common / union - union / hull
