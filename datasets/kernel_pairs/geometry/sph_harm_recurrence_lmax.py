"""Real spherical harmonics of any degree: the recurrence in l is replayed with its derivative, nothing is saved.

Order +m of degree l is P_l(z, s) C_m and order -m is P_l(z, s) S_m with s = x^2 + y^2, C_m + i S_m = (x + i y)^m and

    P_l = a (z P_{l-1} - b r^2 P_{l-2}),  a^2 = (4 l^2 - 1) / (l^2 - m^2),  b^2 = ((l - 1)^2 - m^2) / (4 (l - 1)^2 - 1).

Both passes walk m outside and l inside with two values of P carried along. The slope in z needs no recurrence of its
own, since dP_l/dz at fixed x and y is sqrt((2 l + 1) / (2 l - 1) (l^2 - m^2)) P_{l-1}; the slope in s is carried:
D_l = a (z D_{l-1} - b (P_{l-2} + r^2 D_{l-2})). Outputs are solid harmonics, orthonormal on the unit sphere, with
component l^2 + l + m in row l^2 + l + m: lanes are points, and every row is read and written without gaps.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "sph_harm_recurrence_lmax",
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
def _load_point(V, point, inside):
    x = tl.load(V + 3 * point, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(V + 3 * point + 1, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(V + 3 * point + 2, mask=inside, other=0.0).to(tl.float32)
    return x, y, z


@triton.jit
def _step(degree, m):
    """a, a b and the factor of dP_l/dz for degree degree > m."""
    ll = (degree * degree).to(tl.float32)
    mm = (m * m).to(tl.float32)
    below = ((degree - 1) * (degree - 1)).to(tl.float32)
    a = tl.sqrt((4.0 * ll - 1.0) / (ll - mm))
    ab = a * tl.sqrt((below - mm) / (4.0 * below - 1.0))
    return a, ab, a * (ll - mm) / (2.0 * degree - 1.0)


@triton.jit
def _next_order(x, y, cos_m, sin_m, p_mm, m):
    """C, S and P_m of order m + 1; the two orders of a degree share a factor sqrt(2) from m = 1 on."""
    wider = (2.0 * m + 3.0) / (2.0 * m + 2.0)
    return x * cos_m - y * sin_m, x * sin_m + y * cos_m, p_mm * tl.sqrt(tl.where(m == 0, 2.0 * wider, wider))


@triton.jit
def _sph_fwd(V, Y, E, LMAX, BLOCK: tl.constexpr):
    point = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = point < E
    x, y, z = _load_point(V, point, inside)
    square = x * x + y * y + z * z
    cos_m = tl.full((BLOCK,), 1.0, tl.float32)
    sin_m = tl.zeros((BLOCK,), tl.float32)
    p_mm = 0.28209479177387814
    for m in range(LMAX + 1):
        here = tl.full((BLOCK,), 1.0, tl.float32) * p_mm
        before = tl.zeros((BLOCK,), tl.float32)
        for degree in range(m, LMAX + 1):
            centre = Y + tl.cast(degree * degree + degree, tl.int64) * E + point
            offset = tl.cast(m, tl.int64) * E
            tl.store(centre - offset, here * sin_m, mask=inside & (m > 0))
            tl.store(centre + offset, here * cos_m, mask=inside)
            a, ab, _ = _step(degree + 1, m)
            above = a * z * here - ab * square * before
            before = here
            here = above
        cos_m, sin_m, p_mm = _next_order(x, y, cos_m, sin_m, p_mm, m)


def forward(vectors, lmax):
    vectors = vectors.contiguous()
    E = vectors.shape[0]
    out = torch.empty((lmax + 1) ** 2, E, device=vectors.device, dtype=vectors.dtype)
    _sph_fwd[(triton.cdiv(E, 256),)](vectors, out, E, lmax, BLOCK=256, num_warps=4)
    return out, (vectors, lmax)


# --- backward ---
@triton.jit
def _sph_bwd(DY, V, DV, E, LMAX, dy_row, dy_point, BLOCK: tl.constexpr):
    point = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = point < E
    x, y, z = _load_point(V, point, inside)
    square = x * x + y * y + z * z
    cos_m = tl.full((BLOCK,), 1.0, tl.float32)
    sin_m = tl.zeros((BLOCK,), tl.float32)
    # C and S of order m - 1: d(C_m + i S_m)/dx is m times these, d/dy the same times i.
    # Order 0 does not use them.
    cos_below = tl.zeros((BLOCK,), tl.float32)
    sin_below = tl.full((BLOCK,), 1.0, tl.float32)
    dx = tl.zeros((BLOCK,), tl.float32)
    dy = tl.zeros((BLOCK,), tl.float32)
    dz = tl.zeros((BLOCK,), tl.float32)
    to_s = tl.zeros((BLOCK,), tl.float32)
    p_mm = 0.28209479177387814
    for m in range(LMAX + 1):
        here = tl.full((BLOCK,), 1.0, tl.float32) * p_mm
        before = tl.zeros((BLOCK,), tl.float32)
        slope = tl.zeros((BLOCK,), tl.float32)
        # P_{degree-2} + r^2 D_{degree-2} of the step to come.
        fed = tl.zeros((BLOCK,), tl.float32)
        to_cos = tl.zeros((BLOCK,), tl.float32)
        to_sin = tl.zeros((BLOCK,), tl.float32)
        in_z = tl.zeros((BLOCK,), tl.float32)
        for degree in range(m, LMAX + 1):
            row = tl.cast(degree * degree + degree, tl.int64)
            source = DY + point * dy_point
            g_cos = tl.load(source + (row + m) * dy_row, mask=inside, other=0.0).to(tl.float32)
            g_sin = tl.load(source + (row - m) * dy_row, mask=inside & (m > 0), other=0.0).to(tl.float32)
            along = g_cos * cos_m + g_sin * sin_m
            to_cos += g_cos * here
            to_sin += g_sin * here
            to_s += along * slope
            dz += along * in_z
            a, ab, rise = _step(degree + 1, m)
            in_z = rise * here
            above = a * z * here - ab * square * before
            steeper = a * z * slope - ab * fed
            fed = here + square * slope
            before = here
            here = above
            slope = steeper
        dx += m * (to_cos * cos_below + to_sin * sin_below)
        dy += m * (to_sin * cos_below - to_cos * sin_below)
        cos_below = cos_m
        sin_below = sin_m
        cos_m, sin_m, p_mm = _next_order(x, y, cos_m, sin_m, p_mm, m)
    # s = x^2 + y^2. What changes r^2 at fixed s is in dP/dz already.
    tl.store(DV + 3 * point, dx + 2.0 * x * to_s, mask=inside)
    tl.store(DV + 3 * point + 1, dy + 2.0 * y * to_s, mask=inside)
    tl.store(DV + 3 * point + 2, dz, mask=inside)


def backward(saved, grad_y, needs=None):
    vectors, lmax = saved
    E = vectors.shape[0]
    dvectors = torch.empty_like(vectors)
    _sph_bwd[(triton.cdiv(E, 256),)](grad_y, vectors, dvectors, E, lmax, *grad_y.stride(), BLOCK=256, num_warps=4)
    return dvectors


# --- check ---
SWEEP = (
    {"E": 256, "LMAX": 4},
    {"E": 77, "LMAX": 7},
    {"E": 35, "LMAX": 1, "dtype": "float16"},
    {"E": 40, "LMAX": 5, "dtype": "bfloat16"},
)
BENCH = ({"E": 524288, "LMAX": 8, "dtype": "float32"},)


def make_args(E, LMAX, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    # Lengths around one: high degrees of long vectors would drown the others.
    direction = torch.nn.functional.normalize(torch.randn(E, 3, generator=g), dim=1)
    vectors = direction * (0.8 + 0.4 * torch.rand(E, 1, generator=g))
    return vectors.to(device=device, dtype=getattr(torch, dtype)), LMAX


def reference(vectors, lmax):
    x, y, z = vectors.float().unbind(1)
    square, power = x * x + y * y + z * z, torch.complex(torch.ones_like(x), torch.zeros_like(x))
    step, rows = torch.complex(x, y), [x] * (lmax + 1) ** 2
    for m in range(lmax + 1):
        # The highest order of degree m, then the orders above it by Bonnet's recurrence with (degree - m)! norms.
        first = 1.0
        for k in range(1, m + 1):
            first *= (2 * k + 1) / (2 * k)
        before, here = torch.zeros_like(x), torch.full_like(x, (first * (2 - (m == 0)) / (4 * torch.pi)) ** 0.5)
        for degree in range(m, lmax + 1):
            rows[degree * degree + degree - m], rows[degree * degree + degree + m] = (
                here * power.imag,
                here * power.real,
            )
            up = (4 * (degree + 1) ** 2 - 1) / ((degree + 1) ** 2 - m * m)
            back = (degree * degree - m * m) / (4 * degree * degree - 1)
            before, here = here, up**0.5 * (z * here - back**0.5 * square * before)
        power = power * step
    return torch.stack(rows).to(vectors.dtype)
