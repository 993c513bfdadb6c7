"""Causal linear attention that saves no state: each gradient is the forward's own sweep with its operands swapped.

The sweep computes out_i = sum over j <= i of (a_i . b_j) c_j, chunk by chunk, with the state sum of b_j c_j^T in
registers. The forward is sweep(q, k, v), and the chain rule of it is the same map three times:

    dq = sweep(do, v, k)    dk = sweep(v, do, q) from the end    dv = sweep(k, q, do) from the end

dq replays the states that the forward had, now as v k^T; dk and dv carry the gradient of the state. A program owns a
slab of columns of the result, so that nothing has to be added up afterwards, and recomputes the small (chunk, chunk)
scores.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "linattn_causal_recompute",
    "family": "linear_attention",
    "op": "linear_attention",
    "schema": 1,
    "techniques": ("chunked", "reverse-scan", "recompute", "column-owner", "owner-grid"),
    "saves": (),
    "grads": ("q", "k", "v"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _sweep(
    A, B, C, Out, T, DA, DC, scale, FROM_END: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    base = tl.program_id(1).to(tl.int64) * T
    i = tl.arange(0, CHUNK)
    da = tl.arange(0, BLOCK_A)
    dc = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    state = tl.zeros((BLOCK_A, BLOCK_C), tl.float32)
    chunks = tl.cdiv(T, CHUNK)
    for step in range(chunks):
        if FROM_END:
            t = (chunks - 1 - step) * CHUNK + i
            related = i[:, None] <= i[None, :]
        else:
            t = step * CHUNK + i
            related = i[:, None] >= i[None, :]
        in_a = (t[:, None] < T) & (da[None, :] < DA)
        in_c = (t[:, None] < T) & (dc[None, :] < DC)
        a = tl.load(A + (base + t[:, None]) * DA + da[None, :], mask=in_a, other=0.0)
        b = tl.load(B + (base + t[:, None]) * DA + da[None, :], mask=in_a, other=0.0)
        c = tl.load(C + (base + t[:, None]) * DC + dc[None, :], mask=in_c, other=0.0)
        scores = tl.where(related, tl.dot(a, tl.trans(b)), 0.0)
        out = tl.dot(a, state.to(a.dtype))
        out = tl.dot(scores.to(c.dtype), c, out)
        tl.store(Out + (base + t[:, None]) * DC + dc[None, :], out * scale, mask=in_c)
        state = tl.dot(tl.trans(b), c, state)


def _run_sweep(a, b, c, scale, from_end=False):
    (batch, H, T, DA), DC = a.shape, c.shape[-1]
    out = torch.empty_like(c)
    # Narrow slabs give a long, serial sweep more programs; they read a and b again, from L2.
    chunk, slab = (16, 16) if T <= 256 else (128 // a.element_size(), 32)
    _sweep[(triton.cdiv(DC, slab), batch * H)](
        a, b, c, out, T, DA, DC, scale, FROM_END=from_end,
        CHUNK=chunk, BLOCK_A=max(16, triton.next_power_of_2(DA)), BLOCK_C=slab, num_warps=4, num_stages=2,
    )  # fmt: skip
    return out


def forward(q, k, v):
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    return _run_sweep(q, k, v, q.shape[-1] ** -0.5), (q, k, v)


# --- backward ---
def backward(saved, grad_out, needs=None):
    q, k, v = saved
    need_q, need_k, need_v = needs or (True, True, True)
    # Each sweep reads the cotangent in another role, dk and dq once per slab: one copy pays off.
    do = grad_out.contiguous()
    scale = q.shape[-1] ** -0.5
    dq = _run_sweep(do, v, k, scale) if need_q else None
    dk = _run_sweep(v, do, q, scale, from_end=True) if need_k else None
    dv = _run_sweep(k, q, do, scale, from_end=True) if need_v else None
    return dq, dk, dv


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "T": 64, "K": 16, "V": 32},
    {"B": 2, "H": 1, "T": 43, "K": 12, "V": 20},
    {"B": 1, "H": 2, "T": 51, "K": 24, "V": 16, "dtype": "bfloat16"},
)
BENCH = (
    {"B": 4, "H": 16, "T": 2048, "K": 64, "V": 64, "dtype": "bfloat16"},
    {"B": 4, "H": 8, "T": 4096, "K": 128, "V": 128, "dtype": "bfloat16"},
)


def make_args(B, H, T, K, V, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(B, H, T, n, generator=g).to(device, getattr(torch, dtype)) for n in (K, K, V))


def reference(q, k, v):
    # Chunks of 64 tokens: dense within, running sums of k^T v between.
    T = q.shape[2]
    size = 64 if T > 256 else 16
    q, k, v = (torch.nn.functional.pad(x, (0, 0, 0, -T % size)).unflatten(2, (-1, size)) for x in (q, k, v))
    added = (k.transpose(-1, -2) @ v).float()
    states = (added.cumsum(2) - added).to(q.dtype)
    out = (q @ k.transpose(-1, -2)).tril() @ v + q @ states
    return (out * q.shape[-1] ** -0.5).flatten(2, 3)[:, :, :T]
