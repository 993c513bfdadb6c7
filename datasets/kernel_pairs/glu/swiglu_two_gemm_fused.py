"""Both projections of SwiGLU in one kernel, y = silu(x Wg) * (x Wu): gradients meet in products that share tiles.

The forward reads a tile of x once for two accumulators and keeps both pre-activations. The backward turns dy into dgate
and dup in one elementwise pass; then dx adds dgate Wg^T and dup Wu^T in one accumulator, and both weight gradients come
out of one walk over the rows, which reads x once for the two of them.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "swiglu_two_gemm_fused",
    "family": "glu",
    "op": "swiglu_linear",
    "schema": 1,
    "techniques": ("epilogue-fusion", "loop-swap", "owner-grid", "strided-cotangent"),
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
def _halves(DY, Gate, Up, DGate, DUp, N, dy_m, dy_n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = row * N + n
    dy = tl.load(DY + row * dy_m + n.to(tl.int64) * dy_n, mask=n < N, other=0.0).to(tl.float32)
    gate = tl.load(Gate + at, mask=n < N, other=0.0).to(tl.float32)
    up = tl.load(Up + at, mask=n < N, other=0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    act = gate * s
    tl.store(DGate + at, dy * up * (s + act * (1.0 - s)), mask=n < N)
    tl.store(DUp + at, dy * act, mask=n < N)


@triton.jit
def _gate_up_dx(
    DGate, DUp, GateW, UpW, DX, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    k = (tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)).to(tl.int64)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        rows = (m < M) & (n[None, :] < N)
        # Weights (K, N) are read transposed, with N along memory.
        columns = (n[:, None] < N) & (k < K)
        dgate = tl.load(DGate + m * N + n[None, :], mask=rows, other=0.0)
        acc = tl.dot(dgate, tl.load(GateW + k * N + n[:, None], mask=columns, other=0.0), acc)
        dup = tl.load(DUp + m * N + n[None, :], mask=rows, other=0.0)
        acc = tl.dot(dup, tl.load(UpW + k * N + n[:, None], mask=columns, other=0.0), acc)
    tl.store(DX + m * K + k, acc, mask=(m < M) & (k < K))


@triton.jit
def _gate_up_dw(
    X, DGate, DUp, DGateW, DUpW, M, N, K, x_m, x_k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    k = (tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)).to(tl.int64)[:, None]
    n = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    gate_acc = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    up_acc = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    for start in range(0, M, BLOCK_M):
        m = (start + tl.arange(0, BLOCK_M)).to(tl.int64)
        xt = tl.load(X + m[None, :] * x_m + k * x_k, mask=(m[None, :] < M) & (k < K), other=0.0)
        inside = (m[:, None] < M) & (n < N)
        gate_acc = tl.dot(xt, tl.load(DGate + m[:, None] * N + n, mask=inside, other=0.0), gate_acc)
        up_acc = tl.dot(xt, tl.load(DUp + m[:, None] * N + n, mask=inside, other=0.0), up_acc)
    mask = (k < K) & (n < N)
    tl.store(DGateW + k * N + n, gate_acc, mask=mask)
    tl.store(DUpW + k * N + n, up_acc, mask=mask)


def backward(saved, grad_y, needs=None):
    x, gate_weight, up_weight, gate, up = saved
    need_x, need_gate, need_up = needs or (True, True, True)
    (M, K), N = x.shape, gate.shape[1]
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    BLOCK = max(64, min(1024, triton.next_power_of_2(N)))
    _halves[(M, triton.cdiv(N, BLOCK))](grad_y, gate, up, dgate, dup, N, *grad_y.stride(), BLOCK=BLOCK)
    dx = dgate_weight = dup_weight = None
    BLOCK_K, BLOCK_N = _side(K, 128), _side(N, 64)
    if need_x:
        dx = torch.empty(M, K, device=x.device, dtype=x.dtype)
        BLOCK_M = _side(M, 128)
        _gate_up_dx[(triton.cdiv(M, BLOCK_M), triton.cdiv(K, BLOCK_K))](
            dgate, dup, gate_weight, up_weight, dx, M, N, K,
            BLOCK_M=BLOCK_M, BLOCK_N=64, BLOCK_K=BLOCK_K, num_warps=8, num_stages=3,
        )  # fmt: skip
    if need_gate or need_up:
        dgate_weight, dup_weight = torch.empty_like(gate_weight), torch.empty_like(up_weight)
        _gate_up_dw[(triton.cdiv(K, BLOCK_K), triton.cdiv(N, BLOCK_N))](
            x, dgate, dup, dgate_weight, dup_weight, M, N, K, *x.stride(),
            BLOCK_M=64, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, num_warps=8, num_stages=3,
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
