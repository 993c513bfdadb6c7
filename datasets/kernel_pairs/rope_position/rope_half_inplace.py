"""Rotary embedding that overwrites q and k: rotation by theta, undone in the backward by the same kernel with -theta.

A program owns a group of heads of one token and both halves of each, and reads all it owns before it writes any of it:
one buffer is enough. Inputs and cotangents belong to the caller, so that both passes turn a copy, and the copy settles
any strides; whoever owns its buffers hands them over and has no second tensor at all.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "rope_half_inplace",
    "family": "rope_position",
    "op": "rotary_embedding",
    "schema": 1,
    "techniques": ("orthogonal-adjoint", "in-place", "one-launch", "optional-cotangent"),
    "saves": (),
    "grads": ("q", "k"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _turn_heads(X, first, heads, token, cos, sin, HALF, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr):
    h = first + tl.arange(0, BLOCK_H)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    mask = (h < heads) & (d < HALF)
    lower = X + (token * heads + h) * (2 * HALF) + d
    upper = lower + HALF
    a = tl.load(lower, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(upper, mask=mask, other=0.0).to(tl.float32)
    tl.store(lower, a * cos - b * sin, mask=mask)
    tl.store(upper, b * cos + a * sin, mask=mask)


@triton.jit
def _turn_inplace(
    Q, K, Cos, Sin, S, QH, KH, HALF, q_groups, SIGN: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    # Groups below q_groups are heads of q, the others of k. No group has heads of both.
    group = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)[None, :]
    table = (tl.program_id(0) % S) * HALF + d
    cos = tl.load(Cos + table, mask=d < HALF, other=0.0)
    sin = tl.load(Sin + table, mask=d < HALF, other=0.0) * SIGN
    if group < q_groups:
        _turn_heads(Q, group * BLOCK_H, QH, token, cos, sin, HALF, BLOCK_H, BLOCK_D)
    else:
        _turn_heads(K, (group - q_groups) * BLOCK_H, KH, token, cos, sin, HALF, BLOCK_H, BLOCK_D)


def _launch(q, k, cos, sin, sign, has_q=True, has_k=True):
    """Turn dense q and k in place. One that is not there gets no programs."""
    B, S, QH, D = q.shape
    KH = k.shape[2]
    BLOCK_D = triton.next_power_of_2(D // 2)
    BLOCK_H = max(1, min(triton.next_power_of_2(max(QH, KH)), 1024 // BLOCK_D))
    q_groups = triton.cdiv(QH, BLOCK_H) if has_q else 0
    k_groups = triton.cdiv(KH, BLOCK_H) if has_k else 0
    _turn_inplace[(B * S, q_groups + k_groups)](
        q, k, cos, sin, S, QH, KH, D // 2, q_groups, SIGN=sign, BLOCK_H=BLOCK_H, BLOCK_D=BLOCK_D
    )


def forward(q, k, cos, sin):
    q, k = q.clone(memory_format=torch.contiguous_format), k.clone(memory_format=torch.contiguous_format)
    cos, sin = cos.contiguous(), sin.contiguous()
    _launch(q, k, cos, sin, 1)
    return (q, k), (cos, sin, q.shape, k.shape, q.dtype)


# --- backward ---
def backward(saved, grad_q, grad_k, needs=None):
    cos, sin, q_shape, k_shape, dtype = saved
    grads = []
    for grad, shape in ((grad_q, q_shape), (grad_k, k_shape)):
        turned = (torch.zeros if grad is None else torch.empty)(shape, device=cos.device, dtype=dtype)
        grads.append(turned if grad is None else turned.copy_(grad))
    dq, dk = grads
    if grad_q is not None or grad_k is not None:
        _launch(dq, dk, cos, sin, -1, has_q=grad_q is not None, has_k=grad_k is not None)
    return dq, dk


# --- check ---
SWEEP = (
    {"B": 2, "S": 5, "QH": 4, "KH": 2, "HALF": 16, "dtype": "float16"},
    {"B": 1, "S": 7, "QH": 3, "KH": 1, "HALF": 20},
    {"B": 1, "S": 4, "QH": 40, "KH": 8, "HALF": 32, "dtype": "bfloat16"},
)
BENCH = ({"B": 4, "S": 4096, "QH": 32, "KH": 8, "HALF": 64, "dtype": "bfloat16"},)


def make_args(B, S, QH, KH, HALF, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    dt = getattr(torch, dtype)
    q, k = torch.randn(B, S, QH, 2 * HALF, generator=g), torch.randn(B, S, KH, 2 * HALF, generator=g)
    theta = torch.arange(S)[:, None] * 10000.0 ** (-torch.arange(HALF) / HALF)
    return q.to(device, dt), k.to(device, dt), theta.cos().to(device), theta.sin().to(device)


def reference(q, k, cos, sin):
    c, s = torch.cat((cos, cos), -1)[:, None], torch.cat((sin, sin), -1)[:, None]

    def turn(x):
        a, b = x.float().chunk(2, -1)
        return (x.float() * c + torch.cat((-b, a), -1) * s).to(x.dtype)

    return turn(q), turn(k)
