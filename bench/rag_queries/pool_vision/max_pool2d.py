import torch
import triton
import triton.language as tl


@triton.jit
def max_pool2d_forward_kernel(
    x,
    y,
    arg,
    in_h,
    in_w,
    out_h,
    out_w,
    kh: tl.constexpr,
    kw: tl.constexpr,
    sh,
    sw,
    ph,
    pw,
    BH: tl.constexpr,
    BW: tl.constexpr,
):
    nc = tl.program_id(0)
    oh = tl.program_id(1) * BH + tl.arange(0, BH)
    ow = tl.program_id(2) * BW + tl.arange(0, BW)
    best = tl.full((BH, BW), float("-inf"), tl.float32)
    where = tl.full((BH, BW), -1, tl.int64)
    for i in tl.static_range(kh):
        for j in tl.static_range(kw):
            h = oh[:, None] * sh - ph + i
            w = ow[None, :] * sw - pw + j
            ok = (h >= 0) & (h < in_h) & (w >= 0) & (w < in_w)
            v = tl.load(x + nc * in_h * in_w + h * in_w + w, mask=ok, other=float("-inf"))
            new = v > best
            best = tl.where(new, v, best)
            where = tl.where(new, h * in_w + w, where)
    to = nc * out_h * out_w + oh[:, None] * out_w + ow[None, :]
    ok = (oh < out_h)[:, None] & (ow < out_w)[None, :]
    tl.store(y + to, best, mask=ok)
    tl.store(arg + to, where, mask=ok)


def max_pool2d_with_indices(x, kernel_size, stride, padding):
    n, c, h, w = x.shape
    oh = (h + 2 * padding - kernel_size) // stride + 1
    ow = (w + 2 * padding - kernel_size) // stride + 1
    y = x.new_empty(n, c, oh, ow)
    arg = torch.empty_like(y, dtype=torch.int64)
    grid = (n * c, triton.cdiv(oh, 8), triton.cdiv(ow, 32))
    max_pool2d_forward_kernel[grid](
        x, y, arg, h, w, oh, ow, kernel_size, kernel_size, stride, stride, padding, padding, 8, 32
    )
    return y, arg
