"""Degree 1 real spherical harmonics: a scaled permutation of (x, y, z), so the backward needs no saved tensor at all.

Y_m = sqrt(3 / (4 pi)) (y, z, x) for m = -1, 0, 1, as solid harmonics: homogeneous in the vector, which keeps its
length. The Jacobian is constant, and its adjoint is the inverse permutation with the same scale. Tiles are (point,
component), so that loads and stores run through memory without gaps and the permutation stays inside groups of three.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "sph_harm_l1",
    "family": "geometry",
    "op": "spherical_harmonics",
    "schema": 1,
    "techniques": ("elementwise", "strided-cotangent"),
    "saves": (),
    "grads": ("vectors",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _sph_l1_fwd(V, Y, E, BLOCK: tl.constexpr):
    point = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    order = tl.arange(0, 4)
    inside = (point[:, None] < E) & (order[None, :] < 3)
    # Orders -1, 0, 1 are y, z, x.
    axis = (order + 1) % 3
    v = tl.load(V + 3 * point[:, None] + axis[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(Y + 3 * point[:, None] + order[None, :], 0.4886025119029199 * v, mask=inside)


def forward(vectors):
    vectors = vectors.contiguous()
    E = vectors.shape[0]
    out = torch.empty_like(vectors)
    _sph_l1_fwd[(triton.cdiv(E, 512),)](vectors, out, E, BLOCK=512, num_warps=4)
    return out, ()


# --- backward ---
@triton.jit
def _sph_l1_bwd(DY, DV, E, dy_point, dy_order, BLOCK: tl.constexpr):
    point = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    axis = tl.arange(0, 4)
    inside = (point[:, None] < E) & (axis[None, :] < 3)
    # x, y, z stand at orders 1, -1, 0.
    order = (axis + 2) % 3
    dy = tl.load(DY + point[:, None] * dy_point + order[None, :] * dy_order, mask=inside, other=0.0).to(tl.float32)
    tl.store(DV + 3 * point[:, None] + axis[None, :], 0.4886025119029199 * dy, mask=inside)


def backward(saved, grad_y, needs=None):
    E = grad_y.shape[0]
    dvectors = torch.empty(E, 3, device=grad_y.device, dtype=grad_y.dtype)
    _sph_l1_bwd[(triton.cdiv(E, 512),)](grad_y, dvectors, E, *grad_y.stride(), BLOCK=512, num_warps=4)
    return dvectors


# --- check ---
SWEEP = ({"E": 512}, {"E": 397}, {"E": 100, "dtype": "bfloat16"}, {"E": 33, "dtype": "float16"})
BENCH = ({"E": 8388608, "dtype": "float32"},)


def make_args(E, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(E, 3, generator=g).to(device=device, dtype=getattr(torch, dtype)),)


def reference(vectors):
    return (vectors.float().roll(-1, 1) * (0.75 / torch.pi) ** 0.5).to(vectors.dtype)
