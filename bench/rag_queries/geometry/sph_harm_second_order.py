import torch
import triton
import triton.language as tl


@triton.jit
def second_order_fwd(coord_ptr, out_ptr, numel, BLOCK: tl.constexpr, OUT: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = i < numel
    x = tl.load(coord_ptr + 3 * i, mask=ok)
    y = tl.load(coord_ptr + 3 * i + 1, mask=ok)
    z = tl.load(coord_ptr + 3 * i + 2, mask=ok)
    C0: tl.constexpr = 3.87298334620742
    C1: tl.constexpr = 2.23606797749979
    tl.store(out_ptr + OUT * i, C0 * x * z, mask=ok)
    tl.store(out_ptr + OUT * i + 1, C0 * x * y, mask=ok)
    tl.store(out_ptr + OUT * i + 2, C1 * (y * y - 0.5 * (x * x + z * z)), mask=ok)
    tl.store(out_ptr + OUT * i + 3, C0 * y * z, mask=ok)
    tl.store(out_ptr + OUT * i + 4, 0.5 * C0 * (z * z - x * x), mask=ok)


class SecondOrderSphericalHarmonic(torch.autograd.Function):
    @staticmethod
    def forward(ctx, coords):
        n = coords.shape[0]
        out = coords.new_empty(n, 5)
        second_order_fwd[(triton.cdiv(n, 256),)](coords, out, n, 256, 5)
        ctx.save_for_backward(coords)
        return out
