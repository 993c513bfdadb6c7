import triton
import triton.language as tl


@triton.jit
def _kernel(X, Y, by, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + at, tl.load(X + at, mask=at < N) + by, mask=at < N)
