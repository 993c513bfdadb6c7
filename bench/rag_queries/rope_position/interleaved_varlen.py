import torch
import triton
import triton.language as tl


@triton.jit
def rotary_kernel(OUT, X, C, S, CU, OFFS, seqlen, rdim, ld, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    head = tl.program_id(1)
    b = tl.program_id(2)
    start = tl.load(CU + b)
    n = tl.load(CU + b + 1) - start
    k = tl.arange(0, BLOCK_K)
    swap = k + ((k + 1) % 2) * 2 - 1
    angle = k // 2
    pos = m + tl.load(OFFS + b)
    ok = (m < n)[:, None] & (k < rdim)[None, :]
    cos = tl.load(C + pos[:, None] * (rdim // 2) + angle[None, :], mask=ok, other=1.0)
    sin = tl.load(S + pos[:, None] * (rdim // 2) + angle[None, :], mask=ok, other=0.0)
    base = (start + m)[:, None] * ld + head * rdim
    x0 = tl.load(X + base + k[None, :], mask=ok, other=0.0)
    x1 = tl.load(X + base + swap[None, :], mask=ok, other=0.0)
    o = tl.where(k[None, :] % 2 == 0, x0 * cos - x1 * sin, x0 * cos + x1 * sin)
    tl.store(OUT + base + k[None, :], o, mask=ok)


def apply_rotary(x, cos, sin, cu_seqlens, seqlen_offsets, max_seqlen):
    total, nheads, rdim = x.shape
    out = torch.empty_like(x)
    grid = (triton.cdiv(max_seqlen, 8), nheads, cu_seqlens.numel() - 1)
    rotary_kernel[grid](
        out, x, cos, sin, cu_seqlens, seqlen_offsets, max_seqlen, rdim, x.stride(0), 8, triton.next_power_of_2(rdim)
    )
    return out
