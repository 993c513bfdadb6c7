import torch
import triton
import triton.language as tl


@triton.jit
def smooth_l1_partial(p, t, part, n, beta, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    d = tl.load(p + i, mask=i < n, other=0.0) - tl.load(t + i, mask=i < n, other=0.0)
    a = tl.abs(d)
    v = tl.where(a < beta, 0.5 * d * d / beta, a - 0.5 * beta)
    tl.store(part + tl.program_id(0), tl.sum(v, 0))


def smooth_l1_loss(pred, target, beta=1.0):
    n = pred.numel()
    blocks = triton.cdiv(n, 2048)
    part = torch.empty(blocks, device=pred.device)
    smooth_l1_partial[(blocks,)](pred, target, part, n, beta, B=2048)
    return part.sum() / n
