"""Weight normalisation over all dimensions but the middle one: v (A, B, C), one norm for each b.

The elements of a b are A pieces of C neighbours, B * C apart. A program owns one b and walks its pieces as tiles of
pieces by neighbours, in an outer and an inner loop; <dw, v> of that b is at once dg and the projection of dv.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "weightnorm_dim_mid",
    "family": "norm_channel",
    "op": "weight_norm",
    "schema": 1,
    "techniques": ("two-pass", "one-launch", "recompute", "strided-cotangent"),
    "saves": (),
    "grads": ("v", "g"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _pieces(P, a, c, A, C, p_a, p_c):
    """The tile (a, c) of one b in fp32, zero outside, its mask."""
    ok = (a[:, None] < A) & (c[None, :] < C)
    at = a[:, None].to(tl.int64) * p_a + c[None, :].to(tl.int64) * p_c
    return tl.load(P + at, mask=ok, other=0.0).to(tl.float32), ok


@triton.jit
def _mid_norm_fwd(V, G, W, A, B, C, v_a, v_b, v_c, BLOCK_A: tl.constexpr, BLOCK_C: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    V += b * v_b
    squares = tl.zeros((BLOCK_A, BLOCK_C), tl.float32)
    for outer in range(0, A, BLOCK_A):
        a = outer + tl.arange(0, BLOCK_A)
        for inner in range(0, C, BLOCK_C):
            v, _ = _pieces(V, a, inner + tl.arange(0, BLOCK_C), A, C, v_a, v_c)
            squares += v * v
    gain = tl.load(G + b).to(tl.float32) * tl.rsqrt(tl.sum(squares))
    for outer in range(0, A, BLOCK_A):
        a = outer + tl.arange(0, BLOCK_A)
        for inner in range(0, C, BLOCK_C):
            c = inner + tl.arange(0, BLOCK_C)
            v, ok = _pieces(V, a, c, A, C, v_a, v_c)
            tl.store(W + (a[:, None].to(tl.int64) * B + b) * C + c[None, :], gain * v, mask=ok)


def _tile(A, C):
    """Neighbours of a piece first, then as many pieces as make 2048 elements."""
    block_c = min(256, triton.next_power_of_2(C))
    return {"BLOCK_A": max(1, min(2048 // block_c, triton.next_power_of_2(A))), "BLOCK_C": block_c}


def forward(v, g):
    A, B, C = v.shape
    w = torch.empty(A, B, C, device=v.device, dtype=v.dtype)
    _mid_norm_fwd[(B,)](v, g, w, A, B, C, *v.stride(), **_tile(A, C))
    return w, (v, g)


# --- backward ---
@triton.jit
def _mid_norm_bwd(
    DW, V, G, DV, DG, A, B, C, dw_a, dw_b, dw_c, v_a, v_b, v_c, BLOCK_A: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    V += b * v_b
    DW += b * dw_b
    squares = tl.zeros((BLOCK_A, BLOCK_C), tl.float32)
    along = tl.zeros((BLOCK_A, BLOCK_C), tl.float32)
    for outer in range(0, A, BLOCK_A):
        a = outer + tl.arange(0, BLOCK_A)
        for inner in range(0, C, BLOCK_C):
            c = inner + tl.arange(0, BLOCK_C)
            v, _ = _pieces(V, a, c, A, C, v_a, v_c)
            dw, _ = _pieces(DW, a, c, A, C, dw_a, dw_c)
            # v is read for <dw, v> anyway: its norm is summed again beside it.
            squares += v * v
            along += dw * v
    inv = tl.rsqrt(tl.sum(squares))
    dg = tl.sum(along) * inv
    tl.store(DG + b, dg)
    gain = tl.load(G + b).to(tl.float32) * inv
    for outer in range(0, A, BLOCK_A):
        a = outer + tl.arange(0, BLOCK_A)
        for inner in range(0, C, BLOCK_C):
            c = inner + tl.arange(0, BLOCK_C)
            v, ok = _pieces(V, a, c, A, C, v_a, v_c)
            dw, _ = _pieces(DW, a, c, A, C, dw_a, dw_c)
            out = DV + (a[:, None].to(tl.int64) * B + b) * C + c[None, :]
            tl.store(out, gain * (dw - v * (inv * dg)), mask=ok)


def backward(saved, grad_w, needs=None):
    v, g = saved
    A, B, C = v.shape
    dv = torch.empty(A, B, C, device=v.device, dtype=v.dtype)
    dg = torch.empty_like(g)
    _mid_norm_bwd[(B,)](grad_w, v, g, dv, dg, A, B, C, *grad_w.stride(), *v.stride(), **_tile(A, C))
    return dv, dg


# --- check ---
SWEEP = (
    {"A": 6, "B": 5, "C": 16},
    {"A": 11, "B": 3, "C": 37, "dtype": "float16"},
    {"A": 40, "B": 4, "C": 9, "dtype": "bfloat16"},
)
BENCH = ({"A": 1024, "B": 1024, "C": 16, "dtype": "bfloat16"},)


def make_args(A, B, C, dtype="float32", device="cpu", seed=0):
    gen = torch.Generator().manual_seed(seed)
    v, g = torch.randn(A, B, C, generator=gen), torch.rand(B, generator=gen) + 0.5
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (v, g))


def reference(v, g):
    vf = v.float()
    return (g.float()[:, None] * vf * torch.rsqrt(vf.pow(2).sum((0, 2), keepdim=True))).to(v.dtype)
