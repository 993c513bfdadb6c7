"""LayerNorm over a short feature dim: the dx kernel sums its rows and adds them to dweight and dbias by fp32 atomics.

A program owns a tile of whole rows and adds 2 N sums for all of them, so the backward is one launch with a scratch of
2 N floats. Against rows of partial sums this saves the second kernel and its buffer. It costs a fixed order of addition
(the last bits differ from run to run) and queues at the same 2 N addresses, so it pays where N is short: one program
then stands for many rows, a share of a single wave of programs, and the atomics stay few beside the traffic of x.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "layernorm_atomic",
    "family": "norm_row",
    "op": "layer_norm",
    "schema": 1,
    "techniques": ("atomics", "one-launch", "multi-row-tile", "recompute", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "weight", "bias"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _row_stats(x, mask, N, eps):
    """Mean and 1/std of every row of a tile that is zero outside `mask`."""
    mean = tl.sum(x, 1) / N
    centred = tl.where(mask, x - mean[:, None], 0.0)
    return mean, tl.rsqrt(tl.sum(centred * centred, 1) / N + eps)


@triton.jit
def _ln_atomic_fwd(X, W, B, Y, M, N, eps, ROWS: tl.constexpr, BLOCK_N: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, BLOCK_N)
    mask = (m[:, None] < M) & (n[None, :] < N)
    x = tl.load(X + m[:, None] * N + n[None, :], mask=mask, other=0.0).to(tl.float32)
    w = tl.load(W + n, mask=n < N, other=0.0).to(tl.float32)
    b = tl.load(B + n, mask=n < N, other=0.0).to(tl.float32)
    mean, rstd = _row_stats(x, mask, N, eps)
    y = (x - mean[:, None]) * rstd[:, None] * w[None, :] + b[None, :]
    tl.store(Y + m[:, None] * N + n[None, :], y, mask=mask)


def _tile(N):
    """ROWS and BLOCK_N of a tile with 4096 elements: 32 for each thread of four warps."""
    block = triton.next_power_of_2(N)
    return {"ROWS": max(1, 4096 // block), "BLOCK_N": block, "num_warps": max(4, block // 1024)}


def forward(x, weight, bias, eps=1e-5):
    x = x.contiguous()
    M, N = x.shape
    y = torch.empty_like(x)
    tile = _tile(N)
    _ln_atomic_fwd[(triton.cdiv(M, tile["ROWS"]),)](x, weight, bias, y, M, N, eps, **tile)
    return y, (x, weight, eps)


# --- backward ---
@triton.jit
def _sum_two(a0, b0, a1, b1):
    return a0 + a1, b0 + b1


@triton.jit
def _ln_atomic_bwd(
    DY, X, W, DX, Sums, M, N, dy_m, dy_n, eps, tiles_each,
    WEIGHTS: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    n = tl.arange(0, BLOCK_N)
    w = tl.load(W + n, mask=n < N, other=0.0).to(tl.float32)
    dweight = tl.zeros((ROWS, BLOCK_N), tl.float32)
    dbias = tl.zeros((ROWS, BLOCK_N), tl.float32)
    # A row is one warp's: its sums are shuffles. The next two tiles are copied meanwhile.
    for tile in tl.range(tiles_each, num_stages=3):
        m = (tl.program_id(0).to(tl.int64) * tiles_each + tile) * ROWS + tl.arange(0, ROWS)
        mask = (m[:, None] < M) & (n[None, :] < N)
        x = tl.load(X + m[:, None] * N + n[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(DY + m[:, None] * dy_m + n[None, :] * dy_n, mask=mask, other=0.0).to(tl.float32)
        # The rows are in registers anyway: their statistics cost less than saving and fetching them.
        mean, rstd = _row_stats(x, mask, N, eps)
        xhat = (x - mean[:, None]) * rstd[:, None]
        dxhat = dy * w[None, :]
        shift, slope = tl.reduce((dxhat, dxhat * xhat), 1, _sum_two)
        dx = rstd[:, None] * (dxhat - (shift / N)[:, None] - xhat * (slope / N)[:, None])
        tl.store(DX + m[:, None] * N + n[None, :], dx, mask=mask)
        if WEIGHTS:
            # dy is zero outside the mask: rows past M add nothing. Lanes meet once, behind the loop.
            dweight += dy * xhat
            dbias += dy
    if WEIGHTS:
        # No order among the sums is needed: relaxed.
        tl.atomic_add(Sums + n, tl.sum(dweight, 0), mask=n < N, sem="relaxed")
        tl.atomic_add(Sums + N + n, tl.sum(dbias, 0), mask=n < N, sem="relaxed")


def backward(saved, grad_y, needs=None):
    x, weight, eps = saved
    M, N = x.shape
    weights = needs is None or needs[1] or needs[2]
    dx = torch.empty_like(x)
    # The sums stay fp32 whatever the weights are: bf16 atomics would round at every addition.
    sums = torch.zeros(2, N, device=x.device, dtype=torch.float32)
    block = triton.next_power_of_2(N)
    tile = {"ROWS": max(1, 2048 // block), "BLOCK_N": block, "num_warps": max(4, min(16, block // 512))}
    tiles = triton.cdiv(M, tile["ROWS"])
    # One wave: 512 threads for each of 132 processors, as the registers allow.
    each = max(2, triton.cdiv(tiles, 132 * max(1, 16 // tile["num_warps"])))
    _ln_atomic_bwd[(triton.cdiv(tiles, each),)](
        grad_y, x, weight, dx, sums, M, N, grad_y.stride(0), grad_y.stride(1), eps, each, WEIGHTS=weights, **tile
    )
    if not weights:
        return dx, None, None
    dweight, dbias = sums.to(weight.dtype)
    return dx, dweight, dbias


# --- check ---
SWEEP = ({"M": 80, "N": 64}, {"M": 101, "N": 75, "dtype": "float16"}, {"M": 96, "N": 48, "dtype": "bfloat16"})
BENCH = ({"M": 524288, "N": 256, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = (torch.randn(M, N, generator=g), torch.rand(N, generator=g) + 0.5, torch.randn(N, generator=g))
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors)


def reference(x, weight, bias, eps=1e-5):
    y = torch.nn.functional.layer_norm(x.float(), (x.shape[1],), weight.float(), bias.float(), eps)
    return y.to(x.dtype)
