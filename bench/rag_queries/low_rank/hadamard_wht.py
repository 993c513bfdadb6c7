import torch
import triton
import triton.language as tl


@triton.jit
def fwht(x, y, scale, n: tl.constexpr, LOG: tl.constexpr):
    """Fast Walsh-Hadamard transform of each row."""
    r = tl.program_id(0)
    i = tl.arange(0, n)
    v = tl.load(x + r * n + i).to(tl.float32)
    for _ in tl.static_range(LOG):
        pair = tl.reshape(v, (n // 2, 2))
        a, b = tl.split(pair)
        v = tl.reshape(tl.trans(tl.join(a + b, a - b)), (n,))
    tl.store(y + r * n + i, v * scale)


def hadamard_transform(x, scale=1.0):
    y = torch.empty_like(x)
    n = x.shape[-1]
    fwht[(x.numel() // n,)](x, y, scale, n, n.bit_length() - 1)
    return y
