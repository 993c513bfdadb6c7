"""Nearest code of a VQ-VAE with its two losses: indices are saved sorted, and each code sums the rows that chose it.

z = e[index] passes its gradient straight to x. loss = mean((sg(x) - e)^2) + beta mean((x - sg(e))^2) over all elements
pulls x to its code and the code to its rows: dx = dz + beta s (x - e), de_k = s sum over its rows of (e_k - x_n) with
s = 2 dloss / (N D). The forward sorts the indices once, so that a program of the backward owns a code and the run of
rows that chose it: no atomics, and a code that nobody chose costs a store of zeros.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "vq_codebook_lookup",
    "family": "quant",
    "op": "vector_quantize",
    "schema": 1,
    "techniques": ("straight-through", "sorted-segments", "owner-grid", "strided-cotangent", "optional-cotangent"),
    "saves": ("index: int32 (N)", "order: i64 (N)", "starts: i64 (K + 1)"),
    "grads": ("x", "codebook"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "nondiff_outputs": (2,),
    "gradient": "custom",
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _half_norms(E, Half, K, D, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr):
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    d = tl.arange(0, BLOCK_D)
    e = tl.load(E + k[:, None] * D + d[None, :], mask=(k[:, None] < K) & (d[None, :] < D), other=0.0).to(tl.float32)
    tl.store(Half + k, 0.5 * tl.sum(e * e, 1), mask=k < K)


@triton.jit
def _nearest(X, E, Half, Z, Index, Parts, N, K, D, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr):
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    mask = (n[:, None] < N) & (d[None, :] < D)
    x = tl.load(X + n[:, None] * D + d[None, :], mask=mask, other=0.0)
    best = tl.full((BLOCK_N,), float("inf"), tl.float32)
    index = tl.zeros((BLOCK_N,), tl.int32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        e = tl.load(E + k[:, None] * D + d[None, :], mask=(k[:, None] < K) & (d[None, :] < D), other=0.0)
        # |x - e|^2 / 2 less |x|^2 / 2, which all codes share. Which code is nearest must not hang on tf32.
        distance = tl.load(Half + k, mask=k < K, other=float("inf"))[None, :]
        distance -= tl.dot(x, tl.trans(e), input_precision="tf32x3")
        low, at = tl.min(distance, 1, return_indices=True)
        index = tl.where(low < best, start + at, index)
        best = tl.minimum(low, best)
    z = tl.load(E + index[:, None].to(tl.int64) * D + d[None, :], mask=mask, other=0.0)
    tl.store(Z + n[:, None] * D + d[None, :], z, mask=mask)
    tl.store(Index + n, index, mask=n < N)
    off = x.to(tl.float32) - z.to(tl.float32)
    tl.store(Parts + tl.program_id(0), tl.sum(off * off))


def forward(x, codebook, beta=0.25):
    x, codebook = x.contiguous(), codebook.contiguous()
    (N, D), K = x.shape, codebook.shape[0]
    BLOCK_D = max(16, triton.next_power_of_2(D))
    BLOCK_N, BLOCK_K = (64 if N >= 4096 else 16), (64 if K >= 256 else 16)
    z = torch.empty_like(x)
    index = torch.empty(N, device=x.device, dtype=torch.int32)
    half = torch.empty(K, device=x.device, dtype=torch.float32)
    parts = torch.empty(triton.cdiv(N, BLOCK_N), device=x.device, dtype=torch.float32)
    _half_norms[(triton.cdiv(K, 16),)](codebook, half, K, D, BLOCK_K=16, BLOCK_D=BLOCK_D)
    _nearest[(triton.cdiv(N, BLOCK_N),)](
        x, codebook, half, z, index, parts, N, K, D, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, BLOCK_D=BLOCK_D, num_warps=4
    )
    loss = parts.sum() * ((1.0 + beta) / x.numel())
    chosen, order = torch.sort(index)
    starts = torch.searchsorted(chosen, torch.arange(K + 1, device=x.device, dtype=torch.int32))
    return (z, loss, index), (x, codebook, index, order, starts, beta)


# --- backward ---
@triton.jit
def _vq_dx(
    DZ, DLoss, X, E, Index, DX, N, D, factor, dz_n, dz_d,
    HAS_DZ: tl.constexpr, HAS_DLOSS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    mask = (n[:, None] < N) & (d[None, :] < D)
    dx = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    if HAS_DZ:
        dx += tl.load(DZ + n[:, None] * dz_n + d[None, :] * dz_d, mask=mask, other=0.0).to(tl.float32)
    if HAS_DLOSS:
        k = tl.load(Index + n, mask=n < N, other=0).to(tl.int64)
        x = tl.load(X + n[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
        e = tl.load(E + k[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
        dx += tl.load(DLoss) * factor * (x - e)
    tl.store(DX + n[:, None] * D + d[None, :], dx, mask=mask)


@triton.jit
def _vq_dcode(DLoss, X, E, Order, Starts, DE, D, factor, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    k = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    e = tl.load(E + k * D + d, mask=d < D, other=0.0).to(tl.float32)
    last = tl.load(Starts + k + 1)
    apart = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for first in tl.range(tl.load(Starts + k), last, BLOCK_N, num_stages=2):
        at = first + tl.arange(0, BLOCK_N)
        n = tl.load(Order + at, mask=at < last, other=0)
        mask = (at[:, None] < last) & (d[None, :] < D)
        x = tl.load(X + n[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
        # Differences are summed, not rows: the sum of many rows less a multiple of the code would cancel.
        apart += tl.where(mask, e[None, :] - x, 0.0)
    tl.store(DE + k * D + d, tl.load(DLoss) * factor * tl.sum(apart, 0), mask=d < D)


def backward(saved, grad_z, grad_loss, grad_index, needs=None):
    x, codebook, index, order, starts, beta = saved
    need_x, need_codebook = needs or (True, True)
    (N, D), K = x.shape, codebook.shape[0]
    BLOCK_D = max(16, triton.next_power_of_2(D))
    dx = dcodebook = None
    if need_x:
        dx = torch.empty_like(x)
        BLOCK_N = max(1, 2048 // BLOCK_D)
        dz = x if grad_z is None else grad_z
        _vq_dx[(triton.cdiv(N, BLOCK_N),)](
            dz, grad_loss, x, codebook, index, dx, N, D, 2.0 * beta / x.numel(), *dz.stride(),
            HAS_DZ=grad_z is not None, HAS_DLOSS=grad_loss is not None, BLOCK_N=BLOCK_N, BLOCK_D=BLOCK_D, num_warps=4,
        )  # fmt: skip
    if need_codebook:
        # A loss without a cotangent leaves nothing for the codes; otherwise every code's owner writes its row.
        dcodebook = torch.zeros_like(codebook) if grad_loss is None else torch.empty_like(codebook)
        if grad_loss is not None:
            _vq_dcode[(K,)](
                grad_loss, x, codebook, order, starts, dcodebook, D, 2.0 / x.numel(),
                BLOCK_N=max(1, 2048 // BLOCK_D), BLOCK_D=BLOCK_D, num_warps=4,
            )  # fmt: skip
    return dx, dcodebook


# --- check ---
SWEEP = (
    {"N": 64, "K": 24, "D": 16},
    {"N": 45, "K": 37, "D": 20, "beta": 0.5},
    {"N": 40, "K": 16, "D": 32, "dtype": "float16"},
    {"N": 33, "K": 20, "D": 16, "dtype": "bfloat16"},
)
BENCH = ({"N": 262144, "K": 1024, "D": 64, "dtype": "float32"},)


def make_args(N, K, D, beta=0.25, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    codebook = torch.randn(K, D, generator=g)
    # Rows lie around codes, as after training: which one is nearest does not hang on rounding.
    x = codebook[torch.randint(0, K, (N,), generator=g)] + 0.3 * torch.randn(N, D, generator=g)
    return *(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, codebook)), beta


def reference(x, codebook, beta=0.25):
    # Distances in fp32: rounded to 16 bits they would name other codes than the kernel's accumulators do.
    xf, ef = x.float(), codebook.float()
    with torch.no_grad():
        index = (0.5 * ef.square().sum(1) - xf @ ef.T).argmin(1).int()
    z = torch.nn.functional.embedding(index, ef)
    loss = (xf.detach() - z).square().mean() + beta * (xf - z.detach()).square().mean()
    return (xf + (z - xf).detach()).to(x.dtype), loss, index


def surrogate(x, codebook, beta=0.25):
    with torch.no_grad():
        index = (0.5 * codebook.square().sum(1) - x @ codebook.T).argmin(1).int()
    z = torch.nn.functional.embedding(index, codebook)
    loss = (x.detach() - z).square().mean() + beta * (x - z.detach()).square().mean()
    return x + (z - x).detach(), loss, index
