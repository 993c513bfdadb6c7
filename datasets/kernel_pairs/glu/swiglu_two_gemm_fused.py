"""Both projections of SwiGLU in one kernel, y = silu(x Wg) * (x Wu): gradients meet in products that share tiles.

The forward reads a tile of x once for two accumulators and keeps both pre-activations. The backward turns dy into dgate
and dup in one elementwise pass; then dx adds dgate Wg^T and dup Wu^T in one accumulator, and both weight gradients come
out of one walk over the rows, which reads x once for the two of them.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

META = {
    "slug": "swiglu_two_gemm_fused",
    "family": "glu",
    "op": "swiglu_linear",
    "schema": 1,
    "techniques": ("epilogue-fusion", "loop-swap", "owner-grid"),
    "saves": ("gate: fp16 or bf16 (M, N)", "up: fp16 or bf16 (M, N)"),
    "grads": ("x", "gate_weight", "up_weight"),
    "dtypes": ("float16", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _gate_up_fwd(
    X, GateW, UpW, Gate, Up, Y, M, N, K, x_m, x_k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    n = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = (start + tl.arange(0, BLOCK_K)).to(tl.int64)
        x = tl.load(X + m * x_m + k[None, :] * x_k, mask=(m < M) & (k[None, :] < K), other=0.0)
        inside = (k[:, None] < K) & (n < N)
        gate = tl.dot(x, tl.load(GateW + k[:, None] * N + n, mask=inside, other=0.0), gate)
        up = tl.dot(x, tl.load(UpW + k[:, None] * N + n, mask=inside, other=0.0), up)
    at, mask = m * N + n, (m < M) & (n < N)
    tl.store(Gate + at, gate, mask=mask)
    tl.store(Up + at, up, mask=mask)
    tl.store(Y + at, gate * tl.sigmoid(gate) * up, mask=mask)


def _side(size, most):
    return max(16, min(most, triton.next_power_of_2(size)))


def forward(x, gate_weight, up_weight):
    gate_weight, up_weight = gate_weight.contiguous(), up_weight.contiguous()
    (M, K), N = x.shape, gate_weight.shape[1]
    gate, up, y = (torch.empty(M, N, device=x.device, dtype=x.dtype) for _ in range(3))
    # Two accumulators share the registers.
    BLOCK_M, BLOCK_N = _side(M, 128), _side(N, 64)
    _gate_up_fwd[(triton.cdiv(M, BLOCK_M), triton.cdiv(N, BLOCK_N))](
        x, gate_weight, up_weight, gate, up, y, M, N, K, *x.stride(),
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=64, num_warps=8, num_stages=3,
    )  # fmt: skip
    return y, (x, gate_weight, up_weight, gate, up)


# --- backward ---
@triton.jit
def _halves(DY, Gate, Up, DGate, DUp, N, d_m, dy_m, dy_n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = row * N + n
    dy = tl.load(DY + row * dy_m + n.to(tl.int64) * dy_n, mask=n < N, other=0.0).to(tl.float32)
    gate = tl.load(Gate + at, mask=n < N, other=0.0).to(tl.float32)
    up = tl.load(Up + at, mask=n < N, other=0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    act = gate * s
    tl.store(DGate + row * d_m + n, dy * up * (s + act * (1.0 - s)), mask=n < N)
    tl.store(DUp + row * d_m + n, dy * act, mask=n < N)


@triton.jit
def _gate_up_dx(
    DGate, DUp, GateW, UpW, DX, M, N, K,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Bands of GROUP row tiles, walked column by column: programs in flight share both operands.
    across = tl.cdiv(K, BLOCK_K)
    band = tl.program_id(0) // (GROUP * across)
    height = tl.minimum(tl.cdiv(M, BLOCK_M) - band * GROUP, GROUP)
    inside = tl.program_id(0) % (GROUP * across)
    m, k = (band * GROUP + inside % height) * BLOCK_M, inside // height * BLOCK_K
    acc = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    # Weights (K, N) are read transposed, with N along memory. The two sums follow one another in one accumulator.
    for n in range(0, N, BLOCK_N):
        acc = tl.dot(DGate.load([m, n]), GateW.load([k, n]).T, acc)
    for n in range(0, N, BLOCK_N):
        acc = tl.dot(DUp.load([m, n]), UpW.load([k, n]).T, acc)
    rows, cols = m.to(tl.int64) + tl.arange(0, BLOCK_M), k + tl.arange(0, BLOCK_K)
    tl.store(DX + rows[:, None] * K + cols[None, :], acc, mask=(rows[:, None] < M) & (cols[None, :] < K))


@triton.jit
def _gate_up_dw(
    X, DGate, DUp, DGateW, DUpW, M, N, K,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(N, BLOCK_N)
    band = tl.program_id(0) // (GROUP * across)
    height = tl.minimum(tl.cdiv(K, BLOCK_K) - band * GROUP, GROUP)
    inside = tl.program_id(0) % (GROUP * across)
    k, n = (band * GROUP + inside % height) * BLOCK_K, inside // height * BLOCK_N
    gate_acc = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    up_acc = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    for m in range(0, M, BLOCK_M):
        xt = X.load([m, k]).T
        gate_acc = tl.dot(xt, DGate.load([m, n]), gate_acc)
        up_acc = tl.dot(xt, DUp.load([m, n]), up_acc)
    rows, cols = k.to(tl.int64) + tl.arange(0, BLOCK_K), n + tl.arange(0, BLOCK_N)
    at, mask = rows[:, None] * N + cols[None, :], (rows[:, None] < K) & (cols[None, :] < N)
    tl.store(DGateW + at, gate_acc, mask=mask)
    tl.store(DUpW + at, up_acc, mask=mask)


def _tiles(matrix, rows, cols):
    """Descriptor of (rows, cols) tiles of a matrix, or a copy where rows are not dense or aligned to 16 bytes."""
    step = 16 // matrix.element_size()
    width = matrix.shape[1]
    if matrix.stride(1) != 1 or matrix.stride(0) % step or matrix.stride(0) < width or matrix.storage_offset() % step:
        dense = matrix.new_empty(matrix.shape[0], triton.cdiv(width, step) * step)[:, :width]
        dense.copy_(matrix)
        matrix = dense
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, cols])


def _up(size):
    return max(16, triton.next_power_of_2(size))


def backward(saved, grad_y, needs=None):
    x, gate_weight, up_weight, gate, up = saved
    need_x, need_gate, need_up = needs or (True, True, True)
    (M, K), N = x.shape, gate.shape[1]
    # Rows of the two cotangents start on sixteen bytes, as descriptors need them.
    width = triton.cdiv(N, 8) * 8
    dgate, dup = torch.empty(2, M, width, device=x.device, dtype=x.dtype)[:, :, :N]
    BLOCK = max(64, min(1024, triton.next_power_of_2(N)))
    _halves[(M, triton.cdiv(N, BLOCK))](grad_y, gate, up, dgate, dup, N, width, *grad_y.stride(), BLOCK=BLOCK)
    dx = dgate_weight = dup_weight = None
    if need_x:
        dx = torch.empty(M, K, device=x.device, dtype=x.dtype)
        BLOCK_M, BLOCK_K, BLOCK_N = min(128, _up(M)), min(256, _up(K)), min(64, _up(N))
        grads = (_tiles(t, BLOCK_M, BLOCK_N) for t in (dgate, dup))
        weights = (_tiles(t, BLOCK_K, BLOCK_N) for t in (gate_weight, up_weight))
        _gate_up_dx[(triton.cdiv(M, BLOCK_M) * triton.cdiv(K, BLOCK_K),)](
            *grads, *weights, dx, M, N, K,
            GROUP=8, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, num_warps=8, num_stages=4,
        )  # fmt: skip
    if need_gate or need_up:
        dgate_weight, dup_weight = torch.empty_like(gate_weight), torch.empty_like(up_weight)
        # Two accumulators share the registers.
        BLOCK_K, BLOCK_N, BLOCK_M = min(128, _up(K)), min(128, _up(N)), min(64, _up(M))
        _gate_up_dw[(triton.cdiv(K, BLOCK_K) * triton.cdiv(N, BLOCK_N),)](
            _tiles(x, BLOCK_M, BLOCK_K), *(_tiles(t, BLOCK_M, BLOCK_N) for t in (dgate, dup)),
            dgate_weight, dup_weight, M, N, K,
            GROUP=8, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, num_warps=8, num_stages=4,
        )  # fmt: skip
    return dx, dgate_weight, dup_weight


# --- check ---
SWEEP = (
    {"M": 48, "N": 32, "K": 64, "dtype": "float16"},
    {"M": 37, "N": 51, "K": 43, "dtype": "float16"},
    {"M": 32, "N": 16, "K": 32, "dtype": "bfloat16"},
)
BENCH = ({"M": 4096, "N": 8192, "K": 4096, "dtype": "bfloat16"},)


def make_args(M, N, K, dtype="float16", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = torch.randn(M, K, generator=g), *(torch.randn(K, N, generator=g) * K**-0.5 for _ in range(2))
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors)


def reference(x, gate_weight, up_weight):
    gate, up = (x @ gate_weight).float(), (x @ up_weight).float()
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)
