"""Projection with one weight per head, bsd, hdk -> bhsk: heads share x, so that dx sums over them inside its loop.

y[b, h, s, :] = x[b, s, :] W[h],    dx[b, s] = sum over h of dy[b, h, s] W[h]^T,    dW[h] = sum over b, s of x^T dy.
Head and inner feature are one loop for dx: a single accumulator, no sum over a (B, H, S, D) tensor. For dW the head is
a grid axis and its owner walks over batch and sequence as one counter. The cotangent is read in the layout that it has,
as attention hands it back: head by head, or with heads inside the rows.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

META = {
    "slug": "einsum_bhid_hdj",
    "family": "matmul",
    "op": "head_projection",
    "schema": 1,
    "techniques": ("head-reduction", "owner-grid", "column-owner"),
    "saves": (),
    "grads": ("x", "weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _head_project(X, W, Y, S, D, K, H, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr):
    # Heads are the fast axis: programs that run together project the same rows of x.
    head = (tl.program_id(0) % H).to(tl.int64)
    k = (tl.program_id(0) // H) * BLOCK_K + tl.arange(0, BLOCK_K)
    s = tl.program_id(1) * BLOCK_S + tl.arange(0, BLOCK_S)
    batch = tl.program_id(2).to(tl.int64)
    y = tl.zeros((BLOCK_S, BLOCK_K), tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        x = tl.load(X + (batch * S + s[:, None]) * D + d[None, :], mask=(s[:, None] < S) & (d[None, :] < D), other=0.0)
        w = tl.load(W + (head * D + d[:, None]) * K + k[None, :], mask=(d[:, None] < D) & (k[None, :] < K), other=0.0)
        y = tl.dot(x, w, y)
    out = Y + ((batch * H + head) * S + s[:, None]) * K + k[None, :]
    tl.store(out, y, mask=(s[:, None] < S) & (k[None, :] < K))


def _side(size, most=128):
    return max(16, min(most, triton.next_power_of_2(size)))


def forward(x, weight):
    x, weight = x.contiguous(), weight.contiguous()
    (B, S, D), (H, _, K) = x.shape, weight.shape
    y = torch.empty(B, H, S, K, device=x.device, dtype=x.dtype)
    BS, BK = _side(S), _side(K)
    _head_project[(H * triton.cdiv(K, BK), triton.cdiv(S, BS), B)](
        x, weight, y, S, D, K, H,
        BLOCK_S=BS, BLOCK_K=BK, BLOCK_D=_side(D, 128 // x.element_size()), num_warps=8, num_stages=3,
    )  # fmt: skip
    return y, (x, weight)


# --- backward ---
@triton.jit
def _sum_heads_dx(DY, W, DX, S, D, K, H, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr):
    # Row tiles are the fast axis: programs that run together share a column tile of the weights.
    s, d = tl.program_id(0) * BLOCK_S, tl.program_id(1) * BLOCK_D
    batch = tl.program_id(2)
    pieces = tl.cdiv(K, BLOCK_K)
    dx = tl.zeros((BLOCK_S, BLOCK_D), tl.float32)
    for step in range(H * pieces):
        head, k = step // pieces, step % pieces * BLOCK_K
        dy = tl.reshape(DY.load([batch, head, s, k]), (BLOCK_S, BLOCK_K))
        dx = tl.dot(dy, tl.reshape(W.load([head, d, k]), (BLOCK_D, BLOCK_K)).T, dx)
    rows, cols = s + tl.arange(0, BLOCK_S), d + tl.arange(0, BLOCK_D)
    at = (batch.to(tl.int64) * S + rows[:, None]) * D + cols[None, :]
    tl.store(DX + at, dx, mask=(rows[:, None] < S) & (cols[None, :] < D))


@triton.jit
def _head_dw(DY, X, DW, B, S, D, K, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr):
    d, k = tl.program_id(0) * BLOCK_D, tl.program_id(1) * BLOCK_K
    head = tl.program_id(2)
    pieces = tl.cdiv(S, BLOCK_S)
    dw = tl.zeros((BLOCK_D, BLOCK_K), tl.float32)
    for step in range(B * pieces):
        batch, s = step // pieces, step % pieces * BLOCK_S
        xt = tl.reshape(X.load([batch, s, d]), (BLOCK_S, BLOCK_D)).T
        dw = tl.dot(xt, tl.reshape(DY.load([batch, head, s, k]), (BLOCK_S, BLOCK_K)), dw)
    rows, cols = d + tl.arange(0, BLOCK_D), k + tl.arange(0, BLOCK_K)
    at = (head.to(tl.int64) * D + rows[:, None]) * K + cols[None, :]
    tl.store(DW + at, dw, mask=(rows[:, None] < D) & (cols[None, :] < K))


def _tiles(tensor, *block):
    """A descriptor of tiles of a matrix, or of the matrices of a batch; of a copy where rows are not aligned."""
    step = 16 // tensor.element_size()
    width = tensor.shape[-1]
    outer = tensor.stride()[:-1]
    if tensor.stride(-1) != 1 or any(s % step or s < width for s in outer) or tensor.storage_offset() % step:
        dense = tensor.new_empty(*tensor.shape[:-1], triton.cdiv(width, step) * step)[..., :width]
        dense.copy_(tensor)
        tensor = dense
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(block))


def _up(size):
    return max(16, triton.next_power_of_2(size))


def backward(saved, grad_y, needs=(True, True)):
    x, weight = saved
    (B, S, D), (H, _, K) = x.shape, weight.shape
    step = 128 // x.element_size()
    dx = dw = None
    if needs[0]:
        dx = torch.empty_like(x)
        BS, BD, BK = min(256, _up(S)), min(128, _up(D)), min(step, _up(K))
        _sum_heads_dx[(triton.cdiv(S, BS), triton.cdiv(D, BD), B)](
            _tiles(grad_y, 1, 1, BS, BK), _tiles(weight, 1, BD, BK), dx, S, D, K, H,
            BLOCK_S=BS, BLOCK_K=BK, BLOCK_D=BD, num_warps=8, num_stages=4,
        )  # fmt: skip
    if needs[1]:
        dw = torch.empty_like(weight)
        BD, BK, BS = min(256, _up(D)), min(128, _up(K)), min(step, _up(S))
        _head_dw[(triton.cdiv(D, BD), triton.cdiv(K, BK), H)](
            _tiles(grad_y, 1, 1, BS, BK), _tiles(x, 1, BS, BD), dw, B, S, D, K,
            BLOCK_S=BS, BLOCK_K=BK, BLOCK_D=BD, num_warps=8, num_stages=4,
        )  # fmt: skip
    return dx, dw


# --- check ---
SWEEP = (
    {"B": 2, "S": 32, "D": 48, "H": 2, "K": 16},
    {"B": 1, "S": 75, "D": 41, "H": 3, "K": 29},
    {"B": 2, "S": 20, "D": 24, "H": 4, "K": 40, "dtype": "bfloat16"},
    {"B": 3, "S": 17, "D": 150, "H": 2, "K": 8, "dtype": "float16"},
)
BENCH = ({"B": 4, "S": 2048, "D": 4096, "H": 32, "K": 128, "dtype": "bfloat16"},)


def make_args(B, S, D, H, K, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = (torch.randn(B, S, D, generator=g), torch.randn(H, D, K, generator=g) * D**-0.5)
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors)


def reference(x, weight):
    return torch.einsum("bsd,hdk->bhsk", x, weight)
