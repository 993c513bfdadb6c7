"""RMSNorm of every head of q in (B, S, H, D): 2-D tiles of heads, one shared weight reduced by a persistent loop."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "rmsnorm_per_head",
    "family": "norm_row",
    "op": "rms_norm",
    "schema": 1,
    "techniques": ("persistent-grid", "two-stage-partials", "recompute", "multi-row-tile"),
    "saves": (),
    "grads": ("q", "weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _headnorm_fwd(Q, W, Y, R, D, eps, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    mask = (r[:, None] < R) & (d[None, :] < D)
    at = r[:, None] * D + d[None, :]
    q = tl.load(Q + at, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(W + d, mask=d < D, other=0.0).to(tl.float32)
    inv = tl.rsqrt(tl.sum(q * q, 1) / D + eps)
    tl.store(Y + at, q * inv[:, None] * w[None, :], mask=mask)


def forward(q, weight, eps=1e-6):
    q = q.contiguous()
    B, S, H, D = q.shape
    R = B * S * H
    y = torch.empty_like(q)
    BLOCK_D = triton.next_power_of_2(D)
    BLOCK_R = max(1, 2048 // BLOCK_D)
    _headnorm_fwd[(triton.cdiv(R, BLOCK_R),)](q, weight, y, R, D, eps, BLOCK_R=BLOCK_R, BLOCK_D=BLOCK_D)
    return y, (q, weight, eps)


# --- backward ---
@triton.jit
def _add_sums(a0, b0, a1, b1):
    return a0 + a1, b0 + b1


@triton.jit
def _headnorm_bwd(DY, Q, W, DQ, DWP, R, D, eps, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    w = tl.load(W + d, mask=d < D, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    for tile in tl.range(pid, tl.cdiv(R, BLOCK_R), tl.num_programs(0), num_stages=4):
        r = tile * BLOCK_R + tl.arange(0, BLOCK_R)
        mask = (r[:, None] < R) & (d[None, :] < D)
        at = r[:, None] * D + d[None, :]
        q = tl.load(Q + at, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(DY + at, mask=mask, other=0.0).to(tl.float32)
        gw = g * w[None, :]
        # A head is short, so 1/rms is cheaper to sum again, beside the projection, than to store and fetch.
        squares, along = tl.reduce((q * q, gw * q), 1, _add_sums)
        inv = tl.rsqrt(squares / D + eps)
        radial = inv * along / D
        unit = q * inv[:, None]
        tl.store(DQ + at, (gw - unit * radial[:, None]) * inv[:, None], mask=mask)
        dw += g * unit
    tl.store(DWP + pid * D + d, tl.sum(dw, 0), mask=d < D)


def backward(saved, grad_y, needs=None):
    q, weight, eps = saved
    D = q.shape[-1]
    R = q.numel() // D
    grad_y = grad_y.contiguous()
    BLOCK_D = triton.next_power_of_2(D)
    BLOCK_R = max(1, 2048 // BLOCK_D)
    count = 2 * torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 2
    # Five programs of four warps are resident, and each copies two tiles ahead of the one that it reduces.
    programs = max(1, min(5 * count, triton.cdiv(R, 2 * BLOCK_R)))
    dq = torch.empty_like(q)
    dw_parts = torch.empty(programs, D, device=q.device, dtype=torch.float32)
    _headnorm_bwd[(programs,)](grad_y, q, weight, dq, dw_parts, R, D, eps, BLOCK_R=BLOCK_R, BLOCK_D=BLOCK_D)
    return dq, dw_parts.sum(0).to(weight.dtype)


# --- check ---
SWEEP = (
    {"B": 2, "S": 9, "H": 3, "D": 32},
    {"B": 1, "S": 31, "H": 5, "D": 24, "dtype": "float16"},
    {"B": 2, "S": 6, "H": 2, "D": 64, "dtype": "bfloat16"},
)
BENCH = ({"B": 4, "S": 8192, "H": 32, "D": 128, "dtype": "bfloat16"},)


def make_args(B, S, H, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    q, w = torch.randn(B, S, H, D, generator=g), torch.rand(D, generator=g) + 0.5
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (q, w))


def reference(q, weight, eps=1e-6):
    qf = q.float()
    return (qf * torch.rsqrt((qf * qf).mean(-1, keepdim=True) + eps) * weight.float()).to(q.dtype)
