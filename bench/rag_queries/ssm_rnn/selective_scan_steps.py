import torch
import triton
import triton.language as tl


@triton.jit
def _selective_scan_fwd(
    u, delta, A, B, C, Dskip, out, last, L, D, N: tl.constexpr, BD: tl.constexpr, SOFTPLUS: tl.constexpr
):
    b = tl.program_id(1)
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    n = tl.arange(0, N)
    ok = d < D
    a = tl.load(A + d[:, None] * N + n[None, :], mask=ok[:, None], other=0.0)
    skip = tl.load(Dskip + d, mask=ok, other=0.0)
    h = tl.zeros((BD, N), tl.float32)
    for t in range(L):
        x = tl.load(u + (b * L + t) * D + d, mask=ok, other=0.0).to(tl.float32)
        dt = tl.load(delta + (b * L + t) * D + d, mask=ok, other=0.0).to(tl.float32)
        if SOFTPLUS:
            dt = tl.where(dt > 20.0, dt, tl.log(1.0 + tl.exp(dt)))
        bt = tl.load(B + (b * L + t) * N + n)
        ct = tl.load(C + (b * L + t) * N + n)
        h = tl.exp(dt[:, None] * a) * h + (dt * x)[:, None] * bt[None, :]
        y = tl.sum(h * ct[None, :], 1) + skip * x
        tl.store(out + (b * L + t) * D + d, y, mask=ok)
    tl.store(last + (b * D + d[:, None]) * N + n[None, :], h, mask=ok[:, None])


def selective_scan_fn(u, delta, A, B, C, D, delta_softplus=True):
    bs, L, dim = u.shape
    out = torch.empty_like(u)
    last = u.new_empty(bs, dim, A.shape[1], dtype=torch.float32)
    _selective_scan_fwd[(triton.cdiv(dim, 32), bs)](
        u, delta, A, B, C, D, out, last, L, dim, A.shape[1], 32, delta_softplus
    )
    return out, last
