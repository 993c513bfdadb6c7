"""Degree 2 real spherical harmonics of vectors: five quadratics, whose Jacobian is linear and written out term by term.

Orders -2 to 2 are c xy, c yz, k (2 z^2 - x^2 - y^2), c xz, c/2 (x^2 - y^2) with c = sqrt(15 / pi) / 2 and k = sqrt(5 /
pi) / 4: solid harmonics, orthonormal on the unit sphere, of vectors that keep their length. The backward needs the
three coordinates only. Rows of three and five values are stored as tiles (point, component), so that stores have no
gaps; the loads of the components of a point meet in L1.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "sph_harm_l2",
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
def _load_xyz(V, point, inside):
    x = tl.load(V + 3 * point, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(V + 3 * point + 1, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(V + 3 * point + 2, mask=inside, other=0.0).to(tl.float32)
    return x, y, z


@triton.jit
def _sph_l2_fwd(V, Y, E, BLOCK: tl.constexpr):
    point = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x, y, z = _load_xyz(V, point, point < E)
    # Column m of the tile is order m - 2.
    m = tl.arange(0, 8)[None, :]
    out = tl.where(m == 0, (1.0925484305920792 * x * y)[:, None], 0.0)
    out = tl.where(m == 1, (1.0925484305920792 * y * z)[:, None], out)
    out = tl.where(m == 2, (0.31539156525252005 * (2.0 * z * z - x * x - y * y))[:, None], out)
    out = tl.where(m == 3, (1.0925484305920792 * x * z)[:, None], out)
    out = tl.where(m == 4, (0.5462742152960396 * (x * x - y * y))[:, None], out)
    tl.store(Y + 5 * point[:, None] + m, out, mask=(point[:, None] < E) & (m < 5))


def forward(vectors):
    vectors = vectors.contiguous()
    E = vectors.shape[0]
    out = torch.empty(E, 5, device=vectors.device, dtype=vectors.dtype)
    _sph_l2_fwd[(triton.cdiv(E, 256),)](vectors, out, E, BLOCK=256, num_warps=4)
    return out, (vectors,)


# --- backward ---
@triton.jit
def _sph_l2_bwd(DY, V, DV, E, dy_point, dy_order, BLOCK: tl.constexpr):
    point = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = point < E
    x, y, z = _load_xyz(V, point, inside)
    # Whole rows of cotangents, as (outer, middle, inner) bits of the order's number, taken apart in registers.
    bit = tl.arange(0, 2)
    m = 4 * bit[:, None, None] + 2 * bit[None, :, None] + bit[None, None, :]
    at = point[:, None, None, None] * dy_point + m[None, :, :, :] * dy_order
    g = tl.load(DY + at, mask=inside[:, None, None, None] & (m[None, :, :, :] < 5), other=0.0).to(tl.float32)
    even, odd = tl.split(g)
    zero_four, two = tl.split(even)
    one, three = tl.split(odd)
    g_xy, g_xx = tl.split(zero_four)
    g_zz, _ = tl.split(two)
    g_yz, _ = tl.split(one)
    g_xz, _ = tl.split(three)
    g_xy *= 1.0925484305920792
    g_yz *= 1.0925484305920792
    g_zz *= 0.6307831305050401
    g_xz *= 1.0925484305920792
    g_xx *= 1.0925484305920792
    dx = g_xy * y + g_xz * z + (g_xx - g_zz) * x
    dy = g_xy * x + g_yz * z - (g_xx + g_zz) * y
    dz = g_yz * y + g_xz * x + 2.0 * g_zz * z
    axis = tl.arange(0, 4)[None, :]
    out = tl.where(axis == 0, dx[:, None], tl.where(axis == 1, dy[:, None], dz[:, None]))
    tl.store(DV + 3 * point[:, None] + axis, out, mask=inside[:, None] & (axis < 3))


def backward(saved, grad_y, needs=None):
    (vectors,) = saved
    E = vectors.shape[0]
    dvectors = torch.empty_like(vectors)
    _sph_l2_bwd[(triton.cdiv(E, 256),)](grad_y, vectors, dvectors, E, *grad_y.stride(), BLOCK=256, num_warps=4)
    return dvectors


# --- check ---
SWEEP = ({"E": 512}, {"E": 397}, {"E": 100, "dtype": "bfloat16"}, {"E": 33, "dtype": "float16"})
BENCH = ({"E": 4194304, "dtype": "float32"},)


def make_args(E, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(E, 3, generator=g).to(device=device, dtype=getattr(torch, dtype)),)


def reference(vectors):
    x, y, z = vectors.float().unbind(1)
    c, k = (15.0 / torch.pi) ** 0.5 / 2.0, (5.0 / torch.pi) ** 0.5 / 4.0
    rows = (c * x * y, c * y * z, k * (2.0 * z * z - x * x - y * y), c * x * z, c / 2.0 * (x * x - y * y))
    return torch.stack(rows, 1).to(vectors.dtype)
