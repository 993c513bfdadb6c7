"""adaLN: LayerNorm(x) * (1 + scale) + shift with scale and shift per sample, as in a diffusion transformer.

dx is local to a row. dscale and dshift sum over the sequence of one sample: a program of the second launch owns a
column tile of a sample and walks its tokens, so both come out complete, in the dtype they are wanted in.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "layernorm_modulate",
    "family": "norm_fused",
    "op": "adaptive_layer_norm",
    "schema": 1,
    "techniques": (
        "owner-grid", "column-owner", "row-local", "saved-statistics", "broadcast-reduction", "strided-cotangent",
    ),
    "saves": ("mean: fp32 (B, S)", "rstd: fp32 (B, S)"),
    "grads": ("x", "scale", "shift"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}  # fmt: skip


# --- forward ---
@triton.jit
def _modulate_fwd(X, Scale, Shift, Y, Mean, Rstd, S, D, s_b, t_b, eps, BLOCK: tl.constexpr):
    token = tl.program_id(0)
    sample = tl.program_id(1).to(tl.int64)
    row = sample * S + token
    d = tl.arange(0, BLOCK)
    ok = d < D
    x = tl.load(X + row * D + d, mask=ok, other=0.0).to(tl.float32)
    mean = tl.sum(x, 0) / D
    x = tl.where(ok, x - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
    tl.store(Mean + row, mean)
    tl.store(Rstd + row, rstd)
    gain = 1.0 + tl.load(Scale + sample * s_b + d, mask=ok, other=0.0).to(tl.float32)
    shift = tl.load(Shift + sample * t_b + d, mask=ok, other=0.0).to(tl.float32)
    tl.store(Y + row * D + d, x * rstd * gain + shift, mask=ok)


def forward(x, scale, shift, eps=1e-6):
    # scale and shift are slices of one projection of the condition: their rows may lie apart.
    x = x.contiguous()
    scale = scale if scale.stride(1) == 1 else scale.contiguous()
    shift = shift if shift.stride(1) == 1 else shift.contiguous()
    B, S, D = x.shape
    y = torch.empty_like(x)
    mean = torch.empty(B, S, device=x.device, dtype=torch.float32)
    rstd = torch.empty_like(mean)
    BLOCK = triton.next_power_of_2(D)
    _modulate_fwd[(S, B)](
        x, scale, shift, y, mean, rstd, S, D, scale.stride(0), shift.stride(0), eps,
        BLOCK=BLOCK, num_warps=max(1, min(16, BLOCK // 512)),
    )  # fmt: skip
    return y, (x, scale, mean, rstd)


# --- backward ---
@triton.jit
def _modulate_dx(DY, X, Scale, Mean, Rstd, DX, S, D, s_b, dy_b, dy_s, dy_d, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    sample = tl.program_id(1).to(tl.int64)
    row = sample * S + token
    d = tl.arange(0, BLOCK)
    ok = d < D
    rstd = tl.load(Rstd + row)
    xhat = (tl.load(X + row * D + d, mask=ok, other=0.0).to(tl.float32) - tl.load(Mean + row)) * rstd
    dy = tl.load(DY + sample * dy_b + token * dy_s + d * dy_d, mask=ok, other=0.0).to(tl.float32)
    # dy is zero past the row, so the sums need no mask.
    dxhat = dy * (1.0 + tl.load(Scale + sample * s_b + d, mask=ok, other=0.0).to(tl.float32))
    c1 = tl.sum(dxhat * xhat, 0) / D
    c2 = tl.sum(dxhat, 0) / D
    tl.store(DX + row * D + d, rstd * (dxhat - c2 - xhat * c1), mask=ok)


@triton.jit
def _modulate_dcondition(
    DY, X, Mean, Rstd, DScale, DShift, S, D, dy_b, dy_s, dy_d, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    sample = tl.program_id(1).to(tl.int64)
    dscale = tl.zeros((BLOCK_S, BLOCK_D), tl.float32)
    dshift = tl.zeros((BLOCK_S, BLOCK_D), tl.float32)
    for start in range(0, S, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        row = sample * S + s
        ok = (s[:, None] < S) & (d[None, :] < D)
        x = tl.load(X + row[:, None] * D + d[None, :], mask=ok, other=0.0).to(tl.float32)
        dy_at = sample * dy_b + s[:, None].to(tl.int64) * dy_s + d[None, :].to(tl.int64) * dy_d
        dy = tl.load(DY + dy_at, mask=ok, other=0.0).to(tl.float32)
        mean = tl.load(Mean + row, mask=s < S, other=0.0)
        rstd = tl.load(Rstd + row, mask=s < S, other=0.0)
        dscale += dy * (x - mean[:, None]) * rstd[:, None]
        dshift += dy
    tl.store(DScale + sample * D + d, tl.sum(dscale, 0), mask=d < D)
    tl.store(DShift + sample * D + d, tl.sum(dshift, 0), mask=d < D)


def backward(saved, grad_y, needs=None):
    x, scale, mean, rstd = saved
    B, S, D = x.shape
    need_x, need_scale, need_shift = needs or (True, True, True)
    dx = dscale = dshift = None
    if need_x:
        dx = torch.empty_like(x)
        BLOCK = triton.next_power_of_2(D)
        _modulate_dx[(S, B)](
            grad_y, x, scale, mean, rstd, dx, S, D, scale.stride(0), *grad_y.stride(),
            BLOCK=BLOCK, num_warps=max(1, min(16, BLOCK // 512)),
        )  # fmt: skip
    if need_scale or need_shift:
        dscale = torch.empty(B, D, device=x.device, dtype=scale.dtype)
        dshift = torch.empty_like(dscale)
        # 64 columns: full lines of bf16, and hundreds of programs over all samples.
        _modulate_dcondition[(triton.cdiv(D, 128), B)](
            grad_y, x, mean, rstd, dscale, dshift, S, D, *grad_y.stride(), BLOCK_S=32, BLOCK_D=128, num_warps=4
        )
    return dx, dscale, dshift


# --- check ---
SWEEP = (
    {"B": 2, "S": 5, "D": 64},
    {"B": 3, "S": 37, "D": 83, "dtype": "float16"},
    {"B": 2, "S": 9, "D": 128, "dtype": "bfloat16"},
)
BENCH = ({"B": 32, "S": 1024, "D": 1152, "dtype": "bfloat16"},)


def make_args(B, S, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    to = {"device": device, "dtype": getattr(torch, dtype)}
    x = torch.randn(B, S, D, generator=g).to(**to)
    shift, scale = (torch.randn(B, 2 * D, generator=g) * 0.5).to(**to).chunk(2, 1)
    return x, scale, shift


def reference(x, scale, shift, eps=1e-6):
    normed = torch.nn.functional.layer_norm(x.float(), (x.shape[-1],), eps=eps)
    return (normed * (1.0 + scale.float()[:, None]) + shift.float()[:, None]).to(x.dtype)
