"""Column by column into a transposed gradient, in one workspace that is cut by offsets."""

import torch
import triton
import triton.language as tl


@triton.jit
def _row_sums(DY, X, W, MEAN, RSTD, BOTH, sm, sn, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    first = tl.zeros((BLOCK,), tl.float32)
    second = tl.zeros((BLOCK,), tl.float32)
    mean, rstd = tl.load(MEAN + row), tl.load(RSTD + row)
    for start in tl.range(0, N, BLOCK, num_stages=2):
        c = start + tl.arange(0, BLOCK)
        wdy = tl.load(DY + row * sm + c * sn, mask=c < N, other=0.0) * tl.load(W + c, mask=c < N, other=0.0)
        x = tl.load(X + row * N + c, mask=c < N, other=0.0)
        first += wdy
        second += wdy * (x - mean) * rstd
    tl.store(BOTH + 2 * row, tl.sum(first) / N)
    tl.store(BOTH + 2 * row + 1, tl.sum(second) / N)


@triton.jit
def _columns(DY, X, W, MEAN, RSTD, BOTH, DXT, DW, DB, sm, sn, M, N, BM: tl.constexpr, BN: tl.constexpr):
    c = tl.program_id(0) * BN + tl.arange(0, BN)
    w = tl.load(W + c, mask=c < N, other=0.0)
    dw = tl.zeros((BN,), tl.float32)
    db = tl.zeros((BN,), tl.float32)
    for start in range(0, M, BM):
        r = start + tl.arange(0, BM)
        inside = (r[:, None] < M) & (c[None, :] < N)
        dy = tl.load(DY + r[:, None] * sm + c[None, :] * sn, mask=inside, other=0.0)
        rstd = tl.load(RSTD + r, mask=r < M, other=0.0)
        x = tl.load(X + r[:, None] * N + c[None, :], mask=inside, other=0.0)
        hat = (x - tl.load(MEAN + r, mask=r < M, other=0.0)[:, None]) * rstd[:, None]
        first = tl.load(BOTH + 2 * r, mask=r < M, other=0.0)
        second = tl.load(BOTH + 2 * r + 1, mask=r < M, other=0.0)
        dx = (dy * w[None, :] - hat * second[:, None] - first[:, None]) * rstd[:, None]
        tl.store(DXT + c[:, None] * M + r[None, :], tl.trans(dx), mask=tl.trans(inside))
        dw += tl.sum(dy * hat, 0)
        db += tl.sum(dy, 0)
    tl.store(DW + c, dw, mask=c < N)
    tl.store(DB + c, db, mask=c < N)


def _carve(buffer, offset, *shape):
    count = torch.Size(shape).numel()
    return buffer[offset : offset + count].view(shape), offset + count


def backward(saved, grad_out):
    x, weight, _bias, mean, rstd = saved
    M, N = x.shape
    workspace = torch.empty(2 * M + M * N + 2 * N, dtype=torch.float32, device=x.device)
    both, at = _carve(workspace, 0, M, 2)
    dxt, at = _carve(workspace, at, N, M)
    dw, at = _carve(workspace, at, N)
    db, at = _carve(workspace, at, N)
    strides = grad_out.stride()
    _row_sums[(M,)](grad_out, x, weight, mean, rstd, both, *strides, N, BLOCK=32)
    grid = lambda meta: (triton.cdiv(N, meta["BN"]),)  # noqa: E731
    _columns[grid](grad_out, x, weight, mean, rstd, both, dxt, dw, db, *strides, M, N, BM=16, BN=32, num_warps=2)
    return dxt.t().contiguous(), dw.clone(), db.clone()
