"""Two rigid frames composed and applied to their points: one sum of dy p^T and dy per frame serves all four factors.

A frame is a row-major 3 x 4 matrix [R | t]. y = R1 (R2 p + t2) + t1 for the points of frame f. With G = sum dy p^T and
g = sum dy over the points of a frame, the composition is differentiated on 3 x 4 matrices alone: dR1 = G R2^T + g t2^T,
dt1 = g, dR2 = R1^T G, dt2 = R1^T g, and each point gets (R1 R2)^T dy. A program owns several frames with their few
points each (the atoms of a residue) as one tile, so that the sums never leave it.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "se3_compose_points",
    "family": "geometry",
    "op": "rigid_transform",
    "schema": 1,
    "techniques": ("orthogonal-adjoint", "multi-row-tile", "broadcast-reduction", "one-launch", "strided-cotangent"),
    "saves": (),
    "grads": ("outer", "inner", "points"),
    "dtypes": ("float32",),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _load_row(Frames, f, inside, ROW: tl.constexpr):
    """Row [a, b, c | t] of frames f."""
    at = Frames + 12 * f + 4 * ROW
    a = tl.load(at, mask=inside, other=0.0)
    b = tl.load(at + 1, mask=inside, other=0.0)
    c = tl.load(at + 2, mask=inside, other=0.0)
    return a, b, c, tl.load(at + 3, mask=inside, other=0.0)


@triton.jit
def _row_times(a, b, c, x0, y0, z0, x1, y1, z1, x2, y2, z2):
    """Row (a, b, c) times the matrix whose rows are 0, 1 and 2."""
    return a * x0 + b * x1 + c * x2, a * y0 + b * y1 + c * y2, a * z0 + b * z1 + c * z2


@triton.jit
def _load_points(X, f, p, F, P, x_f, x_p, x_c, BLOCK_F: tl.constexpr, BLOCK_P: tl.constexpr):
    """x, y and z as tiles (frame, point): one load without gaps, taken apart in registers."""
    axis = tl.arange(0, 4)[None, None, :]
    ok = (f[:, None, None] < F) & (p[None, :, None] < P) & (axis < 3)
    at = f[:, None, None] * x_f + p[None, :, None] * x_p + axis * x_c
    tile = tl.reshape(tl.load(X + at, mask=ok, other=0.0), (BLOCK_F, BLOCK_P, 2, 2))
    even, odd = tl.split(tile)
    x, z = tl.split(even)
    y, _ = tl.split(odd)
    return x, y, z


@triton.jit
def _store_points(Y, x, y, z, f, p, F, P, BLOCK_F: tl.constexpr, BLOCK_P: tl.constexpr):
    axis = tl.arange(0, 4)[None, None, :]
    ok = (f[:, None, None] < F) & (p[None, :, None] < P) & (axis < 3)
    tile = tl.reshape(tl.join(tl.join(x, z), tl.join(y, tl.zeros_like(x))), (BLOCK_F, BLOCK_P, 4))
    tl.store(Y + (f[:, None, None] * P + p[None, :, None]) * 3 + axis, tile, mask=ok)


@triton.jit
def _apply(a, b, c, x, y, z):
    return a[:, None] * x + b[:, None] * y + c[:, None] * z


@triton.jit
def _se3_fwd(Outer, Inner, Points, Y, F, P, BLOCK_F: tl.constexpr, BLOCK_P: tl.constexpr):
    f = tl.program_id(0).to(tl.int64) * BLOCK_F + tl.arange(0, BLOCK_F)
    p = tl.arange(0, BLOCK_P)
    inside = f < F
    x, y, z = _load_points(Points, f, p, F, P, 3 * P, 3, 1, BLOCK_F, BLOCK_P)
    a0, b0, c0, t0 = _load_row(Inner, f, inside, 0)
    a1, b1, c1, t1 = _load_row(Inner, f, inside, 1)
    a2, b2, c2, t2 = _load_row(Inner, f, inside, 2)
    ix = _apply(a0, b0, c0, x, y, z) + t0[:, None]
    iy = _apply(a1, b1, c1, x, y, z) + t1[:, None]
    iz = _apply(a2, b2, c2, x, y, z) + t2[:, None]
    a0, b0, c0, t0 = _load_row(Outer, f, inside, 0)
    a1, b1, c1, t1 = _load_row(Outer, f, inside, 1)
    a2, b2, c2, t2 = _load_row(Outer, f, inside, 2)
    ox = _apply(a0, b0, c0, ix, iy, iz) + t0[:, None]
    oy = _apply(a1, b1, c1, ix, iy, iz) + t1[:, None]
    oz = _apply(a2, b2, c2, ix, iy, iz) + t2[:, None]
    _store_points(Y, ox, oy, oz, f, p, F, P, BLOCK_F, BLOCK_P)


def _blocks(P):
    BLOCK_P = triton.next_power_of_2(P)
    return max(1, 512 // BLOCK_P), BLOCK_P


def forward(outer, inner, points):
    outer, inner, points = outer.contiguous(), inner.contiguous(), points.contiguous()
    F, P, _ = points.shape
    y = torch.empty_like(points)
    BLOCK_F, BLOCK_P = _blocks(P)
    _se3_fwd[(triton.cdiv(F, BLOCK_F),)](outer, inner, points, y, F, P, BLOCK_F=BLOCK_F, BLOCK_P=BLOCK_P, num_warps=4)
    return y, (outer, inner, points)


# --- backward ---
@triton.jit
def _moments(g, x, y, z):
    """Row of G and of g: sums over the points of every frame."""
    return tl.sum(g * x, 1), tl.sum(g * y, 1), tl.sum(g * z, 1), tl.sum(g, 1)


@triton.jit
def _with_row(tile, column, a, b, c, t, ROW: tl.constexpr):
    """The tile (frame, 16) with row [a, b, c | t] put in."""
    tile = tl.where(column == 4 * ROW, a[:, None], tile)
    tile = tl.where(column == 4 * ROW + 1, b[:, None], tile)
    tile = tl.where(column == 4 * ROW + 2, c[:, None], tile)
    return tl.where(column == 4 * ROW + 3, t[:, None], tile)


@triton.jit
def _outer_row(Gx, Gy, Gz, g, p0, q0, r0, t0, p1, q1, r1, t1, p2, q2, r2, t2):
    """Row of G R2^T + g t2^T: R2's rows are (p, q, r)."""
    a = Gx * p0 + Gy * q0 + Gz * r0 + g * t0
    b = Gx * p1 + Gy * q1 + Gz * r1 + g * t1
    c = Gx * p2 + Gy * q2 + Gz * r2 + g * t2
    return a, b, c


@triton.jit
def _se3_bwd(
    DY, Outer, Inner, Points, DOuter, DInner, DPoints, F, P, dy_f, dy_p, dy_c,
    BLOCK_F: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    f = tl.program_id(0).to(tl.int64) * BLOCK_F + tl.arange(0, BLOCK_F)
    p = tl.arange(0, BLOCK_P)
    inside = f < F
    gx, gy, gz = _load_points(DY, f, p, F, P, dy_f, dy_p, dy_c, BLOCK_F, BLOCK_P)
    a0, b0, c0, _ = _load_row(Outer, f, inside, 0)
    a1, b1, c1, _ = _load_row(Outer, f, inside, 1)
    a2, b2, c2, _ = _load_row(Outer, f, inside, 2)
    p0, q0, r0, t0 = _load_row(Inner, f, inside, 0)
    p1, q1, r1, t1 = _load_row(Inner, f, inside, 1)
    p2, q2, r2, t2 = _load_row(Inner, f, inside, 2)

    # Points: the rows of R1 R2 are the columns of its transpose.
    u0, v0, w0 = _row_times(a0, b0, c0, p0, q0, r0, p1, q1, r1, p2, q2, r2)
    u1, v1, w1 = _row_times(a1, b1, c1, p0, q0, r0, p1, q1, r1, p2, q2, r2)
    u2, v2, w2 = _row_times(a2, b2, c2, p0, q0, r0, p1, q1, r1, p2, q2, r2)
    dx = _apply(u0, u1, u2, gx, gy, gz)
    dy = _apply(v0, v1, v2, gx, gy, gz)
    dz = _apply(w0, w1, w2, gx, gy, gz)
    _store_points(DPoints, dx, dy, dz, f, p, F, P, BLOCK_F, BLOCK_P)

    # The only sums over points. Lanes outside loaded zeros.
    x, y, z = _load_points(Points, f, p, F, P, 3 * P, 3, 1, BLOCK_F, BLOCK_P)
    G0x, G0y, G0z, g0 = _moments(gx, x, y, z)
    G1x, G1y, G1z, g1 = _moments(gy, x, y, z)
    G2x, G2y, G2z, g2 = _moments(gz, x, y, z)

    column = tl.arange(0, 16)[None, :]
    at = 12 * f[:, None] + column
    ok = inside[:, None] & (column < 12)
    da, db, dc = _outer_row(G0x, G0y, G0z, g0, p0, q0, r0, t0, p1, q1, r1, t1, p2, q2, r2, t2)
    douter = _with_row(tl.zeros((BLOCK_F, 16), tl.float32), column, da, db, dc, g0, 0)
    da, db, dc = _outer_row(G1x, G1y, G1z, g1, p0, q0, r0, t0, p1, q1, r1, t1, p2, q2, r2, t2)
    douter = _with_row(douter, column, da, db, dc, g1, 1)
    da, db, dc = _outer_row(G2x, G2y, G2z, g2, p0, q0, r0, t0, p1, q1, r1, t1, p2, q2, r2, t2)
    douter = _with_row(douter, column, da, db, dc, g2, 2)
    tl.store(DOuter + at, douter, mask=ok)

    # R1^T [G | g]: columns of R1 are rows of its transpose.
    da, db, dc = _row_times(a0, a1, a2, G0x, G0y, G0z, G1x, G1y, G1z, G2x, G2y, G2z)
    dinner = _with_row(tl.zeros((BLOCK_F, 16), tl.float32), column, da, db, dc, a0 * g0 + a1 * g1 + a2 * g2, 0)
    da, db, dc = _row_times(b0, b1, b2, G0x, G0y, G0z, G1x, G1y, G1z, G2x, G2y, G2z)
    dinner = _with_row(dinner, column, da, db, dc, b0 * g0 + b1 * g1 + b2 * g2, 1)
    da, db, dc = _row_times(c0, c1, c2, G0x, G0y, G0z, G1x, G1y, G1z, G2x, G2y, G2z)
    dinner = _with_row(dinner, column, da, db, dc, c0 * g0 + c1 * g1 + c2 * g2, 2)
    tl.store(DInner + at, dinner, mask=ok)


def backward(saved, grad_y, needs=None):
    outer, inner, points = saved
    F, P, _ = points.shape
    douter, dinner, dpoints = torch.empty_like(outer), torch.empty_like(inner), torch.empty_like(points)
    BLOCK_F, BLOCK_P = _blocks(P)
    _se3_bwd[(triton.cdiv(F, BLOCK_F),)](
        grad_y, outer, inner, points, douter, dinner, dpoints, F, P, *grad_y.stride(),
        BLOCK_F=BLOCK_F, BLOCK_P=BLOCK_P, num_warps=4,
    )  # fmt: skip
    return douter, dinner, dpoints


# --- check ---
SWEEP = ({"F": 40, "P": 14}, {"F": 75, "P": 8}, {"F": 5, "P": 37})
BENCH = ({"F": 524288, "P": 14},)


def make_args(F, P, device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    # Rotations from random unit quaternions: columns of I + 2 w [v]x + 2 [v]x [v]x.
    q = torch.nn.functional.normalize(torch.randn(2, F, 4, generator=g), dim=-1)
    w, v = q[..., 0, None, None], q[..., None, 1:].expand(2, F, 3, 3)
    eye = torch.eye(3).expand(2, F, 3, 3)
    cross = torch.linalg.cross(v, eye)
    rotation = (eye + 2.0 * (w * cross + torch.linalg.cross(v, cross))).mT
    outer, inner = torch.cat((rotation, torch.randn(2, F, 3, 1, generator=g)), -1).contiguous()
    return outer.to(device), inner.to(device), torch.randn(F, P, 3, generator=g).to(device)


def reference(outer, inner, points):
    local = points @ inner[:, :, :3].mT + inner[:, None, :, 3]
    return local @ outer[:, :, :3].mT + outer[:, None, :, 3]
