"""Vanilla RNN with the recurrent matrix on chip: time runs inside the kernel, and dW grows in registers on the way.

h_t = tanh(x_t + W h_(t-1)),    dx_t = d_t = (dh_t + dy_t) (1 - h_t^2),    dh_(t-1) = W^T d_t,    dW = sum d_t h_(t-1)^T
Sequences are independent: a program owns 16 of them for all steps. It loads W once, forwards transposed, backwards as
it is, and a step reads and writes nothing but its own rows. The states that come back from memory are those that the
forward went on with, rounded as they are stored. dW is one product of 16 rows per step into an accumulator that leaves
once, as the program's partial.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "rnn_tanh_weights_in_reg",
    "family": "ssm_rnn",
    "op": "rnn_tanh",
    "schema": 1,
    "techniques": ("reverse-scan", "saved-output", "one-launch", "two-stage-partials", "strided-cotangent"),
    "saves": ("y: fp32 or bf16 or fp16 (B, T, H)",),
    "grads": ("x", "weight", "h0"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _rnn_fwd(X, W, H0, Y, B, T, H, BLOCK_B: tl.constexpr, BLOCK_H: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    i = tl.arange(0, BLOCK_H)
    j = tl.arange(0, BLOCK_H)
    inside = (row[:, None] < B) & (j[None, :] < H)
    wt = tl.load(W + j[None, :] * H + i[:, None], mask=(i[:, None] < H) & (j[None, :] < H), other=0.0)
    h = tl.load(H0 + row[:, None] * H + j[None, :], mask=inside, other=0.0)
    at = row[:, None] * T * H + j[None, :]
    for _ in range(T):
        x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
        # tanh by one exponential.
        h = (2.0 * tl.sigmoid(2.0 * tl.dot(h, wt, x)) - 1.0).to(wt.dtype)
        tl.store(Y + at, h, mask=inside)
        at += H


def _tile(H):
    if H > 128:
        raise ValueError("the recurrent matrix must fit on a multiprocessor: at most 128 units")
    BLOCK_H = max(16, triton.next_power_of_2(H))
    return {"BLOCK_B": 16, "BLOCK_H": BLOCK_H, "num_warps": 8 if BLOCK_H == 128 else 4}


def forward(x, weight, h0):
    # x (B, T, H) holds input projection and bias already; weight (H, H) takes states from the right; h0 (B, H).
    x, weight, h0 = x.contiguous(), weight.contiguous(), h0.contiguous()
    B, T, H = x.shape
    y = torch.empty_like(x)
    tile = _tile(H)
    _rnn_fwd[(triton.cdiv(B, 16),)](x, weight, h0, y, B, T, H, **tile)
    return y, (weight, h0, y)


# --- backward ---
@triton.jit
def _rnn_bwd(
    DY, W, H0, Y, DX, DH0, Parts, B, T, H, dy_b, dy_t, dy_h, BLOCK_B: tl.constexpr, BLOCK_H: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    i = tl.arange(0, BLOCK_H)
    j = tl.arange(0, BLOCK_H)
    inside = (row[:, None] < B) & (j[None, :] < H)
    square = (i[:, None] < H) & (j[None, :] < H)
    w = tl.load(W + i[:, None] * H + j[None, :], mask=square, other=0.0)
    at = (row[:, None] * T + T - 1) * H + j[None, :]
    step = tl.cast(dy_t, tl.int64)
    source = DY + row[:, None] * dy_b + (T - 1) * step + j[None, :].to(tl.int64) * dy_h
    h = tl.load(Y + at, mask=inside, other=0.0)
    dh = tl.zeros((BLOCK_B, BLOCK_H), tl.float32)
    dw = tl.zeros((BLOCK_H, BLOCK_H), tl.float32)
    for back in range(T):
        dy = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        before = tl.load(Y + at - H, mask=inside & (back < T - 1), other=0.0)
        if back == T - 1:
            before = tl.load(H0 + row[:, None] * H + j[None, :], mask=inside, other=0.0)
        now = h.to(tl.float32)
        d = ((dh + dy) * (1.0 - now * now)).to(w.dtype)
        tl.store(DX + at, d, mask=inside)
        dw = tl.dot(tl.trans(d), before, dw)
        dh = tl.dot(d, w)
        h = before
        at -= H
        source -= step
    tl.store(DH0 + row[:, None] * H + j[None, :], dh, mask=inside)
    part = tl.program_id(0).to(tl.int64) * H * H
    tl.store(Parts + part + i[:, None] * H + j[None, :], dw, mask=square)


def backward(saved, grad_y, needs=None):
    weight, h0, y = saved
    B, T, H = y.shape
    dx, dh0 = torch.empty_like(y), torch.empty_like(h0)
    programs = triton.cdiv(B, 16)
    parts = torch.empty(programs, H, H, device=y.device, dtype=torch.float32)
    _rnn_bwd[(programs,)](grad_y, weight, h0, y, dx, dh0, parts, B, T, H, *grad_y.stride(), **_tile(H))
    return dx, parts.sum(0).to(weight.dtype), dh0


# --- check ---
SWEEP = (
    {"B": 16, "T": 6, "H": 16},
    {"B": 19, "T": 5, "H": 37},
    {"B": 5, "T": 4, "H": 24, "dtype": "bfloat16"},
    {"B": 7, "T": 3, "H": 16, "dtype": "float16"},
)
BENCH = ({"B": 2112, "T": 256, "H": 128, "dtype": "bfloat16"},)


def make_args(B, T, H, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(B, T, H, generator=g), torch.randn(H, H, generator=g) * H**-0.5
    h0 = torch.tanh(torch.randn(B, H, generator=g))
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, weight, h0))


def reference(x, weight, h0):
    # PyTorch's own RNN; its input projection is the identity.
    units = weight.shape[0]
    eye = torch.eye(units, device=x.device, dtype=x.dtype)
    return torch._VF.rnn_tanh(x, h0[None], (eye, weight), False, 1, 0.0, False, False, True)[0]
