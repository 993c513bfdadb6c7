"""Screened Coulomb energy over a half neighbour list: each pair is computed once and written to both of its atoms.

U = sum over listed pairs of q_i q_j exp(-kappa r) / r * (1 - (r / cutoff)^2)^2, none beyond the cutoff. A program owns
a tile of atoms with their rows of the list. What its own atoms gain is summed over the row first and added once; the
neighbours' ends, equal and opposite, go out as one atomic add per word of (x, y, z, charge). Both meet in one buffer
of four aligned words per atom, whose parts are the two gradients. dkappa is one partial sum per program.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "coulomb_screened",
    "family": "geometry",
    "op": "screened_coulomb",
    "schema": 1,
    "techniques": ("atomics", "scalar-gradient", "two-stage-partials", "recompute", "one-launch"),
    "saves": (),
    "grads": ("positions", "charge", "kappa"),
    "dtypes": ("float32",),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _load_pairs(Pos, Charge, Pairs, N, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Tile (atom, slot): the atoms, the neighbours (-1 for none), the vectors between them and both charges."""
    i = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    own = i < N
    j = tl.load(Pairs + i[:, None] * K + k[None, :], mask=own[:, None] & (k[None, :] < K), other=-1).to(tl.int64)
    real = j >= 0
    x = tl.load(Pos + 3 * i, mask=own, other=0.0)[:, None] - tl.load(Pos + 3 * j, mask=real, other=0.0)
    y = tl.load(Pos + 3 * i + 1, mask=own, other=0.0)[:, None] - tl.load(Pos + 3 * j + 1, mask=real, other=0.0)
    z = tl.load(Pos + 3 * i + 2, mask=own, other=0.0)[:, None] - tl.load(Pos + 3 * j + 2, mask=real, other=0.0)
    qi = tl.load(Charge + i, mask=own, other=0.0)[:, None]
    qj = tl.load(Charge + j, mask=real, other=0.0)
    return i, j, x, y, z, qi, qj


@triton.jit
def _potential(square, j, kappa, inv_cutoff2):
    """exp(-kappa r) / r within the window, the window's root, r and which pairs lie inside the cutoff."""
    near = (j >= 0) & (square * inv_cutoff2 < 1.0)
    inv_r = tl.rsqrt(tl.where(near, square, 1.0))
    r = tl.where(near, square, 1.0) * inv_r
    window = tl.where(near, 1.0 - square * inv_cutoff2, 0.0)
    return tl.exp(-kappa * r) * inv_r, window, r, inv_r, near


@triton.jit
def _coulomb_fwd(Pos, Charge, Kappa, Pairs, Parts, N, K, inv_cutoff2, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    _, j, x, y, z, qi, qj = _load_pairs(Pos, Charge, Pairs, N, K, BLOCK_N, BLOCK_K)
    bare, window, _, _, _ = _potential(x * x + y * y + z * z, j, tl.load(Kappa), inv_cutoff2)
    tl.store(Parts + tl.program_id(0), tl.sum(qi * qj * bare * window * window))


def _blocks(K):
    BLOCK_K = triton.next_power_of_2(K)
    return max(4, 1024 // BLOCK_K), BLOCK_K


def forward(positions, charge, kappa, pairs, cutoff):
    positions, charge, pairs = positions.contiguous(), charge.contiguous(), pairs.contiguous()
    N, K = pairs.shape
    BLOCK_N, BLOCK_K = _blocks(K)
    programs = triton.cdiv(N, BLOCK_N)
    parts = torch.empty(programs, device=positions.device, dtype=torch.float32)
    _coulomb_fwd[(programs,)](
        positions, charge, kappa, pairs, parts, N, K, cutoff**-2, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, num_warps=4
    )
    return parts.sum(), (positions, charge, kappa, pairs, cutoff)


# --- backward ---
@triton.jit
def _coulomb_bwd(
    DEnergy, Pos, Charge, Kappa, Pairs, Ends, Parts, N, K, inv_cutoff2, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    i, j, x, y, z, qi, qj = _load_pairs(Pos, Charge, Pairs, N, K, BLOCK_N, BLOCK_K)
    kappa = tl.load(Kappa)
    bare, window, r, inv_r, near = _potential(x * x + y * y + z * z, j, kappa, inv_cutoff2)
    g = tl.load(DEnergy)
    screened = g * bare * window * window
    # dU/dr over r: from exp and 1 / r, and from the window.
    steep = -(kappa + inv_r) * inv_r * screened - 4.0 * inv_cutoff2 * g * bare * window
    pull = qi * qj * steep
    tl.store(Parts + tl.program_id(0), -tl.sum(qi * qj * r * screened))
    # Pairs beyond the cutoff are spared their atomics.
    tl.atomic_add(Ends + 4 * j, -pull * x, mask=near, sem="relaxed")
    tl.atomic_add(Ends + 4 * j + 1, -pull * y, mask=near, sem="relaxed")
    tl.atomic_add(Ends + 4 * j + 2, -pull * z, mask=near, sem="relaxed")
    tl.atomic_add(Ends + 4 * j + 3, qi * screened, mask=near, sem="relaxed")
    own = i < N
    tl.atomic_add(Ends + 4 * i, tl.sum(pull * x, 1), mask=own, sem="relaxed")
    tl.atomic_add(Ends + 4 * i + 1, tl.sum(pull * y, 1), mask=own, sem="relaxed")
    tl.atomic_add(Ends + 4 * i + 2, tl.sum(pull * z, 1), mask=own, sem="relaxed")
    tl.atomic_add(Ends + 4 * i + 3, tl.sum(qj * screened, 1), mask=own, sem="relaxed")


def backward(saved, grad_energy, needs=None):
    positions, charge, kappa, pairs, cutoff = saved
    N, K = pairs.shape
    BLOCK_N, BLOCK_K = _blocks(K)
    programs = triton.cdiv(N, BLOCK_N)
    ends = torch.zeros(N, 4, device=positions.device, dtype=torch.float32)
    parts = torch.empty(programs, device=positions.device, dtype=torch.float32)
    _coulomb_bwd[(programs,)](
        grad_energy, positions, charge, kappa, pairs, ends, parts, N, K, cutoff**-2,
        BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, num_warps=4,
    )  # fmt: skip
    return ends[:, :3].contiguous(), ends[:, 3].contiguous(), parts.sum()


# --- check ---
SWEEP = ({"N": 48, "REACH": 1}, {"N": 37, "REACH": 2}, {"N": 125, "REACH": 1})
BENCH = ({"N": 262144, "REACH": 2},)


def make_args(N, REACH, device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    side = 1
    while side**3 < N:
        side += 1
    site = torch.arange(N)
    grid = torch.stack((site % side, site // side % side, site // (side * side)), 1)
    positions = grid + 0.4 * torch.rand(N, 3, generator=g)
    # Half of the cells around an atom's own: of two neighbours exactly one lists the other.
    reach = torch.arange(-REACH, REACH + 1)
    steps = torch.cartesian_prod(reach, reach, reach).flip(1)
    steps = steps[len(steps) // 2 + 1 :]
    cell = grid[:, None] + steps
    partner = cell[..., 0] + side * (cell[..., 1] + side * cell[..., 2])
    real = ((cell >= 0) & (cell < side)).all(-1) & (partner < N)
    pairs = torch.where(real, partner, -1).int()
    charge, kappa = torch.randn(N, generator=g), torch.tensor(0.7)
    return positions.to(device), charge.to(device), kappa.to(device), pairs.to(device), REACH + 0.4


def reference(positions, charge, kappa, pairs, cutoff):
    real, j = pairs >= 0, pairs.clamp(min=0).long()
    square = (positions[:, None] - positions[j]).square().sum(-1)
    near = real & (square < cutoff**2)
    r = torch.where(near, square, 1.0).sqrt()
    window = torch.where(near, 1.0 - square / cutoff**2, 0.0)
    return (charge[:, None] * charge[j] * torch.exp(-kappa * r) / r * window**2).sum()
