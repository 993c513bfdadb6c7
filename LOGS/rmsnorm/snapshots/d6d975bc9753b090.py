# --- backward ---
@triton.jit
def _rmsnorm_bwd(
    DY, X, W, DX, PARTS, M, S, N, eps, stride_gb, stride_gs, stride_gn,
    NEEDS_X: tl.constexpr, NEEDS_W: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_N)
    in_n = cols < N
    wide = cols.to(tl.int64)
    w = tl.load(W + cols, mask=in_n, other=0.0).to(tl.float32)
    dw = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for first in range(pid * ROWS, M, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        mask = (row < M)[:, None] & in_n[None, :]
        at = row[:, None] * N + cols[None, :]
        x = tl.load(X + at, mask=mask, other=0.0).to(tl.float32)
        # Row batch * S + position of the cotangent, with its own strides.
        g_row = (row // S) * stride_gb + (row % S) * stride_gs
        dy = tl.load(DY + g_row[:, None] + wide[None, :] * stride_gn, mask=mask, other=0.0).to(tl.float32)
        # Rows outside are zero everywhere; 1 keeps them finite where eps is 0.
        mean = tl.where(row < M, tl.sum(x * x, 1) / N + eps, 1.0)
        rrms = tl.rsqrt(mean)
        unit = x * rrms[:, None]
        if NEEDS_W:
            dw += dy * unit
        if NEEDS_X:
            g = dy * w[None, :]
            along = tl.sum(g * unit, 1) / N
            tl.store(DX + at, (g - unit * along[:, None]) * rrms[:, None], mask=mask)
    if NEEDS_W:
        tl.store(PARTS + pid * N + cols, tl.sum(dw, 0), mask=in_n)


@triton.jit
def _rmsnorm_reduce(PARTS, DW, P, N, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    dw = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    for start in range(0, P, BLOCK_P):
        rows = start + tl.arange(0, BLOCK_P)
        mask = (rows < P)[:, None] & (cols < N)[None, :]
        dw += tl.load(PARTS + rows.to(tl.int64)[:, None] * N + cols[None, :], mask=mask, other=0.0)
    tl.store(DW + cols, tl.sum(dw, 0), mask=cols < N)


def backward(saved, grad_y, needs=None):
    x, weight, y, eps = saved
    need_x, need_w = needs or (True,) * 2
    x = x.contiguous()
    B, S, N = x.shape
    M = B * S
    BLOCK_N = triton.next_power_of_2(N)
    ROWS = max(1, 2048 // BLOCK_N)
    # One to four programs for each of 132 multiprocessors, fewer where rows are wide.
    programs = max(1, min(triton.cdiv(M, ROWS), 132 * max(1, min(4, 8192 // BLOCK_N))))
    dx = torch.empty((B, S, N), dtype=x.dtype, device=x.device)
    dweight = torch.empty_like(weight)
    parts = torch.empty((programs, N), dtype=torch.float32, device=x.device)
    _rmsnorm_bwd[(programs,)](
        grad_y, x, weight, dx, parts, M, S, N, eps, grad_y.stride(0), grad_y.stride(1), grad_y.stride(2),
        NEEDS_X=bool(need_x), NEEDS_W=bool(need_w), ROWS=ROWS, BLOCK_N=BLOCK_N,
        num_warps=max(4, min(8, BLOCK_N // 512)),
    )  # fmt: skip
    if need_w:
        _rmsnorm_reduce[(triton.cdiv(N, 32),)](parts, dweight, programs, N, BLOCK_P=128, BLOCK_N=32, num_warps=4)
    return dx if need_x else None, dweight if need_w else None
