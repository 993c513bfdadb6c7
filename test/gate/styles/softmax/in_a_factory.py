"""Kernels defined where they are made: in a function that builds them, and as a static method of a class."""

import torch
import triton
import triton.language as tl


def make_backward(rows_per_program):
    @triton.jit
    def softmax_backward(DY, Y, DX, sm, sn, M, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
        r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
        c = tl.arange(0, BLOCK)[None, :]
        inside = (r < M) & (c < N)
        y = tl.load(Y + r * N + c, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(DY + r * sm + c * sn, mask=inside, other=0.0).to(tl.float32)
        tl.store(DX + r * N + c, _adjoint(y, dy), mask=inside)

    def launch(y, dy):
        dx = torch.empty_like(y)
        M, N = y.shape
        softmax_backward[(triton.cdiv(M, rows_per_program),)](
            dy, y, dx, dy.stride(0), dy.stride(1), M, N, ROWS=rows_per_program, BLOCK=triton.next_power_of_2(N)
        )
        return dx

    return launch


@triton.jit
def _adjoint(y, dy):
    return y * (dy - tl.sum(y * dy, 1, keep_dims=True))


class Softmax:
    backward = staticmethod(make_backward(4))


def backward(saved, grad_out):
    return Softmax.backward(saved[0], grad_out)
