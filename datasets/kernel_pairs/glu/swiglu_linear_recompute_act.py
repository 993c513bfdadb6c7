"""Down projection of SwiGLU, y = (silu(gate) * up) W^T, that never stores the activation, in either direction.

The forward makes tiles of h = silu(gate) * up while it loads the operands of the product. The backward makes them again
for dW = dY^T h, and takes dH = dY W through both derivatives in the epilogue, tile by tile, to dgate and dup: neither h
nor dH, each as large as gate, ever lies in memory. What is saved is what the caller has anyway.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

META = {
    "slug": "swiglu_linear_recompute_act",
    "family": "glu",
    "op": "swiglu_linear",
    "schema": 1,
    "techniques": ("prologue-fusion", "epilogue-fusion", "recompute", "owner-grid"),
    "saves": (),
    "grads": ("gate", "up", "weight"),
    "dtypes": ("float16", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
    "spills": "a tile and both its factors fill 16 warps but for 8 words, and are a fifth faster than smaller ones",
}


# --- forward ---
@triton.jit
def _activation(Gate, Up, at, mask):
    """h, gate, up and sigmoid(gate) of a tile, in fp32; zeros outside."""
    gate = tl.load(Gate + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(Up + at, mask=mask, other=0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    return gate * s * up, gate, up, s


@triton.jit
def _down_fwd(Gate, Up, W, Y, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    n = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        h, _, _, _ = _activation(Gate, Up, m * K + k[None, :], (m < M) & (k[None, :] < K))
        w = tl.load(W + n * K + k[:, None], mask=(n < N) & (k[:, None] < K), other=0.0)
        acc = tl.dot(h.to(w.dtype), w, acc)
    tl.store(Y + m * N + n, acc, mask=(m < M) & (n < N))


def _side(size):
    return max(16, min(128, triton.next_power_of_2(size)))


def forward(gate, up, weight):
    gate, up, weight = gate.contiguous(), up.contiguous(), weight.contiguous()
    (M, K), N = gate.shape, weight.shape[0]
    y = torch.empty(M, N, device=gate.device, dtype=gate.dtype)
    BLOCK_M, BLOCK_N = _side(M), _side(N)
    _down_fwd[(triton.cdiv(M, BLOCK_M), triton.cdiv(N, BLOCK_N))](
        gate, up, weight, y, M, N, K, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=32, num_warps=8, num_stages=3
    )
    return y, (gate, up, weight)


# --- backward ---
@triton.jit
def _down_dgate_dup(
    DY, W, Gate, Up, DGate, DUp, M, N, K,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Programs walk GROUP row tiles before the next column tile, so that neighbours find their operands in L2.
    tiles_k = tl.cdiv(K, BLOCK_K)
    band = tl.program_id(0) // (GROUP * tiles_k)
    height = tl.minimum(tl.cdiv(M, BLOCK_M) - band * GROUP, GROUP)
    inside = tl.program_id(0) % (GROUP * tiles_k)
    m, k = (band * GROUP + inside % height) * BLOCK_M, inside // height * BLOCK_K
    dh = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for n in range(0, N, BLOCK_N):
        dh = tl.dot(DY.load([m, n]), W.load([n, k]), dh)
    rows, cols = m.to(tl.int64) + tl.arange(0, BLOCK_M), k + tl.arange(0, BLOCK_K)
    at, mask = rows[:, None] * K + cols[None, :], (rows[:, None] < M) & (cols[None, :] < K)
    _, gate, up, s = _activation(Gate, Up, at, mask)
    act = gate * s
    tl.store(DUp + at, dh * act, mask=mask)
    tl.store(DGate + at, dh * up * (s + act * (1.0 - s)), mask=mask)


@triton.jit
def _down_dw(
    DY, Gate, Up, DW, M, N, K,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Programs walk GROUP row tiles before the next column tile, so that neighbours find their operands in L2.
    tiles_k = tl.cdiv(K, BLOCK_K)
    band = tl.program_id(0) // (GROUP * tiles_k)
    height = tl.minimum(tl.cdiv(N, BLOCK_N) - band * GROUP, GROUP)
    inside = tl.program_id(0) % (GROUP * tiles_k)
    n, k = (band * GROUP + inside % height) * BLOCK_N, inside // height * BLOCK_K
    # dW^T = h^T dy: h is made in registers, and the left operand of a product is taken from there.
    acc = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    for m in range(0, M, BLOCK_M):
        gate = Gate.load([m, k]).T.to(tl.float32)
        h = gate * tl.sigmoid(gate) * Up.load([m, k]).T.to(tl.float32)
        dy = DY.load([m, n])
        acc = tl.dot(h.to(dy.dtype), dy, acc)
    rows, cols = n.to(tl.int64) + tl.arange(0, BLOCK_N), k + tl.arange(0, BLOCK_K)
    tl.store(DW + rows[:, None] * K + cols[None, :], acc.T, mask=(rows[:, None] < N) & (cols[None, :] < K))


def _tiles(matrix, rows, cols):
    """A descriptor of (rows, cols) tiles of a matrix, or of a copy where its rows are not dense or not aligned."""
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
    gate, up, weight = saved
    need_gate, need_up, need_weight = needs or (True, True, True)
    (M, K), N = gate.shape, weight.shape[0]
    dgate = dup = dw = None
    if need_gate or need_up:
        dgate, dup = torch.empty_like(gate), torch.empty_like(up)
        # Half as wide as it could be: four tiles are alive in the epilogue.
        BM, BK, BN = min(128, _up(M)), min(128, _up(K)), min(64, _up(N))
        _down_dgate_dup[(triton.cdiv(M, BM) * triton.cdiv(K, BK),)](
            _tiles(grad_y, BM, BN), _tiles(weight, BN, BK), gate, up, dgate, dup, M, N, K,
            GROUP=8, BLOCK_M=BM, BLOCK_N=BN, BLOCK_K=BK, num_warps=8, num_stages=4,
        )  # fmt: skip
    if need_weight:
        dw = torch.empty_like(weight)
        BN, BK, BM = min(256, _up(N)), min(128, _up(K)), min(64, _up(M))
        _down_dw[(triton.cdiv(N, BN) * triton.cdiv(K, BK),)](
            _tiles(grad_y, BM, BN), _tiles(gate, BM, BK), _tiles(up, BM, BK), dw, M, N, K,
            GROUP=8, BLOCK_M=BM, BLOCK_N=BN, BLOCK_K=BK, num_warps=8, num_stages=3,
        )  # fmt: skip
    return dgate, dup, dw


# --- check ---
SWEEP = (
    {"M": 48, "N": 32, "K": 64, "dtype": "float16"},
    {"M": 37, "N": 51, "K": 43, "dtype": "float16"},
    {"M": 32, "N": 16, "K": 32, "dtype": "bfloat16"},
)
BENCH = ({"M": 4096, "N": 4096, "K": 8192, "dtype": "bfloat16"},)


def make_args(M, N, K, dtype="float16", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = torch.randn(M, K, generator=g), torch.randn(M, K, generator=g), torch.randn(N, K, generator=g) / 8
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors)


def reference(gate, up, weight):
    h = torch.nn.functional.silu(gate.float()) * up.float()
    return h.to(weight.dtype) @ weight.t()
