"""Laplacian smoothness energy of a mesh: neighbourhood is symmetric, so that the scatter of its gradient is a gather.

delta_i = v_i - mean of v_j over the neighbours of i, energy = sum |delta_i|^2 / 2. Its gradient is delta_i - sum over
neighbours j of delta_j / degree_j: who uses vertex i is who vertex i uses, and the table of neighbours that the forward
read serves the backward, without atomics and without a transposed list. The forward saves (delta, 1 / degree) as four
words, which makes a neighbour one aligned load of 16 bytes.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "mesh_laplacian_smooth",
    "family": "geometry",
    "op": "laplacian_energy",
    "schema": 1,
    "techniques": ("gather-form", "multi-row-tile"),
    "saves": ("spring: fp32 (V, 4)",),
    "grads": ("vertices",),
    "dtypes": ("float32",),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _laplacian_fwd(
    Vertices, Neighbours, Spring, Energies, V, DEGREE: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr
):
    v = tl.program_id(0).to(tl.int64) * BLOCK_V + tl.arange(0, BLOCK_V)
    slot = tl.arange(0, BLOCK_D)
    axis = tl.arange(0, 4)
    listed = (v[:, None] < V) & (slot[None, :] < DEGREE)
    j = tl.load(Neighbours + v[:, None] * DEGREE + slot[None, :], mask=listed, other=-1)
    real = j >= 0
    degree = tl.sum(real.to(tl.float32), 1)
    # A vertex without neighbours stays where it is and pulls at nobody.
    share = tl.where(degree > 0.0, 1.0, 0.0) / tl.maximum(degree, 1.0)
    at = 3 * j[:, :, None].to(tl.int64) + axis[None, None, :]
    near = tl.load(Vertices + at, mask=real[:, :, None] & (axis < 3)[None, None, :], other=0.0)
    own = (v[:, None] < V) & (axis < 3)[None, :]
    here = tl.load(Vertices + 3 * v[:, None] + axis[None, :], mask=own, other=0.0)
    delta = tl.where((degree > 0.0)[:, None], here, 0.0) - tl.sum(near, 1) * share[:, None]
    spring = tl.where((axis < 3)[None, :], delta, share[:, None])
    tl.store(Spring + 4 * v[:, None] + axis[None, :], spring, mask=v[:, None] < V)
    tl.store(Energies + tl.program_id(0), 0.5 * tl.sum(delta * delta))


def _blocks(V, DEGREE):
    BLOCK_D = triton.next_power_of_2(DEGREE)
    return (64 if V >= 1 << 14 else 16), BLOCK_D


def forward(vertices, neighbours):
    vertices, neighbours = vertices.contiguous(), neighbours.contiguous()
    V, DEGREE = neighbours.shape
    BLOCK_V, BLOCK_D = _blocks(V, DEGREE)
    programs = triton.cdiv(V, BLOCK_V)
    spring = torch.empty(V, 4, device=vertices.device, dtype=torch.float32)
    energies = torch.empty(programs, device=vertices.device, dtype=torch.float32)
    _laplacian_fwd[(programs,)](
        vertices, neighbours, spring, energies, V, DEGREE=DEGREE, BLOCK_V=BLOCK_V, BLOCK_D=BLOCK_D, num_warps=4
    )
    return energies.sum(), (neighbours, spring)


# --- backward ---
@triton.jit
def _laplacian_bwd(DEnergy, Neighbours, Spring, DVertices, V, DEGREE: tl.constexpr, BLOCK_V: tl.constexpr):
    # A lane owns a vertex. Its neighbours come slot by slot, all loads independent; nothing crosses lanes.
    v = tl.program_id(0).to(tl.int64) * BLOCK_V + tl.arange(0, BLOCK_V)
    axis = tl.arange(0, 4)[None, :]
    dv = tl.load(Spring + 4 * v[:, None] + axis, mask=v[:, None] < V, other=0.0)
    for slot in tl.static_range(DEGREE):
        j = tl.load(Neighbours + v * DEGREE + slot, mask=v < V, other=-1)
        near = tl.load(Spring + 4 * j[:, None].to(tl.int64) + axis, mask=(j >= 0)[:, None], other=0.0)
        dv -= near * tl.sum(tl.where(axis == 3, near, 0.0), 1)[:, None]
    tl.store(DVertices + 3 * v[:, None] + axis, tl.load(DEnergy) * dv, mask=(v[:, None] < V) & (axis < 3))


def backward(saved, grad_energy, needs=None):
    neighbours, spring = saved
    V, DEGREE = neighbours.shape
    dvertices = torch.empty(V, 3, device=spring.device, dtype=torch.float32)
    BLOCK_V = 128 if V >= 1 << 14 else 16
    _laplacian_bwd[(triton.cdiv(V, BLOCK_V),)](
        grad_energy, neighbours, spring, dvertices, V, DEGREE=DEGREE, BLOCK_V=BLOCK_V, num_warps=4
    )
    return dvertices


# --- check ---
SWEEP = ({"ROWS": 9, "COLUMNS": 14}, {"ROWS": 1, "COLUMNS": 37}, {"ROWS": 16, "COLUMNS": 8})
BENCH = ({"ROWS": 4096, "COLUMNS": 2048},)


def make_args(ROWS, COLUMNS, device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    # A height field cut into triangles: up to six neighbours along rows, columns and one diagonal, -1 beyond the rim.
    row, column = torch.meshgrid(torch.arange(ROWS), torch.arange(COLUMNS), indexing="ij")
    steps = torch.tensor([(0, 1), (0, -1), (1, 0), (-1, 0), (1, 1), (-1, -1)])
    r, c = row[..., None] + steps[:, 0], column[..., None] + steps[:, 1]
    real = (r >= 0) & (r < ROWS) & (c >= 0) & (c < COLUMNS)
    neighbours = torch.where(real, r * COLUMNS + c, -1).view(-1, 6).int()
    ground = torch.stack((row, column, torch.zeros_like(row)), -1).view(-1, 3)
    vertices = ground + 0.3 * torch.randn(ROWS * COLUMNS, 3, generator=g)
    return vertices.to(device), neighbours.to(device)


def reference(vertices, neighbours):
    real = neighbours >= 0
    degree = real.sum(1, keepdim=True)
    near = vertices[neighbours.clamp(min=0).long()] * real[:, :, None]
    delta = vertices * (degree > 0) - near.sum(1) / degree.clamp(min=1)
    return 0.5 * delta.square().sum()
