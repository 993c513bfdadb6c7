"""Rotary embedding out of one packed qkv buffer of any strides: three cotangents meet again in one dqkv, v's unturned.

q, k and v leave as tensors of their own, so that their cotangents come with strides of their own or not at all. One
launch has a program for each token and slot: q and k turn, v is copied, and a slot whose cotangent is missing is filled
with zeros by the same kernel, so that every byte of dqkv is written once.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "rope_thd_strided",
    "family": "rope_position",
    "op": "rotary_embedding",
    "schema": 1,
    "techniques": ("orthogonal-adjoint", "one-launch", "optional-cotangent", "strided-cotangent"),
    "saves": (),
    "grads": ("qkv",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _turn_slot(Src, Dst, cos, sin, h, d, H, HALF, s_h, s_d, o_h):
    mask = (h < H) & (d < HALF)
    a = tl.load(Src + h * s_h + d * s_d, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(Src + h * s_h + (d + HALF) * s_d, mask=mask, other=0.0).to(tl.float32)
    tl.store(Dst + h * o_h + d, a * cos - b * sin, mask=mask)
    tl.store(Dst + h * o_h + d + HALF, b * cos + a * sin, mask=mask)


@triton.jit
def _copy_slot(Src, Dst, h, d, H, HALF, s_h, s_d, o_h):
    mask = (h < H) & (d < HALF)
    tl.store(Dst + h * o_h + d, tl.load(Src + h * s_h + d * s_d, mask=mask, other=0.0), mask=mask)
    upper = tl.load(Src + h * s_h + (d + HALF) * s_d, mask=mask, other=0.0)
    tl.store(Dst + h * o_h + d + HALF, upper, mask=mask)


@triton.jit
def _unpack_turn(
    X, Positions, Cos, Sin, Q, K, V, H, HALF, x_t, x_slot, x_h, x_d, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1)
    h = tl.arange(0, BLOCK_H)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    at = tl.load(Positions + token).to(tl.int64) * HALF + d
    cos = tl.load(Cos + at, mask=d < HALF, other=0.0)
    sin = tl.load(Sin + at, mask=d < HALF, other=0.0)
    source = X + token * x_t + slot * x_slot
    row = token * H * (2 * HALF)
    if slot == 0:
        _turn_slot(source, Q + row, cos, sin, h, d, H, HALF, x_h, x_d, 2 * HALF)
    elif slot == 1:
        _turn_slot(source, K + row, cos, sin, h, d, H, HALF, x_h, x_d, 2 * HALF)
    else:
        _copy_slot(source, V + row, h, d, H, HALF, x_h, x_d, 2 * HALF)


def forward(qkv, positions, cos, sin):
    positions, cos, sin = positions.contiguous(), cos.contiguous(), sin.contiguous()
    T, _, H, D = qkv.shape
    q, k, v = (torch.empty(T, H, D, device=qkv.device, dtype=qkv.dtype) for _ in range(3))
    _unpack_turn[(T, 3)](
        qkv, positions, cos, sin, q, k, v, H, D // 2, *qkv.stride(),
        BLOCK_H=triton.next_power_of_2(H), BLOCK_D=triton.next_power_of_2(D // 2), num_warps=8,
    )  # fmt: skip
    return (q, k, v), (positions, cos, sin, H, qkv.dtype)


# --- backward ---
@triton.jit
def _pack_turn(
    DQ, DK, DV, Positions, Cos, Sin, DX, H, HALF, q_t, q_h, q_d, k_t, k_h, k_d, v_t, v_h, v_d,
    HAS_Q: tl.constexpr, HAS_K: tl.constexpr, HAS_V: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1)
    h = tl.arange(0, BLOCK_H)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    at = tl.load(Positions + token).to(tl.int64) * HALF + d
    cos = tl.load(Cos + at, mask=d < HALF, other=0.0)
    # The inverse of a rotation is its transpose: the sine changes its sign.
    sin = -tl.load(Sin + at, mask=d < HALF, other=0.0)
    width = 2 * HALF
    target = DX + (token * 3 + slot) * H * width
    if slot == 0 and HAS_Q:
        _turn_slot(DQ + token * q_t, target, cos, sin, h, d, H, HALF, q_h, q_d, width)
    elif slot == 1 and HAS_K:
        _turn_slot(DK + token * k_t, target, cos, sin, h, d, H, HALF, k_h, k_d, width)
    elif slot == 2 and HAS_V:
        _copy_slot(DV + token * v_t, target, h, d, H, HALF, v_h, v_d, width)
    else:
        mask = (h < H) & (d < HALF)
        zero = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
        tl.store(target + h * width + d, zero, mask=mask)
        tl.store(target + h * width + d + HALF, zero, mask=mask)


def backward(saved, grad_q, grad_k, grad_v, needs=None):
    positions, cos, sin, H, dtype = saved
    T, HALF = positions.shape[0], cos.shape[1]
    dqkv = torch.empty(T, 3, H, 2 * HALF, device=cos.device, dtype=dtype)
    has = [grad is not None for grad in (grad_q, grad_k, grad_v)]
    # A missing cotangent is never read; dqkv stands in for its pointer.
    grads = [dqkv[:, 0] if grad is None else grad for grad in (grad_q, grad_k, grad_v)]
    _pack_turn[(T, 3)](
        *grads, positions, cos, sin, dqkv, H, HALF, *grads[0].stride(), *grads[1].stride(), *grads[2].stride(),
        HAS_Q=has[0], HAS_K=has[1], HAS_V=has[2],
        BLOCK_H=triton.next_power_of_2(H), BLOCK_D=triton.next_power_of_2(HALF), num_warps=8,
    )  # fmt: skip
    return dqkv


# --- check ---
SWEEP = (
    {"T": 9, "H": 4, "HALF": 16, "dtype": "float16"},
    {"T": 13, "H": 3, "HALF": 20},
    {"T": 7, "H": 2, "HALF": 32, "dtype": "bfloat16"},
)
BENCH = ({"T": 16384, "H": 32, "HALF": 64, "dtype": "bfloat16"},)


def make_args(T, H, HALF, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    # Heads lie outermost within a token, as some fused projections leave them: (T, H, 3, D) seen as (T, 3, H, D).
    packed = torch.randn(T, H, 3, 2 * HALF, generator=g).to(device=device, dtype=getattr(torch, dtype))
    theta = torch.arange(T)[:, None] * 10000.0 ** (-torch.arange(HALF) / HALF)
    positions = torch.randint(T, (T,), generator=g)
    return packed.transpose(1, 2), positions.to(device), theta.cos().to(device), theta.sin().to(device)


def reference(qkv, positions, cos, sin):
    c, s = cos[positions][:, None], sin[positions][:, None]

    def turn(x):
        a, b = x.float().chunk(2, -1)
        return torch.cat((a * c - b * s, b * c + a * s), -1).to(x.dtype)

    return turn(qkv[:, 0]), turn(qkv[:, 1]), qkv[:, 2].clone()
