"""Maxout over groups of up to sixteen neighbours: the winner's place is a nibble, eight of them make one saved word.

y[m, n] is the largest of x[m, n * K : (n + 1) * K]. The backward reads dy and half a byte for each output and writes dy
to the winner and zeros to the others, a dense store of whole groups; neither x nor y is needed.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "maxout_pairs",
    "family": "activation",
    "op": "maxout",
    "schema": 1,
    "techniques": ("argmax-routing", "packed-bits", "strided-cotangent"),
    "saves": ("winners: int32 (M, W)",),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _maxout_fwd(X, Y, Winners, N, words, x_row, K: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_K: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    nibble = tl.arange(0, 8)[None, :]
    n = w[:, None] * 8 + nibble
    k = tl.arange(0, BLOCK_K)[None, None, :]
    inside = (n[:, :, None] < N) & (k < K)
    x = tl.load(X + row * x_row + n[:, :, None] * K + k, mask=inside, other=-float("inf")).to(tl.float32)
    # Of equals the first wins, in the forward's value and so in the gradient.
    place = tl.argmax(x, 2, tie_break_left=True)
    y = tl.sum(tl.where(k == place[:, :, None], x, 0.0), 2)
    tl.store(Y + row * N + n, y, mask=n < N)
    tl.store(Winners + row * words + w, tl.sum(tl.where(n < N, place, 0) << (4 * nibble), 1), mask=w < words)


def _tile(N, K):
    """Words of a row, words of a tile of about 2048 elements, and the padded size of a group."""
    words, BLOCK_K = triton.cdiv(N, 8), triton.next_power_of_2(K)
    return words, max(1, min(triton.next_power_of_2(words), 256 // BLOCK_K)), BLOCK_K


def forward(x, K):
    if not 1 < K <= 16:
        raise ValueError(f"groups of {K}: a nibble tells 2 to 16 places apart")
    x = x if x.stride(1) == 1 else x.contiguous()
    M, N = x.shape[0], x.shape[1] // K
    words, BLOCK_W, BLOCK_K = _tile(N, K)
    y = torch.empty(M, N, device=x.device, dtype=x.dtype)
    winners = torch.empty(M, words, device=x.device, dtype=torch.int32)
    _maxout_fwd[(M, triton.cdiv(words, BLOCK_W))](
        x, y, winners, N, words, x.stride(0), K=K, BLOCK_W=BLOCK_W, BLOCK_K=BLOCK_K
    )
    return y, (winners, K)


# --- backward ---
@triton.jit
def _maxout_bwd(
    DY, Winners, DX, N, words, dy_row, dy_col, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)[None, :]
    # A lane owns whole groups: it fetches their word, which eight neighbours share, and writes them side by side.
    word = tl.load(Winners + row * words + n // 8, mask=n < N, other=0)
    # The shift is arithmetic; 15 cuts off the copies of the sign.
    place = (word >> (4 * (n % 8))) & 15
    dy = tl.load(DY + row * dy_row + n.to(tl.int64) * dy_col, mask=n < N, other=0.0)
    dx = tl.where(k == place[:, None], dy[:, None], 0.0)
    tl.store(DX + row * N * K + n[:, None] * K + k, dx, mask=(n[:, None] < N) & (k < K))


def backward(saved, grad_y, needs=None):
    winners, K = saved
    M, N = grad_y.shape
    words, _, BLOCK_K = _tile(N, K)
    BLOCK_N = min(8192 // BLOCK_K, triton.next_power_of_2(N))
    dx = torch.empty(M, N * K, device=grad_y.device, dtype=grad_y.dtype)
    _maxout_bwd[(M, triton.cdiv(N, BLOCK_N))](
        grad_y, winners, dx, N, words, *grad_y.stride(), K=K, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, num_warps=4
    )
    return dx


# --- check ---
SWEEP = (
    {"M": 6, "N": 64, "K": 4, "dtype": "float16"},
    {"M": 5, "N": 45, "K": 3},
    {"M": 3, "N": 32, "K": 16, "dtype": "bfloat16"},
)
BENCH = ({"M": 16384, "N": 2048, "K": 4, "dtype": "bfloat16"},)


def make_args(M, N, K, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(M, N * K, generator=g).to(device=device, dtype=getattr(torch, dtype)), K


def reference(x, K):
    # Not amax, which shares a cotangent among equals: here the first of them gets it.
    return x.unflatten(-1, (-1, K)).max(-1).values
