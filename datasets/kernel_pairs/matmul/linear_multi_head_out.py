"""Query, key and value projections of one input: three products in a launch, and one accumulator for their common dx.

q = x Wq,  k = x Wk,  v = x Wv:    dx = dq Wq^T + dk Wk^T + dv Wv^T,    dWi = x^T di.
The widths differ, as with grouped heads. Column tiles of the three outputs are numbered one after another, and a
program finds its weight by its number, so that the narrow outputs do not need launches that cannot fill the device. dx
never exists in three parts. An output without a cotangent drops out of dx's loops at compile time; its dW is zeros.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "linear_multi_head_out",
    "family": "matmul",
    "op": "qkv_linear",
    "schema": 1,
    "techniques": ("head-reduction", "one-launch", "owner-grid", "optional-cotangent", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "wq", "wk", "wv"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _one_output(X, W, Y, m, column, M, D, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    y = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        x = tl.load(X + m[:, None] * D + d[None, :], mask=(m[:, None] < M) & (d[None, :] < D), other=0.0)
        w = tl.load(W + d[:, None] * N + n[None, :], mask=(d[:, None] < D) & (n[None, :] < N), other=0.0)
        y = tl.dot(x, w, y)
    tl.store(Y + m[:, None] * N + n[None, :], y, mask=(m[:, None] < M) & (n[None, :] < N))


@triton.jit
def _qkv_fwd(
    X, WQ, WK, WV, Q, K, V, M, D, NQ, NK, NV, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):
    m = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(0)
    to_k = tl.cdiv(NQ, BLOCK_N)
    to_v = to_k + tl.cdiv(NK, BLOCK_N)
    if column < to_k:
        _one_output(X, WQ, Q, m, column, M, D, NQ, BLOCK_M, BLOCK_N, BLOCK_D)
    elif column < to_v:
        _one_output(X, WK, K, m, column - to_k, M, D, NK, BLOCK_M, BLOCK_N, BLOCK_D)
    else:
        _one_output(X, WV, V, m, column - to_v, M, D, NV, BLOCK_M, BLOCK_N, BLOCK_D)


def _side(size, most=128):
    return max(16, min(most, triton.next_power_of_2(size)))


def forward(x, wq, wk, wv):
    x, wq, wk, wv = x.contiguous(), wq.contiguous(), wk.contiguous(), wv.contiguous()
    M, D = x.shape
    widths = [w.shape[1] for w in (wq, wk, wv)]
    q, k, v = (torch.empty(M, n, device=x.device, dtype=x.dtype) for n in widths)
    BM, BN = _side(M), _side(min(widths))
    _qkv_fwd[(sum(triton.cdiv(n, BN) for n in widths), triton.cdiv(M, BM))](
        x, wq, wk, wv, q, k, v, M, D, *widths,
        BLOCK_M=BM, BLOCK_N=BN, BLOCK_D=_side(D, 128 // x.element_size()), num_warps=8, num_stages=3,
    )  # fmt: skip
    return (q, k, v), (x, wq, wk, wv)


# --- backward ---
@triton.jit
def _add_output(dx, DY, W, m, d, M, D, N, dy_m, dy_n, BLOCK_N: tl.constexpr):
    """dx + dy W^T for rows m and features d."""
    n = tl.arange(0, BLOCK_N).to(tl.int64)
    dy_at = DY + m[:, None] * dy_m + n[None, :] * dy_n
    wt_at = W + d[None, :].to(tl.int64) * N + n[:, None]
    for left in range(N, 0, -BLOCK_N):
        dy = tl.load(dy_at, mask=(m[:, None] < M) & (n[None, :] < left), other=0.0)
        wt = tl.load(wt_at, mask=(d[None, :] < D) & (n[:, None] < left), other=0.0)
        dx = tl.dot(dy, wt, dx)
        dy_at += BLOCK_N * dy_n
        wt_at += BLOCK_N
    return dx


@triton.jit
def _qkv_dx(
    DQ, DK, DV, WQ, WK, WV, DX, M, D, NQ, NK, NV, q_m, q_n, k_m, k_n, v_m, v_n,
    HAS_Q: tl.constexpr, HAS_K: tl.constexpr, HAS_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    dx = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    if HAS_Q:
        dx = _add_output(dx, DQ, WQ, m, d, M, D, NQ, q_m, q_n, BLOCK_N)
    if HAS_K:
        dx = _add_output(dx, DK, WK, m, d, M, D, NK, k_m, k_n, BLOCK_N)
    if HAS_V:
        dx = _add_output(dx, DV, WV, m, d, M, D, NV, v_m, v_n, BLOCK_N)
    tl.store(DX + m[:, None] * D + d[None, :], dx, mask=(m[:, None] < M) & (d[None, :] < D))


@triton.jit
def _one_dw(
    X, DY, DW, d, column, M, D, N, dy_m, dy_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):
    n = (column * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    dw = tl.zeros((BLOCK_D, BLOCK_N), tl.float32)
    for start in range(0, M, BLOCK_M):
        m = (start + tl.arange(0, BLOCK_M)).to(tl.int64)
        xt = tl.load(X + m[None, :] * D + d[:, None], mask=(m[None, :] < M) & (d[:, None] < D), other=0.0)
        dy = tl.load(DY + m[:, None] * dy_m + n[None, :] * dy_n, mask=(m[:, None] < M) & (n[None, :] < N), other=0.0)
        dw = tl.dot(xt, dy, dw)
    tl.store(DW + d[:, None].to(tl.int64) * N + n[None, :], dw, mask=(d[:, None] < D) & (n[None, :] < N))


@triton.jit
def _qkv_dw(
    DQ, DK, DV, X, DWQ, DWK, DWV, M, D, NQ, NK, NV, q_m, q_n, k_m, k_n, v_m, v_n,
    HAS_Q: tl.constexpr, HAS_K: tl.constexpr, HAS_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    column = tl.program_id(0)
    to_k = tl.cdiv(NQ, BLOCK_N)
    to_v = to_k + tl.cdiv(NK, BLOCK_N)
    if column < to_k:
        if HAS_Q:
            _one_dw(X, DQ, DWQ, d, column, M, D, NQ, q_m, q_n, BLOCK_M, BLOCK_N, BLOCK_D)
    elif column < to_v:
        if HAS_K:
            _one_dw(X, DK, DWK, d, column - to_k, M, D, NK, k_m, k_n, BLOCK_M, BLOCK_N, BLOCK_D)
    else:
        if HAS_V:
            _one_dw(X, DV, DWV, d, column - to_v, M, D, NV, v_m, v_n, BLOCK_M, BLOCK_N, BLOCK_D)


def backward(saved, grad_q, grad_k, grad_v, needs=(True,) * 4):
    x, *weights = saved
    M, D = x.shape
    widths = [w.shape[1] for w in weights]
    grads = (grad_q, grad_k, grad_v)
    strides = [s for g in grads for s in (g.stride() if g is not None else (0, 0))]
    flags = {f"HAS_{name}": g is not None for name, g in zip("QKV", grads, strict=True)}
    BM, BN, BD, step = _side(M), _side(min(widths)), _side(D), 128 // x.element_size()
    dx, dws = None, (None, None, None)
    if needs[0]:
        dx = torch.empty_like(x)
        _qkv_dx[(triton.cdiv(D, BD), triton.cdiv(M, BM))](
            *grads, *weights, dx, M, D, *widths, *strides, **flags,
            BLOCK_M=BM, BLOCK_N=min(BN, step), BLOCK_D=BD, num_warps=8, num_stages=3,
        )  # fmt: skip
    if any(needs[1:]):
        dws = [torch.zeros_like(w) if g is None else torch.empty_like(w) for w, g in zip(weights, grads, strict=True)]
        _qkv_dw[(sum(triton.cdiv(n, BN) for n in widths), triton.cdiv(D, BD))](
            *grads, x, *dws, M, D, *widths, *strides, **flags,
            BLOCK_M=min(BM, step), BLOCK_N=BN, BLOCK_D=BD, num_warps=8, num_stages=3,
        )  # fmt: skip
    return dx, *dws


# --- check ---
SWEEP = (
    {"M": 64, "D": 48, "NQ": 64, "NKV": 16},
    {"M": 75, "D": 41, "NQ": 70, "NKV": 29},
    {"M": 40, "D": 136, "NQ": 40, "NKV": 20, "dtype": "bfloat16"},
    {"M": 33, "D": 20, "NQ": 36, "NKV": 18, "dtype": "float16"},
)
BENCH = ({"M": 8192, "D": 2048, "NQ": 2048, "NKV": 512, "dtype": "bfloat16"},)


def make_args(M, D, NQ, NKV, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(M, D, generator=g)]
    tensors += [torch.randn(D, n, generator=g) * D**-0.5 for n in (NQ, NKV, NKV)]
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors)


def reference(x, wq, wk, wv):
    return x @ wq, x @ wk, x @ wv
