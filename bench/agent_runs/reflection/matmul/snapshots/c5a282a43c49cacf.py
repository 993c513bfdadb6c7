# --- backward ---
@triton.jit
def _matmul_bwd_kernel(
    L, R, OUT, M, N, K, l_m, l_k, r_k, r_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):
    # Programs walk down GROUP_M row tiles before the next column tile, so that neighbours find operands in L2.
    pid = tl.program_id(0)
    tiles_n = tl.cdiv(N, BLOCK_N)
    first = (pid // (GROUP_M * tiles_n)) * GROUP_M
    height = tl.minimum(tl.cdiv(M, BLOCK_M) - first, GROUP_M)
    block_m = first + pid % (GROUP_M * tiles_n) % height
    block_n = pid % (GROUP_M * tiles_n) // height
    m = (block_m * BLOCK_M).to(tl.int64) + tl.arange(0, BLOCK_M)
    n = (block_n * BLOCK_N).to(tl.int64) + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    l_at = L + m[:, None] * l_m + k[None, :] * l_k
    r_at = R + k[:, None] * r_k + n[None, :] * r_n
    m_mask = (m < M)[:, None]
    n_mask = (n < N)[None, :]
    l_step = BLOCK_K * tl.cast(l_k, tl.int64)
    r_step = BLOCK_K * tl.cast(r_k, tl.int64)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        left = tl.load(l_at, mask=m_mask & (k[None, :] < K - start), other=0.0)
        right = tl.load(r_at, mask=(k[:, None] < K - start) & n_mask, other=0.0)
        acc = tl.dot(left, right, acc)
        l_at += l_step
        r_at += r_step
    tl.store(OUT + m[:, None] * N + n[None, :], acc, mask=m_mask & n_mask)


def _product(left, right, dtype):
    M, K = left.shape
    N = right.shape[1]
    out = torch.empty((M, N), dtype=dtype, device=left.device)
    # The largest tiles that still fill the device; float32 keeps its columns at 128.
    large = triton.cdiv(M, 128) * triton.cdiv(N, 128) >= 132
    wide = large and dtype != torch.float32 and triton.cdiv(M, 128) * triton.cdiv(N, 256) >= 132
    BLOCK_M = 128 if large else 64
    BLOCK_N = 256 if wide else (128 if large else 64)
    BLOCK_K = 128 // left.element_size()
    _matmul_bwd_kernel[(triton.cdiv(M, BLOCK_M) * triton.cdiv(N, BLOCK_N),)](
        left, right, out, M, N, K, left.stride(0), left.stride(1), right.stride(0), right.stride(1),
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, GROUP_M=8,
        num_warps=8 if large else 4, num_stages=3,
    )
    return out


def backward(saved, grad_c, needs=None):
    a, b, c, transpose_a, transpose_b = saved
    needs = needs or (True,) * 2
    da = db = None
    if needs[0]:
        if transpose_a:
            da = _product(b.t() if transpose_b else b, grad_c.t(), a.dtype)
        else:
            da = _product(grad_c, b if transpose_b else b.t(), a.dtype)
    if needs[1]:
        if transpose_b:
            db = _product(grad_c.t(), a.t() if transpose_a else a, b.dtype)
        else:
            db = _product(a if transpose_a else a.t(), grad_c, b.dtype)
    return da, db
