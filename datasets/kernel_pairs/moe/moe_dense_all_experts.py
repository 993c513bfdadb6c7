"""Soft mixture of linear experts, y = sum over e of p[e] (x W[e]): the gate's gradient falls out of dx's products.

    dx = sum over e of p[e] t[e],  t[e] = dY W[e]^T,    dp[e] = <dY, x W[e]> = <t[e], x>,    dW[e] = x^T (p[e] dY).
The program of a tile of dx loops over the experts: a finished t[e] is multiplied by the tile of x for dp, summed along
its features and left as one partial per feature tile, then added to dx with its weight. x W[e] is not formed again. The
owner of a tile of dW[e] scales the rows of x by p[e] as it loads them.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "moe_dense_all_experts",
    "family": "moe",
    "op": "dense_mixture",
    "schema": 1,
    "techniques": ("epilogue-fusion", "prologue-fusion", "head-reduction", "two-stage-partials", "owner-grid"),
    "saves": (),
    "grads": ("x", "weight", "gate"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _mixture_fwd(X, W, Gate, Y, M, D, N, E, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    m = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    y = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for e in range(E):
        out = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, D, BLOCK_D):
            d = start + tl.arange(0, BLOCK_D)
            w_at = W + (e * D + d[:, None]).to(tl.int64) * N + n[None, :]
            x = tl.load(X + m[:, None] * D + d[None, :], mask=(m[:, None] < M) & (d[None, :] < D), other=0.0)
            w = tl.load(w_at, mask=(d[:, None] < D) & (n[None, :] < N), other=0.0)
            out = tl.dot(x, w, out)
        p = tl.load(Gate + m * E + e, mask=m < M, other=0.0)
        y += p[:, None] * out
    tl.store(Y + m[:, None] * N + n[None, :], y, mask=(m[:, None] < M) & (n[None, :] < N))


def _side(size, most=128):
    return max(16, min(most, triton.next_power_of_2(size)))


def forward(x, weight, gate):
    x, weight, gate = x.contiguous(), weight.contiguous(), gate.contiguous()
    M, (E, D, N) = x.shape[0], weight.shape
    y = torch.empty(M, N, device=x.device, dtype=x.dtype)
    # Two accumulators, the expert's and the sum's: tiles are half as wide.
    BM, BN = _side(M), _side(N, 64)
    _mixture_fwd[(triton.cdiv(N, BN), triton.cdiv(M, BM))](
        x, weight, gate, y, M, D, N, E,
        BLOCK_M=BM, BLOCK_N=BN, BLOCK_D=_side(D, 128 // x.element_size()), num_warps=8, num_stages=3,
    )  # fmt: skip
    return y, (x, weight, gate)


# --- backward ---
@triton.jit
def _mixture_dx_dp(
    DY, X, W, Gate, DX, DPParts, M, D, N, E, dy_m, dy_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    at = m[:, None] * D + d[None, :]
    inside = (m[:, None] < M) & (d[None, :] < D)
    part = DPParts + (tl.program_id(0).to(tl.int64) * M + m) * E
    dx = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for e in range(E):
        t = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        for start in range(0, N, BLOCK_N):
            n = (start + tl.arange(0, BLOCK_N)).to(tl.int64)
            dy = tl.load(
                DY + m[:, None] * dy_m + n[None, :] * dy_n, mask=(m[:, None] < M) & (n[None, :] < N), other=0.0
            )
            w_at = W + (e * D + d[None, :]).to(tl.int64) * N + n[:, None]
            wt = tl.load(w_at, mask=(d[None, :] < D) & (n[:, None] < N), other=0.0)
            t = tl.dot(dy, wt, t)
        # x comes from the cache for every expert: a tile of it in registers would cost more than the loads.
        x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(part + e, tl.sum(t * x, 1), mask=m < M)
        dx += tl.load(Gate + m * E + e, mask=m < M, other=0.0)[:, None] * t
    tl.store(DX + at, dx, mask=inside)


@triton.jit
def _mixture_dw(
    DY, X, Gate, DW, M, D, N, E, dy_m, dy_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    e = tl.program_id(2).to(tl.int64)
    dw = tl.zeros((BLOCK_D, BLOCK_N), tl.float32)
    for start in range(0, M, BLOCK_M):
        m = (start + tl.arange(0, BLOCK_M)).to(tl.int64)
        p = tl.load(Gate + m * E + e, mask=m < M, other=0.0)
        xt = tl.load(X + m[None, :] * D + d[:, None], mask=(m[None, :] < M) & (d[:, None] < D), other=0.0)
        dy = tl.load(DY + m[:, None] * dy_m + n[None, :] * dy_n, mask=(m[:, None] < M) & (n[None, :] < N), other=0.0)
        dw = tl.dot((xt.to(tl.float32) * p[None, :]).to(dy.dtype), dy, dw)
    tl.store(DW + (e * D + d[:, None]) * N + n[None, :], dw, mask=(d[:, None] < D) & (n[None, :] < N))


def backward(saved, grad_y, needs=(True, True, True)):
    x, weight, gate = saved
    M, (E, D, N) = x.shape[0], weight.shape
    step = 128 // x.element_size()
    dx = dw = dp = None
    if needs[0] or needs[2]:
        BM, BD = _side(M), _side(D, 64)
        dx = torch.empty_like(x)
        parts = torch.empty(triton.cdiv(D, BD), M, E, device=x.device, dtype=torch.float32)
        _mixture_dx_dp[(triton.cdiv(D, BD), triton.cdiv(M, BM))](
            grad_y, x, weight, gate, dx, parts, M, D, N, E, *grad_y.stride(),
            BLOCK_M=BM, BLOCK_N=_side(N, step), BLOCK_D=BD, num_warps=8, num_stages=3,
        )  # fmt: skip
        dp = parts.sum(0).to(gate.dtype)
    if needs[1]:
        BN, BD = _side(N), _side(D)
        dw = torch.empty_like(weight)
        _mixture_dw[(triton.cdiv(N, BN), triton.cdiv(D, BD), E)](
            grad_y, x, gate, dw, M, D, N, E, *grad_y.stride(),
            BLOCK_M=_side(M, step), BLOCK_N=BN, BLOCK_D=BD, num_warps=8, num_stages=3,
        )  # fmt: skip
    return dx, dw, dp


# --- check ---
SWEEP = (
    {"M": 64, "D": 48, "N": 32, "E": 3},
    {"M": 75, "D": 41, "N": 70, "E": 2},
    {"M": 40, "D": 80, "N": 20, "E": 4, "dtype": "bfloat16"},
    {"M": 33, "D": 20, "N": 36, "E": 2, "dtype": "float16"},
)
BENCH = ({"M": 8192, "D": 1024, "N": 1024, "E": 8, "dtype": "bfloat16"},)


def make_args(M, D, N, E, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(M, D, generator=g), torch.randn(E, D, N, generator=g) * D**-0.5
    pair = (t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, weight))
    return *pair, torch.softmax(torch.randn(M, E, generator=g), -1).to(device)


def reference(x, weight, gate):
    return (gate.t()[..., None] * (x @ weight).float()).sum(0).to(x.dtype)
