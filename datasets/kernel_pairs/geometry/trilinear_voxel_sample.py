"""Trilinear samples of a voxel grid: one walk over the eight corners scatters to them and slopes along three axes.

The volume is (D, H, W, C), channels last, so that a corner is a run of C words for loads and for atomic adds alike.
Points are (x, y, z) in voxels; outside the grid there are zeros. With s = <dy, corner> the coordinate gradient is the
signed sum of s times the two other weights, which needs the corner's values that dvolume does not: both come out of
one launch. A program owns a tile of points with all their channels.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "trilinear_voxel_sample",
    "family": "geometry",
    "op": "voxel_sample",
    "schema": 1,
    "techniques": ("atomics", "multi-row-tile", "one-launch", "recompute", "strided-cotangent"),
    "saves": (),
    "grads": ("volume", "points"),
    "dtypes": ("float32", "float16", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _split_axis(P, m, M, AXIS: tl.constexpr):
    """The voxel below a coordinate and the distance from it; lanes past the points lie outside the grid."""
    p = tl.load(P + 3 * m + AXIS, mask=m < M, other=-9.0)
    low = tl.floor(p)
    return low.to(tl.int32), p - low


@triton.jit
def _corner_rows(ix, iy, iz, D, H, W, CORNER: tl.constexpr):
    """Number of the voxel at one corner, and whether the grid has it."""
    x = ix + CORNER % 2
    y = iy + CORNER // 2 % 2
    z = iz + CORNER // 4
    real = (x >= 0) & (x < W) & (y >= 0) & (y < H) & (z >= 0) & (z < D)
    return (z.to(tl.int64) * H + y) * W + x, real


@triton.jit
def _voxel_fwd(V, P, Y, M, D, H, W, C, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    ix, tx = _split_axis(P, m, M, 0)
    iy, ty = _split_axis(P, m, M, 1)
    iz, tz = _split_axis(P, m, M, 2)
    y = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    for corner in tl.static_range(8):
        row, real = _corner_rows(ix, iy, iz, D, H, W, corner)
        weight = tx if corner % 2 else 1.0 - tx
        weight *= ty if corner // 2 % 2 else 1.0 - ty
        weight *= tz if corner // 4 else 1.0 - tz
        value = tl.load(V + row[:, None] * C + c[None, :], mask=real[:, None] & (c[None, :] < C), other=0.0)
        y += weight[:, None] * value.to(tl.float32)
    tl.store(Y + m[:, None] * C + c[None, :], y, mask=(m[:, None] < M) & (c[None, :] < C))


def _blocks(C):
    BLOCK_C = min(64, triton.next_power_of_2(C))
    return 512 // BLOCK_C, BLOCK_C


def forward(volume, points):
    volume, points = volume.contiguous(), points.contiguous()
    (D, H, W, C), M = volume.shape, points.shape[0]
    y = torch.empty(M, C, device=volume.device, dtype=volume.dtype)
    BLOCK_M, BLOCK_C = _blocks(C)
    _voxel_fwd[(triton.cdiv(M, BLOCK_M), triton.cdiv(C, BLOCK_C))](
        volume, points, y, M, D, H, W, C, BLOCK_M=BLOCK_M, BLOCK_C=BLOCK_C, num_warps=4
    )
    return y, (volume, points)


# --- backward ---
@triton.jit
def _voxel_bwd(
    DY, V, P, DV, DP, M, D, H, W, C, dy_m, dy_c,
    NEED_V: tl.constexpr, NEED_P: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    ix, tx = _split_axis(P, m, M, 0)
    iy, ty = _split_axis(P, m, M, 1)
    iz, tz = _split_axis(P, m, M, 2)
    dx = tl.zeros((BLOCK_M,), tl.float32)
    dy = tl.zeros((BLOCK_M,), tl.float32)
    dz = tl.zeros((BLOCK_M,), tl.float32)
    for start in tl.range(0, C, BLOCK_C, num_stages=3):
        c = start + tl.arange(0, BLOCK_C)
        mask = (m[:, None] < M) & (c[None, :] < C)
        g = tl.load(DY + m[:, None] * dy_m + c[None, :].to(tl.int64) * dy_c, mask=mask, other=0.0).to(tl.float32)
        for corner in tl.static_range(8):
            row, real = _corner_rows(ix, iy, iz, D, H, W, corner)
            at = row[:, None] * C + c[None, :]
            there = real[:, None] & (c[None, :] < C)
            along_x = tx if corner % 2 else 1.0 - tx
            along_y = ty if corner // 2 % 2 else 1.0 - ty
            along_z = tz if corner // 4 else 1.0 - tz
            if NEED_V:
                weight = along_x * along_y * along_z
                tl.atomic_add(DV + at, weight[:, None] * g, mask=there, sem="relaxed")
            if NEED_P:
                s = tl.sum(g * tl.load(V + at, mask=there, other=0.0).to(tl.float32), 1)
                dx += s * along_y * along_z * (1.0 if corner % 2 else -1.0)
                dy += s * along_x * along_z * (1.0 if corner // 2 % 2 else -1.0)
                dz += s * along_x * along_y * (1.0 if corner // 4 else -1.0)
    if NEED_P:
        axis = tl.arange(0, 4)[None, :]
        out = tl.where(axis == 0, dx[:, None], tl.where(axis == 1, dy[:, None], dz[:, None]))
        tl.store(DP + 3 * m[:, None] + axis, out, mask=(m[:, None] < M) & (axis < 3))


def backward(saved, grad_y, needs=None):
    volume, points = saved
    need_v, need_p = needs or (True, True)
    (D, H, W, C), M = volume.shape, points.shape[0]
    # Atomics add in fp32; a 16-bit volume is rounded once, at the end.
    dvolume = torch.zeros(volume.shape, device=volume.device, dtype=torch.float32) if need_v else None
    dpoints = torch.empty_like(points) if need_p else None
    BLOCK_M, BLOCK_C = _blocks(C)
    _voxel_bwd[(triton.cdiv(M, BLOCK_M),)](
        grad_y, volume, points, dvolume, dpoints, M, D, H, W, C, *grad_y.stride(),
        NEED_V=need_v, NEED_P=need_p, BLOCK_M=BLOCK_M, BLOCK_C=BLOCK_C, num_warps=4,
    )  # fmt: skip
    return dvolume.to(volume.dtype) if need_v else None, dpoints


# --- check ---
SWEEP = (
    {"D": 5, "H": 6, "W": 7, "C": 16, "M": 40},
    {"D": 3, "H": 4, "W": 9, "C": 75, "M": 29, "dtype": "float16"},
    {"D": 8, "H": 2, "W": 5, "C": 8, "M": 33, "dtype": "bfloat16"},
)
BENCH = ({"D": 128, "H": 128, "W": 128, "C": 16, "M": 524288, "dtype": "float32"},)


def make_args(D, H, W, C, M, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    volume = torch.randn(D, H, W, C, generator=g).to(device=device, dtype=getattr(torch, dtype))
    # Some points have corners, or lie, beyond the grid. Coordinates are geometry and stay in fp32.
    points = torch.rand(M, 3, generator=g) * (torch.tensor((W, H, D)) + 2.0) - 1.5
    return volume, points.to(device)


def reference(volume, points):
    # grid_sample wants the channels first and the grid from -1 to 1, the centres of the outer voxels.
    size = torch.tensor(volume.shape[2::-1], device=points.device)
    grid = (2.0 * points / (size - 1) - 1.0)[None, None, None]
    channels_first = volume.permute(3, 0, 1, 2)[None].float()
    y = torch.nn.functional.grid_sample(channels_first, grid, align_corners=True, padding_mode="zeros")
    return y[0, :, 0, 0].T.contiguous().to(volume.dtype)
