"""Softmax of scores (R, H, J, K) plus two biases, one of (R, K) and one of (H, J, K): each gradient sums other axes.

A program owns some rows j of one head and walks R. The pair bias has the same rows for all of R: its gradient is a sum
in registers over the walk. The other bias has the same row for all heads and j: every step of the walk leaves its
column sums as a partial, which is smaller than dx by the number of rows owned, and one sum over programs ends it.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "softmax_pair_bias",
    "family": "softmax",
    "op": "softmax",
    "schema": 1,
    "techniques": ("broadcast-reduction", "two-stage-partials", "saved-output", "multi-row-tile", "strided-cotangent"),
    "saves": ("y: fp32 or bf16 or fp16 (R, H, J, K)",),
    "grads": ("scores", "key_bias", "pair_bias"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _pair_softmax_fwd(
    X, KeyBias, PairBias, Y, R, H, J, K, x_i, x_h, x_j, tiles, ROWS: tl.constexpr, BLOCK_K: tl.constexpr
):
    h = tl.program_id(0) // tiles
    j = ((tl.program_id(0) % tiles) * ROWS + tl.arange(0, ROWS))[:, None]
    k = tl.arange(0, BLOCK_K)[None, :]
    mask = (j < J) & (k < K)
    pair = tl.load(PairBias + (h * J + j) * K + k, mask=mask, other=0.0).to(tl.float32)
    for i in range(tl.program_id(1), R, tl.num_programs(1)):
        source = X + i.to(tl.int64) * x_i + h.to(tl.int64) * x_h + j.to(tl.int64) * x_j + k
        x = tl.load(source, mask=mask, other=0.0).to(tl.float32) + pair
        x += tl.load(KeyBias + i * K + k, mask=k < K, other=0.0).to(tl.float32)
        x = tl.where(k < K, x, -float("inf"))
        e = tl.exp(x - tl.max(x, 1, keep_dims=True))
        at = ((i.to(tl.int64) * H + h) * J + j) * K + k
        tl.store(Y + at, e / tl.sum(e, 1, keep_dims=True), mask=mask)


def _tile(J, K):
    """Rows and columns of a tile of at most 8192 elements: the more rows, the fewer partials of the key bias."""
    BLOCK_K = triton.next_power_of_2(K)
    return max(1, min(triton.next_power_of_2(J), 8192 // BLOCK_K)), BLOCK_K


def forward(scores, key_bias, pair_bias):
    scores = scores if scores.stride(3) == 1 else scores.contiguous()
    key_bias, pair_bias = key_bias.contiguous(), pair_bias.contiguous()
    R, H, J, K = scores.shape
    y = torch.empty(R, H, J, K, device=scores.device, dtype=scores.dtype)
    ROWS, BLOCK_K = _tile(J, K)
    tiles = triton.cdiv(J, ROWS)
    # Each program keeps its pair bias for several steps of R.
    _pair_softmax_fwd[(H * tiles, triton.cdiv(R, 4))](
        scores,
        key_bias,
        pair_bias,
        y,
        R,
        H,
        J,
        K,
        *scores.stride()[:3],
        tiles,
        ROWS=ROWS,
        BLOCK_K=BLOCK_K,
        num_warps=16,
    )
    return y, (y, key_bias.dtype, pair_bias.dtype)


# --- backward ---
@triton.jit
def _pair_softmax_bwd(
    DY, Y, DX, KeyParts, PairParts, R, H, J, K, dy_i, dy_h, dy_j, dy_k, tiles,
    ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    owner = tl.program_id(0)
    h = owner // tiles
    j = ((owner % tiles) * ROWS + tl.arange(0, ROWS))[:, None]
    k = tl.arange(0, BLOCK_K)
    mask = (j < J) & (k[None, :] < K)
    grad = DY + h.to(tl.int64) * dy_h + j.to(tl.int64) * dy_j + k[None, :].to(tl.int64) * dy_k
    pair = tl.zeros((ROWS, BLOCK_K), tl.float32)
    for i in range(tl.program_id(1), R, tl.num_programs(1)):
        at = ((i.to(tl.int64) * H + h) * J + j) * K + k[None, :]
        y = tl.load(Y + at, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(grad + i.to(tl.int64) * dy_i, mask=mask, other=0.0).to(tl.float32)
        dx = y * (dy - tl.sum(y * dy, 1, keep_dims=True))
        tl.store(DX + at, dx, mask=mask)
        tl.store(KeyParts + (owner.to(tl.int64) * R + i) * K + k, tl.sum(dx, 0), mask=k < K)
        pair += dx
    out = PairParts + ((tl.program_id(1).to(tl.int64) * H + h) * J + j) * K + k[None, :]
    tl.store(out, pair, mask=mask)


def backward(saved, grad_y, needs=None):
    y, key_dtype, pair_dtype = saved
    R, H, J, K = y.shape
    ROWS, BLOCK_K = _tile(J, K)
    tiles = triton.cdiv(J, ROWS)
    # A few walkers share R where rows alone are too few programs for 132 processors.
    walkers = max(1, min(R, 528 // (H * tiles)))
    dx = torch.empty_like(y)
    key_parts = torch.empty(H * tiles, R, K, device=y.device, dtype=torch.float32)
    pair_parts = torch.empty(walkers, H, J, K, device=y.device, dtype=torch.float32)
    _pair_softmax_bwd[(H * tiles, walkers)](
        grad_y, y, dx, key_parts, pair_parts, R, H, J, K, *grad_y.stride(), tiles,
        ROWS=ROWS, BLOCK_K=BLOCK_K, num_warps=16,
    )  # fmt: skip
    return dx, key_parts.sum(0).to(key_dtype), pair_parts.sum(0).to(pair_dtype)


# --- check ---
SWEEP = (
    {"R": 6, "H": 2, "J": 16, "K": 32, "dtype": "float16"},
    {"R": 5, "H": 3, "J": 9, "K": 45},
    {"R": 4, "H": 2, "J": 8, "K": 64, "dtype": "bfloat16"},
)
BENCH = ({"R": 384, "H": 4, "J": 384, "K": 384, "dtype": "bfloat16"},)


def make_args(R, H, J, K, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = (R, H, J, K), (R, K), (H, J, K)
    return tuple(torch.randn(shape, generator=g).to(device=device, dtype=getattr(torch, dtype)) for shape in shapes)


def reference(scores, key_bias, pair_bias):
    return torch.softmax(scores.float() + key_bias[:, None, None].float() + pair_bias.float(), -1).to(scores.dtype)
