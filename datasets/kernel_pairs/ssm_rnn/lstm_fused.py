"""LSTM through time in one kernel each way: gates are saved in half precision, dU is a product behind the recurrence.

i, f, o = sigmoid, g = tanh of x + U h;    c' = f c + i g,  h' = o tanh(c')
dc' += dh' o (1 - tanh(c')^2),  di, df, dg, do from dc' and dh',  dc = f dc',  dh = sum over the gates of U^T dgate.
All gates lie between -1 and 1, where fp16 resolves 2^-11 or better: for inputs in half precision it holds them at half
the size and loses less than the inputs did. Cells, which grow, stay in fp32. With both saved, a step back has four
products and no activation but one tanh. The gates' gradients are dx, so dU = dx^T h is left to a second launch that
has all steps of all sequences as its summed axis, split over programs; it finds the state before a step one row up.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "lstm_fused",
    "family": "ssm_rnn",
    "op": "lstm",
    "schema": 1,
    "techniques": (
        "reverse-scan", "checkpointed-states", "saved-output", "split-k", "two-stage-partials", "optional-cotangent",
        "strided-cotangent",
    ),
    "saves": (
        "gates: fp16 or fp32 (B, T, 4 H)",
        "cells: fp32 (B, T, H)",
        "y: fp32 or bf16 or fp16 (B, T, H)",
    ),
    "grads": ("x", "weight", "h0", "c0"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}  # fmt: skip


# --- forward ---
@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _lstm_fwd(X, U, H0, C0, Y, Gates, Cells, B, T, H, BLOCK_B: tl.constexpr, BLOCK_H: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    k = tl.arange(0, BLOCK_H)
    unit = tl.arange(0, BLOCK_H)
    inside = (row[:, None] < B) & (unit[None, :] < H)
    u_at = U + unit[None, :] * H + k[:, None]
    u_ok = (k[:, None] < H) & (unit[None, :] < H)
    ui = tl.load(u_at, mask=u_ok, other=0.0)
    uf = tl.load(u_at + H * H, mask=u_ok, other=0.0)
    ug = tl.load(u_at + 2 * H * H, mask=u_ok, other=0.0)
    uo = tl.load(u_at + 3 * H * H, mask=u_ok, other=0.0)
    first = row[:, None] * H + unit[None, :]
    h = tl.load(H0 + first, mask=inside, other=0.0)
    c = tl.load(C0 + first, mask=inside, other=0.0).to(tl.float32)
    for t in range(T):
        at = (row[:, None] * T + t) * H + unit[None, :]
        gate_at = at + (row[:, None] * T + t) * 3 * H
        i = tl.sigmoid(tl.dot(h, ui, tl.load(X + gate_at, mask=inside, other=0.0).to(tl.float32)))
        f = tl.sigmoid(tl.dot(h, uf, tl.load(X + gate_at + H, mask=inside, other=0.0).to(tl.float32)))
        g = _tanh(tl.dot(h, ug, tl.load(X + gate_at + 2 * H, mask=inside, other=0.0).to(tl.float32)))
        o = tl.sigmoid(tl.dot(h, uo, tl.load(X + gate_at + 3 * H, mask=inside, other=0.0).to(tl.float32)))
        c = f * c + i * g
        h = (o * _tanh(c)).to(h.dtype)
        tl.store(Gates + gate_at, i, mask=inside)
        tl.store(Gates + gate_at + H, f, mask=inside)
        tl.store(Gates + gate_at + 2 * H, g, mask=inside)
        tl.store(Gates + gate_at + 3 * H, o, mask=inside)
        tl.store(Cells + at, c, mask=inside)
        tl.store(Y + at, h, mask=inside)


def _tile(H, dtype):
    most = 64 if dtype == torch.float32 else 128
    if most < H:
        raise ValueError("the four recurrent matrices must fit on a multiprocessor: at most 128 units, in fp32 64")
    BLOCK_H = max(16, triton.next_power_of_2(H))
    return {"BLOCK_B": 16, "BLOCK_H": BLOCK_H, "num_warps": 8 if BLOCK_H == 128 else 4}


def forward(x, weight, h0, c0):
    # x (B, T, 4 H): input projections and biases of i, f, g, o; weight (4 H, H), h0 and c0 (B, H). Outputs: h, last c.
    x, weight, h0, c0 = x.contiguous(), weight.contiguous(), h0.contiguous(), c0.contiguous()
    B, T, H = *x.shape[:2], h0.shape[1]
    gates = torch.empty_like(x, dtype=torch.float32 if x.dtype == torch.float32 else torch.float16)
    y = torch.empty(B, T, H, device=x.device, dtype=x.dtype)
    cells = torch.empty(B, T, H, device=x.device, dtype=torch.float32)
    _lstm_fwd[(triton.cdiv(B, 16),)](x, weight, h0, c0, y, gates, cells, B, T, H, **_tile(H, x.dtype))
    return (y, cells[:, -1].clone()), (weight, h0, c0, gates, cells, y)


# --- backward ---
@triton.jit
def _lstm_bwd(
    DY, DLast, U, C0, Gates, Cells, DX, DH0, DC0, B, T, H, dy_b, dy_t, dy_h, dl_b, dl_h,
    HAS_DY: tl.constexpr, HAS_LAST: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    k = tl.arange(0, BLOCK_H)
    unit = tl.arange(0, BLOCK_H)
    inside = (row[:, None] < B) & (unit[None, :] < H)
    u_at = U + k[:, None] * H + unit[None, :]
    u_ok = (k[:, None] < H) & (unit[None, :] < H)
    ui = tl.load(u_at, mask=u_ok, other=0.0)
    uf = tl.load(u_at + H * H, mask=u_ok, other=0.0)
    ug = tl.load(u_at + 2 * H * H, mask=u_ok, other=0.0)
    uo = tl.load(u_at + 3 * H * H, mask=u_ok, other=0.0)
    dh = tl.zeros((BLOCK_B, BLOCK_H), tl.float32)
    dc = tl.zeros((BLOCK_B, BLOCK_H), tl.float32)
    wide = unit[None, :].to(tl.int64)
    if HAS_LAST:
        dc += tl.load(DLast + row[:, None] * dl_b + wide * dl_h, mask=inside, other=0.0).to(tl.float32)
    first = row[:, None] * H + unit[None, :]
    c = tl.load(Cells + (row[:, None] * T + T - 1) * H + unit[None, :], mask=inside, other=0.0)
    for back in range(T):
        t = T - 1 - back
        at = (row[:, None] * T + t) * H + unit[None, :]
        gate_at = at + (row[:, None] * T + t) * 3 * H
        i = tl.load(Gates + gate_at, mask=inside, other=0.0).to(tl.float32)
        f = tl.load(Gates + gate_at + H, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(Gates + gate_at + 2 * H, mask=inside, other=0.0).to(tl.float32)
        o = tl.load(Gates + gate_at + 3 * H, mask=inside, other=0.0).to(tl.float32)
        before = tl.load(Cells + at - H, mask=inside & (t > 0), other=0.0)
        if t == 0:
            before = tl.load(C0 + first, mask=inside, other=0.0).to(tl.float32)
        if HAS_DY:
            source = DY + row[:, None] * dy_b + t.to(tl.int64) * dy_t + wide * dy_h
            dh += tl.load(source, mask=inside, other=0.0).to(tl.float32)
        squashed = _tanh(c)
        dc += dh * o * (1.0 - squashed * squashed)
        di = (dc * g * i * (1.0 - i)).to(ui.dtype)
        df = (dc * before * f * (1.0 - f)).to(ui.dtype)
        dg = (dc * i * (1.0 - g * g)).to(ui.dtype)
        do = (dh * squashed * o * (1.0 - o)).to(ui.dtype)
        tl.store(DX + gate_at, di, mask=inside)
        tl.store(DX + gate_at + H, df, mask=inside)
        tl.store(DX + gate_at + 2 * H, dg, mask=inside)
        tl.store(DX + gate_at + 3 * H, do, mask=inside)
        dh = tl.dot(di, ui)
        dh = tl.dot(df, uf, dh)
        dh = tl.dot(dg, ug, dh)
        dh = tl.dot(do, uo, dh)
        dc *= f
        c = before
    tl.store(DH0 + first, dh, mask=inside)
    tl.store(DC0 + first, dc, mask=inside)


@triton.jit
def _lstm_du(
    DX, Y, H0, Parts, T, H, rows, rows_each, BLOCK_G: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr
):
    # A tile of dU over the steps of one split: rows (sequence, step) of dx against the states one step before.
    gate = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    unit = tl.arange(0, BLOCK_H)
    split = tl.program_id(0).to(tl.int64)
    last = tl.minimum((split + 1) * rows_each, rows)
    acc = tl.zeros((BLOCK_G, BLOCK_H), tl.float32)
    for start in range(split * rows_each, last, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        d_at = DX + r[None, :] * 4 * H + gate[:, None]
        d = tl.load(d_at, mask=(r[None, :] < last) & (gate[:, None] < 4 * H), other=0.0)
        later = (r % T > 0) & (r < last)
        h = tl.load(Y + (r[:, None] - 1) * H + unit[None, :], mask=later[:, None] & (unit[None, :] < H), other=0.0)
        opening = (r % T == 0) & (r < last)
        h0_at = H0 + (r // T)[:, None] * H + unit[None, :]
        h += tl.load(h0_at, mask=opening[:, None] & (unit[None, :] < H), other=0.0)
        acc = tl.dot(d, h, acc)
    at = Parts + (split * 4 * H + gate[:, None]) * H + unit[None, :]
    tl.store(at, acc, mask=(gate[:, None] < 4 * H) & (unit[None, :] < H))


def backward(saved, grad_y, grad_c, needs=(True, True, True, True)):
    weight, h0, c0, gates, cells, y = saved
    B, T, H = y.shape
    dx = torch.empty(B, T, 4 * H, device=y.device, dtype=y.dtype)
    dh0, dc0 = torch.empty_like(h0), torch.empty_like(c0)
    has_y, has_c = grad_y is not None, grad_c is not None
    _lstm_bwd[(triton.cdiv(B, 16),)](
        grad_y, grad_c, weight, c0, gates, cells, dx, dh0, dc0, B, T, H,
        *(grad_y.stride() if has_y else (0, 0, 0)), *(grad_c.stride() if has_c else (0, 0)),
        HAS_DY=has_y, HAS_LAST=has_c, **_tile(H, y.dtype),
    )  # fmt: skip
    if not needs[1]:
        return dx, None, dh0, dc0
    BLOCK_H = max(16, triton.next_power_of_2(H))
    BLOCK_G = min(128, 4 * BLOCK_H)
    tiles = triton.cdiv(4 * H, BLOCK_G)
    splits = max(1, min(264 // tiles, triton.cdiv(B * T, 256)))
    rows_each = triton.cdiv(triton.cdiv(B * T, splits), 64) * 64
    splits = triton.cdiv(B * T, rows_each)
    parts = torch.empty(splits, 4 * H, H, device=y.device, dtype=torch.float32)
    _lstm_du[(splits, tiles)](
        dx, y, h0, parts, T, H, B * T, rows_each, BLOCK_G=BLOCK_G, BLOCK_H=BLOCK_H, BLOCK_R=64, num_warps=8,
        num_stages=2,
    )  # fmt: skip
    return dx, parts.sum(0).to(weight.dtype), dh0, dc0


# --- check ---
SWEEP = (
    {"B": 16, "T": 4, "H": 16},
    {"B": 19, "T": 5, "H": 21},
    {"B": 5, "T": 4, "H": 24, "dtype": "bfloat16"},
    {"B": 7, "T": 3, "H": 16, "dtype": "float16"},
)
BENCH = ({"B": 2112, "T": 128, "H": 128, "dtype": "bfloat16"},)


def make_args(B, T, H, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(B, T, 4 * H, generator=g), torch.randn(4 * H, H, generator=g) * H**-0.5
    h0, c0 = torch.tanh(torch.randn(B, H, generator=g)), torch.randn(B, H, generator=g)
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, weight, h0, c0))


def reference(x, weight, h0, c0):
    # PyTorch's own LSTM; its input projection is the identity.
    eye = torch.eye(x.shape[2], device=x.device, dtype=x.dtype)
    y, _, c = torch._VF.lstm(x, (h0[None], c0[None]), (eye, weight), False, 1, 0.0, False, False, True)
    # The last cell is an output in fp32.
    return y, c[0].to(torch.promote_types(torch.float32, c.dtype))
