import triton as T
from triton import language as tl
from triton import jit


def programs(n):
    return T.cdiv(n, 256)


@jit
def _at(n, BLOCK: tl.constexpr):
    return tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)


@jit
def multiply(A, B, C, N, BLOCK: tl.constexpr):
    at = _at(N, BLOCK)
    tl.store(C + at, tl.load(A + at, mask=at < N) * tl.load(B + at, mask=at < N), mask=at < N)


@T.jit
def dleft(B, DC, DA, N, BLOCK: tl.constexpr):
    at = _at(N, BLOCK)
    tl.store(DA + at, tl.load(B + at, mask=at < N) * tl.load(DC + at, mask=at < N), mask=at < N)


@T.jit(do_not_specialize=["N"])
def dright(A, DC, DB, N, BLOCK: tl.constexpr):
    at = _at(N, BLOCK)
    tl.store(DB + at, tl.load(A + at, mask=at < N) * tl.load(DC + at, mask=at < N), mask=at < N)
