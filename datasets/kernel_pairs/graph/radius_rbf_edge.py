"""Radial basis features of graph edges with a smooth cutoff: a distance's gradient pulls at both ends of its edge."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "radius_rbf_edge",
    "family": "graph",
    "op": "edge_rbf",
    "schema": 1,
    "techniques": ("atomics", "recompute", "multi-row-tile", "strided-cotangent"),
    "saves": (),
    "grads": ("positions",),
    "dtypes": ("float32",),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _edge_vector(Pos, Source, Target, e, E):
    """Difference of the two end points of each edge, by component, and the two node numbers."""
    i = tl.load(Source + e, mask=e < E, other=0).to(tl.int64)
    j = tl.load(Target + e, mask=e < E, other=0).to(tl.int64)
    x = tl.load(Pos + 3 * i, mask=e < E, other=0.0) - tl.load(Pos + 3 * j, mask=e < E, other=0.0)
    y = tl.load(Pos + 3 * i + 1, mask=e < E, other=0.0) - tl.load(Pos + 3 * j + 1, mask=e < E, other=0.0)
    z = tl.load(Pos + 3 * i + 2, mask=e < E, other=0.0) - tl.load(Pos + 3 * j + 2, mask=e < E, other=0.0)
    return i, j, x, y, z


@triton.jit
def _rbf_fwd(Pos, Source, Target, Out, E, K, cutoff, gamma, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr):
    # feature[e, k] = exp(-gamma (r - c_k)^2) (1 - (r/cutoff)^2)^2 inside the cutoff, centres c_k = cutoff k / K.
    e = tl.program_id(0).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)
    k = tl.arange(0, BLOCK_K)
    _, _, x, y, z = _edge_vector(Pos, Source, Target, e, E)
    square = x * x + y * y + z * z
    r = tl.sqrt(square)
    window = tl.maximum(1.0 - square / (cutoff * cutoff), 0.0)
    off = r[:, None] - (k * (cutoff / K))[None, :]
    feature = tl.exp(-gamma * off * off) * (window * window)[:, None]
    tl.store(Out + e[:, None] * K + k[None, :], feature, mask=(e[:, None] < E) & (k[None, :] < K))


def forward(positions, source, target, features, cutoff, gamma):
    positions = positions.contiguous()
    E = source.numel()
    out = torch.empty(E, features, device=positions.device, dtype=positions.dtype)
    BLOCK_K = triton.next_power_of_2(features)
    BLOCK_E = max(16, 1024 // BLOCK_K)
    _rbf_fwd[(triton.cdiv(E, BLOCK_E),)](
        positions, source, target, out, E, features, cutoff, gamma, BLOCK_E=BLOCK_E, BLOCK_K=BLOCK_K
    )
    return out, (positions, source, target, cutoff, gamma)


# --- backward ---
@triton.jit
def _rbf_bwd(
    DOut, Pos, Source, Target, DPos, E, K, cutoff, gamma, stride_e, stride_k,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(0).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)
    k = tl.arange(0, BLOCK_K)
    i, j, x, y, z = _edge_vector(Pos, Source, Target, e, E)
    square = x * x + y * y + z * z
    # Two nodes at one place have no direction: the pull is then zero.
    apart = (square > 0.0) & (e < E)
    r = tl.sqrt(tl.where(apart, square, 1.0))
    window = tl.maximum(1.0 - square / (cutoff * cutoff), 0.0)
    mask = (e[:, None] < E) & (k[None, :] < K)
    g = tl.load(DOut + e[:, None] * stride_e + k[None, :] * stride_k, mask=mask, other=0.0)
    off = r[:, None] - (k * (cutoff / K))[None, :]
    bell = g * tl.exp(-gamma * off * off)
    # d feature / dr = bell window (-2 gamma off window - 4 r / cutoff^2)
    slope = tl.sum(bell * (-2.0 * gamma) * off, 1) * window * window
    slope -= tl.sum(bell, 1) * window * 4.0 * r / (cutoff * cutoff)
    pull = tl.where(apart, slope / r, 0.0)
    # An edge beyond the cutoff pulls with zero; it is spared its six atomic adds.
    active = apart & (window > 0.0)
    tl.atomic_add(DPos + 3 * i, pull * x, mask=active, sem="relaxed")
    tl.atomic_add(DPos + 3 * i + 1, pull * y, mask=active, sem="relaxed")
    tl.atomic_add(DPos + 3 * i + 2, pull * z, mask=active, sem="relaxed")
    tl.atomic_add(DPos + 3 * j, -pull * x, mask=active, sem="relaxed")
    tl.atomic_add(DPos + 3 * j + 1, -pull * y, mask=active, sem="relaxed")
    tl.atomic_add(DPos + 3 * j + 2, -pull * z, mask=active, sem="relaxed")


def backward(saved, grad_out, needs=None):
    positions, source, target, cutoff, gamma = saved
    E, K = grad_out.shape
    dpos = torch.zeros_like(positions)
    BLOCK_K = triton.next_power_of_2(K)
    BLOCK_E = max(16, 1024 // BLOCK_K)
    _rbf_bwd[(triton.cdiv(E, BLOCK_E),)](
        grad_out, positions, source, target, dpos, E, K, cutoff, gamma, grad_out.stride(0), grad_out.stride(1),
        BLOCK_E=BLOCK_E, BLOCK_K=BLOCK_K,
    )  # fmt: skip
    return dpos


# --- check ---
SWEEP = ({"V": 9, "E": 40, "K": 16}, {"V": 13, "E": 77, "K": 11})
BENCH = ({"V": 16384, "E": 262144, "K": 64},)


def make_args(V, E, K, device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    positions = torch.randn(V + 1, 3, generator=g)
    source = torch.randint(0, V + 1, (E,), generator=g)
    # Never from a node to itself; about one edge in five is longer than the cutoff.
    target = (source + torch.randint(1, V + 1, (E,), generator=g)) % (V + 1)
    return positions.to(device), source.to(device), target.to(device), K, 3.0, 1.5


def reference(positions, source, target, features, cutoff, gamma):
    r = (positions[source] - positions[target]).norm(dim=-1, keepdim=True)
    centres = torch.arange(features, device=positions.device) * (cutoff / features)
    window = torch.clamp(1.0 - (r / cutoff) ** 2, min=0.0)
    return torch.exp(-gamma * (r - centres) ** 2) * window**2
