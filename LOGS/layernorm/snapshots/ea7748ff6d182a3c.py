# --- backward ---
@triton.jit
def _layernorm_bwd(
    DY, X, W, MEAN, RSTD, DX, SUMS_W, SUMS_B, M, N, stride_gm, stride_gn, stride_xm, stride_xn,
    NEEDS_X: tl.constexpr, NEEDS_W: tl.constexpr, NEEDS_B: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0)
    cols = tl.arange(0, BLOCK_N)
    in_n = cols < N
    wide = cols.to(tl.int64)
    dw = tl.zeros((ROWS, BLOCK_N), tl.float32)
    db = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for first in range(pid * ROWS, M, programs * ROWS):
        row = first + tl.arange(0, ROWS)
        live = row < M
        mask = live[:, None] & in_n[None, :]
        g = tl.load(DY + row[:, None] * stride_gm + wide[None, :] * stride_gn, mask=mask, other=0.0).to(tl.float32)
        if NEEDS_B:
            db += g
        if NEEDS_X or NEEDS_W:
            x = tl.load(X + row[:, None] * stride_xm + wide[None, :] * stride_xn, mask=mask, other=0.0).to(tl.float32)
            mean = tl.load(MEAN + row, mask=live, other=0.0)
            rstd = tl.load(RSTD + row, mask=live, other=0.0)
            xhat = tl.where(mask, (x - mean[:, None]) * rstd[:, None], 0.0)
            if NEEDS_W:
                dw += g * xhat
            if NEEDS_X:
                # The weight stays in cache: loading it again is cheaper than registers held over the loop.
                w = tl.load(W + cols, mask=in_n, other=0.0).to(tl.float32)
                wg = g * w[None, :]
                along_one = tl.sum(wg, 1) / N
                along_xhat = tl.sum(wg * xhat, 1) / N
                dx = (wg - along_one[:, None] - xhat * along_xhat[:, None]) * rstd[:, None]
                tl.store(DX + row[:, None] * N + cols[None, :], dx, mask=mask)
    # One row of partial sums, or the gradients themselves where there is one program.
    if NEEDS_W:
        tl.store(SUMS_W + pid * N + cols, tl.sum(dw, 0), mask=in_n)
    if NEEDS_B:
        tl.store(SUMS_B + pid * N + cols, tl.sum(db, 0), mask=in_n)


@triton.jit
def _layernorm_reduce(
    PARTS, DW, DB, P, N, FIRST: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr
):
    # Axis 1 of the grid: 0 adds the rows of dweight, 1 those of dbias.
    which = tl.program_id(1).to(tl.int64) + FIRST
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    for start in range(0, P, BLOCK_P):
        rows = start + tl.arange(0, BLOCK_P)
        mask = (rows < P)[:, None] & (cols < N)[None, :]
        total += tl.load(PARTS + (which * P + rows)[:, None] * N + cols[None, :], mask=mask, other=0.0)
    if which == 0:
        tl.store(DW + cols, tl.sum(total, 0), mask=cols < N)
    else:
        tl.store(DB + cols, tl.sum(total, 0), mask=cols < N)


def backward(saved, grad_out0, grad_mean, grad_rstd, needs=None):
    x, weight, bias, out0, mean, rstd, eps = saved
    need_x, need_w, need_b = needs or (True,) * 3
    M, N = x.shape
    BLOCK_N = triton.next_power_of_2(N)
    ROWS = max(1, 2048 // BLOCK_N)
    # One to four programs for each of 132 multiprocessors, fewer where rows are wide.
    programs = max(1, min(triton.cdiv(M, ROWS), 132 * max(1, min(4, 8192 // BLOCK_N))))
    if programs <= 3:
        programs = 1
    dx = torch.empty((M, N), dtype=x.dtype, device=x.device)
    dweight = torch.empty_like(weight)
    dbias = torch.empty_like(bias)
    alone = programs == 1
    parts = None if alone else torch.empty((2, programs, N), dtype=torch.float32, device=x.device)
    _layernorm_bwd[(programs,)](
        grad_out0, x, weight, mean, rstd, dx, dweight if alone else parts[0], dbias if alone else parts[1], M, N,
        grad_out0.stride(0), grad_out0.stride(1), x.stride(0), x.stride(1),
        NEEDS_X=bool(need_x), NEEDS_W=bool(need_w), NEEDS_B=bool(need_b),
        ROWS=ROWS, BLOCK_N=BLOCK_N, num_warps=max(4, min(16, BLOCK_N // 512)),
    )  # fmt: skip
    if not alone and (need_w or need_b):
        _layernorm_reduce[(triton.cdiv(N, 32), int(bool(need_w)) + int(bool(need_b)))](
            parts, dweight, dbias, programs, N, FIRST=0 if need_w else 1, BLOCK_P=128, BLOCK_N=32, num_warps=8,
        )  # fmt: skip
    return dx if need_x else None, dweight if need_w else None, dbias if need_b else None
