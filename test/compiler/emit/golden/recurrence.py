import triton
import triton.language as tl


@triton.jit
def recurrence(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    h = tl.zeros([BLOCK], dtype=tl.float32)
    g = tl.zeros([BLOCK], dtype=tl.float32)
    for i in range(n - 1, -1, -1):
        offs_i = i * BLOCK + offs
        x = tl.load(x_ptr + offs_i)
        total = h * x + g
        tl.store(out_ptr + offs_i, total)
        if i > 2:
            g = tl.sigmoid(h)
        h = g
        g = total
