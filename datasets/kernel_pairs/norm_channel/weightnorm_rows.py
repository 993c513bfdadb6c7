"""Weight normalisation per output row, w = g * v / ||v||: one row pass gives dv and dg, and both are final.

<dw, v> is read off once. Over the norm it is dg; over the squared norm it is the part of dw along v that dv must lose.
Rows longer than a block are walked twice, and the second walk finds them in L2.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "weightnorm_rows",
    "family": "norm_channel",
    "op": "weight_norm",
    "schema": 1,
    "techniques": ("row-local", "two-pass", "one-launch", "saved-statistics", "strided-cotangent"),
    "saves": ("norm: fp32 (N,)",),
    "grads": ("v", "g"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _weight_norm_fwd(V, G, W, Norm, K, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    base = row.to(tl.int64) * K
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        v = tl.load(V + base + k, mask=k < K, other=0.0).to(tl.float32)
        squares += v * v
    norm = tl.sqrt(tl.sum(squares, 0))
    tl.store(Norm + row, norm)
    gain = tl.load(G + row).to(tl.float32) / norm
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        v = tl.load(V + base + k, mask=k < K, other=0.0).to(tl.float32)
        tl.store(W + base + k, gain * v, mask=k < K)


def _launch(K):
    block = min(4096, triton.next_power_of_2(K))
    return {"BLOCK": block, "num_warps": max(1, min(8, block // 512))}


def forward(v, g):
    v = v.contiguous()
    N, K = v.shape
    w = torch.empty_like(v)
    norm = torch.empty(N, device=v.device, dtype=torch.float32)
    _weight_norm_fwd[(N,)](v, g, w, norm, K, **_launch(K))
    return w, (v, g, norm)


# --- backward ---
@triton.jit
def _weight_norm_bwd(DW, V, G, Norm, DV, DG, K, dw_n, dw_k, NEED_V: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    base = row.to(tl.int64) * K
    dw_base = row.to(tl.int64) * dw_n
    along = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, K, BLOCK, num_stages=2):
        k = start + tl.arange(0, BLOCK)
        dw = tl.load(DW + dw_base + k.to(tl.int64) * dw_k, mask=k < K, other=0.0).to(tl.float32)
        along += dw * tl.load(V + base + k, mask=k < K, other=0.0).to(tl.float32)
    inv = 1.0 / tl.load(Norm + row)
    dg = tl.sum(along, 0) * inv
    tl.store(DG + row, dg)
    if NEED_V:
        gain = tl.load(G + row).to(tl.float32) * inv
        for start in range(0, K, BLOCK):
            k = start + tl.arange(0, BLOCK)
            dw = tl.load(DW + dw_base + k.to(tl.int64) * dw_k, mask=k < K, other=0.0).to(tl.float32)
            unit = tl.load(V + base + k, mask=k < K, other=0.0).to(tl.float32) * inv
            tl.store(DV + base + k, gain * (dw - unit * dg), mask=k < K)


def backward(saved, grad_w, needs=None):
    v, g, norm = saved
    N, K = v.shape
    need_v = needs is None or needs[0]
    dv = torch.empty_like(v) if need_v else None
    dg = torch.empty_like(g)
    _weight_norm_bwd[(N,)](
        grad_w, v, g, norm, dv, dg, K, grad_w.stride(0), grad_w.stride(1), NEED_V=need_v, **_launch(K)
    )
    return dv, dg


# --- check ---
SWEEP = (
    {"N": 9, "K": 64},
    {"N": 14, "K": 83, "dtype": "float16"},
    {"N": 8, "K": 128, "dtype": "bfloat16"},
)
BENCH = ({"N": 8192, "K": 8192, "dtype": "bfloat16"},)


def make_args(N, K, dtype="float32", device="cpu", seed=0):
    gen = torch.Generator().manual_seed(seed)
    v, g = torch.randn(N, K, generator=gen), torch.rand(N, generator=gen) + 0.5
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (v, g))


def reference(v, g):
    vf = v.float()
    return (g.float()[:, None] * vf / torch.linalg.vector_norm(vf, dim=1, keepdim=True)).to(v.dtype)
