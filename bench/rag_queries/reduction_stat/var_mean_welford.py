import triton
import triton.language as tl


@triton.jit
def welford(na, ma, sa, nb, mb, sb):
    n = na + nb
    d = mb - ma
    f = tl.where(n > 0, nb / n, 0.0)
    return n, ma + d * f, sa + sb + d * d * na * f


@triton.jit
def var_mean_welford_kernel(X, Var, Mean, M, N, correction, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    rows = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    mean = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    count = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for off in range(0, N, BLOCK_N):
        cols = off + tl.arange(0, BLOCK_N)[None, :]
        mask = (rows < M) & (cols < N)
        x = tl.load(X + rows * N + cols, mask, other=0.0).to(tl.float32)
        count += mask
        delta = x - mean
        mean += tl.where(mask, delta / tl.maximum(count, 1), 0.0)
        acc += tl.where(mask, delta * (x - mean), 0.0)
    n, mean, acc = tl.reduce((count, mean, acc), 1, welford)
    r = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    tl.store(Mean + r, mean, r < M)
    tl.store(Var + r, acc / (N - correction), r < M)


def var_mean(x, correction=1):
    M, N = x.shape
    var, mean = x.new_empty(M), x.new_empty(M)
    var_mean_welford_kernel[(triton.cdiv(M, 8),)](x, var, mean, M, N, correction, BLOCK_M=8, BLOCK_N=256)
    return var, mean
