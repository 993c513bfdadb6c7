"""Multi-resolution hash encoding: eight trilinear weights per level and point, the table's gradient by atomic adds.

Level l cuts the unit cube into resolution[l]^3 cells; a corner's row of the table is its index where all corners fit,
else a hash of its three numbers. The encoding is stored level by level, (L, M, F), and levels are the slower axis of
the grid: programs that run together share one level's slice of the table (4 MB of 2^19 rows) and of its gradient in
L2. Positions are samples along rays and get no gradient. Corners are found again rather than saved: eight indices and
weights a level would be eight times the encoding.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "hash_grid_encode",
    "family": "geometry",
    "op": "hash_encoding",
    "schema": 1,
    "techniques": ("atomics", "recompute", "partial-gradient", "strided-cotangent"),
    "saves": (),
    "grads": ("table",),
    "dtypes": ("float32", "float16", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _cells(Points, Resolution, level, m, M):
    """The level's resolution, the lowest corner of every point's cell and the place within the cell."""
    resolution = tl.load(Resolution + level)
    px = tl.load(Points + 3 * m, mask=m < M, other=0.0) * resolution
    py = tl.load(Points + 3 * m + 1, mask=m < M, other=0.0) * resolution
    pz = tl.load(Points + 3 * m + 2, mask=m < M, other=0.0) * resolution
    fx = tl.floor(px)
    fy = tl.floor(py)
    fz = tl.floor(pz)
    return resolution, fx.to(tl.int32), fy.to(tl.int32), fz.to(tl.int32), px - fx, py - fy, pz - fz


@triton.jit
def _corner(resolution, ix, iy, iz, tx, ty, tz, CORNER: tl.constexpr, SIZE: tl.constexpr):
    """Row of the level's table and weight of one of the eight corners."""
    ix += CORNER % 2
    iy += CORNER // 2 % 2
    iz += CORNER // 4
    weight = tx if CORNER % 2 else 1.0 - tx
    weight *= ty if CORNER // 2 % 2 else 1.0 - ty
    weight *= tz if CORNER // 4 else 1.0 - tz
    side = resolution + 1
    # Three primes, the first of them one, as unsigned products that wrap around.
    mixed = ix.to(tl.uint32) ^ (iy.to(tl.uint32) * 2654435761) ^ (iz.to(tl.uint32) * 805459861)
    hashed = (mixed & (SIZE - 1)).to(tl.int32)
    fits = side.to(tl.int64) * side * side <= SIZE
    return tl.where(fits, ix + side * (iy + side * iz), hashed), weight


@triton.jit
def _hash_fwd(Points, Table, Resolution, Y, M, SIZE: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    level = tl.program_id(1).to(tl.int64)
    f = tl.arange(0, F)[None, :]
    resolution, ix, iy, iz, tx, ty, tz = _cells(Points, Resolution, level, m, M)
    y = tl.zeros((BLOCK, F), tl.float32)
    for corner in tl.static_range(8):
        row, weight = _corner(resolution, ix, iy, iz, tx, ty, tz, corner, SIZE)
        at = (level * SIZE + row)[:, None] * F + f
        y += weight[:, None] * tl.load(Table + at, mask=(m < M)[:, None], other=0.0).to(tl.float32)
    tl.store(Y + (level * M + m)[:, None] * F + f, y, mask=(m < M)[:, None])


def forward(table, points, resolution):
    table, points = table.contiguous(), points.contiguous()
    (L, SIZE, F), M = table.shape, points.shape[0]
    y = torch.empty(L, M, F, device=table.device, dtype=table.dtype)
    BLOCK = 256 if M >= 4096 else 32
    _hash_fwd[(triton.cdiv(M, BLOCK), L)](
        points, table, resolution, y, M, SIZE=SIZE, F=F, BLOCK=BLOCK, num_warps=BLOCK // 64 or 1
    )
    return y, (table, points, resolution)


# --- backward ---
@triton.jit
def _hash_bwd(
    DY, Points, Resolution, DTable, M, dy_l, dy_m, dy_f, SIZE: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr
):
    m = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    level = tl.program_id(1).to(tl.int64)
    f = tl.arange(0, F)[None, :]
    resolution, ix, iy, iz, tx, ty, tz = _cells(Points, Resolution, level, m, M)
    inside = (m < M)[:, None]
    dy = tl.load(DY + level * dy_l + m[:, None] * dy_m + f * dy_f, mask=inside, other=0.0).to(tl.float32)
    for corner in tl.static_range(8):
        row, weight = _corner(resolution, ix, iy, iz, tx, ty, tz, corner, SIZE)
        at = (level * SIZE + row)[:, None] * F + f
        tl.atomic_add(DTable + at, weight[:, None] * dy, mask=inside, sem="relaxed")


def backward(saved, grad_y, needs=None):
    table, points, resolution = saved
    (L, SIZE, F), M = table.shape, points.shape[0]
    # Thousands of points share a corner of the coarse levels: the sums are kept in fp32 whatever the table's dtype.
    dtable = torch.zeros(L, SIZE, F, device=table.device, dtype=torch.float32)
    BLOCK = 256 if M >= 4096 else 32
    _hash_bwd[(triton.cdiv(M, BLOCK), L)](
        grad_y, points, resolution, dtable, M, *grad_y.stride(), SIZE=SIZE, F=F, BLOCK=BLOCK,
        num_warps=BLOCK // 64 or 1,
    )  # fmt: skip
    return dtable.to(table.dtype)


# --- check ---
SWEEP = (
    {"M": 64, "L": 4, "LOG2": 8, "F": 2},
    {"M": 37, "L": 3, "LOG2": 6, "F": 4, "dtype": "float16"},
    {"M": 50, "L": 2, "LOG2": 9, "F": 2, "dtype": "bfloat16"},
)
BENCH = ({"M": 262144, "L": 16, "LOG2": 19, "F": 2, "dtype": "float32"},)


def make_args(M, L, LOG2, F, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    table = torch.randn(L, 1 << LOG2, F, generator=g).to(device=device, dtype=getattr(torch, dtype))
    # From four cells a side at the coarsest level, two fifths more at each next one.
    resolution = (4.0 * 1.4 ** torch.arange(L)).int()
    return table, torch.rand(M, 3, generator=g).to(device), resolution.to(device)


def reference(table, points, resolution):
    L, size, _ = table.shape
    place = points * resolution[:, None, None]
    low = place.floor()
    corner = torch.cartesian_prod(*(torch.arange(2, device=table.device),) * 3)
    within = (place - low)[:, :, None]
    weight = torch.where(corner == 1, within, 1.0 - within).prod(-1)
    x, y, z = (low.long()[:, :, None] + corner).unbind(-1)
    side = resolution.long()[:, None, None] + 1
    hashed = (x ^ (y * 2654435761) ^ (z * 805459861)) & (size - 1)
    row = torch.where(side**3 <= size, x + side * (y + side * z), hashed)
    level = torch.arange(L, device=table.device)[:, None, None]
    return (weight[..., None] * table[level, row].float()).sum(2).to(table.dtype)
