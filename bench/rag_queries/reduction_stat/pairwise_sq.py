import triton
import triton.language as tl


@triton.jit
def _cdist(A, B, O, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    d = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, K, BK):
        for j in range(BK):
            k = k0 + j
            a = tl.load(A + rm * K + k, mask=(rm < M) & (k < K), other=0.0)
            b = tl.load(B + rn * K + k, mask=(rn < N) & (k < K), other=0.0)
            e = a[:, None] - b[None, :]
            d += e * e
    tl.store(O + rm[:, None] * N + rn[None, :], tl.sqrt(d), mask=(rm < M)[:, None] & (rn < N)[None, :])


def euclidean_cdist(a, b):
    out = a.new_empty(a.shape[0], b.shape[0])
    _cdist[(triton.cdiv(a.shape[0], 32), triton.cdiv(b.shape[0], 32))](
        a, b, out, a.shape[0], b.shape[0], a.shape[1], 32, 32, 16
    )
    return out
