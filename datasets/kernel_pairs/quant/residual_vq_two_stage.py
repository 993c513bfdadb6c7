"""Two-stage residual quantisation: residuals are formed again from the input, one launch scatters to both codebooks.

r1 = x - e1[i1] is quantised again, z = e1[i1] + e2[i2] passes its gradient straight to x. Each stage has the loss
mean((sg(r) - e)^2) + beta mean((r - sg(e))^2) with r = x and r = x - sg(e1). With a = x - e1, b = a - e2 and s =
2 dloss / (N D): dx = dz + beta s (a + b), de1 = -s sum of a, de2 = -s sum of b over the rows that chose the code. A
program owns a tile of rows: it reads x once, gathers both codes, stores dx and adds -s a and -s b to the codes by
atomics, which needs neither sorting nor a second read of x.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "residual_vq_two_stage",
    "family": "quant",
    "op": "residual_vector_quantize",
    "schema": 1,
    "techniques": ("straight-through", "recompute", "atomics", "one-launch", "strided-cotangent", "optional-cotangent"),
    "saves": ("indices: int32 (2, N)",),
    "grads": ("x", "first", "second"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "nondiff_outputs": (2,),
    "gradient": "custom",
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _half_squares(E, Half, K, D, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr):
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    d = tl.arange(0, BLOCK_D)
    e = tl.load(E + k[:, None] * D + d[None, :], mask=(k[:, None] < K) & (d[None, :] < D), other=0.0).to(tl.float32)
    tl.store(Half + k, 0.5 * tl.sum(e * e, 1), mask=k < K)


@triton.jit
def _choose(residual, E, Half, K, D, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr):
    """Number of the nearest code for every row of a tile in registers, and the codes themselves."""
    d = tl.arange(0, BLOCK_D)
    best = tl.full((BLOCK_N,), float("inf"), tl.float32)
    index = tl.zeros((BLOCK_N,), tl.int32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        e = tl.load(E + k[:, None] * D + d[None, :], mask=(k[:, None] < K) & (d[None, :] < D), other=0.0)
        # Residuals are fp32 whatever x is: so are the products that choose.
        product = tl.dot(residual, tl.trans(e.to(tl.float32)), input_precision="tf32x3")
        distance = tl.load(Half + k, mask=k < K, other=float("inf"))[None, :] - product
        low, at = tl.min(distance, 1, return_indices=True)
        index = tl.where(low < best, start + at, index)
        best = tl.minimum(low, best)
    code = tl.load(E + index[:, None].to(tl.int64) * D + d[None, :], mask=d[None, :] < D, other=0.0)
    return index, code.to(tl.float32)


@triton.jit
def _rvq_fwd(
    X, E1, E2, Half, Z, Indices, Parts, N, K1, K2, D,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    mask = (n[:, None] < N) & (d[None, :] < D)
    x = tl.load(X + n[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
    i1, e1 = _choose(x, E1, Half, K1, D, BLOCK_N, BLOCK_K, BLOCK_D)
    i2, e2 = _choose(x - e1, E2, Half + K1, K2, D, BLOCK_N, BLOCK_K, BLOCK_D)
    tl.store(Z + n[:, None] * D + d[None, :], e1 + e2, mask=mask)
    tl.store(Indices + n, i1, mask=n < N)
    tl.store(Indices + N + n, i2, mask=n < N)
    a = tl.where(mask, x - e1, 0.0)
    b = tl.where(mask, a - e2, 0.0)
    tl.store(Parts + tl.program_id(0), tl.sum(a * a + b * b))


def forward(x, first, second, beta=0.25):
    x, first, second = x.contiguous(), first.contiguous(), second.contiguous()
    (N, D), K1, K2 = x.shape, first.shape[0], second.shape[0]
    BLOCK_D = max(16, triton.next_power_of_2(D))
    BLOCK_N, BLOCK_K = (64, 32) if N >= 4096 else (16, 16)
    z = torch.empty_like(x)
    indices = torch.empty(2, N, device=x.device, dtype=torch.int32)
    half = torch.empty(K1 + K2, device=x.device, dtype=torch.float32)
    parts = torch.empty(triton.cdiv(N, BLOCK_N), device=x.device, dtype=torch.float32)
    _half_squares[(triton.cdiv(K1, 16),)](first, half, K1, D, BLOCK_K=16, BLOCK_D=BLOCK_D)
    _half_squares[(triton.cdiv(K2, 16),)](second, half[K1:], K2, D, BLOCK_K=16, BLOCK_D=BLOCK_D)
    _rvq_fwd[(triton.cdiv(N, BLOCK_N),)](
        x, first, second, half, z, indices, parts, N, K1, K2, D,
        BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, BLOCK_D=BLOCK_D, num_warps=4,
    )  # fmt: skip
    return (z, parts.sum() * ((1.0 + beta) / x.numel()), indices), (x, first, second, indices, beta)


# --- backward ---
@triton.jit
def _rvq_bwd(
    DZ, DLoss, X, E1, E2, Indices, DX, DE1, DE2, N, D, pull, beta, dz_n, dz_d,
    HAS_DZ: tl.constexpr, HAS_DLOSS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    mask = (n[:, None] < N) & (d[None, :] < D)
    dx = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    if HAS_DZ:
        dx += tl.load(DZ + n[:, None] * dz_n + d[None, :] * dz_d, mask=mask, other=0.0).to(tl.float32)
    if HAS_DLOSS:
        s = tl.load(DLoss) * pull
        at1 = tl.load(Indices + n, mask=n < N, other=0).to(tl.int64)[:, None] * D + d[None, :]
        at2 = tl.load(Indices + N + n, mask=n < N, other=0).to(tl.int64)[:, None] * D + d[None, :]
        x = tl.load(X + n[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
        a = x - tl.load(E1 + at1, mask=mask, other=0.0).to(tl.float32)
        b = a - tl.load(E2 + at2, mask=mask, other=0.0).to(tl.float32)
        dx += beta * s * (a + b)
        tl.atomic_add(DE1 + at1, -s * a, mask=mask, sem="relaxed")
        tl.atomic_add(DE2 + at2, -s * b, mask=mask, sem="relaxed")
    tl.store(DX + n[:, None] * D + d[None, :], dx, mask=mask)


def backward(saved, grad_z, grad_loss, grad_indices, needs=None):
    x, first, second, indices, beta = saved
    N, D = x.shape
    dx = torch.empty_like(x)
    # Hundreds of rows share a code: their sums are kept in fp32.
    dfirst = torch.zeros(first.shape, device=x.device, dtype=torch.float32)
    dsecond = torch.zeros(second.shape, device=x.device, dtype=torch.float32)
    BLOCK_D = triton.next_power_of_2(D)
    BLOCK_N = max(1, 1024 // BLOCK_D)
    dz = x if grad_z is None else grad_z
    _rvq_bwd[(triton.cdiv(N, BLOCK_N),)](
        dz, grad_loss, x, first, second, indices, dx, dfirst, dsecond, N, D, 2.0 / x.numel(), beta, *dz.stride(),
        HAS_DZ=grad_z is not None, HAS_DLOSS=grad_loss is not None, BLOCK_N=BLOCK_N, BLOCK_D=BLOCK_D, num_warps=4,
    )  # fmt: skip
    return dx, dfirst.to(first.dtype), dsecond.to(second.dtype)


# --- check ---
SWEEP = (
    {"N": 48, "K": 24, "D": 16},
    {"N": 45, "K": 37, "D": 20, "beta": 0.5, "dtype": "float16"},
    {"N": 33, "K": 20, "D": 32, "dtype": "bfloat16"},
)
BENCH = ({"N": 131072, "K": 1024, "D": 64, "dtype": "float32"},)


def make_args(N, K, D, beta=0.25, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    # Rows lie around sums of codes, as after training, the second ones small: rounding chooses no code.
    first, second = torch.randn(K, D, generator=g), 0.3 * torch.randn(K + 3, D, generator=g)
    x = first[torch.randint(0, K, (N,), generator=g)] + second[torch.randint(0, K + 3, (N,), generator=g)]
    x = x + 0.1 * torch.randn(N, D, generator=g)
    return *(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, first, second)), beta


def _stage(residual, codes, beta):
    with torch.no_grad():
        index = (0.5 * codes.square().sum(1) - residual @ codes.T).argmin(1).int()
    code = torch.nn.functional.embedding(index, codes)
    loss = (residual.detach() - code).square().mean() + beta * (residual - code.detach()).square().mean()
    return index, code, loss


def surrogate(x, first, second, beta=0.25):
    i1, e1, loss1 = _stage(x, first, beta)
    i2, e2, loss2 = _stage(x - e1.detach(), second, beta)
    return x + (e1 + e2 - x).detach(), loss1 + loss2, torch.stack((i1, i2))


def reference(x, first, second, beta=0.25):
    # Distances in fp32: rounded to 16 bits they would name other codes than the kernel does.
    z, loss, indices = surrogate(x.float(), first.float(), second.float(), beta)
    return z.to(x.dtype), loss, indices
