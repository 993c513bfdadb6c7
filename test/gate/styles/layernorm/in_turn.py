"""Deterministic sums without partial buffers: programs wait for their turn, as deterministic attention does."""

import torch
import triton
import triton.language as tl


@triton.jit
def _in_turn(DY, X, W, MEAN, RSTD, DX, DW, DB, TURN, sm, sn, M, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    r = pid * ROWS + tl.arange(0, ROWS)
    inside = (r < M)[:, None] & (c < N)[None, :]
    dy = tl.load(DY + r[:, None] * sm + c[None, :] * sn, mask=inside, other=0.0)
    x = tl.load(X + r[:, None] * N + c[None, :], mask=inside, other=0.0)
    w = tl.load(W + c, mask=c < N, other=0.0)
    rstd = tl.load(RSTD + r, mask=r < M, other=0.0)[:, None]
    hat = tl.where(inside, (x - tl.load(MEAN + r, mask=r < M, other=0.0)[:, None]) * rstd, 0.0)
    wdy = dy * w[None, :]
    dx = (wdy - (hat * tl.sum(wdy * hat, 1, keep_dims=True) + tl.sum(wdy, 1, keep_dims=True)) / N) * rstd
    tl.store(DX + r[:, None] * N + c[None, :], dx, mask=inside)
    while tl.atomic_add(TURN, 0, sem="acquire") != pid:
        pass
    before_w = tl.load(DW + c, mask=c < N, other=0.0, volatile=True)
    before_b = tl.load(DB + c, mask=c < N, other=0.0, volatile=True)
    tl.store(DW + c, before_w + tl.sum(dy * hat, 0), mask=c < N)
    tl.store(DB + c, before_b + tl.sum(dy, 0), mask=c < N)
    tl.debug_barrier()
    tl.atomic_xchg(TURN, pid + 1, sem="release")


def backward(saved, grad_out):
    x, weight, bias, mean, rstd = saved
    M, N = x.shape
    dx, dw, db = torch.empty_like(x), torch.zeros_like(weight), torch.zeros_like(bias)
    turn = torch.zeros(1, device=x.device, dtype=torch.int32)
    _in_turn[(triton.cdiv(M, 4),)](
        grad_out, x, weight, mean, rstd, dx, dw, db, turn, *grad_out.stride(), M, N,
        ROWS=4, BLOCK=triton.next_power_of_2(N),
    )  # fmt: skip
    return dx, dw, db
