"""Rotary position embedding in the half-split form, for queries and keys in one launch."""

import torch
import triton
import triton.language as tl

from kernel_agent import autodiff


@triton.jit
def rotate_heads(
    X,
    Y,
    b_cos,
    b_sin,
    stride_h,
    H: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Rotate the H heads of one token: (a, b) -> (a cos - b sin, b cos + a sin) for the halves a, b of a head."""
    heads = tl.arange(0, BLOCK_H)
    dims = tl.arange(0, BLOCK_D)
    mask = (heads < H)[:, None] & (dims < HALF)[None, :]
    offsets = heads[:, None] * stride_h + dims[None, :]
    b_a = tl.load(X + offsets, mask=mask, other=0.0).to(tl.float32)
    b_b = tl.load(X + offsets + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(Y + offsets, b_a * b_cos - b_b * b_sin, mask=mask)
    tl.store(Y + offsets + HALF, b_b * b_cos + b_a * b_sin, mask=mask)


@triton.jit
def rotary_fwd_kernel(
    Q,
    K,
    COS,
    SIN,
    Q_OUT,
    K_OUT,
    T,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HQ: tl.constexpr,
    BLOCK_HK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    position = token % T
    dims = tl.arange(0, BLOCK_D)
    b_cos = tl.load(COS + position * HALF + dims, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
    b_sin = tl.load(SIN + position * HALF + dims, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
    D: tl.constexpr = 2 * HALF
    rotate_heads(Q + token * HQ * D, Q_OUT + token * HQ * D, b_cos, b_sin, D, HQ, HALF, BLOCK_HQ, BLOCK_D)
    rotate_heads(K + token * HK * D, K_OUT + token * HK * D, b_cos, b_sin, D, HK, HALF, BLOCK_HK, BLOCK_D)


@autodiff(inputs_require_grad=("q", "k"))
def rotary(q, k, cos, sin):
    """Rotate q (B, T, HQ, D) and k (B, T, HK, D) by the tables cos and sin (T, D / 2)."""
    B, T, HQ, D = q.shape
    HK = k.shape[2]
    q, k, cos, sin = q.contiguous(), k.contiguous(), cos.contiguous(), sin.contiguous()
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    rotary_fwd_kernel[(B * T,)](
        q,
        k,
        cos,
        sin,
        q_out,
        k_out,
        T,
        HQ=HQ,
        HK=HK,
        HALF=D // 2,
        BLOCK_HQ=triton.next_power_of_2(HQ),
        BLOCK_HK=triton.next_power_of_2(HK),
        BLOCK_D=triton.next_power_of_2(D // 2),
    )
    return q_out, k_out


SWEEP = [
    dict(B=4, T=2048, HQ=32, HK=8, D=128),
    dict(B=4, T=2048, HQ=32, HK=8, D=128, dtype="bfloat16"),
    dict(B=2, T=37, HQ=3, HK=1, D=48),
]


def make_args(B, T, HQ, HK, D, dtype="float32", device="cuda"):
    dtype = getattr(torch, dtype)
    q = torch.randn(B, T, HQ, D, device=device).to(dtype)
    k = torch.randn(B, T, HK, D, device=device).to(dtype)
    frequency = 10000.0 ** (-torch.arange(0, D, 2, device=device, dtype=torch.float32) / D)
    angle = torch.arange(T, device=device, dtype=torch.float32)[:, None] * frequency[None, :]
    return q, k, angle.cos(), angle.sin()


def reference(q, k, cos, sin):
    def rotate(x):
        a, b = x.chunk(2, dim=-1)
        c, s = cos[None, :, None, :], sin[None, :, None, :]
        return torch.cat((a * c - b * s, b * c + a * s), dim=-1).to(x.dtype)

    return rotate(q), rotate(k)
