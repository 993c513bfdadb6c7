import triton
import triton.language as tl


@triton.jit
def matmul(A, W, Out, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    pid_m = tl.program_id(0)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    pid_n = tl.program_id(1)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    range_k = tl.arange(0, BLOCK_K)
    mask_m = offs_m[:, None] < M
    mask_n = offs_n[None, :] < N
    out = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        offs_k = k + range_k
        a = tl.load(A + offs_m[:, None] * K + offs_k[None, :], mask=mask_m & (offs_k[None, :] < K), other=0.0)
        w = tl.load(W + offs_k[:, None] * N + offs_n[None, :], mask=(offs_k[:, None] < K) & mask_n, other=0.0)
        out = tl.dot(a, w, out)
    tl.store(Out + offs_m[:, None] * N + offs_n[None, :], out, mask=mask_m & mask_n)
