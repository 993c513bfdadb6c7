"""Classic GLU over the channels of (N, 2C, T): with y saved the gate's gradient is dy * y * (1 - s), without the value.

s = sigmoid(gate) is recomputed. dvalue = dy * s and dgate = dy * value * s * (1 - s), where value * s is y: the half of
x that held the values is not read again. A sample's two halves are flat runs of C * T, so that no channel index is
needed.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "glu_sigmoid",
    "family": "glu",
    "op": "glu",
    "schema": 1,
    "techniques": ("elementwise", "saved-output", "recompute"),
    "saves": ("y: fp32 or bf16 or fp16 (N, C, T)",),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _glu_channels_fwd(X, Y, run, BLOCK: tl.constexpr):
    sample = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(X + 2 * sample * run + i, mask=i < run, other=0.0).to(tl.float32)
    gate = tl.load(X + (2 * sample + 1) * run + i, mask=i < run, other=0.0).to(tl.float32)
    tl.store(Y + sample * run + i, value * tl.sigmoid(gate), mask=i < run)


def forward(x):
    x = x.contiguous()
    N, C, T = x.shape[0], x.shape[1] // 2, x.shape[2]
    y = torch.empty(N, C, T, device=x.device, dtype=x.dtype)
    BLOCK = max(64, min(2048, triton.next_power_of_2(C * T)))
    _glu_channels_fwd[(triton.cdiv(C * T, BLOCK), N)](x, y, C * T, BLOCK=BLOCK)
    return y, (x, y)


# --- backward ---
@triton.jit
def _glu_channels_bwd(DY, X, Y, DX, run, BLOCK: tl.constexpr):
    sample = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dy = tl.load(DY + sample * run + i, mask=i < run, other=0.0).to(tl.float32)
    y = tl.load(Y + sample * run + i, mask=i < run, other=0.0).to(tl.float32)
    second = (2 * sample + 1) * run + i
    gate = tl.load(X + second, mask=i < run, other=0.0).to(tl.float32)
    # The complement of the sigmoid as one of -gate: 1 - s would lose its digits where s is near one.
    tl.store(DX + second - run, dy * tl.sigmoid(gate), mask=i < run)
    tl.store(DX + second, dy * y * tl.sigmoid(-gate), mask=i < run)


def backward(saved, grad_y, needs=None):
    x, y = saved
    N, C, T = y.shape
    dx = torch.empty_like(x)
    BLOCK = max(64, min(2048, triton.next_power_of_2(C * T)))
    # Runs of C * T need a dense cotangent; one that is transposed, as from a channels-last layer, is copied once.
    _glu_channels_bwd[(triton.cdiv(C * T, BLOCK), N)](grad_y.contiguous(), x, y, dx, C * T, BLOCK=BLOCK)
    return dx


# --- check ---
SWEEP = (
    {"N": 2, "C": 8, "T": 32, "dtype": "float16"},
    {"N": 3, "C": 5, "T": 41},
    {"N": 1, "C": 6, "T": 64, "dtype": "bfloat16"},
)
BENCH = ({"N": 32, "C": 512, "T": 4096, "dtype": "bfloat16"},)


def make_args(N, C, T, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return ((2 * torch.randn(N, 2 * C, T, generator=g)).to(device=device, dtype=getattr(torch, dtype)),)


def reference(x):
    return torch.nn.functional.glu(x.float(), 1).to(x.dtype)
