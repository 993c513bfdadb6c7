import triton
import triton.language as tl

try:
    from .tuned import BLOCK
except ImportError:
    BLOCK = 128

HAS_EXTRA = False
if HAS_EXTRA:

    @triton.jit
    def twice(x, y, n, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        v = tl.load(x + at, mask=at < n)
        tl.store(y + at, v + v, mask=at < n)

else:

    @triton.jit
    def twice(x, y, n, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(y + at, tl.load(x + at, mask=at < n) * 2.0, mask=at < n)


def launch(kernel, *tensors):
    """Over all elements of the first."""
    n = tensors[0].numel()
    kernel[(triton.cdiv(n, BLOCK),)](*tensors, n, BLOCK=BLOCK)
