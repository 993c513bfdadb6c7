"""Complex first-order recurrence h_t = a_t h_{t-1} + x_t on (re, im) pairs: the adjoint scan conjugates a.

g_t = dy_t + conj(a_{t+1}) g_{t+1} is dx_t, and da_t = g_t conj(h_{t-1}), where the gradient of a complex number is the
pair of gradients of its parts. Pairs are loaded and stored whole, as tiles with a last axis of two that is split in
registers, so that no lane skips every other word.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "scan_complex",
    "family": "ssm_rnn",
    "op": "complex_linear_recurrence",
    "schema": 1,
    "techniques": ("reverse-scan", "chunked", "saved-output", "strided-cotangent"),
    "saves": ("h: fp32 or bf16 or fp16 (B, L, C, 2)",),
    "grads": ("a", "x"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _complex_affine(a1r, a1i, b1r, b1i, a2r, a2i, b2r, b2i):
    # Map 1, then map 2, of h -> a h + b over complex numbers.
    return (
        a2r * a1r - a2i * a1i,
        a2r * a1i + a2i * a1r,
        a2r * b1r - a2i * b1i + b2r,
        a2r * b1i + a2i * b1r + b2i,
    )


@triton.jit
def _load_complex(source, mask, part_stride):
    """Real and imaginary parts of a tile of pairs; zero where masked."""
    part = tl.arange(0, 2)
    pair = tl.load(source[:, :, None] + part[None, None, :] * part_stride, mask=mask[:, :, None], other=0.0)
    return tl.split(pair.to(tl.float32))


@triton.jit
def _store_complex(target, real, imag, mask):
    part = tl.arange(0, 2)
    tl.store(target[:, :, None] + part[None, None, :], tl.join(real, imag), mask=mask[:, :, None])


@triton.jit
def _complex_scan_fwd(A, X, Out, L, C, BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    last = (tl.arange(0, BLOCK_L) == BLOCK_L - 1)[:, None]
    carry_r = tl.zeros((BLOCK_C,), tl.float32)
    carry_i = tl.zeros((BLOCK_C,), tl.float32)
    for start in range(0, L, BLOCK_L):
        t = start + tl.arange(0, BLOCK_L)
        inside = (t[:, None] < L) & (c[None, :] < C)
        at = ((b * L + t[:, None]) * C + c[None, :]) * 2
        ar, ai = _load_complex(A + at, inside, 1)
        xr, xi = _load_complex(X + at, inside, 1)
        dr, di, hr, hi = tl.associative_scan((ar, ai, xr, xi), 0, _complex_affine)
        hr += dr * carry_r[None, :] - di * carry_i[None, :]
        hi += dr * carry_i[None, :] + di * carry_r[None, :]
        _store_complex(Out + at, hr, hi, inside)
        carry_r = tl.sum(tl.where(last, hr, 0.0), 0)
        carry_i = tl.sum(tl.where(last, hi, 0.0), 0)


def forward(a, x):
    a, x = a.contiguous(), x.contiguous()
    B, L, C, _ = x.shape
    h = torch.empty_like(x)
    BLOCK_C = min(16, triton.next_power_of_2(C))
    _complex_scan_fwd[(B, triton.cdiv(C, BLOCK_C))](a, x, h, L, C, BLOCK_L=64, BLOCK_C=BLOCK_C, num_warps=4)
    return h, (a, h)


# --- backward ---
@triton.jit
def _complex_scan_bwd(
    DH, A, Out, DA, DX, L, C, dh_b, dh_t, dh_c, dh_part, BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr
):
    b = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    first = (tl.arange(0, BLOCK_L) == 0)[:, None]
    carry_r = tl.zeros((BLOCK_C,), tl.float32)
    carry_i = tl.zeros((BLOCK_C,), tl.float32)
    tiles = tl.cdiv(L, BLOCK_L)
    for back in range(tiles):
        t = (tiles - 1 - back) * BLOCK_L + tl.arange(0, BLOCK_L)
        live = c[None, :] < C
        inside = (t[:, None] < L) & live
        at = ((b * L + t[:, None]) * C + c[None, :]) * 2
        # Past the end dh and the carry are zero, so that a zero coefficient does as well as any.
        ar, ai = _load_complex(A + at + 2 * C, (t[:, None] + 1 < L) & live, 1)
        source = DH + b * dh_b + t[:, None].to(tl.int64) * dh_t + c[None, :].to(tl.int64) * dh_c
        gr, gi = _load_complex(source, inside, dh_part)
        dr, di, gr, gi = tl.associative_scan((ar, -ai, gr, gi), 0, _complex_affine, reverse=True)
        gr += dr * carry_r[None, :] - di * carry_i[None, :]
        gi += dr * carry_i[None, :] + di * carry_r[None, :]
        hr, hi = _load_complex(Out + at - 2 * C, inside & (t[:, None] > 0), 1)
        _store_complex(DX + at, gr, gi, inside)
        _store_complex(DA + at, gr * hr + gi * hi, gi * hr - gr * hi, inside)
        carry_r = tl.sum(tl.where(first, gr, 0.0), 0)
        carry_i = tl.sum(tl.where(first, gi, 0.0), 0)


def backward(saved, grad_h, needs=None):
    a, h = saved
    B, L, C, _ = h.shape
    da, dx = torch.empty_like(a), torch.empty_like(h)
    BLOCK_C = min(16, triton.next_power_of_2(C))
    _complex_scan_bwd[(B, triton.cdiv(C, BLOCK_C))](
        grad_h, a, h, da, dx, L, C, *grad_h.stride(), BLOCK_L=64, BLOCK_C=BLOCK_C, num_warps=4
    )
    return da, dx


# --- check ---
SWEEP = (
    {"B": 2, "L": 64, "C": 16},
    {"B": 1, "L": 141, "C": 19},
    {"B": 1, "L": 70, "C": 8, "dtype": "bfloat16"},
    {"B": 1, "L": 33, "C": 4, "dtype": "float16"},
)
BENCH = ({"B": 8, "L": 2048, "C": 1024, "dtype": "float32"},)


def make_args(B, L, C, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    # |a| below 1, any phase.
    radius, phase = torch.sigmoid(torch.randn(B, L, C, generator=g) + 2.0), torch.rand(B, L, C, generator=g) * 6.283
    a = torch.stack((radius * phase.cos(), radius * phase.sin()), -1)
    x = torch.randn(B, L, C, 2, generator=g)
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (a, x))


def reference(a, x):
    def times(p, q):
        real = p[..., 0] * q[..., 0] - p[..., 1] * q[..., 1]
        return torch.stack((real, p[..., 0] * q[..., 1] + p[..., 1] * q[..., 0]), -1)

    # Scan by doubling: after each turn every step has taken in twice as many steps before it.
    decay, h = a.float(), x.float()
    reach = 1
    while reach < x.shape[1]:
        h = torch.cat((h[:, :reach], h[:, reach:] + times(decay[:, reach:], h[:, :-reach])), 1)
        decay = torch.cat((decay[:, :reach], times(decay[:, reach:], decay[:, :-reach])), 1)
        reach *= 2
    return h.to(x.dtype)
