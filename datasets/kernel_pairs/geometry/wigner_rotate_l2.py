"""Degree 2 features turned by a quaternion: dx turns back, dquat needs three torques instead of the Jacobian of D(q).

The five features of degree 2 are the symmetric traceless matrices S, and D(q) x is R S R^T with R quadratic in the unit
quaternion. A small turn w changes the result by [w] S' - S' [w], so that dL/dw = sum over channels of g^T J y with the
three antisymmetric generators J: three sums, taken from the saved output y. The Jacobian of the unit quaternion is then
its product with the turn, dq = 2 (0, dL/dw) q, tangent to the sphere; the normalisation only divides by |q|.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "wigner_rotate_l2",
    "family": "geometry",
    "op": "wigner_rotate",
    "schema": 1,
    "techniques": ("orthogonal-adjoint", "saved-output", "broadcast-reduction", "one-launch", "strided-cotangent"),
    "saves": ("y: fp32 or bf16 or fp16 (E, 5, C)",),
    "grads": ("features", "quat"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _unit(Quat, e, E):
    """The normalised quaternion of every edge and the inverse of its length; lanes outside do not turn."""
    w = tl.load(Quat + 4 * e, mask=e < E, other=1.0)
    x = tl.load(Quat + 4 * e + 1, mask=e < E, other=0.0)
    y = tl.load(Quat + 4 * e + 2, mask=e < E, other=0.0)
    z = tl.load(Quat + 4 * e + 3, mask=e < E, other=0.0)
    inv = tl.rsqrt(w * w + x * x + y * y + z * z)
    return w * inv, x * inv, y * inv, z * inv, inv


@triton.jit
def _rotated(w, x, y, z, px, py, pz):
    """R p; the conjugate quaternion, -w, gives R^T p."""
    cx = y * pz - z * py
    cy = z * px - x * pz
    cz = x * py - y * px
    rx = px + 2.0 * (w * cx + y * cz - z * cy)
    ry = py + 2.0 * (w * cy + z * cx - x * cz)
    rz = pz + 2.0 * (w * cz + x * cy - y * cx)
    return rx, ry, rz


@triton.jit
def _turned(w, x, y, z, f0, f1, f2, f3, f4):
    """D(q) f for orders xy, yz, z^2, xz, x^2 - y^2: the columns of S are rotated, then the rows of R S."""
    # Components in an orthonormal basis of symmetric traceless matrices, common factor 1 / sqrt(2) left out.
    third = 0.5773502691896258 * f2
    sxx = f4 - third
    syy = -f4 - third
    szz = 2.0 * third
    xx, yx, zx = _rotated(w, x, y, z, sxx, f0, f3)
    xy, yy, zy = _rotated(w, x, y, z, f0, syy, f1)
    xz, yz, zz = _rotated(w, x, y, z, f3, f1, szz)
    txx, txy, txz = _rotated(w, x, y, z, xx, xy, xz)
    _, tyy, tyz = _rotated(w, x, y, z, yx, yy, yz)
    _, _, tzz = _rotated(w, x, y, z, zx, zy, zz)
    return txy, tyz, 0.8660254037844386 * tzz, txz, 0.5 * (txx - tyy)


@triton.jit
def _load_five(X, at, stride, mask):
    f0 = tl.load(X + at, mask=mask, other=0.0).to(tl.float32)
    f1 = tl.load(X + at + stride, mask=mask, other=0.0).to(tl.float32)
    f2 = tl.load(X + at + 2 * stride, mask=mask, other=0.0).to(tl.float32)
    f3 = tl.load(X + at + 3 * stride, mask=mask, other=0.0).to(tl.float32)
    f4 = tl.load(X + at + 4 * stride, mask=mask, other=0.0).to(tl.float32)
    return f0, f1, f2, f3, f4


@triton.jit
def _store_five(X, at, stride, f0, f1, f2, f3, f4, mask):
    tl.store(X + at, f0, mask=mask)
    tl.store(X + at + stride, f1, mask=mask)
    tl.store(X + at + 2 * stride, f2, mask=mask)
    tl.store(X + at + 3 * stride, f3, mask=mask)
    tl.store(X + at + 4 * stride, f4, mask=mask)


@triton.jit
def _wigner_fwd(X, Quat, Y, E, C, BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr):
    e = tl.program_id(0).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    w, x, y, z, _ = _unit(Quat, e, E)
    at = e[:, None] * 5 * C + c[None, :]
    mask = (e[:, None] < E) & (c[None, :] < C)
    f0, f1, f2, f3, f4 = _load_five(X, at, C, mask)
    f0, f1, f2, f3, f4 = _turned(w[:, None], x[:, None], y[:, None], z[:, None], f0, f1, f2, f3, f4)
    _store_five(Y, at, C, f0, f1, f2, f3, f4, mask)


def _blocks(C):
    BLOCK_C = max(16, min(128, triton.next_power_of_2(C)))
    return 512 // BLOCK_C, BLOCK_C


def forward(features, quat):
    features, quat = features.contiguous(), quat.contiguous()
    E, _, C = features.shape
    y = torch.empty_like(features)
    BLOCK_E, BLOCK_C = _blocks(C)
    _wigner_fwd[(triton.cdiv(E, BLOCK_E), triton.cdiv(C, BLOCK_C))](
        features, quat, y, E, C, BLOCK_E=BLOCK_E, BLOCK_C=BLOCK_C, num_warps=4
    )
    return y, (quat, y)


# --- backward ---
@triton.jit
def _wigner_bwd(DY, Quat, Y, DX, DQuat, E, C, dy_e, dy_o, dy_c, BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr):
    # A program owns its edges with all their channels: the torques meet in registers.
    e = tl.program_id(0).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)
    w, x, y, z, inv = _unit(Quat, e, E)
    torque_x = tl.zeros((BLOCK_E,), tl.float32)
    torque_y = tl.zeros((BLOCK_E,), tl.float32)
    torque_z = tl.zeros((BLOCK_E,), tl.float32)
    for start in range(0, C, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        mask = (e[:, None] < E) & (c[None, :] < C)
        at = e[:, None] * 5 * C + c[None, :]
        dy_at = e[:, None] * dy_e + c[None, :].to(tl.int64) * dy_c
        g0, g1, g2, g3, g4 = _load_five(DY, dy_at, dy_o, mask)
        f0, f1, f2, f3, f4 = _load_five(Y, at, C, mask)
        # g^T J y for the generators of turns about x, y and z.
        about_x = g3 * f0 - g0 * f3 + 1.7320508075688772 * (g2 * f1 - g1 * f2) + g4 * f1 - g1 * f4
        about_y = g0 * f1 - g1 * f0 + 1.7320508075688772 * (g3 * f2 - g2 * f3) + g4 * f3 - g3 * f4
        about_z = 2.0 * (g0 * f4 - g4 * f0) + g1 * f3 - g3 * f1
        torque_x += tl.sum(about_x, 1)
        torque_y += tl.sum(about_y, 1)
        torque_z += tl.sum(about_z, 1)
        g0, g1, g2, g3, g4 = _turned(-w[:, None], x[:, None], y[:, None], z[:, None], g0, g1, g2, g3, g4)
        _store_five(DX, at, C, g0, g1, g2, g3, g4, mask)
    # 2 (0, torque) q, over the length that q was divided by.
    scale = 2.0 * inv
    dw = -scale * (torque_x * x + torque_y * y + torque_z * z)
    dx = scale * (w * torque_x + torque_y * z - torque_z * y)
    dy = scale * (w * torque_y + torque_z * x - torque_x * z)
    dz = scale * (w * torque_z + torque_x * y - torque_y * x)
    part = tl.arange(0, 4)[None, :]
    dq = tl.where(part < 1, dw[:, None], tl.where(part < 2, dx[:, None], tl.where(part < 3, dy[:, None], dz[:, None])))
    tl.store(DQuat + 4 * e[:, None] + part, dq, mask=e[:, None] < E)


def backward(saved, grad_y, needs=None):
    quat, y = saved
    E, _, C = y.shape
    dfeatures, dquat = torch.empty_like(y), torch.empty_like(quat)
    BLOCK_E, BLOCK_C = _blocks(C)
    _wigner_bwd[(triton.cdiv(E, BLOCK_E),)](
        grad_y, quat, y, dfeatures, dquat, E, C, *grad_y.stride(), BLOCK_E=BLOCK_E, BLOCK_C=BLOCK_C, num_warps=4
    )
    return dfeatures, dquat


# --- check ---
SWEEP = (
    {"E": 12, "C": 32},
    {"E": 9, "C": 141},
    {"E": 21, "C": 19, "dtype": "float16"},
    {"E": 10, "C": 64, "dtype": "bfloat16"},
)
BENCH = ({"E": 65536, "C": 128, "dtype": "float32"},)


def make_args(E, C, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    features = torch.randn(E, 5, C, generator=g).to(device=device, dtype=getattr(torch, dtype))
    # Directions are geometry: they stay in fp32.
    return features, torch.randn(E, 4, generator=g).to(device)


def reference(features, quat):
    w, x, y, z = torch.nn.functional.normalize(quat, dim=-1).unbind(-1)
    rotation = torch.stack(
        (
            1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y),
            2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x),
            2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y),
        ), -1,
    ).view(-1, 3, 3)  # fmt: skip
    a, b = 0.5**0.5, 6**-0.5
    basis = torch.zeros(5, 3, 3)
    for order, row, column in ((0, 0, 1), (1, 1, 2), (3, 0, 2)):
        basis[order, row, column] = basis[order, column, row] = a
    basis[2], basis[4] = torch.diag(torch.tensor((-b, -b, 2 * b))), torch.diag(torch.tensor((a, -a, 0.0)))
    basis = basis.to(quat.device)
    matrix = torch.einsum("iab,eac,ebd,jcd->eij", basis, rotation, rotation, basis)
    return (matrix.to(features.dtype) @ features).to(features.dtype)
