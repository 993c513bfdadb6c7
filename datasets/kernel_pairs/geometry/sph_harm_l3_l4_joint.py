"""Degrees 3 and 4 of the real spherical harmonics in one row of sixteen, forward and backward from shared monomials.

Order +m is Q(z, s) C_m, order -m is Q(z, s) S_m, with s = x^2 + y^2 and C_m + i S_m = (x + i y)^m: solid harmonics,
orthonormal on the unit sphere, of vectors that keep their length. The powers serve both degrees and the Jacobian
alike, as d(C_m + i S_m)/dx = m (C_{m-1} + i S_{m-1}) and d/dy = i d/dx. The backward first adds the degrees of equal
order, so that each power is differentiated once. Columns are degree 3 from -3 to 3, then degree 4 from -4 to 4.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "sph_harm_l3_l4_joint",
    "family": "geometry",
    "op": "spherical_harmonics",
    "schema": 1,
    "techniques": ("row-local", "recompute", "strided-cotangent"),
    "saves": (),
    "grads": ("vectors",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _load_powers(V, point, inside):
    """x = C_1, y = S_1, z and the parts of the second to fourth power of x + i y."""
    x = tl.load(V + 3 * point, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(V + 3 * point + 1, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(V + 3 * point + 2, mask=inside, other=0.0).to(tl.float32)
    c2 = x * x - y * y
    s2 = 2.0 * x * y
    c3 = x * c2 - y * s2
    s3 = x * s2 + y * c2
    return x, y, z, c2, s2, c3, s3, c2 * c2 - s2 * s2, 2.0 * c2 * s2


@triton.jit
def _four_columns(a0, a1, a2, a3, BLOCK: tl.constexpr):
    return tl.reshape(tl.join(tl.join(a0, a2), tl.join(a1, a3)), (BLOCK, 4))


@triton.jit
def _eight_columns(a0, a1, a2, a3, a4, a5, a6, a7, BLOCK: tl.constexpr):
    even = _four_columns(a0, a2, a4, a6, BLOCK)
    odd = _four_columns(a1, a3, a5, a7, BLOCK)
    return tl.reshape(tl.join(even, odd), (BLOCK, 8))


@triton.jit
def _sph_l34_fwd(V, Y, E, BLOCK: tl.constexpr):
    point = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x, y, z, c2, s2, c3, s3, c4, s4 = _load_powers(V, point, point < E)
    s = x * x + y * y
    zz = z * z
    # Q of degree 3, orders 0 to 2, and of degree 4, orders 0 to 3; the highest orders have a constant.
    p0 = 0.3731763325901154 * z * (2.0 * zz - 3.0 * s)
    p1 = 0.4570457994644658 * (4.0 * zz - s)
    p2 = 1.445305721320277 * z
    q0 = 0.10578554691520431 * (8.0 * zz * zz - 24.0 * zz * s + 3.0 * s * s)
    q1 = 0.6690465435572892 * z * (4.0 * zz - 3.0 * s)
    q2 = 0.47308734787878004 * (6.0 * zz - s)
    q3 = 1.7701307697799304 * z
    # Whole rows are built in registers: stored value by value, each store would touch every line of the output.
    even = _eight_columns(
        0.5900435899266435 * s3, p1 * y, p1 * x, 0.5900435899266435 * c3, q3 * s3, q1 * y, q1 * x, q3 * c3, BLOCK
    )
    odd = _eight_columns(
        p2 * s2, p0, p2 * c2, 0.6258357354491761 * s4, q2 * s2, q0, q2 * c2, 0.6258357354491761 * c4, BLOCK
    )
    row = tl.reshape(tl.join(even, odd), (BLOCK, 16))
    tl.store(Y + 16 * point[:, None] + tl.arange(0, 16)[None, :], row, mask=point[:, None] < E)


def forward(vectors):
    vectors = vectors.contiguous()
    E = vectors.shape[0]
    out = torch.empty(E, 16, device=vectors.device, dtype=vectors.dtype)
    _sph_l34_fwd[(triton.cdiv(E, 128),)](vectors, out, E, BLOCK=128, num_warps=4)
    return out, (vectors,)


# --- backward ---
@triton.jit
def _halves(tile, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The even and the odd columns of a (BLOCK, WIDTH) tile."""
    return tl.split(tl.reshape(tile, (BLOCK, WIDTH // 2, 2)))


@triton.jit
def _four_values(tile, BLOCK: tl.constexpr):
    even, odd = _halves(tile, 4, BLOCK)
    a0, a2 = tl.split(even)
    a1, a3 = tl.split(odd)
    return a0, a1, a2, a3


@triton.jit
def _sph_l34_bwd(DY, V, DV, E, dy_point, dy_column, BLOCK: tl.constexpr):
    point = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = point < E
    x, y, z, c2, s2, c3, s3, _, _ = _load_powers(V, point, inside)
    s = x * x + y * y
    zz = z * z

    # Whole rows are loaded and taken apart in registers: column by column, each load would touch every line.
    column = tl.arange(0, 16)[None, :]
    at = DY + point[:, None] * dy_point + column * dy_column
    even, odd = _halves(tl.load(at, mask=inside[:, None], other=0.0).to(tl.float32), 16, BLOCK)
    by_four, two_off = _halves(even, 8, BLOCK)
    one_off, three_off = _halves(odd, 8, BLOCK)
    g_0, g_4, g_8, g_12 = _four_values(by_four, BLOCK)
    g_1, g_5, g_9, g_13 = _four_values(one_off, BLOCK)
    g_2, g_6, g_10, g_14 = _four_values(two_off, BLOCK)
    g_3, g_7, g_11, g_15 = _four_values(three_off, BLOCK)

    # Order 0: only z and s. `to_s` and `to_z` collect what reaches the arguments of all Q.
    g3 = 0.3731763325901154 * g_3
    g4 = 0.10578554691520431 * g_11
    to_z = g3 * (6.0 * zz - 3.0 * s) + g4 * z * (32.0 * zz - 48.0 * s)
    to_s = -3.0 * g3 * z + g4 * (6.0 * s - 24.0 * zz)

    # Order 1: u goes to C_1 = x, v to S_1 = y.
    g3u = 0.4570457994644658 * g_4
    g3v = 0.4570457994644658 * g_2
    g4u = 0.6690465435572892 * g_12
    g4v = 0.6690465435572892 * g_10
    turned3 = g3u * x + g3v * y
    turned4 = g4u * x + g4v * y
    to_z += 8.0 * z * turned3 + (12.0 * zz - 3.0 * s) * turned4
    to_s -= turned3 + 3.0 * z * turned4
    dx = g3u * (4.0 * zz - s) + g4u * z * (4.0 * zz - 3.0 * s)
    dy = g3v * (4.0 * zz - s) + g4v * z * (4.0 * zz - 3.0 * s)

    # Order 2.
    g3u = 1.445305721320277 * g_5
    g3v = 1.445305721320277 * g_1
    g4u = 0.47308734787878004 * g_13
    g4v = 0.47308734787878004 * g_9
    turned4 = g4u * c2 + g4v * s2
    to_z += g3u * c2 + g3v * s2 + 12.0 * z * turned4
    to_s -= turned4
    u = 2.0 * (g3u * z + g4u * (6.0 * zz - s))
    v = 2.0 * (g3v * z + g4v * (6.0 * zz - s))
    dx += u * x + v * y
    dy += v * x - u * y

    # Order 3.
    g3u = 0.5900435899266435 * g_6
    g3v = 0.5900435899266435 * g_0
    g4u = 1.7701307697799304 * g_14
    g4v = 1.7701307697799304 * g_8
    to_z += g4u * c3 + g4v * s3
    u = 3.0 * (g3u + g4u * z)
    v = 3.0 * (g3v + g4v * z)
    dx += u * c2 + v * s2
    dy += v * c2 - u * s2

    # Order 4.
    u = 2.5033429417967046 * g_15
    v = 2.5033429417967046 * g_7
    dx += u * c3 + v * s3 + 2.0 * x * to_s
    dy += v * c3 - u * s3 + 2.0 * y * to_s

    row = _four_columns(dx, dy, to_z, tl.zeros_like(dx), BLOCK)
    axis = tl.arange(0, 4)[None, :]
    tl.store(DV + 3 * point[:, None] + axis, row, mask=inside[:, None] & (axis < 3))


def backward(saved, grad_y, needs=None):
    (vectors,) = saved
    E = vectors.shape[0]
    dvectors = torch.empty_like(vectors)
    _sph_l34_bwd[(triton.cdiv(E, 128),)](grad_y, vectors, dvectors, E, *grad_y.stride(), BLOCK=128, num_warps=4)
    return dvectors


# --- check ---
SWEEP = ({"E": 256}, {"E": 199}, {"E": 100, "dtype": "bfloat16"}, {"E": 33, "dtype": "float16"})
BENCH = ({"E": 2097152, "dtype": "float32"},)


def make_args(E, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(E, 3, generator=g).to(device=device, dtype=getattr(torch, dtype)),)


def reference(vectors):
    # Monomials written out, independent of the recurrence of powers.
    x, y, z = vectors.float().unbind(1)
    xx, yy, zz = x * x, y * y, z * z
    pi = torch.pi
    a, b, c = (35 / (2 * pi)) ** 0.5 / 4, (105 / pi) ** 0.5 / 4, (21 / (2 * pi)) ** 0.5 / 4
    d, e, f = (35 / pi) ** 0.5 * 3 / 16, (35 / (2 * pi)) ** 0.5 * 3 / 4, (5 / pi) ** 0.5 * 3 / 8
    h, k = (5 / (2 * pi)) ** 0.5 * 3 / 4, (1 / pi) ** 0.5 * 3 / 16
    third = (
        a * y * (3 * xx - yy), 2 * b * x * y * z, c * y * (4 * zz - xx - yy), (7 / pi) ** 0.5 / 4 * z
        * (2 * zz - 3 * xx - 3 * yy), c * x * (4 * zz - xx - yy), b * z * (xx - yy), a * x * (xx - 3 * yy),
    )  # fmt: skip
    fourth = (
        4 * d * x * y * (xx - yy), e * y * z * (3 * xx - yy), 2 * f * x * y * (6 * zz - xx - yy),
        h * y * z * (4 * zz - 3 * xx - 3 * yy), k * (8 * zz * zz - 24 * zz * (xx + yy) + 3 * (xx + yy) ** 2),
        h * x * z * (4 * zz - 3 * xx - 3 * yy), f * (xx - yy) * (6 * zz - xx - yy), e * x * z * (xx - 3 * yy),
        d * (xx * xx - 6 * xx * yy + yy * yy),
    )  # fmt: skip
    return torch.stack((*third, *fourth), 1).to(vectors.dtype)
