import triton
import triton.language as tl


@triton.jit
def _lora_linear(X, W, A, B, Y, M, N, K, s, R: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    r = tl.arange(0, R)
    base = tl.zeros((BM, BN), tl.float32)
    down = tl.zeros((BM, R), tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        x = tl.load(X + m[:, None] * K + k[None, :], mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
        w = tl.load(W + n[None, :] * K + k[:, None], mask=(n < N)[None, :] & (k < K)[:, None], other=0.0)
        a = tl.load(A + r[None, :] * K + k[:, None], mask=(k < K)[:, None], other=0.0)
        base += tl.dot(x, w)
        down += tl.dot(x, a)
    up = tl.load(B + n[None, :] * R + r[:, None], mask=(n < N)[None, :], other=0.0)
    y = base + s * tl.dot(down.to(up.dtype), up)
    tl.store(Y + m[:, None] * N + n[None, :], y, mask=(m < M)[:, None] & (n < N)[None, :])


def matmul_lora(X, W, A, B, s):
    """X W^T plus the adapter s (X A^T) B^T in one launch."""
    out = X.new_empty(X.shape[0], W.shape[0])
    grid = (triton.cdiv(X.shape[0], 64), triton.cdiv(W.shape[0], 64))
    _lora_linear[grid](X, W, A, B, out, X.shape[0], W.shape[0], X.shape[1], s, A.shape[0], 64, 64, 32)
    return out
