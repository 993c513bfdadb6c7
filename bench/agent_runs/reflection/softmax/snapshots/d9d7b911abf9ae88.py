# --- backward ---
@triton.jit
def _softmax_bwd_tile_kernel(
    DY, X, DX, M, N, stride_xm, stride_dm, stride_dn, scale, ROWS: tl.constexpr, BLOCK_N: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < M) & (cols < N)
    x = tl.load(X + rows * stride_xm + cols, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(DY + rows * stride_dm + cols.to(tl.int64) * stride_dn, mask=mask, other=0.0).to(tl.float32)
    # Columns past N count nothing; rows past M only must not be NaN.
    z = tl.where(cols < N, x * scale, float("-inf"))
    e = tl.exp(z - tl.max(z, axis=1)[:, None])
    p = e / tl.sum(e, axis=1)[:, None]
    mean = tl.sum(p * dy, axis=1)[:, None]
    tl.store(DX + rows * N + cols, p * (dy - mean) * scale, mask=mask)


@triton.jit
def _softmax_bwd_long_kernel(
    DY, X, DX, N, stride_xm, stride_dm, stride_dn, scale, BLOCK_N: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    X += row * stride_xm
    DY += row * stride_dm
    DX += row * N
    lanes = tl.arange(0, BLOCK_N)
    # Every lane keeps its own maximum, sum of e and sum of e * dy; the maximum starts finite, so no difference is NaN.
    b_max = tl.full((BLOCK_N,), -3.0e38, tl.float32)
    b_sum = tl.zeros((BLOCK_N,), tl.float32)
    b_dot = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, N, BLOCK_N):
        cols = start + lanes
        mask = cols < N
        x = tl.load(X + cols, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(DY + cols.to(tl.int64) * stride_dn, mask=mask, other=0.0).to(tl.float32)
        z = tl.where(mask, x * scale, float("-inf"))
        e = tl.exp(-tl.abs(z - b_max))
        higher = z > b_max
        old = tl.where(higher, e, 1.0)
        new = tl.where(higher, 1.0, e)
        b_sum = b_sum * old + new
        b_dot = b_dot * old + new * dy
        b_max = tl.maximum(b_max, z)
    row_max = tl.max(b_max, axis=0)
    shrink = tl.exp(b_max - row_max)
    row_sum = tl.sum(b_sum * shrink, axis=0)
    mean = tl.sum(b_dot * shrink, axis=0) / row_sum
    factor = 1.0 / row_sum
    # Last tile first: what the first loop read most recently is still in cache.
    tiles = tl.cdiv(N, BLOCK_N)
    for i in range(tiles):
        cols = (tiles - 1 - i) * BLOCK_N + lanes
        mask = cols < N
        x = tl.load(X + cols, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(DY + cols.to(tl.int64) * stride_dn, mask=mask, other=0.0).to(tl.float32)
        z = tl.where(mask, x * scale, float("-inf"))
        p = tl.exp(z - row_max) * factor
        tl.store(DX + cols, p * (dy - mean) * scale, mask=mask)


def backward(saved, grad_y, needs=None):
    x, y, scale = saved
    if needs is not None and not needs[0]:
        return None
    if x.stride(1) != 1:
        x = x.contiguous()
    M, N = x.shape
    dx = torch.empty((M, N), dtype=x.dtype, device=x.device)
    if N <= 16384:
        BLOCK_N = max(16, triton.next_power_of_2(N))
        ROWS = max(1, 1024 // BLOCK_N)
        _softmax_bwd_tile_kernel[(triton.cdiv(M, ROWS),)](
            grad_y, x, dx, M, N, x.stride(0), grad_y.stride(0), grad_y.stride(1), scale,
            ROWS=ROWS, BLOCK_N=BLOCK_N, num_warps=max(4, min(16, BLOCK_N // 512)),
        )
    else:
        _softmax_bwd_long_kernel[(M,)](
            grad_y, x, dx, N, x.stride(0), grad_y.stride(0), grad_y.stride(1), scale,
            BLOCK_N=8192, num_warps=32,
        )
    return dx
