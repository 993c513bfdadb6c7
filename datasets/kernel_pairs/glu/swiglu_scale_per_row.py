"""SwiGLU weighted per token, y = weight[m] * silu(gate) * up: the weight's gradient is a row's dot product.

A program owns one token and walks its columns. What it computes for dgate and dup anyway, silu(gate) * up, is
multiplied by dy and summed in registers; at the end of the row that is the routing weight's gradient, with no second
launch.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "swiglu_scale_per_row",
    "family": "glu",
    "op": "swiglu",
    "schema": 1,
    "techniques": ("row-local", "recompute", "one-launch", "strided-cotangent"),
    "saves": (),
    "grads": ("gate", "up", "weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _routed_swiglu_fwd(Gate, Up, Weight, Y, N, g_row, u_row, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    weight = tl.load(Weight + row).to(tl.float32)
    gate = tl.load(Gate + row * g_row + c, mask=c < N, other=0.0).to(tl.float32)
    up = tl.load(Up + row * u_row + c, mask=c < N, other=0.0).to(tl.float32)
    tl.store(Y + row * N + c, weight * gate * tl.sigmoid(gate) * up, mask=c < N)


def _rows_dense(x):
    return x if x.stride(1) == 1 else x.contiguous()


def _block(N):
    return max(32, min(2048, triton.next_power_of_2(N)))


def forward(gate, up, weight):
    gate, up, weight = _rows_dense(gate), _rows_dense(up), weight.contiguous()
    M, N = gate.shape
    y = torch.empty(M, N, device=gate.device, dtype=gate.dtype)
    BLOCK = _block(N)
    _routed_swiglu_fwd[(M, triton.cdiv(N, BLOCK))](gate, up, weight, y, N, gate.stride(0), up.stride(0), BLOCK=BLOCK)
    return y, (gate, up, weight)


# --- backward ---
@triton.jit
def _routed_swiglu_bwd(DY, Gate, Up, Weight, DGate, DUp, DWeight, N, dy_row, dy_col, g_row, u_row, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    weight = tl.load(Weight + row).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        c = start + lane
        dy = tl.load(DY + row * dy_row + c.to(tl.int64) * dy_col, mask=c < N, other=0.0).to(tl.float32)
        gate = tl.load(Gate + row * g_row + c, mask=c < N, other=0.0).to(tl.float32)
        up = tl.load(Up + row * u_row + c, mask=c < N, other=0.0).to(tl.float32)
        s = tl.sigmoid(gate)
        act = gate * s
        total += dy * act * up
        scaled = weight * dy
        tl.store(DGate + row * N + c, scaled * up * (s + act * (1.0 - s)), mask=c < N)
        tl.store(DUp + row * N + c, scaled * act, mask=c < N)
    tl.store(DWeight + row, tl.sum(total, 0))


def backward(saved, grad_y, needs=None):
    gate, up, weight = saved
    M, N = gate.shape
    dgate = torch.empty(M, N, device=gate.device, dtype=gate.dtype)
    dup = torch.empty(M, N, device=up.device, dtype=up.dtype)
    dweight = torch.empty_like(weight)
    _routed_swiglu_bwd[(M,)](
        grad_y, gate, up, weight, dgate, dup, dweight, N, grad_y.stride(0), grad_y.stride(1),
        gate.stride(0), up.stride(0), BLOCK=_block(N),
    )  # fmt: skip
    return dgate, dup, dweight


# --- check ---
SWEEP = ({"M": 6, "N": 128, "dtype": "float16"}, {"M": 5, "N": 77}, {"M": 3, "N": 4200, "dtype": "bfloat16"})
BENCH = ({"M": 16384, "N": 4096, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    gate, up, weight = torch.randn(M, N, generator=g), torch.randn(M, N, generator=g), torch.rand(M, generator=g)
    return *(t.to(device=device, dtype=getattr(torch, dtype)) for t in (gate, up)), weight.to(device)


def reference(gate, up, weight):
    return (weight[:, None] * torch.nn.functional.silu(gate.float()) * up.float()).to(gate.dtype)
