import triton
import triton.language as tl


@triton.jit
def keys_backward(Q, K, Lse, Delta, dO, dK, n, scale, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr):
    scale = tl.cast(scale, tl.float32)  # float64 under torch.compile
    offs_d = tl.arange(0, BLOCK)
    pid_n = tl.program_id(0)
    k_offs = (pid_n * BLOCK + offs_d)[:, None] * BLOCK + offs_d[None, :]
    k = tl.load(K + k_offs)
    range_m = tl.arange(0, BLOCK_M)
    dk = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start_m in range(0, n, BLOCK_M):
        offs_m = start_m + range_m
        offs = offs_m[:, None] * BLOCK + offs_d[None, :]
        q = tl.load(Q + offs)
        lse = tl.load(Lse + offs_m)
        p = tl.exp(tl.dot(k, tl.trans(q), input_precision="ieee") * scale - lse[None, :])
        d_o = tl.load(dO + offs)
        d_p = tl.dot(k, tl.trans(d_o), input_precision="ieee")
        delta = tl.load(Delta + offs_m)
        d_s = p * (d_p - delta[None, :]) * scale
        dk = tl.dot(d_s, q, dk, input_precision="ieee")
    tl.store(dK + k_offs, dk)
