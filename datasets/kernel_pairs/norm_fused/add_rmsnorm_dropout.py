"""h = residual + dropout(x), y = RMSNorm(h): no mask is stored, the backward draws it again while dh is in registers.

Four neighbours share one Philox call. dh is the gradient of the residual; times the redrawn mask it is that of x, so
both leave the same row pass.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "add_rmsnorm_dropout",
    "family": "norm_fused",
    "op": "dropout_add_rms_norm",
    "schema": 1,
    "techniques": ("rng-replay", "row-local", "saved-statistics", "two-stage-partials", "optional-cotangent"),
    "saves": ("h: fp32 or bf16 or fp16 (M, N)", "inv_rms: fp32 (M,)"),
    "grads": ("x", "residual", "weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _row_mask(seed, row, N, p, scale, BLOCK: tl.constexpr):
    """`scale` where an element of the row survives, 0 where it is dropped: a pure function of seed, row and column.

    Column c takes number c % 4 of counter row * ceil(N / 4) + c // 4.
    """
    counter = row * tl.cdiv(N, 4) + tl.arange(0, BLOCK // 4)
    u0, u1, u2, u3 = tl.rand4x(seed, counter.to(tl.int32))
    u = tl.reshape(tl.join(tl.join(u0, u2), tl.join(u1, u3)), (BLOCK,))
    return tl.where(u >= p, scale, 0.0)


@triton.jit
def _drop_add_rms_fwd(X, Res, W, Y, H, InvRms, N, p, scale, seed, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    ok = c < N
    at = row * N + c
    x = tl.load(X + at, mask=ok, other=0.0).to(tl.float32)
    res = tl.load(Res + at, mask=ok, other=0.0).to(tl.float32)
    h = (res + x * _row_mask(seed, row, N, p, scale, BLOCK)).to(H.dtype.element_ty)
    tl.store(H + at, h, mask=ok)
    h = h.to(tl.float32)
    inv = tl.rsqrt(tl.sum(h * h, 0) / N + eps)
    tl.store(InvRms + row, inv)
    w = tl.load(W + c, mask=ok, other=0.0).to(tl.float32)
    tl.store(Y + at, h * inv * w, mask=ok)


def _launch(N):
    block = max(4, triton.next_power_of_2(N))
    return {"BLOCK": block, "num_warps": max(1, min(16, block // 256))}


def forward(x, residual, weight, p, seed, eps=1e-6):
    x, residual = x.contiguous(), residual.contiguous()
    M, N = x.shape
    y, h = torch.empty_like(x), torch.empty_like(x)
    inv_rms = torch.empty(M, device=x.device, dtype=torch.float32)
    _drop_add_rms_fwd[(M,)](x, residual, weight, y, h, inv_rms, N, p, 1.0 / (1.0 - p), seed, eps, **_launch(N))
    return (y, h), (h, weight, inv_rms, p, seed)


# --- backward ---
@triton.jit
def _drop_add_rms_bwd(
    DY, DHOut, H, W, InvRms, DX, DRes, Parts, M, N, p, scale, seed, dy_row, dy_col, dh_row, dh_col,
    HAS_DY: tl.constexpr, HAS_DH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    ok = c < N
    w = tl.load(W + c, mask=ok, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK,), tl.float32)
    for row in tl.range(pid, M, tl.num_programs(0), num_stages=2):
        at = row * N + c
        dh = tl.zeros((BLOCK,), tl.float32)
        if HAS_DY:
            dy = tl.load(DY + row * dy_row + c * dy_col, mask=ok, other=0.0).to(tl.float32)
            inv = tl.load(InvRms + row)
            unit = tl.load(H + at, mask=ok, other=0.0).to(tl.float32) * inv
            dunit = dy * w
            dh = inv * (dunit - unit * (tl.sum(dunit * unit, 0) / N))
            dw += dy * unit
        if HAS_DH:
            dh += tl.load(DHOut + row * dh_row + c * dh_col, mask=ok, other=0.0).to(tl.float32)
        tl.store(DRes + at, dh, mask=ok)
        tl.store(DX + at, dh * _row_mask(seed, row, N, p, scale, BLOCK), mask=ok)
    tl.store(Parts + pid * N + c, dw, mask=ok)


def backward(saved, grad_y, grad_h, needs=None):
    h, weight, inv_rms, p, seed = saved
    M, N = h.shape
    launch = _launch(N)
    # One wave: 1024 threads for each of 132 processors, every program walks its share of the rows.
    programs = min(132 * 32 // launch["num_warps"], triton.cdiv(M, 2))
    dx, dresidual = torch.empty_like(h), torch.empty_like(h)
    parts = torch.empty(programs, N, device=h.device, dtype=torch.float32)
    _drop_add_rms_bwd[(programs,)](
        grad_y, grad_h, h, weight, inv_rms, dx, dresidual, parts, M, N, p, 1.0 / (1.0 - p), seed,
        *(grad_y.stride() if grad_y is not None else (0, 0)), *(grad_h.stride() if grad_h is not None else (0, 0)),
        HAS_DY=grad_y is not None, HAS_DH=grad_h is not None, **launch,
    )  # fmt: skip
    return dx, dresidual, parts.sum(0).to(weight.dtype)


# --- check ---
SWEEP = ({"M": 6, "N": 64}, {"M": 9, "N": 107, "dtype": "float16"}, {"M": 4, "N": 128, "dtype": "bfloat16"})
BENCH = ({"M": 8192, "N": 4096, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = (torch.randn(M, N, generator=g), torch.randn(M, N, generator=g), torch.rand(N, generator=g) + 0.5)
    return (*(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors), 0.15, 4321 + seed)


# Kept out of compiled graphs: their backward would draw again, in 64-bit arithmetic, what autograd just keeps.
@torch.compiler.disable
def _philox_uniforms(seed, counters):
    """Philox4x32-10 at counters (i, 0, 0, 0): its four words as floats in [0, 1), one new last dim of four."""
    low = 0xFFFFFFFF
    c = [counters.long(), *(torch.zeros_like(counters) for _ in range(3))]
    k0, k1 = seed & low, (seed >> 32) & low
    for _ in range(10):
        # 32 x 32 -> 64 bit products by halves, because int64 has no unsigned high part.
        products = []
        for factor, word in ((0xD2511F53, c[0]), (0xCD9E8D57, c[2])):
            upper = factor * (word >> 16)
            lower = factor * (word & 0xFFFF)
            total = ((upper & 0xFFFF) << 16) + lower
            products.append(((upper >> 16) + (total >> 32), total & low))
        (hi_a, lo_a), (hi_b, lo_b) = products
        c = [(hi_b ^ c[1] ^ k0) & low, lo_b, (hi_a ^ c[3] ^ k1) & low, lo_a]
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    words = torch.stack(c, -1)
    signed = torch.where(words >= 2**31, words - 2**32, words)
    return torch.where(signed < 0, -signed - 1, signed).double() * 4.6566127342e-10


def reference(x, residual, weight, p, seed, eps=1e-6):
    M, N = x.shape
    fours = (N + 3) // 4
    keep = _philox_uniforms(seed, torch.arange(M * fours, device=x.device)).view(M, 4 * fours)[:, :N] >= p
    h = (residual.float() + x.float() * keep / (1.0 - p)).to(x.dtype)
    hf = h.float()
    return (hf * torch.rsqrt(hf.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype), h
