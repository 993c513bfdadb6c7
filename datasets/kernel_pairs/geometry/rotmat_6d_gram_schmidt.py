"""Rotation matrices from six numbers by Gram-Schmidt: the adjoint walks cross product, two normalisations, projection.

Rows of R are b1 = a1 / |a1|, b2 = u / |u| with u = a2 - <b1, a2> b1, and b3 = b1 x b2, for (a1, a2) in the last axis.
Nothing but the input is saved: a frame costs some forty operations, against nine words that would have to be written
and read. Each point is one lane; its rows leave as a tile (component, row) so that the stores have no gaps.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "rotmat_6d_gram_schmidt",
    "family": "geometry",
    "op": "rotation_6d_to_matrix",
    "schema": 1,
    "techniques": ("row-local", "recompute", "strided-cotangent"),
    "saves": (),
    "grads": ("rotation6d",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _load_vector(source, stride, inside, X_OUTSIDE: tl.constexpr, Y_OUTSIDE: tl.constexpr):
    """Three components. Lanes outside get a vector of choice: two that make a frame divide by no zero."""
    x = tl.load(source, mask=inside, other=X_OUTSIDE).to(tl.float32)
    y = tl.load(source + stride, mask=inside, other=Y_OUTSIDE).to(tl.float32)
    z = tl.load(source + 2 * stride, mask=inside, other=0.0).to(tl.float32)
    return x, y, z


@triton.jit
def _dot3(ax, ay, az, bx, by, bz):
    return ax * bx + ay * by + az * bz


@triton.jit
def _cross3(ax, ay, az, bx, by, bz):
    return ay * bz - az * by, az * bx - ax * bz, ax * by - ay * bx


@triton.jit
def _frame(ax, ay, az, cx, cy, cz):
    """b1, b2, <b1, a2> and the inverse lengths of a1 and u."""
    inv1 = 1.0 / tl.sqrt(_dot3(ax, ay, az, ax, ay, az))
    ax *= inv1
    ay *= inv1
    az *= inv1
    along = _dot3(ax, ay, az, cx, cy, cz)
    cx -= along * ax
    cy -= along * ay
    cz -= along * az
    inv2 = 1.0 / tl.sqrt(_dot3(cx, cy, cz, cx, cy, cz))
    return ax, ay, az, cx * inv2, cy * inv2, cz * inv2, along, inv1, inv2


@triton.jit
def _padded(x, y, z, BLOCK: tl.constexpr):
    """(x, y, z, 0) in the last axis of a tile."""
    return tl.reshape(tl.join(tl.join(x, z), tl.join(y, tl.zeros_like(x))), (BLOCK, 4))


@triton.jit
def _gram_schmidt_fwd(Six, R, E, BLOCK: tl.constexpr):
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = e < E
    ax, ay, az = _load_vector(Six + 6 * e, 1, inside, 1.0, 0.0)
    cx, cy, cz = _load_vector(Six + 6 * e + 3, 1, inside, 0.0, 1.0)
    ax, ay, az, cx, cy, cz, _, _, _ = _frame(ax, ay, az, cx, cy, cz)
    nx, ny, nz = _cross3(ax, ay, az, cx, cy, cz)
    first = _padded(ax, ay, az, BLOCK)
    second = _padded(cx, cy, cz, BLOCK)
    third = _padded(nx, ny, nz, BLOCK)
    # The last axes are row modulo 2 and row half of a 4 x 4 matrix that holds the 3 x 3 one.
    tile = tl.join(tl.join(first, third), tl.join(second, tl.zeros_like(first)))
    rows = tl.reshape(tile, (BLOCK, 4, 4))
    component = tl.arange(0, 4)[None, :, None]
    row = tl.arange(0, 4)[None, None, :]
    at = 9 * e[:, None, None] + 3 * row + component
    tl.store(R + at, rows, mask=inside[:, None, None] & (component < 3) & (row < 3))


def forward(rotation6d):
    rotation6d = rotation6d.contiguous()
    E = rotation6d.shape[0]
    out = torch.empty(E, 3, 3, device=rotation6d.device, dtype=rotation6d.dtype)
    _gram_schmidt_fwd[(triton.cdiv(E, 128),)](rotation6d, out, E, BLOCK=128, num_warps=4)
    return out, (rotation6d,)


# --- backward ---
@triton.jit
def _gram_schmidt_bwd(DR, Six, DSix, E, dr_e, dr_row, dr_col, BLOCK: tl.constexpr):
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = e < E
    ax, ay, az = _load_vector(Six + 6 * e, 1, inside, 1.0, 0.0)
    cx, cy, cz = _load_vector(Six + 6 * e + 3, 1, inside, 0.0, 1.0)
    px, py, pz, qx, qy, qz, along, inv1, inv2 = _frame(ax, ay, az, cx, cy, cz)
    source = DR + e * dr_e
    g1x, g1y, g1z = _load_vector(source, dr_col, inside, 0.0, 0.0)
    g2x, g2y, g2z = _load_vector(source + dr_row, dr_col, inside, 0.0, 0.0)
    g3x, g3y, g3z = _load_vector(source + 2 * dr_row, dr_col, inside, 0.0, 0.0)
    # <g3, b1 x b2> gives b2 x g3 to b1 and g3 x b1 to b2.
    tx, ty, tz = _cross3(qx, qy, qz, g3x, g3y, g3z)
    g1x += tx
    g1y += ty
    g1z += tz
    tx, ty, tz = _cross3(g3x, g3y, g3z, px, py, pz)
    g2x += tx
    g2y += ty
    g2z += tz
    # Through |u|: what lies along b2 is lost.
    lost = _dot3(qx, qy, qz, g2x, g2y, g2z)
    ux = (g2x - lost * qx) * inv2
    uy = (g2y - lost * qy) * inv2
    uz = (g2z - lost * qz) * inv2
    # Through u = a2 - <b1, a2> b1 to both of its vectors.
    onto = _dot3(px, py, pz, ux, uy, uz)
    g1x -= along * ux + onto * cx
    g1y -= along * uy + onto * cy
    g1z -= along * uz + onto * cz
    lost = _dot3(px, py, pz, g1x, g1y, g1z)
    first = _padded((g1x - lost * px) * inv1, (g1y - lost * py) * inv1, (g1z - lost * pz) * inv1, BLOCK)
    second = _padded(ux - onto * px, uy - onto * py, uz - onto * pz, BLOCK)
    component = tl.arange(0, 4)[None, :, None]
    at = 6 * e[:, None, None] + 3 * tl.arange(0, 2)[None, None, :] + component
    tl.store(DSix + at, tl.join(first, second), mask=inside[:, None, None] & (component < 3))


def backward(saved, grad_r, needs=None):
    (rotation6d,) = saved
    E = rotation6d.shape[0]
    drotation = torch.empty_like(rotation6d)
    _gram_schmidt_bwd[(triton.cdiv(E, 128),)](
        grad_r, rotation6d, drotation, E, *grad_r.stride(), BLOCK=128, num_warps=4
    )
    return drotation


# --- check ---
SWEEP = ({"E": 256}, {"E": 199}, {"E": 100, "dtype": "bfloat16"}, {"E": 33, "dtype": "float16"})
BENCH = ({"E": 2097152, "dtype": "float32"},)


def make_args(E, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    # Around the identity, as a network's head gives it: the two vectors are never near to parallel.
    identity = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 0.0])
    return ((identity + 0.3 * torch.randn(E, 6, generator=g)).to(device=device, dtype=getattr(torch, dtype)),)


def reference(rotation6d):
    first, second = rotation6d.float().split(3, 1)
    b1 = first / first.norm(dim=1, keepdim=True)
    u = second - (b1 * second).sum(1, keepdim=True) * b1
    b2 = u / u.norm(dim=1, keepdim=True)
    return torch.stack((b1, b2, torch.linalg.cross(b1, b2)), 1).to(rotation6d.dtype)
