import triton
import triton.language as tl


@triton.jit
def triton_jagged_to_dense(values, offsets, dense, max_len, D, pad, BL: tl.constexpr, BD: tl.constexpr):
    b = tl.program_id(1)
    lo = tl.load(offsets + b)
    n = tl.minimum(tl.load(offsets + b + 1) - lo, max_len)
    i = tl.program_id(0) * BL + tl.arange(0, BL)
    for d0 in range(0, D, BD):
        d = d0 + tl.arange(0, BD)
        v = tl.load(values + (lo + i)[:, None] * D + d[None, :], mask=(i < n)[:, None] & (d < D)[None, :], other=pad)
        tl.store(dense + (b * max_len + i)[:, None] * D + d[None, :], v, mask=(i < max_len)[:, None] & (d < D)[None, :])


def jagged_to_dense(values, offsets, max_len, padding_value=0.0):
    B, D = offsets.numel() - 1, values.shape[1]
    dense = values.new_empty(B, max_len, D)
    triton_jagged_to_dense[(triton.cdiv(max_len, 32), B)](values, offsets, dense, max_len, D, padding_value, 32, 64)
    return dense
