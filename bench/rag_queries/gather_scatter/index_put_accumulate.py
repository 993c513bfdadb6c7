import triton
import triton.language as tl


@triton.jit
def scatter_reduce_add(dst, ids, src, rows, width, BR: tl.constexpr, BW: tl.constexpr):
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    w = tl.program_id(1) * BW + tl.arange(0, BW)
    ok = (r < rows)[:, None] & (w < width)[None, :]
    to = tl.load(ids + r, mask=r < rows, other=0)
    v = tl.load(src + r[:, None] * width + w[None, :], mask=ok, other=0.0)
    tl.atomic_add(dst + to[:, None] * width + w[None, :], v, mask=ok, sem="relaxed")


def index_add_(dst, ids, src):
    out = dst.clone()
    rows, width = src.shape
    scatter_reduce_add[(triton.cdiv(rows, 4), triton.cdiv(width, 256))](out, ids, src, rows, width, BR=4, BW=256)
    return out
