"""The k largest of each row: one program clears the row of the gradient and, past a barrier, stores k cotangents in it.

Winners are taken out one after the other, the row staying in registers. The indices of a row differ, so that plain
stores do for the backward; the barrier orders them behind the zeros, and no second launch or memset is needed.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "take_along_topk",
    "family": "gather_scatter",
    "op": "topk",
    "schema": 1,
    "techniques": ("argmax-routing", "row-local", "one-launch", "strided-cotangent"),
    "saves": ("index: i64 (M, K)",),
    "grads": ("x",),
    "nondiff_outputs": (1,),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _topk_fwd(X, Value, Index, N, K, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    x = tl.load(X + row * N + n, mask=n < N, other=float("-inf")).to(tl.float32)
    left = n < N
    for k in range(K):
        # Of what is left: rows with true infinities lose no column to the mask.
        top = tl.max(tl.where(left, x, float("-inf")), 0)
        place = tl.min(tl.where(left & (x == top), n, BLOCK_N), 0)
        # The value is read where the gradient will go; a row without numbers has no such place.
        tl.store(Value + row * K + k, tl.load(X + row * N + place, mask=place < N, other=float("nan")))
        tl.store(Index + row * K + k, place.to(tl.int64))
        left = left & (n != place)


def forward(x, k):
    """x (M, N) with N up to about 16384 and a small k: the values in falling order, and their columns."""
    x = x.contiguous()
    M, N = x.shape
    value = torch.empty(M, k, device=x.device, dtype=x.dtype)
    index = torch.empty(M, k, device=x.device, dtype=torch.int64)
    BLOCK_N = triton.next_power_of_2(N)
    _topk_fwd[(M,)](x, value, index, N, k, BLOCK_N=BLOCK_N, num_warps=max(1, min(16, BLOCK_N // 512)))
    return (value, index), (index, N)


# --- backward ---
@triton.jit
def _topk_bwd(DValue, Index, DX, N, K, dv_m, dv_k, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        tl.store(DX + row * N + n, tl.zeros((BLOCK_N,), tl.float32), mask=n < N)
    # The thread that stores a winner need not be the one that cleared its place.
    tl.debug_barrier()
    k = tl.arange(0, BLOCK_K)
    index = tl.load(Index + row * K + k, mask=k < K, other=N)
    dvalue = tl.load(DValue + row * dv_m + k.to(tl.int64) * dv_k, mask=k < K, other=0.0)
    tl.store(DX + row * N + index, dvalue, mask=index < N)


def backward(saved, grad_value, grad_index, needs=None):
    index, N = saved
    M, K = index.shape
    dx = torch.empty(M, N, device=grad_value.device, dtype=grad_value.dtype)
    BLOCK_N = min(2048, triton.next_power_of_2(N))
    _topk_bwd[(M,)](
        grad_value, index, dx, N, K, *grad_value.stride(),
        BLOCK_N=BLOCK_N, BLOCK_K=triton.next_power_of_2(K), num_warps=max(1, min(8, BLOCK_N // 256)),
    )  # fmt: skip
    return dx


# --- check ---
SWEEP = ({"M": 9, "N": 64, "k": 4}, {"M": 5, "N": 2603, "k": 7}, {"M": 11, "N": 40, "k": 3, "dtype": "bfloat16"})
BENCH = ({"M": 16384, "N": 4096, "k": 8, "dtype": "bfloat16"},)


def make_args(M, N, k, dtype="float32", device="cpu", seed=0):
    if k > N:
        raise ValueError("k is at most N")
    g = torch.Generator().manual_seed(seed)
    return torch.randn(M, N, generator=g).to(device=device, dtype=getattr(torch, dtype)), k


def reference(x, k):
    # A stable sort names the first of equals, which torch.topk does not promise. It needs no gradient itself.
    index = x.detach().sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return x.gather(1, index), index
