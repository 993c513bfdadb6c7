"""Attention with sigmoid weights and a bias per head: no normaliser, hence no saved statistics and no delta."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "sigmoid_attention",
    "family": "attention_special",
    "op": "sigmoid_attention",
    "schema": 1,
    "techniques": ("loop-swap", "owner-grid", "recompute", "two-stage-partials"),
    "saves": (),
    "grads": ("q", "k", "v", "bias"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _sigmoid_fwd(
    Q, K, V, Bias, Out, S, D, H, scale, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):
    head = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    in_m = (m[:, None] < S) & (d[None, :] < D)
    q = tl.load(Q + (head * S + m[:, None]) * D + d[None, :], mask=in_m, other=0.0)
    bias = tl.load(Bias + head % H).to(tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(0, S, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        in_n = (n[:, None] < S) & (d[None, :] < D)
        k = tl.load(K + (head * S + n[:, None]) * D + d[None, :], mask=in_n, other=0.0)
        # Keys beyond S have weight sigmoid(bias), but their values are loaded as zero.
        v = tl.load(V + (head * S + n[:, None]) * D + d[None, :], mask=in_n, other=0.0)
        acc = tl.dot(tl.sigmoid(tl.dot(q, tl.trans(k)) * scale + bias).to(v.dtype), v, acc)
    tl.store(Out + (head * S + m[:, None]) * D + d[None, :], acc, mask=in_m)


def _block(S, q):
    # Four (BLOCK, D) operands share the multiprocessor's memory, twice as large in fp32.
    return 64 if S > 256 and q.element_size() == 2 else 32


def forward(q, k, v, bias):
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    B, H, S, D = q.shape
    out = torch.empty_like(q)
    BLOCK = _block(S, q)
    _sigmoid_fwd[(triton.cdiv(S, BLOCK), B * H)](
        q, k, v, bias, out, S, D, H, D**-0.5,
        BLOCK_M=BLOCK, BLOCK_N=BLOCK, BLOCK_D=max(16, triton.next_power_of_2(D)),
    )  # fmt: skip
    return out, (q, k, v, bias)


# --- backward ---
@triton.jit
def _sigmoid_dkdv(
    Q, K, V, Bias, DO, DK, DV, S, D, H, scale, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):
    head = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    in_n = (n[:, None] < S) & (d[None, :] < D)
    k = tl.load(K + (head * S + n[:, None]) * D + d[None, :], mask=in_n, other=0.0)
    v = tl.load(V + (head * S + n[:, None]) * D + d[None, :], mask=in_n, other=0.0)
    bias = tl.load(Bias + head % H).to(tl.float32)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for start in range(0, S, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        in_m = (m[:, None] < S) & (d[None, :] < D)
        # Queries beyond S have q = dout = 0 and so add nothing to either sum: no score mask is needed.
        q = tl.load(Q + (head * S + m[:, None]) * D + d[None, :], mask=in_m, other=0.0)
        do = tl.load(DO + (head * S + m[:, None]) * D + d[None, :], mask=in_m, other=0.0)
        p_t = tl.sigmoid(tl.dot(k, tl.trans(q)) * scale + bias)
        dv = tl.dot(p_t.to(do.dtype), do, dv)
        ds_t = tl.dot(v, tl.trans(do)) * p_t * (1.0 - p_t)
        dk = tl.dot(ds_t.to(q.dtype), q, dk)
    tl.store(DK + (head * S + n[:, None]) * D + d[None, :], dk * scale, mask=in_n)
    tl.store(DV + (head * S + n[:, None]) * D + d[None, :], dv, mask=in_n)


@triton.jit
def _sigmoid_dq_dbias(
    Q, K, V, Bias, DO, DQ, Parts, S, D, H, scale, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):
    head = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    in_m = (m[:, None] < S) & (d[None, :] < D)
    q = tl.load(Q + (head * S + m[:, None]) * D + d[None, :], mask=in_m, other=0.0)
    do = tl.load(DO + (head * S + m[:, None]) * D + d[None, :], mask=in_m, other=0.0)
    bias = tl.load(Bias + head % H).to(tl.float32)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    dbias = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, S, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        in_n = (n[:, None] < S) & (d[None, :] < D)
        k = tl.load(K + (head * S + n[:, None]) * D + d[None, :], mask=in_n, other=0.0)
        v = tl.load(V + (head * S + n[:, None]) * D + d[None, :], mask=in_n, other=0.0)
        p = tl.sigmoid(tl.dot(q, tl.trans(k)) * scale + bias)
        ds = tl.dot(do, tl.trans(v)) * p * (1.0 - p)
        dq = tl.dot(ds.to(k.dtype), k, dq)
        dbias += tl.sum(ds, 1)
    tl.store(DQ + (head * S + m[:, None]) * D + d[None, :], dq * scale, mask=in_m)
    # Parts is (tiles, B, H): the sum over its two leading axes is the gradient of the heads' biases.
    tl.store(Parts + tl.program_id(0) * tl.num_programs(1) + head, tl.sum(dbias, 0))


def backward(saved, grad_out, needs=None):
    q, k, v, bias = saved
    B, H, S, D = q.shape
    do = grad_out.contiguous()
    BLOCK = _block(S, q)
    tiles = triton.cdiv(S, BLOCK)
    blocks = {"BLOCK_M": BLOCK, "BLOCK_N": BLOCK, "BLOCK_D": max(16, triton.next_power_of_2(D))}
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    parts = torch.empty(tiles, B, H, device=q.device, dtype=torch.float32)
    _sigmoid_dkdv[(tiles, B * H)](q, k, v, bias, do, dk, dv, S, D, H, D**-0.5, **blocks)
    _sigmoid_dq_dbias[(tiles, B * H)](q, k, v, bias, do, dq, parts, S, D, H, D**-0.5, **blocks)
    return dq, dk, dv, parts.sum((0, 1)).to(bias.dtype)


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "S": 64, "D": 16},
    {"B": 2, "H": 3, "S": 45, "D": 24, "dtype": "bfloat16"},
    {"B": 1, "H": 1, "S": 32, "D": 32, "dtype": "float16"},
)
BENCH = ({"B": 2, "H": 16, "S": 1024, "D": 64, "dtype": "float16"},)


def make_args(B, H, S, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    dt = getattr(torch, dtype)
    q, k, v = (torch.randn(B, H, S, D, generator=g).to(device, dt) for _ in range(3))
    return q, k, v, (torch.randn(H, generator=g) - 2.0).to(device, dt)


def reference(q, k, v, bias):
    scores = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    return torch.sigmoid(scores + bias.float()[:, None, None]).to(v.dtype) @ v
