import triton
import triton.language as tl


@triton.jit
def scale_rows(X, S, Y, N, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(X + row * N + cols, mask=cols < N)
    tl.store(Y + row * N + cols, x * tl.load(S + row), mask=cols < N)


@triton.jit
def adjoint(X, S, DY, DX, DS, N, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(X + row * N + cols, mask=cols < N, other=0.0)
    dy = tl.load(DY + row * N + cols, mask=cols < N, other=0.0)
    tl.store(DX + row * N + cols, dy * tl.load(S + row), mask=cols < N)
    tl.store(DS + row, tl.sum(x * dy, axis=0))
