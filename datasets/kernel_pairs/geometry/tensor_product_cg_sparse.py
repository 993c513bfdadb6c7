"""Clebsch-Gordan product of node features and edge harmonics, scaled per channel: nonzeros sorted for each owner.

z[e, k, c] = w[e, c] * sum over (i, j) of cg[i, j, k] x[e, i, c] y[e, j]. Of the (2 l1 + 1)(2 l2 + 1)(2 l3 + 1)
coefficients a few dozen are not zero; they come as a list in three orders, sorted by k, by i and by j, so that every
result is one run of the list in registers. The backward walks the list by i for dx, whose sum before w also gives dw
= sum of x_i times it, and by j for dy, which alone adds up over channels. Channels are lanes throughout.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "tensor_product_cg_sparse",
    "family": "geometry",
    "op": "tensor_product",
    "schema": 1,
    "techniques": ("sorted-segments", "multi-row-tile", "broadcast-reduction", "one-launch", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "y", "weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _edge_value(Y, e, E, NJ, j):
    return tl.load(Y + e * NJ + j, mask=e < E, other=0.0).to(tl.float32)[:, None]


@triton.jit
def _tensor_product_fwd(
    X, Y, W, Z, Starts, Partners, Values, E, NI, NJ, NK, C, BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr
):
    e = tl.program_id(0).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (e[:, None] < E) & (c[None, :] < C)
    lane = e[:, None] * C + c[None, :]
    row = e[:, None] * C
    w = tl.load(W + lane, mask=mask, other=0.0).to(tl.float32)
    for k in range(NK):
        total = tl.zeros((BLOCK_E, BLOCK_C), tl.float32)
        for n in range(tl.load(Starts + k), tl.load(Starts + k + 1)):
            i = tl.load(Partners + 2 * n)
            j = tl.load(Partners + 2 * n + 1)
            x = tl.load(X + row * NI + i * C + c[None, :], mask=mask, other=0.0).to(tl.float32)
            total += tl.load(Values + n) * _edge_value(Y, e, E, NJ, j) * x
        tl.store(Z + row * NK + k * C + c[None, :], w * total, mask=mask)


def _blocks(C):
    BLOCK_C = max(16, min(128, triton.next_power_of_2(C)))
    return 512 // BLOCK_C, BLOCK_C


def forward(x, y, weight, degree, starts, partners, values):
    # Row 0 of the three tables is sorted by k, row 1 by i, row 2 by j; partners are the two other indices.
    x, y, weight = x.contiguous(), y.contiguous(), weight.contiguous()
    (E, NI, C), NJ, NK = x.shape, y.shape[1], 2 * degree + 1
    z = torch.empty(E, NK, C, device=x.device, dtype=x.dtype)
    BLOCK_E, BLOCK_C = _blocks(C)
    _tensor_product_fwd[(triton.cdiv(E, BLOCK_E), triton.cdiv(C, BLOCK_C))](
        x, y, weight, z, starts[0], partners[0], values[0], E, NI, NJ, NK, C,
        BLOCK_E=BLOCK_E, BLOCK_C=BLOCK_C, num_warps=4,
    )  # fmt: skip
    return z, (x, y, weight, starts, partners, values)


# --- backward ---
@triton.jit
def _tensor_product_bwd(
    DZ, X, Y, W, DX, DY, DW, Starts, Partners, Values, E, NI, NJ, C, stride_starts, nonzeros, dz_e, dz_k, dz_c,
    BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    # A program owns its edges with all their channels, so that dy needs no partial sums.
    e = tl.program_id(0).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)
    by_i = 2 * nonzeros
    by_j = 4 * nonzeros
    for start in range(0, C, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        mask = (e[:, None] < E) & (c[None, :] < C)
        lane = e[:, None] * C + c[None, :]
        at_x = e[:, None] * C * NI + c[None, :]
        at_z = e[:, None] * dz_e + c[None, :].to(tl.int64) * dz_c
        w = tl.load(W + lane, mask=mask, other=0.0).to(tl.float32)
        dw = tl.zeros((BLOCK_E, BLOCK_C), tl.float32)
        for i in range(NI):
            total = tl.zeros((BLOCK_E, BLOCK_C), tl.float32)
            at_start = Starts + stride_starts + i
            for n in range(tl.load(at_start), tl.load(at_start + 1)):
                j = tl.load(Partners + by_i + 2 * n)
                k = tl.load(Partners + by_i + 2 * n + 1)
                dz = tl.load(DZ + at_z + k * dz_k, mask=mask, other=0.0).to(tl.float32)
                total += tl.load(Values + nonzeros + n) * _edge_value(Y, e, E, NJ, j) * dz
            x = tl.load(X + at_x + i * C, mask=mask, other=0.0).to(tl.float32)
            dw += x * total
            tl.store(DX + at_x + i * C, w * total, mask=mask)
        tl.store(DW + lane, dw, mask=mask)
    # dy alone adds up over channels.
    for j in range(NJ):
        at_start = Starts + 2 * stride_starts + j
        dy = tl.zeros((BLOCK_E,), tl.float32)
        for start in range(0, C, BLOCK_C):
            c = start + tl.arange(0, BLOCK_C)
            mask = (e[:, None] < E) & (c[None, :] < C)
            at_x = e[:, None] * C * NI + c[None, :]
            at_z = e[:, None] * dz_e + c[None, :].to(tl.int64) * dz_c
            w = tl.load(W + e[:, None] * C + c[None, :], mask=mask, other=0.0).to(tl.float32)
            total = tl.zeros((BLOCK_E, BLOCK_C), tl.float32)
            for n in range(tl.load(at_start), tl.load(at_start + 1)):
                i = tl.load(Partners + by_j + 2 * n)
                k = tl.load(Partners + by_j + 2 * n + 1)
                x = tl.load(X + at_x + i * C, mask=mask, other=0.0).to(tl.float32)
                dz = tl.load(DZ + at_z + k * dz_k, mask=mask, other=0.0).to(tl.float32)
                total += tl.load(Values + 2 * nonzeros + n) * x * dz
            dy += tl.sum(w * total, 1)
        tl.store(DY + e * NJ + j, dy, mask=e < E)


def backward(saved, grad_z, needs=None):
    x, y, weight, starts, partners, values = saved
    (E, NI, C), NJ = x.shape, y.shape[1]
    dx, dy, dw = torch.empty_like(x), torch.empty_like(y), torch.empty_like(weight)
    BLOCK_E, BLOCK_C = _blocks(C)
    _tensor_product_bwd[(triton.cdiv(E, BLOCK_E),)](
        grad_z, x, y, weight, dx, dy, dw, starts, partners, values, E, NI, NJ, C, starts.shape[1], values.shape[1],
        *grad_z.stride(), BLOCK_E=BLOCK_E, BLOCK_C=BLOCK_C, num_warps=4,
    )  # fmt: skip
    return dx, dy, dw


# --- check ---
SWEEP = (
    {"E": 8, "C": 32, "L1": 2, "L2": 1, "L3": 2},
    {"E": 7, "C": 139, "L1": 1, "L2": 2, "L3": 1},
    {"E": 13, "C": 19, "L1": 1, "L2": 1, "L3": 2, "dtype": "float16"},
    {"E": 10, "C": 16, "L1": 0, "L2": 2, "L3": 2, "dtype": "bfloat16"},
)
BENCH = ({"E": 65536, "C": 128, "L1": 2, "L2": 2, "L3": 2, "dtype": "float32"},)


def _turns(degree):
    """Real generators of turns about x, y and z: (3, 2 l + 1, 2 l + 1), antisymmetric."""
    m = torch.arange(-degree, degree + 1, dtype=torch.float64)
    up = torch.diag(torch.sqrt(degree * (degree + 1) - m[:-1] * (m[:-1] + 1)), -1).to(torch.complex128)
    momenta = torch.stack(((up + up.T) / 2, (up - up.T) / 2j, torch.diag(m).to(torch.complex128)))
    real = torch.zeros(len(m), len(m), dtype=torch.complex128)
    real[degree, degree] = 1.0
    for order in range(1, degree + 1):
        sign = (-1) ** order
        real[degree + order, degree - order], real[degree + order, degree + order] = 2**-0.5, sign * 2**-0.5
        real[degree - order, degree - order], real[degree - order, degree + order] = 2**-0.5 * 1j, -sign * 2**-0.5 * 1j
    return (real @ momenta @ real.mH).imag


def _coefficients(first, second, third):
    """The one tensor (NI, NJ, NK) of norm sqrt(NK) that no common turn of all three indices changes."""
    a, b, c = (2 * degree + 1 for degree in (first, second, third))
    turn_a, turn_b, turn_c = _turns(first), _turns(second), _turns(third)
    eye = [torch.eye(size, dtype=torch.float64) for size in (a, b, c)]
    change = torch.einsum("tia,jb,kc->tijkabc", turn_a, eye[1], eye[2])
    change += torch.einsum("ia,tjb,kc->tijkabc", eye[0], turn_b, eye[2])
    change += torch.einsum("ia,jb,tkc->tijkabc", eye[0], eye[1], turn_c)
    unchanged = torch.linalg.svd(change.reshape(-1, a * b * c)).Vh[-1]
    return c**0.5 * unchanged.view(a, b, c)


def make_args(E, C, L1, L2, L3, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    sizes = ((E, 2 * L1 + 1, C), (E, 2 * L2 + 1), (E, C))
    x, y, weight = (torch.randn(size, generator=g).to(device, getattr(torch, dtype)) for size in sizes)
    cg = _coefficients(L1, L2, L3)
    found = (cg.abs() > 1e-9).nonzero()
    starts, partners, values = [], [], []
    for owner, others in ((2, [0, 1]), (0, [1, 2]), (1, [0, 2])):
        run = found[found[:, owner].argsort(stable=True)]
        longest = 2 * max(L1, L2, L3) + 2
        starts.append(torch.searchsorted(run[:, owner].contiguous(), torch.arange(longest)))
        partners.append(run[:, others])
        values.append(cg[tuple(run.T)])
    tables = (torch.stack(starts).int(), torch.stack(partners).int(), torch.stack(values).float())
    return x, y, weight, L3, *(table.to(device) for table in tables)


def reference(x, y, weight, degree, starts, partners, values):
    NK = 2 * degree + 1
    count = (starts[0, 1 : NK + 1] - starts[0, :NK]).long()
    owner = torch.arange(NK, device=x.device).repeat_interleave(count)
    cg = torch.zeros(x.shape[1], y.shape[1], NK, device=x.device)
    i, j = partners[0].long().unbind(1)
    cg = cg.index_put((i, j, owner), values[0])
    per_edge = (y.float() @ cg.permute(1, 0, 2).flatten(1)).view(len(y), x.shape[1], NK)
    return (weight.float()[:, None] * (per_edge.mT @ x.float())).to(x.dtype)
