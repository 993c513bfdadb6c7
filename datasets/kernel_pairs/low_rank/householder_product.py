"""y = H_k ... H_1 x with H = I - 2 v v^T / <v, v>: the backward runs the reflections in reverse, rebuilding each state.

A reflection is its own inverse and its own adjoint, so from y and dy alone the previous state is H y, and its gradient
is H dy. With tau = 2 / <v, v>, dv of a row is -tau ((x.v) g + (g.v) x) + tau^2 (x.v)(g.v) v for input state x and
gradient g of the output state; a program sums it over its tile of rows and leaves a partial row for each reflection.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "householder_product",
    "family": "low_rank",
    "op": "householder_product",
    "schema": 1,
    "techniques": (
        "orthogonal-adjoint", "saved-output", "recompute", "multi-row-tile", "two-stage-partials", "strided-cotangent",
    ),
    "saves": ("y: fp32 or bf16 or fp16 (M, N)",),
    "grads": ("x", "vectors"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}  # fmt: skip


# --- forward ---
@triton.jit
def _reflector(V, i, n, N):
    """Vector number i as a row, and tau = 2 / <v, v>."""
    v = tl.load(V + i * N + n, mask=n < N, other=0.0).to(tl.float32)
    return v[None, :], 2.0 / tl.sum(v * v, 0)


@triton.jit
def _reflect_fwd(X, V, Y, M, N, COUNT: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, BLOCK_N)
    ok = (m[:, None] < M) & (n[None, :] < N)
    state = tl.load(X + m[:, None] * N + n[None, :], mask=ok, other=0.0).to(tl.float32)
    for i in range(COUNT):
        v, tau = _reflector(V, i, n, N)
        state -= (tau * tl.sum(state * v, 1))[:, None] * v
    tl.store(Y + m[:, None] * N + n[None, :], state, mask=ok)


def _tile(N):
    """Whole rows, 16 elements for each thread."""
    block = triton.next_power_of_2(N)
    rows = max(1, min(32, 8192 // block))
    return {"ROWS": rows, "BLOCK_N": block, "num_warps": max(4, min(16, rows * block // 512))}


def forward(x, vectors):
    x, vectors = x.contiguous(), vectors.contiguous()
    M, N = x.shape
    y = torch.empty_like(x)
    tile = _tile(N)
    _reflect_fwd[(triton.cdiv(M, tile["ROWS"]),)](x, vectors, y, M, N, COUNT=vectors.shape[0], **tile)
    return y, (y, vectors)


# --- backward ---
@triton.jit
def _reflect_bwd(
    DY, Y, V, DX, Parts, M, N, dy_m, dy_n, COUNT: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    m = pid * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, BLOCK_N)
    ok = (m[:, None] < M) & (n[None, :] < N)
    state = tl.load(Y + m[:, None] * N + n[None, :], mask=ok, other=0.0).to(tl.float32)
    g = tl.load(DY + m[:, None] * dy_m + n[None, :] * dy_n, mask=ok, other=0.0).to(tl.float32)
    for back in range(COUNT):
        i = COUNT - 1 - back
        v, tau = _reflector(V, i, n, N)
        gv = tl.sum(g * v, 1)[:, None]
        # The state before the reflection; along v it is the opposite of the state behind it.
        sv = tl.sum(state * v, 1)[:, None]
        state -= tau * sv * v
        xv = -sv
        dv = tau * tau * xv * gv * v - tau * (xv * g + gv * state)
        tl.store(Parts + (pid * COUNT + i) * N + n, tl.sum(dv, 0), mask=n < N)
        g -= tau * gv * v
    tl.store(DX + m[:, None] * N + n[None, :], g, mask=ok)


def backward(saved, grad_y, needs=None):
    y, vectors = saved
    M, N = y.shape
    count = vectors.shape[0]
    tile = _tile(N)
    programs = triton.cdiv(M, tile["ROWS"])
    dx = torch.empty_like(y)
    parts = torch.empty(programs, count, N, device=y.device, dtype=torch.float32)
    _reflect_bwd[(programs,)](
        grad_y, y, vectors, dx, parts, M, N, grad_y.stride(0), grad_y.stride(1), COUNT=count, **tile
    )
    return dx, parts.sum(0).to(vectors.dtype)


# --- check ---
SWEEP = (
    {"M": 40, "N": 64, "COUNT": 3},
    {"M": 37, "N": 45, "COUNT": 5, "dtype": "float16"},
    {"M": 21, "N": 96, "COUNT": 2, "dtype": "bfloat16"},
)
BENCH = ({"M": 65536, "N": 256, "COUNT": 8, "dtype": "bfloat16"},)


def make_args(M, N, COUNT, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = (torch.randn(M, N, generator=g), torch.randn(COUNT, N, generator=g))
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors)


def reference(x, vectors):
    state = x.float()
    for v in vectors.float():
        state = state - (2.0 / v.dot(v)) * (state @ v)[:, None] * v
    return state.to(x.dtype)
