"""Log of the cumulative sum of exponentials: a scan from the right with factors below one keeps the adjoint stable.

    dx[n] = exp(x[n] - y[n]) s[n],    s[n] = dy[n] + exp(y[n] - y[n + 1]) s[n + 1]

y never falls along a row, so every exponential is of a number at most zero. The textbook form, exp(x) times a reversed
sum of dy exp(-y), overflows as soon as a row spans more than fp32's range.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "logcumsumexp_rows",
    "family": "reduction_stat",
    "op": "logcumsumexp",
    "schema": 1,
    "techniques": ("reverse-scan", "chunked", "saved-lse", "multi-row-tile", "strided-cotangent"),
    "saves": ("lse: fp32 (M, N)",),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _add_exponentials(top1, total1, top2, total2):
    # A sum of exponentials as its largest exponent and the sum relative to it.
    top = tl.maximum(top1, top2)
    return top, total1 * tl.exp(top1 - top) + total2 * tl.exp(top2 - top)


@triton.jit
def _logcumsumexp_fwd(
    X, Y, LSE, M, N, SEPARATE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    lane = tl.arange(0, BLOCK_N)[None, :]
    so_far = tl.full((BLOCK_M,), -1.0e30, tl.float32)
    for start in range(0, N, BLOCK_N):
        n = start + lane
        ok = (m < M) & (n < N)
        x = tl.load(X + m * N + n, mask=ok, other=-1.0e30).to(tl.float32)
        top, total = tl.associative_scan((x, tl.full((BLOCK_M, BLOCK_N), 1.0, tl.float32)), 1, _add_exponentials)
        high = tl.maximum(top, so_far[:, None])
        lse = high + tl.log(total * tl.exp(top - high) + tl.exp(so_far[:, None] - high))
        tl.store(LSE + m * N + n, lse, mask=ok)
        if SEPARATE:
            tl.store(Y + m * N + n, lse, mask=ok)
        so_far = tl.max(lse, 1)


def _tile(N):
    BLOCK_N = max(16, min(1024, triton.next_power_of_2(N)))
    return 1024 // BLOCK_N, BLOCK_N


def forward(x):
    x = x.contiguous()
    M, N = x.shape
    # The backward takes exponentials of differences of y: it needs them in fp32, which for fp32 rows is y itself.
    lse = torch.empty(M, N, device=x.device, dtype=torch.float32)
    separate = x.dtype != torch.float32
    y = torch.empty_like(x) if separate else lse
    BLOCK_M, BLOCK_N = _tile(N)
    _logcumsumexp_fwd[(triton.cdiv(M, BLOCK_M),)](
        x, y, lse, M, N, SEPARATE=separate, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=4
    )
    return y, (x, lse)


# --- backward ---
@triton.jit
def _then(factor1, term1, factor2, term2):
    # First step 1, then step 2, of s -> factor s + term.
    return factor2 * factor1, factor2 * term1 + term2


@triton.jit
def _logcumsumexp_bwd(DY, X, LSE, DX, M, N, dy_m, dy_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    first = (tl.arange(0, BLOCK_N) == 0)[None, :]
    carry = tl.zeros((BLOCK_M,), tl.float32)
    behind = tl.full((BLOCK_M,), float("inf"), tl.float32)
    for start in tl.range((N - 1) // BLOCK_N * BLOCK_N, -1, -BLOCK_N, num_stages=2):
        n = start + tl.arange(0, BLOCK_N)[None, :]
        ok = (m < M) & (n < N)
        at = m * N + n
        lse = tl.load(LSE + at, mask=ok, other=0.0)
        # Behind the end of the row the factor is exp(-inf) = 0.
        following = tl.load(LSE + at + 1, mask=(m < M) & (n + 1 < N), other=float("inf"))
        dy = tl.load(DY + m * dy_m + n.to(tl.int64) * dy_n, mask=ok, other=0.0).to(tl.float32)
        _, s = tl.associative_scan((tl.exp(lse - following), dy), 1, _then, reverse=True)
        s += tl.exp(lse - behind[:, None]) * carry[:, None]
        x = tl.load(X + at, mask=ok, other=0.0).to(tl.float32)
        tl.store(DX + at, tl.exp(x - lse) * s, mask=ok)
        carry = tl.sum(tl.where(first, s, 0.0), 1)
        behind = tl.sum(tl.where(first, lse, 0.0), 1)


def backward(saved, grad_y, needs=None):
    x, lse = saved
    M, N = x.shape
    dx = torch.empty_like(x)
    # A product of n factors is off by what n exponentials are: few columns, and one exponential to those behind.
    BLOCK_N = max(16, min(256, triton.next_power_of_2(N)))
    BLOCK_M = 1024 // BLOCK_N
    _logcumsumexp_bwd[(triton.cdiv(M, BLOCK_M),)](
        grad_y, x, lse, dx, M, N, *grad_y.stride(), BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=4
    )
    return dx


# --- check ---
SWEEP = ({"M": 9, "N": 128}, {"M": 3, "N": 2051}, {"M": 11, "N": 40, "dtype": "bfloat16"})
BENCH = ({"M": 16384, "N": 4096, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return ((3.0 * torch.randn(M, N, generator=g)).to(device=device, dtype=getattr(torch, dtype)),)


def reference(x):
    return x.float().logcumsumexp(-1).to(x.dtype)
