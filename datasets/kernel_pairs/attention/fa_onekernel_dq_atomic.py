"""Flash attention without a mask, one backward kernel: dk and dv stay with their key tile, dq is added atomically."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "fa_onekernel_dq_atomic",
    "family": "attention",
    "op": "attention",
    "schema": 1,
    "techniques": ("atomics", "one-launch", "saved-lse", "recompute", "strided-cotangent"),
    "saves": ("out: fp32 or bf16 or fp16 (B, H, SQ, D)", "lse: fp32 (B, H, SQ)"),
    "grads": ("q", "k", "v"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _full_fwd(Q, K, V, Out, Lse, SQ, SK, D, scale, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    head = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    in_m = (m[:, None] < SQ) & (d[None, :] < D)
    q = tl.load(Q + (head * SQ + m[:, None]) * D + d[None, :], mask=in_m, other=0.0)
    top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(0, SK, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        in_n = (n[:, None] < SK) & (d[None, :] < D)
        k = tl.load(K + (head * SK + n[:, None]) * D + d[None, :], mask=in_n, other=0.0)
        v = tl.load(V + (head * SK + n[:, None]) * D + d[None, :], mask=in_n, other=0.0)
        score = tl.where(n[None, :] < SK, tl.dot(q, tl.trans(k)) * scale, -float("inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        p = tl.exp(score - higher[:, None])
        fade = tl.exp(top - higher)
        total = total * fade + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None])
        top = higher
    tl.store(Out + (head * SQ + m[:, None]) * D + d[None, :], acc / total[:, None], mask=in_m)
    tl.store(Lse + head * SQ + m, top + tl.log(total), mask=m < SQ)


def forward(q, k, v):
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    (B, H, SQ, D), SK = q.shape, k.shape[2]
    out = torch.empty_like(q)
    lse = torch.empty(B, H, SQ, device=q.device, dtype=torch.float32)
    BLOCK_M, BLOCK_N = (128, 64) if SQ > 512 and q.element_size() == 2 else (32, 32)
    _full_fwd[(triton.cdiv(SQ, BLOCK_M), B * H)](
        q, k, v, out, lse, SQ, SK, D, D**-0.5,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_D=max(16, triton.next_power_of_2(D)),
        num_warps=8 if BLOCK_M > 32 else 4,
    )  # fmt: skip
    return out, (q, k, v, out, lse)


# --- backward ---
@triton.jit
def _full_bwd(
    Q, K, V, Out, DO, Lse, DQ, DK, DV, H, SQ, SK, D, scale, do_b, do_h, do_m, do_d,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    in_n = (n[:, None] < SK) & (d[None, :] < D)
    k = tl.load(K + (head * SK + n[:, None]) * D + d[None, :], mask=in_n, other=0.0)
    v = tl.load(V + (head * SK + n[:, None]) * D + d[None, :], mask=in_n, other=0.0)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dout = DO + (head // H) * do_b + (head % H) * do_h
    tiles = tl.cdiv(SQ, BLOCK_M)
    for i in range(tiles):
        # Each key tile begins at another query tile, so that the atomic adds of neighbours do not collide.
        m = (i + tl.program_id(0)) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
        in_m = (m[:, None] < SQ) & (d[None, :] < D)
        at = (head * SQ + m[:, None]) * D + d[None, :]
        q = tl.load(Q + at, mask=in_m, other=0.0)
        o = tl.load(Out + at, mask=in_m, other=0.0).to(tl.float32)
        do = tl.load(dout + m[:, None] * do_m + d[None, :] * do_d, mask=in_m, other=0.0)
        # A row sum of two tiles that are here anyway: cheaper than one more kernel and buffer.
        delta = tl.sum(o * do.to(tl.float32), 1)
        lse = tl.load(Lse + head * SQ + m, mask=m < SQ, other=0.0)
        inside = (m[:, None] < SQ) & (n[None, :] < SK)
        p = tl.exp(tl.where(inside, tl.dot(q, tl.trans(k)) * scale - lse[:, None], -float("inf")))
        dv = tl.dot(tl.trans(p).to(do.dtype), do, dv)
        ds = p * (tl.dot(do, tl.trans(v)) - delta[:, None]) * scale
        dk = tl.dot(tl.trans(ds).to(q.dtype), q, dk)
        tl.atomic_add(DQ + at, tl.dot(ds.to(k.dtype), k), mask=in_m, sem="relaxed")
    tl.store(DK + (head * SK + n[:, None]) * D + d[None, :], dk, mask=in_n)
    tl.store(DV + (head * SK + n[:, None]) * D + d[None, :], dv, mask=in_n)


def backward(saved, grad_out, needs=None):
    q, k, v, out, lse = saved
    (B, H, SQ, D), SK = q.shape, k.shape[2]
    dq = torch.zeros(B, H, SQ, D, device=q.device, dtype=torch.float32)
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    BLOCK_M, BLOCK_N = (64 if D <= 64 else 32, 64) if SQ > 512 and q.element_size() == 2 else (16, 32)
    _full_bwd[(triton.cdiv(SK, BLOCK_N), B * H)](
        q, k, v, out, grad_out, lse, dq, dk, dv, H, SQ, SK, D, D**-0.5, *grad_out.stride(),
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_D=max(16, triton.next_power_of_2(D)),
        num_warps=8 if BLOCK_M > 16 else 4, num_stages=2,
    )  # fmt: skip
    return dq.to(q.dtype), dk, dv


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "SQ": 48, "SK": 64, "D": 16},
    {"B": 2, "H": 1, "SQ": 37, "SK": 53, "D": 20, "dtype": "bfloat16"},
    {"B": 1, "H": 1, "SQ": 32, "SK": 32, "D": 32, "dtype": "float16"},
)
BENCH = ({"B": 2, "H": 16, "SQ": 1024, "SK": 1024, "D": 64, "dtype": "float16"},)


def make_args(B, H, SQ, SK, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    lengths = (SQ, SK, SK)
    return tuple(torch.randn(B, H, n, D, generator=g).to(device=device, dtype=getattr(torch, dtype)) for n in lengths)


def reference(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)
