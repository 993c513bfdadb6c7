"""Softmax over the k largest logits of a row: indices and probabilities of those k are saved, the backward gathers.

The forward takes the maximum k times, the first of equals, and knows the rest of y to be zero. The backward reads k
cotangents of each row, not N, applies the softmax rule to them, and puts k numbers into rows of zeros; a program does
many rows at once.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "softmax_topk",
    "family": "softmax",
    "op": "softmax_topk",
    "schema": 1,
    "techniques": ("argmax-routing", "gather-form", "multi-row-tile", "strided-cotangent"),
    "saves": ("index: int32 (M, K)", "p: fp32 (M, K)"),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _topk_softmax_fwd(X, Y, Index, P, N, x_row, K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    k = tl.arange(0, BLOCK_K)
    x = tl.load(X + row * x_row + c, mask=c < N, other=-float("inf")).to(tl.float32)
    index = tl.zeros((BLOCK_K,), tl.int32)
    logit = tl.full((BLOCK_K,), -float("inf"), tl.float32)
    left = x
    for step in range(K):
        best = tl.argmax(left, 0, tie_break_left=True)
        # Read off by its place: the gradient belongs to one logit, also where several are equal.
        logit = tl.where(k == step, tl.sum(tl.where(c == best, x, 0.0), 0), logit)
        index = tl.where(k == step, best, index)
        left = tl.where(c == best, -float("inf"), left)
    e = tl.exp(logit - tl.max(logit, 0))
    p = e / tl.sum(e, 0)
    tl.store(Index + row * K + k, index, mask=k < K)
    tl.store(P + row * K + k, p, mask=k < K)
    tl.store(Y + row * N + index, p, mask=k < K)


def forward(x, k):
    x = x if x.stride(1) == 1 else x.contiguous()
    M, N = x.shape
    if not 0 < k <= N:
        raise ValueError(f"k is {k}; a row has {N} logits")
    y = torch.zeros(M, N, device=x.device, dtype=x.dtype)
    index = torch.empty(M, k, device=x.device, dtype=torch.int32)
    p = torch.empty(M, k, device=x.device, dtype=torch.float32)
    BLOCK = triton.next_power_of_2(N)
    _topk_softmax_fwd[(M,)](
        x, y, index, p, N, x.stride(0), K=k, BLOCK_K=triton.next_power_of_2(k), BLOCK=BLOCK,
        num_warps=max(1, min(16, BLOCK // 512)),
    )  # fmt: skip
    return y, (index, p, x.dtype)


# --- backward ---
@triton.jit
def _topk_softmax_bwd(DY, Index, P, DX, M, N, K, dy_row, dy_col, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    m = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    k = tl.arange(0, BLOCK_K)[None, :]
    mask = (m < M) & (k < K)
    index = tl.load(Index + m * K + k, mask=mask, other=0).to(tl.int64)
    p = tl.load(P + m * K + k, mask=mask, other=0.0)
    dy = tl.load(DY + m * dy_row + index * dy_col, mask=mask, other=0.0).to(tl.float32)
    # Indices of a row are distinct, so that no two stores meet.
    tl.store(DX + m * N + index, p * (dy - tl.sum(p * dy, 1, keep_dims=True)), mask=mask)


def backward(saved, grad_y, needs=None):
    index, p, dtype = saved
    (M, N), K = grad_y.shape, index.shape[1]
    dx = torch.zeros(M, N, device=grad_y.device, dtype=dtype)
    BLOCK_K = triton.next_power_of_2(K)
    ROWS = max(1, 256 // BLOCK_K)
    _topk_softmax_bwd[(triton.cdiv(M, ROWS),)](
        grad_y, index, p, dx, M, N, K, *grad_y.stride(), ROWS=ROWS, BLOCK_K=BLOCK_K
    )
    return dx


# --- check ---
SWEEP = (
    {"M": 12, "N": 64, "k": 4, "dtype": "float16"},
    {"M": 37, "N": 101, "k": 5},
    {"M": 9, "N": 32, "k": 8, "dtype": "bfloat16"},
)
BENCH = ({"M": 65536, "N": 1024, "k": 8, "dtype": "bfloat16"},)


def make_args(M, N, k, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(M, N, generator=g).to(device=device, dtype=getattr(torch, dtype)), min(k, N)


def reference(x, k):
    # A stable sort puts the first of equals first, as the kernel does, and topk does not.
    index = x.detach().sort(dim=-1, descending=True, stable=True).indices[:, :k]
    p = torch.softmax(x.gather(1, index).float(), -1)
    return torch.zeros_like(x).scatter(1, index, p.to(x.dtype))
