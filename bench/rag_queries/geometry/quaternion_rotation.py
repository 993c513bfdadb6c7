import triton
import triton.language as tl


@triton.jit
def q2r(q, r, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    k = i < n
    w = tl.load(q + 4 * i, mask=k, other=1.0)
    x = tl.load(q + 4 * i + 1, mask=k, other=0.0)
    y = tl.load(q + 4 * i + 2, mask=k, other=0.0)
    z = tl.load(q + 4 * i + 3, mask=k, other=0.0)
    s = tl.rsqrt(w * w + x * x + y * y + z * z)
    w, x, y, z = w * s, x * s, y * s, z * s
    tl.store(r + 9 * i, 1 - 2 * (y * y + z * z), mask=k)
    tl.store(r + 9 * i + 1, 2 * (x * y - w * z), mask=k)
    tl.store(r + 9 * i + 2, 2 * (x * z + w * y), mask=k)
    tl.store(r + 9 * i + 3, 2 * (x * y + w * z), mask=k)
    tl.store(r + 9 * i + 4, 1 - 2 * (x * x + z * z), mask=k)
    tl.store(r + 9 * i + 5, 2 * (y * z - w * x), mask=k)
    tl.store(r + 9 * i + 6, 2 * (x * z - w * y), mask=k)
    tl.store(r + 9 * i + 7, 2 * (y * z + w * x), mask=k)
    tl.store(r + 9 * i + 8, 1 - 2 * (x * x + y * y), mask=k)


def quaternion_to_matrix(quaternions):
    flat = quaternions.reshape(-1, 4)
    out = flat.new_empty(flat.shape[0], 3, 3)
    q2r[(triton.cdiv(flat.shape[0], 256),)](flat, out, flat.shape[0], B=256)
    return out
