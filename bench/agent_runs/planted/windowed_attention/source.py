"""Attention with shared key heads, scores capped by tanh, and a window of keys per query.

s = cap * tanh(sm_scale * q k^T / cap),   t - window < key <= t
o = softmax over the keys and one learnt sink per head, which takes weight and gives nothing
"""

import torch
import triton
import triton.language as tl

from kernel_agent import autodiff


@triton.jit
def windowed_attention_fwd_kernel(
    Q,
    K,
    V,
    SINK,
    O,
    sm_scale,
    cap,
    T,
    H,
    GROUP,
    WINDOW,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    batch = (tl.program_id(1) // H).to(tl.int64)
    head = tl.program_id(1) % H
    Q += (batch * H + head) * T * D
    O += (batch * H + head) * T * D
    kv_head = batch * (H // GROUP) + head // GROUP
    K += kv_head * T * D
    V += kv_head * T * D

    first = tl.program_id(0) * BLOCK_M
    rows = first + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    q_mask = (rows < T)[:, None] & (dims < D)[None, :]
    b_q = tl.load(Q + rows[:, None] * D + dims[None, :], mask=q_mask, other=0.0)

    b_max = tl.zeros((BLOCK_M,), tl.float32) + tl.load(SINK + head)
    b_sum = tl.full((BLOCK_M,), 1.0, tl.float32)
    b_acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    start = tl.maximum(0, (first - WINDOW + 1) // BLOCK_N * BLOCK_N)
    for at in range(start, tl.minimum(T, first + BLOCK_M), BLOCK_N):
        keys = at + tl.arange(0, BLOCK_N)
        kv_mask = (keys < T)[:, None] & (dims < D)[None, :]
        b_k = tl.load(K + keys[:, None] * D + dims[None, :], mask=kv_mask, other=0.0)
        b_v = tl.load(V + keys[:, None] * D + dims[None, :], mask=kv_mask, other=0.0)
        b_s = tl.dot(b_q, tl.trans(b_k)) * (sm_scale / cap)
        b_s = cap * (2.0 * tl.sigmoid(2.0 * b_s) - 1.0)
        seen = (keys[None, :] <= rows[:, None]) & (keys[None, :] > rows[:, None] - WINDOW) & (keys < T)[None, :]
        b_s = tl.where(seen, b_s, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, axis=1))
        b_p = tl.exp(b_s - b_new[:, None])
        b_alpha = tl.exp(b_max - b_new)
        b_sum = b_sum * b_alpha + tl.sum(b_p, axis=1)
        b_acc = b_acc * b_alpha[:, None] + tl.dot(b_p.to(b_v.dtype), b_v)
        b_max = b_new
    tl.store(O + rows[:, None] * D + dims[None, :], b_acc / b_sum[:, None], mask=q_mask)


@autodiff(inputs_require_grad=("q", "k", "v", "sink"))
def windowed_attention(q, k, v, sink, window, cap=30.0, sm_scale=None):
    """Attend for q (B, H, T, D), k and v (B, H / group, T, D), sink (H,) float32; returns o like q."""
    B, H, T, D = q.shape
    sm_scale = D**-0.5 if sm_scale is None else sm_scale
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    o = torch.empty_like(q)
    BLOCK_M = 64
    windowed_attention_fwd_kernel[(triton.cdiv(T, BLOCK_M), B * H)](
        q,
        k,
        v,
        sink,
        o,
        sm_scale,
        cap,
        T,
        H,
        H // k.shape[1],
        window,
        D=D,
        BLOCK_D=max(16, triton.next_power_of_2(D)),
        BLOCK_M=BLOCK_M,
        BLOCK_N=32,
    )
    return o


SWEEP = [
    dict(B=2, H=16, group=4, T=4096, D=64, window=512, dtype="bfloat16"),
    dict(B=2, H=16, group=4, T=2048, D=128, window=2048, dtype="float16"),
    dict(B=1, H=4, group=2, T=77, D=24, window=20),
]


def make_args(B, H, group, T, D, window, dtype="float32", device="cuda"):
    dtype = getattr(torch, dtype)
    q = 2.0 * torch.randn(B, H, T, D, device=device)
    k, v = torch.randn(2, B, H // group, T, D, device=device)
    sink = torch.randn(H, device=device)
    return (q.to(dtype), k.to(dtype), v.to(dtype), sink, window), dict(cap=5.0)


def reference(q, k, v, sink, window, cap=30.0, sm_scale=None):
    B, H, T, D = q.shape
    group = H // k.shape[1]
    scale = D**-0.5 if sm_scale is None else sm_scale
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = cap * torch.tanh(scale / cap * (q @ k.transpose(-1, -2)).to(sink.dtype))
    row, key = torch.arange(T, device=q.device)[:, None], torch.arange(T, device=q.device)[None, :]
    scores = scores.masked_fill((key > row) | (key <= row - window), float("-inf"))
    scores = torch.cat([scores, sink[None, :, None, None].expand(B, H, T, 1)], dim=-1)
    return torch.softmax(scores, dim=-1)[..., :-1].to(v.dtype) @ v
