import torch
import triton
import triton.language as tl


@triton.jit
def _fast_rms_forward(Y, stride_y, X, stride_x, W, r, stride_r, n_cols, eps, BLOCK_SIZE: tl.constexpr):
    """One row per program; W is scaled in the weight's own dtype."""
    i = tl.program_id(0)
    c = tl.arange(0, BLOCK_SIZE)
    m = c < n_cols
    Y += i * stride_y
    X += i * stride_x
    xi = tl.load(X + c, mask=m, other=0).to(tl.float32)
    wi = tl.load(W + c, mask=m, other=0)
    var = tl.sum(xi * xi, axis=0) / n_cols
    inv = tl.math.rsqrt(var + eps)
    tl.store(r + i * stride_r, inv)
    tl.store(Y + c, (xi * inv).to(wi.dtype) * wi, mask=m)


class FastRMS(torch.autograd.Function):
    @staticmethod
    def forward(ctx, X, W, eps):
        shape = X.shape
        X = X.view(-1, shape[-1])
        n_rows, n_cols = X.shape
        Y = torch.empty_like(X)
        r = torch.empty(n_rows, dtype=torch.float32, device=X.device)
        _fast_rms_forward[(n_rows,)](
            Y, Y.stride(0), X, X.stride(0), W, r, r.stride(0), n_cols, eps, triton.next_power_of_2(n_cols)
        )
        ctx.save_for_backward(X, W, r)
        return Y.view(shape)
