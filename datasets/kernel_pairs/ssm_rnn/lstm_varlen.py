"""LSTM over packed sequences: a program takes 16 of similar length, runs to the longest, and each stops at its own end.

i, f, o = sigmoid, g = tanh of x + U h;    c' = f c + i g,  h' = o tanh(c')
Tokens of all sequences lie one after another with offsets. Sequences are dealt out in order of length, so that a tile
wastes little; a row that has ended neither loads nor stores, and its state is out of use. Backwards the rows wake up
one by one: before its last step a row has no cotangent, and everything it contributes is zero. Only h and c are saved,
gates are made again from the state before. dU grows in registers through all steps of a tile, and the tiles' sums,
which finish at very different times, meet in one buffer by atomic adds.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "lstm_varlen",
    "family": "ssm_rnn",
    "op": "lstm_varlen",
    "schema": 1,
    "techniques": ("reverse-scan", "varlen", "recompute", "saved-output", "masking", "atomics", "strided-cotangent"),
    "saves": ("order: int32 (S,)", "cells: fp32 (tokens, H)", "y: fp32 or bf16 or fp16 (tokens, H)"),
    "grads": ("x", "weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _squash(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _sequences(Offsets, Order, S, BLOCK_S: tl.constexpr):
    """First token and length of the program's sequences; places without a sequence have length 0."""
    rank = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    number = tl.load(Order + rank, mask=rank < S, other=0)
    begin = tl.load(Offsets + number, mask=rank < S, other=0)
    end = tl.load(Offsets + number + 1, mask=rank < S, other=0)
    return begin.to(tl.int64), end - begin


@triton.jit
def _token_gates(X, token, live, unit, h, wi, wf, wg, wo, H):
    """Activated gates of one token for each sequence; the matrices (from, to) are transposed already."""
    at = token[:, None] * 4 * H + unit[None, :]
    ok = live[:, None] & (unit[None, :] < H)
    i = tl.sigmoid(tl.dot(h, wi) + tl.load(X + at, mask=ok, other=0.0).to(tl.float32))
    f = tl.sigmoid(tl.dot(h, wf) + tl.load(X + at + H, mask=ok, other=0.0).to(tl.float32))
    g = _squash(tl.dot(h, wg) + tl.load(X + at + 2 * H, mask=ok, other=0.0).to(tl.float32))
    o = tl.sigmoid(tl.dot(h, wo) + tl.load(X + at + 3 * H, mask=ok, other=0.0).to(tl.float32))
    return i, f, g, o, at, ok


@triton.jit
def _lstm_varlen_fwd(X, U, Offsets, Order, Y, Cells, S, H, BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr):
    begin, length = _sequences(Offsets, Order, S, BLOCK_S)
    unit = tl.arange(0, BLOCK_H)
    source = tl.arange(0, BLOCK_H)
    square = (source[:, None] < H) & (unit[None, :] < H)
    turned = U + unit[None, :] * H + source[:, None]
    wi = tl.load(turned, mask=square, other=0.0)
    wf = tl.load(turned + H * H, mask=square, other=0.0)
    wg = tl.load(turned + 2 * H * H, mask=square, other=0.0)
    wo = tl.load(turned + 3 * H * H, mask=square, other=0.0)
    h = tl.zeros((BLOCK_S, BLOCK_H), U.dtype.element_ty)
    c = tl.zeros((BLOCK_S, BLOCK_H), tl.float32)
    for t in range(tl.max(length, 0)):
        token = begin + t
        i, f, g, o, _, ok = _token_gates(X, token, t < length, unit, h, wi, wf, wg, wo, H)
        c = f * c + i * g
        h = (o * _squash(c)).to(h.dtype)
        tl.store(Cells + token[:, None] * H + unit[None, :], c, mask=ok)
        tl.store(Y + token[:, None] * H + unit[None, :], h, mask=ok)


def _tile(H):
    if H > 64:
        raise ValueError("four matrices and their gradients must fit on a multiprocessor: at most 64 units")
    BLOCK_H = max(16, triton.next_power_of_2(H))
    return {"BLOCK_S": 16, "BLOCK_H": BLOCK_H, "num_warps": 8 if BLOCK_H == 64 else 4}


def forward(x, weight, offsets):
    # x (tokens, 4 H): input projections and biases of i, f, g, o; weight (4 H, H); offsets (S + 1). States start at 0.
    x, weight = x.contiguous(), weight.contiguous()
    H, S = weight.shape[1], offsets.numel() - 1
    order = offsets.diff().argsort(descending=True).to(torch.int32)
    y = torch.empty(x.shape[0], H, device=x.device, dtype=x.dtype)
    cells = torch.empty(x.shape[0], H, device=x.device, dtype=torch.float32)
    _lstm_varlen_fwd[(triton.cdiv(S, 16),)](x, weight, offsets, order, y, cells, S, H, **_tile(H))
    return y, (x, weight, offsets, order, cells, y)


# --- backward ---
@triton.jit
def _lstm_varlen_bwd(
    DY, X, U, Offsets, Order, Cells, Y, DX, DU, S, H, dy_t, dy_h, BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr
):  # fmt: skip
    begin, length = _sequences(Offsets, Order, S, BLOCK_S)
    unit = tl.arange(0, BLOCK_H)
    source = tl.arange(0, BLOCK_H)
    square = (source[:, None] < H) & (unit[None, :] < H)
    straight = source[:, None] * H + unit[None, :]
    ui = tl.load(U + straight, mask=square, other=0.0)
    uf = tl.load(U + straight + H * H, mask=square, other=0.0)
    ug = tl.load(U + straight + 2 * H * H, mask=square, other=0.0)
    uo = tl.load(U + straight + 3 * H * H, mask=square, other=0.0)
    dui = tl.zeros((BLOCK_H, BLOCK_H), tl.float32)
    duf = tl.zeros((BLOCK_H, BLOCK_H), tl.float32)
    dug = tl.zeros((BLOCK_H, BLOCK_H), tl.float32)
    duo = tl.zeros((BLOCK_H, BLOCK_H), tl.float32)
    dh = tl.zeros((BLOCK_S, BLOCK_H), tl.float32)
    dc = tl.zeros((BLOCK_S, BLOCK_H), tl.float32)
    longest = tl.max(length, 0)
    for back in range(longest):
        t = longest - 1 - back
        live = t < length
        token = begin + t
        here = token[:, None] * H + unit[None, :]
        follows = (live & (t > 0))[:, None] & (unit[None, :] < H)
        h = tl.load(Y + here - H, mask=follows, other=0.0)
        c = tl.load(Cells + here - H, mask=follows, other=0.0)
        i, f, g, o, at, ok = _token_gates(
            X, token, live, unit, h, tl.trans(ui), tl.trans(uf), tl.trans(ug), tl.trans(uo), H
        )
        # A row that has not begun to go back has no dy here, and dh = dc = 0 from the loop.
        dy = tl.load(DY + token[:, None] * dy_t + unit[None, :].to(tl.int64) * dy_h, mask=ok, other=0.0)
        dh += dy.to(tl.float32)
        squashed = _squash(f * c + i * g)
        dc += dh * o * (1.0 - squashed * squashed)
        di = (dc * g * i * (1.0 - i)).to(h.dtype)
        df = (dc * c * f * (1.0 - f)).to(h.dtype)
        dg = (dc * i * (1.0 - g * g)).to(h.dtype)
        do = (dh * squashed * o * (1.0 - o)).to(h.dtype)
        tl.store(DX + at, di, mask=ok)
        tl.store(DX + at + H, df, mask=ok)
        tl.store(DX + at + 2 * H, dg, mask=ok)
        tl.store(DX + at + 3 * H, do, mask=ok)
        dui = tl.dot(tl.trans(di), h, dui)
        duf = tl.dot(tl.trans(df), h, duf)
        dug = tl.dot(tl.trans(dg), h, dug)
        duo = tl.dot(tl.trans(do), h, duo)
        dh = tl.dot(di, ui) + tl.dot(df, uf) + tl.dot(dg, ug) + tl.dot(do, uo)
        dc *= f
    tl.atomic_add(DU + straight, dui, mask=square, sem="relaxed")
    tl.atomic_add(DU + straight + H * H, duf, mask=square, sem="relaxed")
    tl.atomic_add(DU + straight + 2 * H * H, dug, mask=square, sem="relaxed")
    tl.atomic_add(DU + straight + 3 * H * H, duo, mask=square, sem="relaxed")


def backward(saved, grad_y, needs=None):
    x, weight, offsets, order, cells, y = saved
    H, S = weight.shape[1], order.numel()
    dx = torch.empty_like(x)
    du = torch.zeros(weight.shape, device=x.device, dtype=torch.float32)
    _lstm_varlen_bwd[(triton.cdiv(S, 16),)](
        grad_y, x, weight, offsets, order, cells, y, dx, du, S, H, *grad_y.stride(), **_tile(H)
    )
    return dx, du.to(weight.dtype)


# --- check ---
SWEEP = (
    {"S": 16, "longest": 5, "H": 16},
    {"S": 19, "longest": 6, "H": 21},
    {"S": 5, "longest": 4, "H": 24, "dtype": "bfloat16"},
    {"S": 7, "longest": 3, "H": 16, "dtype": "float16"},
)
BENCH = ({"S": 4224, "longest": 256, "H": 64, "dtype": "bfloat16"},)


def make_args(S, longest, H, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    length = torch.randint(1, longest + 1, (S,), generator=g)
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), length.cumsum(0))).to(torch.int32)
    x, weight = torch.randn(int(offsets[-1]), 4 * H, generator=g), torch.randn(4 * H, H, generator=g) * H**-0.5
    x, weight = (t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, weight))
    return x, weight, offsets.to(device)


def reference(x, weight, offsets):
    # PyTorch's own packed LSTM: tokens step by step, longest sequences first; its input projection is the identity.
    length = offsets.diff().long()
    order = length.argsort(descending=True)
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=x.device))
    step = torch.arange(x.shape[0], device=x.device) - torch.repeat_interleave(offsets[:-1].long(), length)
    packed = (step * order.numel() + torch.repeat_interleave(rank, length)).argsort()
    eye = torch.eye(x.shape[1], device=x.device, dtype=x.dtype)
    start = torch.zeros(1, order.numel(), weight.shape[1], device=x.device, dtype=x.dtype)
    sizes = torch.bincount(step).cpu()
    y = torch._VF.lstm(x[packed], sizes, (start, start), (eye, weight), False, 1, 0.0, False, False)[0]
    return torch.zeros_like(y).index_copy(0, packed, y)
