"""LoRA with factors of each expert, y = s (x A_e^T) B_e^T on tokens sorted by expert: grouped products of rank R.

A program takes a tile of one expert's tokens and runs both products: the R columns between them stay in registers. The
same kernel gives dx, with dy for x and the factors in exchanged roles. A program of the weight gradients owns a column
tile of one expert and walks that expert's tokens, so nothing is shared. Group borders are read on the device.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "lora_moe_grouped",
    "family": "low_rank",
    "op": "lora_grouped_linear",
    "schema": 1,
    "techniques": ("varlen", "column-owner", "loop-swap", "strided-cotangent"),
    "saves": ("low: fp32 or bf16 or fp16 (T, R)",),
    "grads": ("x", "lora_a", "lora_b"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _grouped_chain(
    IN, P, Q, Offsets, LOW, OUT, K, N, R, E, scale, in_t, in_k, p_e, p_k, p_r, q_e, q_r, q_n,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    # LOW = scale * IN P_e, OUT = LOW Q_e. Programs are dealt to experts by their counts of tiles.
    pid = tl.program_id(0)
    e = tl.arange(0, BLOCK_E)
    start = tl.load(Offsets + e, mask=e < E, other=0)
    stop = tl.load(Offsets + e + 1, mask=e < E, other=0)
    tiles = tl.where(e < E, (stop - start + BLOCK_T - 1) // BLOCK_T, 0)
    upto = tl.cumsum(tiles, 0)
    expert = tl.sum((upto <= pid).to(tl.int32), 0)
    if expert >= E:
        return
    mine = e == expert
    first = tl.sum(tl.where(mine, start + (pid - upto + tiles) * BLOCK_T, 0), 0)
    last = tl.sum(tl.where(mine, stop, 0), 0)
    t = (first + tl.arange(0, BLOCK_T)).to(tl.int64)
    r = tl.arange(0, BLOCK_R)
    P += expert.to(tl.int64) * p_e
    Q += expert.to(tl.int64) * q_e
    low = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
    for begin in range(0, K, BLOCK_K):
        k = (begin + tl.arange(0, BLOCK_K)).to(tl.int64)
        left = tl.load(
            IN + t[:, None] * in_t + k[None, :] * in_k, mask=(t[:, None] < last) & (k[None, :] < K), other=0.0
        )
        p = tl.load(P + k[:, None] * p_k + r[None, :] * p_r, mask=(k[:, None] < K) & (r[None, :] < R), other=0.0)
        low = tl.dot(left, p, low)
    low = (low * scale).to(LOW.dtype.element_ty)
    tl.store(LOW + t[:, None] * R + r[None, :], low, mask=(t[:, None] < last) & (r[None, :] < R))
    for begin in range(0, N, BLOCK_N):
        n = (begin + tl.arange(0, BLOCK_N)).to(tl.int64)
        q = tl.load(Q + r[:, None] * q_r + n[None, :] * q_n, mask=(r[:, None] < R) & (n[None, :] < N), other=0.0)
        tl.store(OUT + t[:, None] * N + n[None, :], tl.dot(low, q), mask=(t[:, None] < last) & (n[None, :] < N))


def _chain(left, p, q, offsets, scale):
    """scale * left @ p[e] (T, R), and that @ q[e] (T, N)."""
    T, K = left.shape
    E, _, R = p.shape
    N = q.shape[2]
    low = torch.empty(T, R, device=left.device, dtype=p.dtype)
    out = torch.empty(T, N, device=left.device, dtype=p.dtype)
    # Every expert may leave one tile unfilled: that many programs suffice for any distribution of the tokens.
    _grouped_chain[(triton.cdiv(T, 64) + E,)](
        left, p, q, offsets, low, out, K, N, R, E, scale, *left.stride(), *p.stride(), *q.stride(),
        BLOCK_T=64, BLOCK_K=128 // p.element_size(), BLOCK_N=64, BLOCK_R=max(16, triton.next_power_of_2(R)),
        BLOCK_E=triton.next_power_of_2(E), num_warps=4, num_stages=3,
    )  # fmt: skip
    return low, out


def forward(x, lora_a, lora_b, offsets, scale):
    low, y = _chain(x, lora_a.transpose(1, 2), lora_b.transpose(1, 2), offsets, scale)
    return y, (x, lora_a, lora_b, offsets, scale, low)


# --- backward ---
@triton.jit
def _expert_grad(
    WIDE, LOW, Offsets, OUT, C, R, wide_t, wide_c, o_c, o_r,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    # OUT_e = WIDE^T LOW over the tokens of one expert; an expert without tokens writes zeros.
    c = tl.program_id(0).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    expert = tl.program_id(1).to(tl.int64)
    r = tl.arange(0, BLOCK_R)
    first = tl.load(Offsets + expert)
    last = tl.load(Offsets + expert + 1)
    acc = tl.zeros((BLOCK_C, BLOCK_R), tl.float32)
    for begin in range(first, last, BLOCK_T):
        t = (begin + tl.arange(0, BLOCK_T)).to(tl.int64)
        wide = tl.load(
            WIDE + c[:, None] * wide_c + t[None, :] * wide_t, mask=(c[:, None] < C) & (t[None, :] < last), other=0.0
        )
        low = tl.load(LOW + t[:, None] * R + r[None, :], mask=(t[:, None] < last) & (r[None, :] < R), other=0.0)
        acc = tl.dot(wide, low, acc)
    out = OUT + expert * C * R + c[:, None] * o_c + r[None, :] * o_r
    tl.store(out, acc, mask=(c[:, None] < C) & (r[None, :] < R))


def _factor_gradient(wide, low, offsets, like, o_c, o_r):
    C, R = wide.shape[1], low.shape[1]
    grad = torch.empty(like.shape, device=like.device, dtype=like.dtype)
    _expert_grad[(triton.cdiv(C, 64), like.shape[0])](
        wide, low, offsets, grad, C, R, *wide.stride(), o_c, o_r,
        BLOCK_T=64, BLOCK_C=64, BLOCK_R=max(16, triton.next_power_of_2(R)), num_warps=4, num_stages=3,
    )  # fmt: skip
    return grad


def backward(saved, grad_y, needs=None):
    x, lora_a, lora_b, offsets, scale, low = saved
    need_x, need_a, need_b = needs or (True, True, True)
    R, K = lora_a.shape[1:]
    dx = da = db = None
    if need_x or need_a:
        dlow, dx = _chain(grad_y, lora_b, lora_a, offsets, scale)
    if need_a:
        da = _factor_gradient(x, dlow, offsets, lora_a, 1, K)
    if need_b:
        # The saved product carries the scale already.
        db = _factor_gradient(grad_y, low, offsets, lora_b, R, 1)
    return dx, da, db


# --- check ---
SWEEP = (
    {"E": 3, "T": 128, "K": 32, "N": 48, "R": 16},
    {"E": 4, "T": 151, "K": 43, "N": 27, "R": 5, "dtype": "float16"},
    {"E": 2, "T": 90, "K": 40, "N": 32, "R": 8, "dtype": "bfloat16"},
)
BENCH = ({"E": 16, "T": 16384, "K": 4096, "N": 4096, "R": 16, "dtype": "bfloat16"},)


def make_args(E, T, K, N, R, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    # Uneven groups; the second expert has no token.
    share = torch.rand(E, generator=g) + 0.2
    if E > 1:
        share[1] = 0.0
    ends = (share.cumsum(0) / share.sum() * T).round().to(torch.int32)
    ends[-1] = T
    offsets = torch.cat((torch.zeros(1, dtype=torch.int32), ends))
    tensors = (
        torch.randn(T, K, generator=g),
        torch.randn(E, R, K, generator=g) * K**-0.5,
        torch.randn(E, N, R, generator=g) * R**-0.5,
    )
    return (*(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors), offsets.to(device), 0.5)


def reference(x, lora_a, lora_b, offsets, scale):
    E, R, K = lora_a.shape
    N = lora_b.shape[1]
    # All factors side by side as one wide pair, whose columns of other experts are zeroed: the shapes do not depend on
    # the groups.
    expert = torch.bucketize(torch.arange(x.shape[0], device=x.device), offsets[1:], right=True)
    mine = (expert[:, None] == torch.arange(E, device=x.device)).repeat_interleave(R, 1)
    low = (x @ lora_a.reshape(E * R, K).t()) * mine * scale
    return low @ lora_b.transpose(1, 2).reshape(E * R, N)
