"""adaLN-zero around RMSNorm, y = residual + gate * (1 + scale) * xhat, gate and scale per sample: one sum serves both.

With E the sum of dy * xhat over a sample's tokens, dgate = (1 + scale) * E and dscale = gate * E, so the token pass
reduces E alone. It walks bands of tokens with gate * (1 + scale) in registers, and a last small launch forms both.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "rmsnorm_modulate_gate",
    "family": "norm_fused",
    "op": "adaptive_rms_norm_gate",
    "schema": 1,
    "techniques": ("row-local", "recompute", "two-stage-partials", "broadcast-reduction", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "residual", "scale", "gate"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _sample_gain(Scale, Gate, sample, d, D, c_b):
    """gate * (1 + scale) of one sample; the two lie in rows c_b apart."""
    scale = tl.load(Scale + sample * c_b + d, mask=d < D, other=0.0).to(tl.float32)
    gate = tl.load(Gate + sample * c_b + d, mask=d < D, other=0.0).to(tl.float32)
    return gate * (1.0 + scale)


@triton.jit
def _gated_norm_fwd(X, Res, Scale, Gate, Y, S, D, c_b, eps, BLOCK: tl.constexpr):
    sample = tl.program_id(1).to(tl.int64)
    at = (sample * S + tl.program_id(0)) * D
    d = tl.arange(0, BLOCK)
    x = tl.load(X + at + d, mask=d < D, other=0.0).to(tl.float32)
    res = tl.load(Res + at + d, mask=d < D, other=0.0).to(tl.float32)
    xhat = x * tl.rsqrt(tl.sum(x * x, 0) / D + eps)
    tl.store(Y + at + d, res + _sample_gain(Scale, Gate, sample, d, D, c_b) * xhat, mask=d < D)


def forward(x, residual, scale, gate, eps=1e-6):
    x, residual = x.contiguous(), residual.contiguous()
    # Both are slices of one projection of the condition, with the same distance between samples.
    if scale.stride() != gate.stride() or scale.stride(1) != 1:
        scale, gate = scale.contiguous(), gate.contiguous()
    B, S, D = x.shape
    y = torch.empty_like(x)
    BLOCK = triton.next_power_of_2(D)
    _gated_norm_fwd[(S, B)](
        x, residual, scale, gate, y, S, D, scale.stride(0), eps, BLOCK=BLOCK, num_warps=max(1, min(16, BLOCK // 512))
    )
    return y, (x, scale, gate, eps)


# --- backward ---
@triton.jit
def _add_moments(a0, b0, a1, b1):
    return a0 + a1, b0 + b1


@triton.jit
def _gated_norm_bwd(
    DY, X, Scale, Gate, DX, Parts, S, D, c_b, dy_b, dy_s, dy_d, eps, tokens_each,
    STAGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    band = tl.program_id(0)
    sample = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK)
    gain = _sample_gain(Scale, Gate, sample, d, D, c_b)
    total = tl.zeros((BLOCK,), tl.float32)
    # Tokens are copied two turns ahead: a token's reduction is a wait for all warps.
    for s in tl.range(band * tokens_each, tl.minimum((band + 1) * tokens_each, S), num_stages=STAGES):
        x = tl.load(X + (sample * S + s) * D + d, mask=d < D, other=0.0).to(tl.float32)
        dy_at = DY + sample * dy_b + tl.cast(s, tl.int64) * dy_s + d * dy_d
        dy = tl.load(dy_at, mask=d < D, other=0.0).to(tl.float32)
        dxhat = dy * gain
        squares, along = tl.reduce((x * x, dxhat * x), 0, _add_moments)
        inv = tl.rsqrt(squares / D + eps)
        xhat = x * inv
        total += dy * xhat
        radial = inv * along / D
        tl.store(DX + (sample * S + s) * D + d, inv * (dxhat - xhat * radial), mask=d < D)
    tl.store(Parts + (sample * tl.num_programs(0) + band) * D + d, total, mask=d < D)


@triton.jit
def _split_between(Parts, Scale, Gate, DScale, DGate, bands, D, c_b, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr):
    sample = tl.program_id(1).to(tl.int64)
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    acc = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
    for start in range(0, bands, BLOCK_P):
        band = (start + tl.arange(0, BLOCK_P))[:, None]
        part = Parts + (sample * bands + band) * D + d[None, :]
        acc += tl.load(part, mask=(band < bands) & (d[None, :] < D), other=0.0)
    total = tl.sum(acc, 0)
    scale = tl.load(Scale + sample * c_b + d, mask=d < D, other=0.0).to(tl.float32)
    gate = tl.load(Gate + sample * c_b + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(DScale + sample * D + d, gate * total, mask=d < D)
    tl.store(DGate + sample * D + d, (1.0 + scale) * total, mask=d < D)


def backward(saved, grad_y, needs=None):
    x, scale, gate, eps = saved
    B, S, D = x.shape
    BLOCK = triton.next_power_of_2(D)
    warps = max(1, min(16, BLOCK // 512))
    # One wave over all samples: 1024 threads for each of 132 processors.
    tokens_each = max(2, triton.cdiv(S, max(1, 132 * 32 // (warps * B))))
    bands = triton.cdiv(S, tokens_each)
    dx = torch.empty_like(x)
    parts = torch.empty(B, bands, D, device=x.device, dtype=torch.float32)
    dscale = torch.empty(B, D, device=x.device, dtype=scale.dtype)
    dgate = torch.empty_like(dscale)
    _gated_norm_bwd[(bands, B)](
        grad_y, x, scale, gate, dx, parts, S, D, scale.stride(0), *grad_y.stride(), eps, tokens_each,
        STAGES=3 if BLOCK * x.element_size() <= 32768 else 1, BLOCK=BLOCK, num_warps=warps,
    )  # fmt: skip
    _split_between[(triton.cdiv(D, 64), B)](
        parts, scale, gate, dscale, dgate, bands, D, scale.stride(0), BLOCK_P=16, BLOCK_D=64
    )
    return dx, grad_y, dscale, dgate


# --- check ---
SWEEP = (
    {"B": 2, "S": 5, "D": 64},
    {"B": 3, "S": 11, "D": 83, "dtype": "float16"},
    {"B": 2, "S": 9, "D": 128, "dtype": "bfloat16"},
)
BENCH = ({"B": 32, "S": 1024, "D": 1152, "dtype": "bfloat16"},)


def make_args(B, S, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    to = {"device": device, "dtype": getattr(torch, dtype)}
    x, residual = torch.randn(B, S, D, generator=g).to(**to), torch.randn(B, S, D, generator=g).to(**to)
    scale, gate = (torch.randn(B, 2 * D, generator=g) * 0.5).to(**to).chunk(2, 1)
    return x, residual, scale, gate


def reference(x, residual, scale, gate, eps=1e-6):
    xhat = torch.nn.functional.rms_norm(x.float(), (x.shape[-1],), eps=eps)
    gain = gate.float() * (1.0 + scale.float())
    return (residual.float() + gain[:, None] * xhat).to(x.dtype)
