"""Exact GEGLU of two tensors, gelu(gate) * up: both gradients out of one pass that evaluates erf once.

dgate = dy * up * (Phi(gate) + gate * phi(gate)) and dup = dy * gate * Phi(gate) share Phi. Operands keep their row
strides, since they often are the two halves of one projection; each gradient is left out where it is not needed.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "geglu_erf",
    "family": "glu",
    "op": "geglu",
    "schema": 1,
    "techniques": ("elementwise", "recompute", "one-launch", "strided-cotangent"),
    "saves": (),
    "grads": ("gate", "up"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _normal_cdf(x):
    return 0.5 * (1.0 + tl.math.erf(x * 0.7071067811865476))


@triton.jit
def _geglu_erf_fwd(Gate, Up, Y, M, N, g_row, u_row, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    m = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    n = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    mask = (m < M) & (n < N)
    gate = tl.load(Gate + m * g_row + n, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(Up + m * u_row + n, mask=mask, other=0.0).to(tl.float32)
    tl.store(Y + m * N + n, gate * _normal_cdf(gate) * up, mask=mask)


def _rows_dense(x):
    return x if x.stride(1) == 1 else x.contiguous()


def _tile(N):
    """A tile of 1024 elements, as wide as the rows allow."""
    BLOCK = max(16, min(1024, triton.next_power_of_2(N)))
    return 1024 // BLOCK, BLOCK


def forward(gate, up):
    gate, up = _rows_dense(gate), _rows_dense(up)
    M, N = gate.shape
    y = torch.empty(M, N, device=gate.device, dtype=gate.dtype)
    ROWS, BLOCK = _tile(N)
    _geglu_erf_fwd[(triton.cdiv(M, ROWS), triton.cdiv(N, BLOCK))](
        gate, up, y, M, N, gate.stride(0), up.stride(0), ROWS=ROWS, BLOCK=BLOCK
    )
    return y, (gate, up)


# --- backward ---
@triton.jit
def _geglu_erf_bwd(
    DY, Gate, Up, DGate, DUp, M, N, dy_row, dy_col, g_row, u_row,
    NEED_GATE: tl.constexpr, NEED_UP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    m = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    n = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    mask = (m < M) & (n < N)
    dy = tl.load(DY + m * dy_row + n.to(tl.int64) * dy_col, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(Gate + m * g_row + n, mask=mask, other=0.0).to(tl.float32)
    cdf = _normal_cdf(gate)
    if NEED_GATE:
        up = tl.load(Up + m * u_row + n, mask=mask, other=0.0).to(tl.float32)
        density = 0.3989422804014327 * tl.exp(-0.5 * gate * gate)
        tl.store(DGate + m * N + n, dy * up * (cdf + gate * density), mask=mask)
    if NEED_UP:
        tl.store(DUp + m * N + n, dy * gate * cdf, mask=mask)


def backward(saved, grad_y, needs=None):
    gate, up = saved
    need_gate, need_up = needs or (True, True)
    M, N = gate.shape
    dgate = torch.empty(M, N, device=gate.device, dtype=gate.dtype) if need_gate else None
    dup = torch.empty(M, N, device=up.device, dtype=up.dtype) if need_up else None
    ROWS, BLOCK = _tile(N)
    _geglu_erf_bwd[(triton.cdiv(M, ROWS), triton.cdiv(N, BLOCK))](
        grad_y, gate, up, dgate, dup, M, N, grad_y.stride(0), grad_y.stride(1), gate.stride(0), up.stride(0),
        NEED_GATE=need_gate, NEED_UP=need_up, ROWS=ROWS, BLOCK=BLOCK,
    )  # fmt: skip
    return dgate, dup


# --- check ---
SWEEP = ({"M": 16, "N": 128, "dtype": "float16"}, {"M": 13, "N": 101}, {"M": 5, "N": 256, "dtype": "bfloat16"})
BENCH = ({"M": 8192, "N": 10240, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    gate, up = 2 * torch.randn(M, N, generator=g), torch.randn(M, N, generator=g)
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (gate, up))


def reference(gate, up):
    return (torch.nn.functional.gelu(gate.float()) * up.float()).to(gate.dtype)
