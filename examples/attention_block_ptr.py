"""Flash attention forward on block pointers, in two stages: unmasked key blocks, then the diagonal.

`tl.make_block_ptr` was removed in Triton 3.9; attention.py is the same operation on plain pointers.
"""

import torch
import triton
import triton.language as tl

from kernel_agent import autodiff


@triton.jit
def attend(
    b_acc,
    b_sum,
    b_max,
    b_q,
    p_k,
    p_v,
    first,
    last,
    rows,
    T,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One sweep over the key blocks from `first` to `last`, a multiple of BLOCK_N apart, with the running softmax."""
    p_k = tl.advance(p_k, (0, first))
    p_v = tl.advance(p_v, (first, 0))
    for start in range(first, last, BLOCK_N):
        b_k = tl.load(p_k, boundary_check=(1,), padding_option="zero")
        b_s = tl.dot(b_q, b_k)
        if MASKED:
            keys = start + tl.arange(0, BLOCK_N)
            seen = (keys < T)[None, :]
            if CAUSAL:
                seen = seen & (rows[:, None] >= keys[None, :])
            b_s = tl.where(seen, b_s, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, axis=1))
        b_p = tl.exp2(b_s - b_new[:, None])
        b_alpha = tl.exp2(b_max - b_new)
        b_sum = b_sum * b_alpha + tl.sum(b_p, axis=1)
        b_v = tl.load(p_v, boundary_check=(0,), padding_option="zero")
        b_acc = b_acc * b_alpha[:, None] + tl.dot(b_p.to(b_v.dtype), b_v)
        b_max = b_new
        p_k = tl.advance(p_k, (0, BLOCK_N))
        p_v = tl.advance(p_v, (BLOCK_N, 0))
    return b_acc, b_sum, b_max


@triton.jit
def attention_fwd_kernel(
    Q,
    K,
    V,
    O,
    LSE,
    stride_h,
    stride_t,
    sm_scale,
    T,
    D: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    first_row = tl.program_id(0) * BLOCK_M
    p_q = tl.make_block_ptr(Q + head * stride_h, (T, D), (stride_t, 1), (first_row, 0), (BLOCK_M, D), (1, 0))
    p_k = tl.make_block_ptr(K + head * stride_h, (D, T), (1, stride_t), (0, 0), (D, BLOCK_N), (0, 1))
    p_v = tl.make_block_ptr(V + head * stride_h, (T, D), (stride_t, 1), (0, 0), (BLOCK_N, D), (1, 0))
    p_o = tl.make_block_ptr(O + head * stride_h, (T, D), (stride_t, 1), (first_row, 0), (BLOCK_M, D), (1, 0))

    LOG2E: tl.constexpr = 1.4426950408889634
    b_q = tl.load(p_q, boundary_check=(0,), padding_option="zero")
    b_q = (b_q * (sm_scale * LOG2E)).to(b_q.dtype)
    rows = first_row + tl.arange(0, BLOCK_M)
    b_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    b_sum = tl.zeros((BLOCK_M,), tl.float32)
    b_acc = tl.zeros((BLOCK_M, D), tl.float32)

    # Key blocks that every row of this program sees whole need no mask. BLOCK_M is a multiple of BLOCK_N.
    whole = T // BLOCK_N * BLOCK_N
    end = T
    if CAUSAL:
        whole = tl.minimum(whole, first_row)
        end = tl.minimum(T, first_row + BLOCK_M)
    b_acc, b_sum, b_max = attend(
        b_acc, b_sum, b_max, b_q, p_k, p_v, 0, whole, rows, T, MASKED=False, CAUSAL=CAUSAL, BLOCK_N=BLOCK_N
    )
    b_acc, b_sum, b_max = attend(
        b_acc, b_sum, b_max, b_q, p_k, p_v, whole, end, rows, T, MASKED=True, CAUSAL=CAUSAL, BLOCK_N=BLOCK_N
    )

    tl.store(p_o, (b_acc / b_sum[:, None]).to(O.dtype.element_ty), boundary_check=(0,))
    tl.store(LSE + head * T + rows, b_max / LOG2E + tl.log(b_sum), mask=rows < T)


@autodiff(inputs_require_grad=(0, 1, 2), nondiff_outputs=(1,))
def attention_block_ptr(q, k, v, causal, sm_scale):
    """`softmax(sm_scale * q k^T) v` for q, k, v (B, H, T, D), D a power of two from 16.

    Returns the output like q, and the rows' log-sum-exp (B, H, T) in float32.
    """
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    B, H, T, D = q.shape
    o = torch.empty_like(q)
    lse = torch.empty((B, H, T), dtype=torch.float32, device=q.device)
    BLOCK_M, BLOCK_N = 128, 64
    attention_fwd_kernel[(triton.cdiv(T, BLOCK_M), B * H)](
        q,
        k,
        v,
        o,
        lse,
        T * D,
        D,
        sm_scale,
        T,
        D=D,
        CAUSAL=causal,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        num_warps=8,
        num_stages=3,
    )
    return o, lse


SWEEP = [
    dict(B=4, H=16, T=2048, D=64, causal=True, dtype="float16"),
    dict(B=4, H=16, T=2048, D=128, causal=False, dtype="bfloat16"),
    dict(B=2, H=2, T=200, D=64, causal=True),
    dict(B=1, H=3, T=77, D=32, causal=False),
]


def make_args(B, H, T, D, causal, dtype="float32", device="cuda"):
    q, k, v = torch.randn(3, B, H, T, D, device=device).to(getattr(torch, dtype))
    return (q, k, v), dict(causal=causal, sm_scale=D**-0.5)


def reference(q, k, v, causal, sm_scale):
    T = q.shape[2]
    scores = sm_scale * (q @ k.transpose(-1, -2))
    if causal:
        hidden = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return torch.softmax(scores, dim=-1) @ v, torch.logsumexp(scores, dim=-1)
