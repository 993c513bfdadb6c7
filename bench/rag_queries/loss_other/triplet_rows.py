import triton
import triton.language as tl


@triton.jit
def triplet_margin(anchor, pos, neg, out, D, margin, BD: tl.constexpr):
    """max(0, |a - p| - |a - n| + margin) for each row."""
    r = tl.program_id(0)
    dp = 0.0
    dn = 0.0
    for j in range(0, D, BD):
        c = j + tl.arange(0, BD)
        a = tl.load(anchor + r * D + c, mask=c < D, other=0.0)
        p = tl.load(pos + r * D + c, mask=c < D, other=0.0)
        n = tl.load(neg + r * D + c, mask=c < D, other=0.0)
        dp += tl.sum((a - p) * (a - p), 0)
        dn += tl.sum((a - n) * (a - n), 0)
    tl.store(out + r, tl.maximum(tl.sqrt(dp) - tl.sqrt(dn) + margin, 0.0))


def triplet_loss(anchor, positive, negative, margin=1.0):
    losses = anchor.new_empty(anchor.shape[0])
    triplet_margin[(anchor.shape[0],)](anchor, positive, negative, losses, anchor.shape[1], margin, BD=256)
    return losses.mean()
