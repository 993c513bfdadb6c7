import triton
import triton.language as tl


@triton.jit
def softmax_backward(Y, dY, dX, stride, n, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    row = tl.program_id(0)
    offs = row * stride + cols
    mask = cols < n
    y = tl.load(Y + offs, mask=mask, other=0.0).to(tl.float32)
    d_y = tl.load(dY + offs, mask=mask, other=0.0).to(tl.float32)
    d_x = y * (d_y - tl.sum(y * d_y, axis=0))
    tl.store(dX + offs, d_x, mask=mask)
