"""RMSNorm in groups, then a SiLU gate: y = w * x / rms(x) * silu(z), as at the end of a Mamba-2 block.

A program owns one group of columns and walks rows. One read of x, z and dy gives dx, dz and the row's share of dweight:
the norm is recomputed from x, so nothing is saved beyond the inputs.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "rmsnorm_gated_silu",
    "family": "norm_fused",
    "op": "gated_rms_norm",
    "schema": 1,
    "techniques": ("row-local", "recompute", "two-stage-partials", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "z", "weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _norm_then_gate_fwd(X, Z, W, Y, N, D, x_row, z_row, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    ok = d < D
    col = tl.program_id(1) * D + d
    x = tl.load(X + row * x_row + col, mask=ok, other=0.0).to(tl.float32)
    z = tl.load(Z + row * z_row + col, mask=ok, other=0.0).to(tl.float32)
    w = tl.load(W + col, mask=ok, other=0.0).to(tl.float32)
    inv = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
    tl.store(Y + row * N + col, x * inv * w * z * tl.sigmoid(z), mask=ok)


def forward(x, z, weight, groups, eps=1e-5):
    # x and z are often column slices of one projection: their rows may lie apart.
    x = x if x.stride(1) == 1 else x.contiguous()
    z = z if z.stride(1) == 1 else z.contiguous()
    M, N = x.shape
    D = N // groups
    y = torch.empty(M, N, device=x.device, dtype=x.dtype)
    BLOCK = triton.next_power_of_2(D)
    _norm_then_gate_fwd[(M, groups)](
        x, z, weight, y, N, D, x.stride(0), z.stride(0), eps, BLOCK=BLOCK, num_warps=max(1, min(16, BLOCK // 512))
    )
    return y, (x, z, weight, groups, eps)


# --- backward ---
@triton.jit
def _sum_pairs(a0, b0, a1, b1):
    return a0 + a1, b0 + b1


@triton.jit
def _norm_then_gate_bwd(
    DY, X, Z, W, DX, DZ, Parts, M, N, D, x_row, z_row, dy_row, dy_col, eps, STAGES: tl.constexpr, BLOCK: tl.constexpr
):
    pid = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    ok = d < D
    col = tl.program_id(1) * D + d
    w = tl.load(W + col, mask=ok, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK,), tl.float32)
    # While a row is reduced, the next rows of all three tensors are copied.
    for row in tl.range(pid, M, tl.num_programs(0), num_stages=STAGES):
        x = tl.load(X + row * x_row + col, mask=ok, other=0.0).to(tl.float32)
        z = tl.load(Z + row * z_row + col, mask=ok, other=0.0).to(tl.float32)
        dy = tl.load(DY + row * dy_row + col.to(tl.int64) * dy_col, mask=ok, other=0.0).to(tl.float32)
        s = tl.sigmoid(z)
        # Product rule: each factor's gradient is dy times the other factor.
        dnormed = dy * z * s
        dunit = dnormed * w
        # Sums of x^2 and of dunit * x in one reduction: 1/rms is taken out of the second.
        squares, along = tl.reduce((x * x, dunit * x), 0, _sum_pairs)
        inv = tl.rsqrt(squares / D + eps)
        unit = x * inv
        tl.store(DZ + row * N + col, dy * unit * w * s * (1.0 + z * (1.0 - s)), mask=ok)
        dw += dnormed * unit
        tl.store(DX + row * N + col, (dunit - unit * (inv * along / D)) * inv, mask=ok)
    tl.store(Parts + pid * N + col, dw, mask=ok)


def backward(saved, grad_y, needs=None):
    x, z, weight, groups, eps = saved
    M, N = x.shape
    D = N // groups
    BLOCK = triton.next_power_of_2(D)
    warps = max(1, min(16, BLOCK // 256))
    # One wave over all groups: 512 threads for each of 132 processors, as the registers allow.
    programs = max(1, min(132 * 16 // (warps * groups), triton.cdiv(M, 2)))
    dx = torch.empty(M, N, device=x.device, dtype=x.dtype)
    dz = torch.empty(M, N, device=z.device, dtype=z.dtype)
    parts = torch.empty(programs, N, device=x.device, dtype=torch.float32)
    _norm_then_gate_bwd[(programs, groups)](
        grad_y, x, z, weight, dx, dz, parts, M, N, D, x.stride(0), z.stride(0), grad_y.stride(0), grad_y.stride(1),
        eps, STAGES=3 if BLOCK * x.element_size() <= 16384 else 1, BLOCK=BLOCK, num_warps=warps,
    )  # fmt: skip
    return dx, dz, parts.sum(0).to(weight.dtype)


# --- check ---
SWEEP = (
    {"M": 6, "G": 2, "D": 32},
    {"M": 11, "G": 3, "D": 27, "dtype": "float16"},
    {"M": 5, "G": 1, "D": 128, "dtype": "bfloat16"},
)
BENCH = ({"M": 16384, "G": 1, "D": 4096, "dtype": "bfloat16"}, {"M": 16384, "G": 8, "D": 512, "dtype": "bfloat16"})


def make_args(M, G, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    N = G * D
    packed = torch.randn(M, 2 * N, generator=g).to(device=device, dtype=getattr(torch, dtype))
    weight = (torch.rand(N, generator=g) + 0.5).to(device=device, dtype=getattr(torch, dtype))
    z, x = packed.split(N, 1)
    return x, z, weight, G


def reference(x, z, weight, groups, eps=1e-5):
    xf = x.float().unflatten(1, (groups, -1))
    normed = (xf * torch.rsqrt(xf.pow(2).mean(-1, keepdim=True) + eps)).flatten(1)
    return (normed * weight.float() * torch.nn.functional.silu(z.float())).to(x.dtype)
