"""LayerNorm that feeds two affine branches: cotangents meet before the projection, which is then taken once.

y1 = xh w1 + b1 for the attention and y2 = xh w2 + b2 for the MLP of a parallel block, xh = (x - mean) rstd being one.
With g = w1 dy1 + w2 dy2 the row gradient is rstd (g - mean(g) - xh mean(g xh)): two sums per row however many branches
there are. The four gradients of weights and biases are column sums of dy and dy xh per branch. A program walks a band
of rows, several to a tile where they are short, keeps them lane by lane and leaves one row of partial sums of each. A
branch without cotangent costs nothing.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "layernorm_two_outputs",
    "family": "norm_fused",
    "op": "layer_norm_parallel",
    "schema": 1,
    "techniques": (
        "two-stage-partials", "saved-statistics", "multi-row-tile", "optional-cotangent", "strided-cotangent",
    ),
    "saves": ("stats: fp32 (M, 2)",),
    "grads": ("x", "w1", "b1", "w2", "b2"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}  # fmt: skip


# --- forward ---
@triton.jit
def _vector(V, c, N):
    return tl.load(V + c, mask=c < N, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _two_affine_fwd(X, W1, B1, W2, B2, Y1, Y2, Stats, M, N, eps, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    m = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    c = tl.arange(0, BLOCK_N)
    mask = (m < M) & (c[None, :] < N)
    at = m * N + c[None, :]
    x = tl.load(X + at, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(x, 1, keep_dims=True) / N
    centred = tl.where(mask, x - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, 1, keep_dims=True) / N + eps)
    tl.store(Stats + 2 * m, mean, mask=m < M)
    tl.store(Stats + 2 * m + 1, rstd, mask=m < M)
    xh = centred * rstd
    tl.store(Y1 + at, xh * _vector(W1, c, N) + _vector(B1, c, N), mask=mask)
    tl.store(Y2 + at, xh * _vector(W2, c, N) + _vector(B2, c, N), mask=mask)


def _blocks(N):
    """Rows of a tile, its width, warps: eight elements a lane."""
    BLOCK_N = triton.next_power_of_2(N)
    BLOCK_M = max(1, 1024 // BLOCK_N)
    return BLOCK_M, BLOCK_N, max(2, min(16, BLOCK_M * BLOCK_N // 256))


def forward(x, w1, b1, w2, b2, eps=1e-5):
    x = x.contiguous()
    M, N = x.shape
    y1, y2 = torch.empty_like(x), torch.empty_like(x)
    stats = torch.empty(M, 2, device=x.device, dtype=torch.float32)
    BLOCK_M, BLOCK_N, warps = _blocks(N)
    _two_affine_fwd[(triton.cdiv(M, BLOCK_M),)](
        x, w1, b1, w2, b2, y1, y2, stats, M, N, eps, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=warps
    )
    return (y1, y2), (x, w1, w2, stats)


# --- backward ---
@triton.jit
def _pairwise_sum(a0, b0, a1, b1):
    return a0 + a1, b0 + b1


@triton.jit
def _two_affine_bwd(
    DY1, DY2, X, W1, W2, Stats, DX, Parts, M, N, band, s1_m, s1_n, s2_m, s2_n,
    HAS1: tl.constexpr, HAS2: tl.constexpr, STAGES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    c = tl.arange(0, BLOCK_N)
    w1 = _vector(W1, c, N)
    w2 = _vector(W2, c, N)
    first = tl.program_id(0).to(tl.int64) * band
    last = tl.minimum(first + band, M)
    dw1 = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    db1 = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    dw2 = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    db2 = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # Few programs fit beside four rows of sums: two tiles ahead are on their way to shared memory.
    for start in tl.range(first, last, BLOCK_M, num_stages=STAGES):
        m = (start + tl.arange(0, BLOCK_M))[:, None]
        mask = (m < last) & (c[None, :] < N)
        x = tl.load(X + m * N + c[None, :], mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(Stats + 2 * m, mask=m < last, other=0.0)
        rstd = tl.load(Stats + 2 * m + 1, mask=m < last, other=0.0)
        xh = tl.where(mask, (x - mean) * rstd, 0.0)
        g = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if HAS1:
            dy = tl.load(DY1 + m * s1_m + c[None, :] * s1_n, mask=mask, other=0.0).to(tl.float32)
            g += w1 * dy
            dw1 += dy * xh
            db1 += dy
        if HAS2:
            dy = tl.load(DY2 + m * s2_m + c[None, :] * s2_n, mask=mask, other=0.0).to(tl.float32)
            g += w2 * dy
            dw2 += dy * xh
            db2 += dy
        shift, slope = tl.reduce((g, g * xh), 1, _pairwise_sum, keep_dims=True)
        tl.store(DX + m * N + c[None, :], rstd * (g - shift / N - xh * (slope / N)), mask=mask)
    out = Parts + tl.program_id(0).to(tl.int64) * 4 * N + c
    tl.store(out, tl.sum(dw1, 0), mask=c < N)
    tl.store(out + N, tl.sum(db1, 0), mask=c < N)
    tl.store(out + 2 * N, tl.sum(dw2, 0), mask=c < N)
    tl.store(out + 3 * N, tl.sum(db2, 0), mask=c < N)


def backward(saved, grad_y1, grad_y2, needs=None):
    x, w1, w2, stats = saved
    M, N = x.shape
    dx = torch.empty_like(x)
    BLOCK_M, BLOCK_N, warps = _blocks(N)
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 4
    # As many programs as are resident at once with some 100 registers a lane.
    programs = max(1, min(triton.cdiv(M, 2 * BLOCK_M), processors * max(1, 16 // warps)))
    band = triton.cdiv(M, programs)
    programs = triton.cdiv(M, band)
    parts = torch.empty(programs, 4, N, device=x.device, dtype=torch.float32)
    dy1, dy2 = (x if dy is None else dy for dy in (grad_y1, grad_y2))
    _two_affine_bwd[(programs,)](
        dy1, dy2, x, w1, w2, stats, dx, parts, M, N, band, *dy1.stride(), *dy2.stride(),
        HAS1=grad_y1 is not None, HAS2=grad_y2 is not None,
        STAGES=3 if BLOCK_M * BLOCK_N * x.element_size() <= 16384 else 1,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=warps,
    )  # fmt: skip
    totals = parts.sum(0).to(w1.dtype)
    return dx, totals[0], totals[1], totals[2], totals[3]


# --- check ---
SWEEP = (
    {"M": 13, "N": 64},
    {"M": 37, "N": 91, "dtype": "float16"},
    {"M": 12, "N": 192, "dtype": "bfloat16"},
)
BENCH = ({"M": 16384, "N": 2048, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = (torch.randn(M, N, generator=g), *torch.randn(4, N, generator=g))
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors)


def reference(x, w1, b1, w2, b2, eps=1e-5):
    normed = torch.nn.functional.layer_norm(x.float(), (x.shape[1],), eps=eps)
    return (normed * w1 + b1).to(x.dtype), (normed * w2 + b2).to(x.dtype)
