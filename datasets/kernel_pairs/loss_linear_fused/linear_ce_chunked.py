"""Linear head and mean cross-entropy in chunks of tokens: the forward finishes both gradients, chunk by chunk.

For each chunk: logits = x W^T, then softmax - onehot, then dX = dlogits W and dW += dlogits^T x. Only one chunk of
logits is ever held, and none is computed twice; an evaluation without gradients pays for work that it does not need.
The mean's 1/T enters with the cotangent, where the backward scales the two finished gradients: before that, entries of
dlogits are of order one and survive fp16.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "linear_ce_chunked",
    "family": "loss_linear_fused",
    "op": "linear_cross_entropy",
    "schema": 1,
    "techniques": ("grad-in-forward", "chunked", "scalar-gradient", "elementwise"),
    "saves": ("dx: fp32 or bf16 or fp16 (T, H)", "dw: fp32 (V, H)"),
    "grads": ("hidden", "weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _chunk_product(
    L, R, OUT, M, N, K, l_m, l_k, r_k, r_n,
    ADD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # OUT (M, N) = L (M, K) R (K, N), or OUT += L R: chunks follow one another on the stream, so no atomics.
    m = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    out = OUT + m[:, None] * N + n[None, :]
    inside = (m[:, None] < M) & (n[None, :] < N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if ADD:
        acc += tl.load(out, mask=inside, other=0.0)
    for start in range(0, K, BLOCK_K):
        kk = start + k
        left = tl.load(L + m[:, None] * l_m + kk[None, :] * l_k, mask=(m[:, None] < M) & (kk[None, :] < K), other=0.0)
        right = tl.load(R + kk[:, None] * r_k + n[None, :] * r_n, mask=(kk[:, None] < K) & (n[None, :] < N), other=0.0)
        acc = tl.dot(left, right, acc)
    tl.store(out, acc, mask=inside)


@triton.jit
def _chunk_softmax_grad(Logits, Target, DLogits, Loss, V, T, BLOCK: tl.constexpr):
    # fp32 logits in, softmax - onehot out in the dtype that the two products behind it multiply in.
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(Target + row)
    top = -float("inf")
    total = 0.0
    for start in range(0, V, BLOCK):
        c = start + tl.arange(0, BLOCK)
        x = tl.load(Logits + row * V + c, mask=c < V, other=-float("inf"))
        higher = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
        top = higher
    lse = top + tl.log(total)
    tl.store(Loss + row, (lse - tl.load(Logits + row * V + target)) / T)
    for start in range(0, V, BLOCK):
        c = start + tl.arange(0, BLOCK)
        p = tl.exp(tl.load(Logits + row * V + c, mask=c < V, other=0.0) - lse)
        tl.store(DLogits + row * V + c, tl.where(c == target, p - 1.0, p), mask=c < V)


def _product(left, right, out, add=False):
    (M, K), N = left.shape, right.shape[1]
    _chunk_product[(triton.cdiv(N, 128), triton.cdiv(M, 128))](
        left, right, out, M, N, K, *left.stride(), *right.stride(),
        ADD=add, BLOCK_M=128, BLOCK_N=128, BLOCK_K=128 // left.element_size(), num_warps=8, num_stages=3,
    )  # fmt: skip


def forward(hidden, weight, target, chunk=2048):
    hidden, weight, target = hidden.contiguous(), weight.contiguous(), target.contiguous()
    (T, H), V = hidden.shape, weight.shape[0]
    losses = torch.empty(T, device=hidden.device, dtype=torch.float32)
    dx = torch.empty_like(hidden)
    dw = torch.empty(V, H, device=hidden.device, dtype=torch.float32)
    logits = torch.empty(min(chunk, T), V, device=hidden.device, dtype=torch.float32)
    dlogits = torch.empty_like(logits, dtype=hidden.dtype)
    BLOCK = max(64, min(4096, triton.next_power_of_2(V)))
    for first in range(0, T, chunk):
        x = hidden[first : first + chunk]
        rows = x.shape[0]
        _product(x, weight.t(), logits)
        _chunk_softmax_grad[(rows,)](
            logits, target[first:], dlogits, losses[first:], V, T, BLOCK=BLOCK, num_warps=max(1, min(8, BLOCK // 512))
        )
        _product(dlogits[:rows], weight, dx[first:])
        _product(dlogits[:rows].t(), x, dw, add=first > 0)
    return losses.sum(), (dx, dw)


# --- backward ---
@triton.jit
def _finish(DLoss, Grad, OUT, T, numel, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    factor = tl.load(DLoss) / T
    grad = tl.load(Grad + i, mask=i < numel, other=0.0).to(tl.float32)
    tl.store(OUT + i, factor * grad, mask=i < numel)


def backward(saved, grad_loss, needs=(True, True)):
    finished = []
    dtype = saved[0].dtype
    T = saved[0].shape[0]
    for grad, need in zip(saved, needs, strict=True):
        out = torch.empty_like(grad, dtype=dtype) if need else None
        if need:
            _finish[(triton.cdiv(grad.numel(), 2048),)](grad_loss, grad, out, T, grad.numel(), BLOCK=2048, num_warps=4)
        finished.append(out)
    return tuple(finished)


# --- check ---
SWEEP = (
    {"T": 32, "V": 64, "H": 32, "chunk": 16},
    {"T": 37, "V": 75, "H": 40, "chunk": 15},
    {"T": 16, "V": 48, "H": 16, "chunk": 64, "dtype": "float16"},
    {"T": 20, "V": 40, "H": 24, "chunk": 8, "dtype": "bfloat16"},
)
BENCH = ({"T": 8192, "V": 32000, "H": 2048, "chunk": 1024, "dtype": "bfloat16"},)


def make_args(T, V, H, chunk, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    dt = getattr(torch, dtype)
    hidden, weight = torch.randn(T, H, generator=g), torch.randn(V, H, generator=g) / H**0.5
    target = torch.randint(0, V, (T,), generator=g)
    return hidden.to(device, dt), weight.to(device, dt), target.to(device), chunk


def reference(hidden, weight, target, chunk=2048):
    return torch.nn.functional.cross_entropy((hidden @ weight.T).float(), target)
