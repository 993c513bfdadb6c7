"""GRU through time in one kernel each way: no gate is saved, three products of the saved state give them back.

r, z = sigmoid(x_r + U_r h), sigmoid(x_z + U_z h),  q = U_n h + b_n,  n = tanh(x_n + r q),  h' = (1 - z) n + z h
dz = dh' (h - n) z (1 - z),  dn = dh' (1 - z) (1 - n^2),  dr = dn q r (1 - r),  dq = r dn,
dh = z dh' + U_r^T dr + U_z^T dz + U_n^T dq,    dU_n = sum dq h^T; dU_r and dU_z with dr and dz.
A gate depends on the input and on the state before, which is an output: the backward makes the gates again, off the
path from step to step, instead of reading three more numbers per unit. Its program owns 16 sequences, all of U and of
dU, whose three tiles grow in registers over time and leave as one partial with db_n.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "gru_fused",
    "family": "ssm_rnn",
    "op": "gru",
    "schema": 1,
    "techniques": ("reverse-scan", "recompute", "saved-output", "two-stage-partials", "strided-cotangent"),
    "saves": ("y: fp32 or bf16 or fp16 (B, T, H)",),
    "grads": ("x", "weight", "bias_n", "h0"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _three(Source, at, gap, inside):
    """Tiles of the reset gate, the update gate and the new state, which lie `gap` apart."""
    r = tl.load(Source + at, mask=inside, other=0.0)
    z = tl.load(Source + at + gap, mask=inside, other=0.0)
    return r, z, tl.load(Source + at + 2 * gap, mask=inside, other=0.0)


@triton.jit
def _gates(X, at, inside, h, ur, uz, un, bias, H):
    """r, z, n and q of a step from its input and the state before; the matrices are transposed."""
    xr, xz, xn = _three(X, at, H, inside)
    r = tl.sigmoid(tl.dot(h, ur) + xr.to(tl.float32))
    z = tl.sigmoid(tl.dot(h, uz) + xz.to(tl.float32))
    q = tl.dot(h, un) + bias
    return r, z, 2.0 * tl.sigmoid(2.0 * (xn.to(tl.float32) + r * q)) - 1.0, q


@triton.jit
def _gru_fwd(X, U, BiasN, H0, Y, B, T, H, BLOCK_B: tl.constexpr, BLOCK_H: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)[None, None] * BLOCK_B + tl.arange(0, BLOCK_B)[:, None]
    i = tl.arange(0, BLOCK_H)[:, None]
    j = tl.arange(0, BLOCK_H)[None, :]
    inside = (row < B) & (j < H)
    ur, uz, un = _three(U, j * H + i, H * H, (i < H) & (j < H))
    bias = tl.load(BiasN + j, mask=j < H, other=0.0).to(tl.float32)
    h = tl.load(H0 + row * H + j, mask=inside, other=0.0)
    for t in range(T):
        _, z, n, _ = _gates(X, (row * T + t) * 3 * H + j, inside, h, ur, uz, un, bias, H)
        h = (n + z * (h.to(tl.float32) - n)).to(h.dtype)
        tl.store(Y + (row * T + t) * H + j, h, mask=inside)


def _tile(H):
    if H > 64:
        raise ValueError("six matrices must fit on a multiprocessor: at most 64 units")
    BLOCK_H = max(16, triton.next_power_of_2(H))
    return {"BLOCK_B": 16, "BLOCK_H": BLOCK_H, "num_warps": 4}


def forward(x, weight, bias_n, h0):
    # x (B, T, 3 H): input projections and biases of r, z, n; weight (3 H, H), bias_n (H) inside r's product, h0 (B, H).
    x, weight, h0 = x.contiguous(), weight.contiguous(), h0.contiguous()
    B, T, H = *x.shape[:2], h0.shape[1]
    y = torch.empty(B, T, H, device=x.device, dtype=x.dtype)
    _gru_fwd[(triton.cdiv(B, 16),)](x, weight, bias_n, h0, y, B, T, H, **_tile(H))
    return y, (x, weight, bias_n, h0, y)


# --- backward ---
@triton.jit
def _gru_bwd(
    DY, X, U, BiasN, H0, Y, DX, DH0, Parts, B, T, H, dy_b, dy_t, dy_h, BLOCK_B: tl.constexpr, BLOCK_H: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)[None, None] * BLOCK_B + tl.arange(0, BLOCK_B)[:, None]
    i = tl.arange(0, BLOCK_H)[:, None]
    j = tl.arange(0, BLOCK_H)[None, :]
    inside = (row < B) & (j < H)
    square = (i < H) & (j < H)
    ur, uz, un = _three(U, i * H + j, H * H, square)
    bias = tl.load(BiasN + j, mask=j < H, other=0.0).to(tl.float32)
    dur = tl.zeros((BLOCK_H, BLOCK_H), tl.float32)
    duz = tl.zeros((BLOCK_H, BLOCK_H), tl.float32)
    dun = tl.zeros((BLOCK_H, BLOCK_H), tl.float32)
    dbias = tl.zeros((BLOCK_B, BLOCK_H), tl.float32)
    dh = tl.zeros((BLOCK_B, BLOCK_H), tl.float32)
    source = DY + row * dy_b + j.to(tl.int64) * dy_h
    for back in range(T):
        t = T - 1 - back
        dh += tl.load(source + t.to(tl.int64) * dy_t, mask=inside, other=0.0).to(tl.float32)
        h = tl.load(Y + (row * T + t - 1) * H + j, mask=inside & (t > 0), other=0.0)
        if t == 0:
            h = tl.load(H0 + row * H + j, mask=inside, other=0.0)
        at = (row * T + t) * 3 * H + j
        r, z, n, q = _gates(X, at, inside, h, tl.trans(ur), tl.trans(uz), tl.trans(un), bias, H)
        dz = (dh * (h.to(tl.float32) - n) * z * (1.0 - z)).to(h.dtype)
        dn = dh * (1.0 - z) * (1.0 - n * n)
        dr = (dn * q * r * (1.0 - r)).to(h.dtype)
        dq = tl.where(inside, dn * r, 0.0)
        dbias += dq
        dq = dq.to(h.dtype)
        tl.store(DX + at, dr, mask=inside)
        tl.store(DX + at + H, dz, mask=inside)
        tl.store(DX + at + 2 * H, dn, mask=inside)
        dh = tl.dot(dq, un, tl.dot(dz, uz, tl.dot(dr, ur, dh * z)))
        dur = tl.dot(tl.trans(dr), h, dur)
        duz = tl.dot(tl.trans(dz), h, duz)
        dun = tl.dot(tl.trans(dq), h, dun)
    tl.store(DH0 + row * H + j, dh, mask=inside)
    # A partial has the three matrices, then the bias as one more row.
    part = Parts + tl.program_id(0).to(tl.int64) * (3 * H + 1) * H
    tl.store(part + i * H + j, dur, mask=square)
    tl.store(part + H * H + i * H + j, duz, mask=square)
    tl.store(part + 2 * H * H + i * H + j, dun, mask=square)
    column = tl.arange(0, BLOCK_H)
    tl.store(part + 3 * H * H + column, tl.sum(dbias, 0), mask=column < H)


def backward(saved, grad_y, needs=None):
    x, weight, bias_n, h0, y = saved
    B, T, H = y.shape
    dx, dh0 = torch.empty_like(x), torch.empty_like(h0)
    programs = triton.cdiv(B, 16)
    parts = torch.empty(programs, 3 * H + 1, H, device=x.device, dtype=torch.float32)
    _gru_bwd[(programs,)](grad_y, x, weight, bias_n, h0, y, dx, dh0, parts, B, T, H, *grad_y.stride(), **_tile(H))
    totals = parts.sum(0).to(weight.dtype)
    return dx, totals[:-1], totals[-1], dh0


# --- check ---
SWEEP = (
    {"B": 16, "T": 5, "H": 16},
    {"B": 19, "T": 4, "H": 37},
    {"B": 5, "T": 4, "H": 24, "dtype": "bfloat16"},
    {"B": 7, "T": 3, "H": 16, "dtype": "float16"},
)
BENCH = ({"B": 4224, "T": 256, "H": 64, "dtype": "bfloat16"},)


def make_args(B, T, H, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(B, T, 3 * H, generator=g), torch.randn(3 * H, H, generator=g) * H**-0.5
    bias_n, h0 = 0.5 * torch.randn(H, generator=g), torch.tanh(torch.randn(B, H, generator=g))
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, weight, bias_n, h0))


def reference(x, weight, bias_n, h0):
    # PyTorch's own GRU; its input projection is the identity.
    H = h0.shape[1]
    eye, zero = torch.eye(3 * H, device=x.device, dtype=x.dtype), torch.zeros_like(x[0, 0])
    bias = torch.nn.functional.pad(bias_n, (2 * H, 0))
    return torch._VF.gru(x, h0[None], (eye, weight, zero, bias), True, 1, 0.0, False, False, True)[0]
