"""Points of each cloud turned by its quaternion: dpoints turn back, dquat comes from the 3 x 3 sum of dy p^T."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "quat_to_rotmat_apply",
    "family": "geometry",
    "op": "quaternion_rotate",
    "schema": 1,
    "techniques": ("orthogonal-adjoint", "broadcast-reduction", "one-launch", "strided-cotangent"),
    "saves": (),
    "grads": ("quat", "points"),
    "dtypes": ("float32",),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _unit_quaternion(Quat, b):
    """The normalised quaternion (w, x, y, z) of cloud b and the inverse of its length."""
    w = tl.load(Quat + 4 * b)
    x = tl.load(Quat + 4 * b + 1)
    y = tl.load(Quat + 4 * b + 2)
    z = tl.load(Quat + 4 * b + 3)
    inv = 1.0 / tl.sqrt(w * w + x * x + y * y + z * z)
    return w * inv, x * inv, y * inv, z * inv, inv


@triton.jit
def _rotate(w, x, y, z, px, py, pz):
    """R p with R = I + 2 w [v]x + 2 [v]x [v]x, v = (x, y, z); with -w it is the transpose."""
    cx = y * pz - z * py
    cy = z * px - x * pz
    cz = x * py - y * px
    rx = px + 2.0 * (w * cx + y * cz - z * cy)
    ry = py + 2.0 * (w * cy + z * cx - x * cz)
    rz = pz + 2.0 * (w * cz + x * cy - y * cx)
    return rx, ry, rz


@triton.jit
def _quat_fwd(Quat, Points, Out, P, BLOCK: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    w, x, y, z, _ = _unit_quaternion(Quat, b)
    at = (b * P + i) * 3
    px = tl.load(Points + at, mask=i < P, other=0.0)
    py = tl.load(Points + at + 1, mask=i < P, other=0.0)
    pz = tl.load(Points + at + 2, mask=i < P, other=0.0)
    rx, ry, rz = _rotate(w, x, y, z, px, py, pz)
    tl.store(Out + at, rx, mask=i < P)
    tl.store(Out + at + 1, ry, mask=i < P)
    tl.store(Out + at + 2, rz, mask=i < P)


def forward(quat, points):
    quat, points = quat.contiguous(), points.contiguous()
    B, P, _ = points.shape
    out = torch.empty_like(points)
    _quat_fwd[(B, triton.cdiv(P, 256))](quat, points, out, P, BLOCK=256)
    return out, (quat, points)


# --- backward ---
@triton.jit
def _quat_bwd(DOut, Quat, Points, DQuat, DPoints, P, s_b, s_p, s_c, BLOCK: tl.constexpr):
    # One program walks a cloud: it keeps four sums, so dquat needs neither partials nor atomics.
    b = tl.program_id(0).to(tl.int64)
    w, x, y, z, inv = _unit_quaternion(Quat, b)
    aw = tl.zeros((BLOCK,), tl.float32)
    ax = tl.zeros((BLOCK,), tl.float32)
    ay = tl.zeros((BLOCK,), tl.float32)
    az = tl.zeros((BLOCK,), tl.float32)
    axis = tl.arange(0, 4)[None, :]
    for start in range(0, P, BLOCK):
        i = start + tl.arange(0, BLOCK)
        at = (b * P + i) * 3
        px = tl.load(Points + at, mask=i < P, other=0.0)
        py = tl.load(Points + at + 1, mask=i < P, other=0.0)
        pz = tl.load(Points + at + 2, mask=i < P, other=0.0)
        source = DOut + b * s_b + i.to(tl.int64) * s_p
        gx = tl.load(source, mask=i < P, other=0.0)
        gy = tl.load(source + s_c, mask=i < P, other=0.0)
        gz = tl.load(source + 2 * s_c, mask=i < P, other=0.0)
        bx, by, bz = _rotate(-w, x, y, z, gx, gy, gz)
        # A (point, axis) tile leaves no gaps between what is stored.
        rows = tl.where(axis == 0, bx[:, None], tl.where(axis == 1, by[:, None], bz[:, None]))
        tl.store(DPoints + at[:, None] + axis, rows, mask=(i[:, None] < P) & (axis < 3))
        # <g, R p> = <g, p> + 2 w <g, v x p> + 2 (<v, p><g, v> - <v, v><g, p>), differentiated by w and by v.
        vp = x * px + y * py + z * pz
        gv = x * gx + y * gy + z * gz
        gp = gx * px + gy * py + gz * pz
        nx = py * gz - pz * gy
        ny = pz * gx - px * gz
        nz = px * gy - py * gx
        aw += x * nx + y * ny + z * nz
        ax += w * nx + px * gv + gx * vp - 2.0 * x * gp
        ay += w * ny + py * gv + gy * vp - 2.0 * y * gp
        az += w * nz + pz * gv + gz * vp - 2.0 * z * gp
    dw = 2.0 * tl.sum(aw, 0)
    dx = 2.0 * tl.sum(ax, 0)
    dy = 2.0 * tl.sum(ay, 0)
    dz = 2.0 * tl.sum(az, 0)
    # Back through the normalisation: drop the part along the quaternion itself.
    along = dw * w + dx * x + dy * y + dz * z
    tl.store(DQuat + 4 * b, (dw - along * w) * inv)
    tl.store(DQuat + 4 * b + 1, (dx - along * x) * inv)
    tl.store(DQuat + 4 * b + 2, (dy - along * y) * inv)
    tl.store(DQuat + 4 * b + 3, (dz - along * z) * inv)


def backward(saved, grad_out, needs=None):
    quat, points = saved
    B, P, _ = points.shape
    dquat, dpoints = torch.empty_like(quat), torch.empty_like(points)
    BLOCK = max(32, min(1024, triton.next_power_of_2(P) // 2))
    _quat_bwd[(B,)](grad_out, quat, points, dquat, dpoints, P, *grad_out.stride(), BLOCK=BLOCK)
    return dquat, dpoints


# --- check ---
SWEEP = ({"B": 3, "P": 64}, {"B": 2, "P": 101})
BENCH = ({"B": 4096, "P": 1024},)


def make_args(B, P, device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(B, 4, generator=g).to(device), torch.randn(B, P, 3, generator=g).to(device)


def reference(quat, points):
    w, v = (quat / quat.norm(dim=-1, keepdim=True)).split((1, 3), -1)
    v = v[:, None].expand_as(points)
    cross = torch.linalg.cross(v, points)
    return points + 2.0 * (w[:, None] * cross + torch.linalg.cross(v, cross))
