import triton
import triton.language as tl


@triton.jit
def dwt_haar(img, ll, lh, hl, hh, H, W, BW: tl.constexpr):
    """One level of the Haar transform: four half-size bands."""
    y = tl.program_id(0)
    x = tl.program_id(1) * BW + tl.arange(0, BW)
    ok = x < W // 2
    a = tl.load(img + 2 * y * W + 2 * x, mask=ok)
    b = tl.load(img + 2 * y * W + 2 * x + 1, mask=ok)
    c = tl.load(img + (2 * y + 1) * W + 2 * x, mask=ok)
    d = tl.load(img + (2 * y + 1) * W + 2 * x + 1, mask=ok)
    o = y * (W // 2) + x
    tl.store(ll + o, 0.5 * (a + b + c + d), mask=ok)
    tl.store(lh + o, 0.5 * (a - b + c - d), mask=ok)
    tl.store(hl + o, 0.5 * (a + b - c - d), mask=ok)
    tl.store(hh + o, 0.5 * (a - b - c + d), mask=ok)


def haar2d(img):
    H, W = img.shape
    bands = img.new_empty(4, H // 2, W // 2)
    dwt_haar[(H // 2, triton.cdiv(W // 2, 128))](img, *bands, H, W, BW=128)
    return bands
