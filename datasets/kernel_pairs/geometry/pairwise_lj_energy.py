"""Lennard-Jones energy of all pairs: every atom owns its force and meets all others, so both ends of a pair are served.

U = sum over pairs i < j of 4 eps ((sigma / r)^12 - (sigma / r)^6) with sigma = (sigma_i + sigma_j) / 2 and eps =
sqrt(eps_i eps_j), per system. The forward adds up half of every ordered pair. In the backward the atom that was looped
over becomes an owner in its turn: computing each pair twice costs less than adding a force to its other end by atomics,
and force, dsigma and deps of an atom are sums in registers. Systems are many and share the grid's first axis.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "pairwise_lj_energy",
    "family": "geometry",
    "op": "lennard_jones",
    "schema": 1,
    "techniques": ("loop-swap", "recompute", "row-local", "one-launch"),
    "saves": (),
    "grads": ("positions", "sigma", "eps"),
    "dtypes": ("float32",),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _load_atoms(Pos, Sigma, Eps, at, inside):
    """Coordinates, half of sigma and the root of eps: the mixing rules are then a sum and a product."""
    x = tl.load(Pos + 3 * at, mask=inside, other=0.0)
    y = tl.load(Pos + 3 * at + 1, mask=inside, other=0.0)
    z = tl.load(Pos + 3 * at + 2, mask=inside, other=0.0)
    half = 0.5 * tl.load(Sigma + at, mask=inside, other=0.0)
    root = tl.sqrt(tl.load(Eps + at, mask=inside, other=0.0))
    return x, y, z, half, root


@triton.jit
def _attraction(dx, dy, dz, sigma, pair):
    """1 / r^2 and (sigma / r)^6, zeros where there is no pair."""
    inv_square = tl.where(pair, 1.0, 0.0) / tl.where(pair, dx * dx + dy * dy + dz * dz, 1.0)
    ratio = sigma * sigma * inv_square
    return inv_square, ratio * ratio * ratio


@triton.jit
def _lj_fwd(Pos, Sigma, Eps, Parts, N, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr):
    system = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    xi, yi, zi, half_i, root_i = _load_atoms(Pos, Sigma, Eps, system * N + i, i < N)
    energy = tl.zeros((BLOCK_I,), tl.float32)
    for start in range(0, N, BLOCK_J):
        j = start + tl.arange(0, BLOCK_J)
        xj, yj, zj, half_j, root_j = _load_atoms(Pos, Sigma, Eps, system * N + j, j < N)
        # Atoms outside have eps 0; they must not meet one another at distance 0.
        pair = (i[:, None] != j[None, :]) & (i[:, None] < N) & (j[None, :] < N)
        _, six = _attraction(
            xi[:, None] - xj[None, :], yi[:, None] - yj[None, :], zi[:, None] - zj[None, :],
            half_i[:, None] + half_j[None, :], pair,
        )  # fmt: skip
        energy += tl.sum(root_j[None, :] * (six * six - six), 1)
    # 4 eps, and half of it from either end.
    tl.store(Parts + system * tl.num_programs(1) + tl.program_id(1), 2.0 * tl.sum(energy * root_i, 0))


def _blocks(N):
    return (32, 32) if N >= 512 else (16, 16)


def forward(positions, sigma, eps):
    positions, sigma, eps = positions.contiguous(), sigma.contiguous(), eps.contiguous()
    B, N, _ = positions.shape
    BLOCK_I, BLOCK_J = _blocks(N)
    parts = torch.empty(B, triton.cdiv(N, BLOCK_I), device=positions.device, dtype=torch.float32)
    _lj_fwd[(B, triton.cdiv(N, BLOCK_I))](
        positions, sigma, eps, parts, N, BLOCK_I=BLOCK_I, BLOCK_J=BLOCK_J, num_warps=4
    )
    return parts.sum(1), (positions, sigma, eps)


# --- backward ---
@triton.jit
def _lj_bwd(DEnergy, Pos, Sigma, Eps, DPos, DSigma, DEps, N, stride_b, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr):
    system = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    xi, yi, zi, half_i, root_i = _load_atoms(Pos, Sigma, Eps, system * N + i, i < N)
    fx = tl.zeros((BLOCK_I,), tl.float32)
    fy = tl.zeros((BLOCK_I,), tl.float32)
    fz = tl.zeros((BLOCK_I,), tl.float32)
    dsigma = tl.zeros((BLOCK_I,), tl.float32)
    deps = tl.zeros((BLOCK_I,), tl.float32)
    for start in range(0, N, BLOCK_J):
        j = start + tl.arange(0, BLOCK_J)
        xj, yj, zj, half_j, root_j = _load_atoms(Pos, Sigma, Eps, system * N + j, j < N)
        pair = (i[:, None] != j[None, :]) & (i[:, None] < N) & (j[None, :] < N)
        dx = xi[:, None] - xj[None, :]
        dy = yi[:, None] - yj[None, :]
        dz = zi[:, None] - zj[None, :]
        sigma = half_i[:, None] + half_j[None, :]
        inv_square, six = _attraction(dx, dy, dz, sigma, pair)
        # r dU/dr = -4 eps (12 s^12 - 6 s^6), and sigma dU/dsigma is its negative.
        virial = root_j[None, :] * (2.0 * six * six - six)
        pull = virial * inv_square
        fx += tl.sum(pull * dx, 1)
        fy += tl.sum(pull * dy, 1)
        fz += tl.sum(pull * dz, 1)
        dsigma += tl.sum(virial / tl.where(pair, sigma, 1.0), 1)
        deps += tl.sum(root_j[None, :] * (six * six - six), 1)
    g = tl.load(DEnergy + system * stride_b)
    force = -24.0 * g * root_i
    at = system * N + i
    tl.store(DPos + 3 * at, force * fx, mask=i < N)
    tl.store(DPos + 3 * at + 1, force * fy, mask=i < N)
    tl.store(DPos + 3 * at + 2, force * fz, mask=i < N)
    # sigma_i enters sigma by half, eps_i enters eps by half a root over its own.
    tl.store(DSigma + at, 12.0 * g * root_i * dsigma, mask=i < N)
    tl.store(DEps + at, 2.0 * g * deps / tl.where(i < N, root_i, 1.0), mask=i < N)


def backward(saved, grad_energy, needs=None):
    positions, sigma, eps = saved
    B, N, _ = positions.shape
    dpositions, dsigma, deps = torch.empty_like(positions), torch.empty_like(sigma), torch.empty_like(eps)
    BLOCK_I, BLOCK_J = _blocks(N)
    _lj_bwd[(B, triton.cdiv(N, BLOCK_I))](
        grad_energy, positions, sigma, eps, dpositions, dsigma, deps, N, grad_energy.stride(0),
        BLOCK_I=BLOCK_I, BLOCK_J=BLOCK_J, num_warps=4,
    )  # fmt: skip
    return dpositions, dsigma, deps


# --- check ---
SWEEP = ({"B": 2, "N": 32}, {"B": 3, "N": 27}, {"B": 1, "N": 70})
BENCH = ({"B": 8, "N": 2048},)


def make_args(B, N, device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    # A liquid's density: sites of a grid, shaken by less than what would bring two atoms to the wall of the potential.
    side = 1
    while side**3 < N:
        side += 1
    site = torch.arange(N)
    grid = torch.stack((site % side, site // side % side, site // (side * side)), 1)
    positions = 1.2 * (grid + 0.2 * torch.rand(B, N, 3, generator=g))
    sigma, eps = 0.9 + 0.2 * torch.rand(2, B, N, generator=g)
    return positions.to(device), sigma.to(device), eps.to(device)


def reference(positions, sigma, eps):
    N = positions.shape[1]
    self = torch.eye(N, dtype=torch.bool, device=positions.device)
    square = (positions[:, :, None] - positions[:, None]).square().sum(-1).masked_fill(self, 1.0)
    ratio = 0.25 * (sigma[:, :, None] + sigma[:, None]).square() / square
    six = (ratio**3).masked_fill(self, 0.0)
    return (2.0 * (eps[:, :, None] * eps[:, None]).sqrt() * (six * six - six)).sum((1, 2))
