"""Highway gate, y = t * h + (1 - t) * x with t = sigmoid(gate): the saved t serves three gradients in one pass.

dh = dy * t, dx = dy * (1 - t), dgate = dy * (h - x) * t * (1 - t). The forward writes t once, in the inputs' dtype, and
the backward evaluates no exponential; h and x are read for the gate's gradient alone, and not if it is not needed.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "gated_residual_highway",
    "family": "glu",
    "op": "highway",
    "schema": 1,
    "techniques": ("elementwise", "saved-output", "one-launch", "strided-cotangent"),
    "saves": ("t: fp32 or bf16 or fp16 (M, N)",),
    "grads": ("gate", "h", "x"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _highway_fwd(Gate, Hidden, X, Y, Saved, N, g_row, h_row, x_row, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    t = tl.sigmoid(tl.load(Gate + row * g_row + c, mask=c < N, other=0.0).to(tl.float32))
    h = tl.load(Hidden + row * h_row + c, mask=c < N, other=0.0).to(tl.float32)
    x = tl.load(X + row * x_row + c, mask=c < N, other=0.0).to(tl.float32)
    tl.store(Saved + row * N + c, t, mask=c < N)
    tl.store(Y + row * N + c, x + t * (h - x), mask=c < N)


def _rows_dense(x):
    return x if x.stride(1) == 1 else x.contiguous()


def _block(N):
    return max(32, min(1024, triton.next_power_of_2(N)))


def forward(gate, h, x):
    gate, h, x = _rows_dense(gate), _rows_dense(h), _rows_dense(x)
    M, N = x.shape
    y = torch.empty(M, N, device=x.device, dtype=x.dtype)
    t = torch.empty(M, N, device=x.device, dtype=x.dtype)
    BLOCK = _block(N)
    _highway_fwd[(M, triton.cdiv(N, BLOCK))](gate, h, x, y, t, N, gate.stride(0), h.stride(0), x.stride(0), BLOCK=BLOCK)
    return y, (t, h, x)


# --- backward ---
@triton.jit
def _highway_bwd(
    DY, Saved, Hidden, X, DGate, DHidden, DX, N, dy_row, dy_col, h_row, x_row,
    NEED_GATE: tl.constexpr, NEED_H: tl.constexpr, NEED_X: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    out = row * N + c
    t = tl.load(Saved + out, mask=c < N, other=0.0).to(tl.float32)
    dy = tl.load(DY + row * dy_row + c.to(tl.int64) * dy_col, mask=c < N, other=0.0).to(tl.float32)
    if NEED_GATE:
        h = tl.load(Hidden + row * h_row + c, mask=c < N, other=0.0).to(tl.float32)
        x = tl.load(X + row * x_row + c, mask=c < N, other=0.0).to(tl.float32)
        tl.store(DGate + out, dy * (h - x) * t * (1.0 - t), mask=c < N)
    if NEED_H:
        tl.store(DHidden + out, dy * t, mask=c < N)
    if NEED_X:
        tl.store(DX + out, dy * (1.0 - t), mask=c < N)


def backward(saved, grad_y, needs=None):
    t, h, x = saved
    needs = needs or (True, True, True)
    M, N = t.shape
    dgate, dh, dx = (torch.empty_like(t) if need else None for need in needs)
    BLOCK = _block(N)
    _highway_bwd[(M, triton.cdiv(N, BLOCK))](
        grad_y, t, h, x, dgate, dh, dx, N, *grad_y.stride(), h.stride(0), x.stride(0),
        NEED_GATE=needs[0], NEED_H=needs[1], NEED_X=needs[2], BLOCK=BLOCK,
    )  # fmt: skip
    return dgate, dh, dx


# --- check ---
SWEEP = ({"M": 8, "N": 128, "dtype": "float16"}, {"M": 5, "N": 77}, {"M": 4, "N": 96, "dtype": "bfloat16"})
BENCH = ({"M": 16384, "N": 4096, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(M, N, generator=g).to(device=device, dtype=getattr(torch, dtype)) for _ in range(3))


def reference(gate, h, x):
    t = torch.sigmoid(gate.float())
    return (t * h.float() + (1 - t) * x.float()).to(x.dtype)
