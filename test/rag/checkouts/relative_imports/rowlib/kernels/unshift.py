import triton
import triton.language as tl


@triton.jit
def _kernel(DY, DX, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(DX + at, tl.load(DY + at, mask=at < N), mask=at < N)
