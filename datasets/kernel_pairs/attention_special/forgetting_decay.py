"""Softmax attention with forget gates: s_ij = scale q_i . k_j + F_i - F_j with F the running sum of log gates.

dF_t is the row sum of dS, which the dq kernel has in its tiles, less the column sum, which the dk/dv kernel has; the
gates' gradient is the sum of dF over later tokens, one short reverse scan. The row sums are zero on paper, since the
softmax ignores what is constant along a row. Rounding of the output leaves a little in every row, and the scan over
columns alone would collect it token by token: with the row sums it cancels.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "forgetting_decay",
    "family": "attention_special",
    "op": "forgetting_attention",
    "schema": 1,
    "techniques": (
        "saved-lse", "causal-bounds", "loop-swap", "owner-grid", "reverse-scan", "recompute", "strided-cotangent",
    ),
    "saves": (
        "o: fp32 or bf16 (B, H, T, D)", "lse: fp32 (B, H, T)", "total: fp32 (B, H, T)",
    ),
    "grads": ("q", "k", "v", "log_gate"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}  # fmt: skip


# --- forward ---
@triton.jit
def _scan_gates(In, Out, T, REVERSE: tl.constexpr, BLOCK_T: tl.constexpr):
    # Running sums along one row; REVERSE: from the end.
    row = tl.program_id(0).to(tl.int64) * T
    carry = 0.0
    tiles = tl.cdiv(T, BLOCK_T)
    for step in range(tiles):
        tile = step
        if REVERSE:
            tile = tiles - 1 - step
        t = tile * BLOCK_T + tl.arange(0, BLOCK_T)
        x = tl.load(In + row + t, mask=t < T, other=0.0).to(tl.float32)
        tl.store(Out + row + t, carry + tl.cumsum(x, 0, reverse=REVERSE), mask=t < T)
        carry += tl.sum(x, 0)


@triton.jit
def _forget_fwd(
    Q, K, V, Total, Out, LSE, T, D, scale, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    base = tl.program_id(1).to(tl.int64) * T
    m = first + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    in_q = (m[:, None] < T) & (d[None, :] < D)
    q = tl.load(Q + (base + m[:, None]) * D + d[None, :], mask=in_q, other=0.0)
    till_m = tl.load(Total + base + m, mask=m < T, other=0.0)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    norm = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(0, tl.minimum(first + BLOCK_M, T), BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        in_kv = (n[:, None] < T) & (d[None, :] < D)
        k = tl.load(K + (base + n[:, None]) * D + d[None, :], mask=in_kv, other=0.0)
        v = tl.load(V + (base + n[:, None]) * D + d[None, :], mask=in_kv, other=0.0)
        till_n = tl.load(Total + base + n, mask=n < T, other=0.0)
        s = (tl.dot(q, tl.trans(k)) * scale + (till_m[:, None] - till_n[None, :])) * 1.4426950408889634
        s = tl.where(m[:, None] >= n[None, :], s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        shrink = tl.exp2(top - new_top)
        p = tl.exp2(s - new_top[:, None])
        norm = norm * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
        top = new_top
    tl.store(Out + (base + m[:, None]) * D + d[None, :], acc / norm[:, None], mask=in_q)
    tl.store(LSE + base + m, top + tl.log2(norm), mask=m < T)


def _blocks(q):
    """(owned rows, rows of the other side, warps)."""
    T, D = q.shape[2:]
    if T <= 256:
        return 32, 16, 4
    if q.element_size() == 4:
        return 64, 32, 8
    return (128, 64, 8) if D <= 64 else (128, 32, 8)


def forward(q, k, v, log_gate):
    q, k, v, log_gate = q.contiguous(), k.contiguous(), v.contiguous(), log_gate.contiguous()
    B, H, T, D = q.shape
    total, lse = (torch.empty(B, H, T, device=q.device, dtype=torch.float32) for _ in range(2))
    _scan_gates[(B * H,)](log_gate, total, T, REVERSE=False, BLOCK_T=1024, num_warps=4)
    o = torch.empty_like(q)
    own, other, warps = _blocks(q)
    _forget_fwd[(triton.cdiv(T, own), B * H)](
        q, k, v, total, o, lse, T, D, D**-0.5,
        BLOCK_M=own, BLOCK_N=other, BLOCK_D=max(16, triton.next_power_of_2(D)), num_warps=warps,
    )  # fmt: skip
    return o, (q, k, v, log_gate, o, lse, total)


# --- backward ---
@triton.jit
def _forget_dq(
    Q, K, V, Total, Out, DO, LSE, Delta, DQ, Rows, H, T, D, do_b, do_h, do_t, do_d, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    head = tl.program_id(1).to(tl.int64)
    base = head * T
    m = first + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    in_q = (m[:, None] < T) & (d[None, :] < D)
    q_at = (base + m[:, None]) * D + d[None, :]
    q = tl.load(Q + q_at, mask=in_q, other=0.0)
    o = tl.load(Out + q_at, mask=in_q, other=0.0)
    do_at = head // H * do_b + head % H * do_h + m[:, None].to(tl.int64) * do_t + d[None, :] * do_d
    do = tl.load(DO + do_at, mask=in_q, other=0.0)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(Delta + base + m, delta, mask=m < T)
    lse = tl.load(LSE + base + m, mask=m < T, other=float("inf"))
    till_m = tl.load(Total + base + m, mask=m < T, other=0.0)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    rows = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, tl.minimum(first + BLOCK_M, T), BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        in_kv = (n[:, None] < T) & (d[None, :] < D)
        k = tl.load(K + (base + n[:, None]) * D + d[None, :], mask=in_kv, other=0.0)
        v = tl.load(V + (base + n[:, None]) * D + d[None, :], mask=in_kv, other=0.0)
        till_n = tl.load(Total + base + n, mask=n < T, other=0.0)
        s = (tl.dot(q, tl.trans(k)) * scale + (till_m[:, None] - till_n[None, :])) * 1.4426950408889634
        p = tl.exp2(tl.where(m[:, None] >= n[None, :], s - lse[:, None], float("-inf")))
        ds = p * (tl.dot(do, tl.trans(v)) - delta[:, None])
        rows += tl.sum(ds, 1)
        dq = tl.dot(ds.to(k.dtype), k, dq)
    tl.store(DQ + q_at, dq * scale, mask=in_q)
    tl.store(Rows + base + m, rows, mask=m < T)


@triton.jit
def _forget_dkdv(
    Q, K, V, Total, DO, LSE, Delta, DK, DV, Sums, H, T, D, do_b, do_h, do_t, do_d, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK_N
    head = tl.program_id(1).to(tl.int64)
    base = head * T
    n = first + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    in_kv = (n[:, None] < T) & (d[None, :] < D)
    kv_at = (base + n[:, None]) * D + d[None, :]
    k = tl.load(K + kv_at, mask=in_kv, other=0.0)
    v = tl.load(V + kv_at, mask=in_kv, other=0.0)
    till_n = tl.load(Total + base + n, mask=n < T, other=0.0)
    DO += head // H * do_b + head % H * do_h
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    columns = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(first // BLOCK_M * BLOCK_M, T, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        in_q = (m[:, None] < T) & (d[None, :] < D)
        q = tl.load(Q + (base + m[:, None]) * D + d[None, :], mask=in_q, other=0.0)
        do = tl.load(DO + m[:, None].to(tl.int64) * do_t + d[None, :] * do_d, mask=in_q, other=0.0)
        lse = tl.load(LSE + base + m, mask=m < T, other=float("inf"))
        delta = tl.load(Delta + base + m, mask=m < T, other=0.0)
        till_m = tl.load(Total + base + m, mask=m < T, other=0.0)
        s = (tl.dot(k, tl.trans(q)) * scale + (till_m[None, :] - till_n[:, None])) * 1.4426950408889634
        p = tl.exp2(tl.where(m[None, :] >= n[:, None], s - lse[None, :], float("-inf")))
        dv = tl.dot(p.to(do.dtype), do, dv)
        ds = p * (tl.dot(v, tl.trans(do)) - delta[None, :])
        columns += tl.sum(ds, 1)
        dk = tl.dot(ds.to(q.dtype), q, dk)
    tl.store(DK + kv_at, dk * scale, mask=in_kv)
    tl.store(DV + kv_at, dv, mask=in_kv)
    # What the dq kernel left for the same tokens, as rows: the scan takes the difference.
    rows = tl.load(Sums + base + n, mask=n < T, other=0.0)
    tl.store(Sums + base + n, rows - columns, mask=n < T)


def backward(saved, grad_o, needs=None):
    q, k, v, log_gate, o, lse, total = saved
    _, need_k, need_v, need_gate = needs or (True,) * 4
    B, H, T, D = q.shape
    own, other, warps = _blocks(q)
    BLOCK_D = max(16, triton.next_power_of_2(D))
    grid = (triton.cdiv(T, own), B * H)
    sizes = (H, T, D, *grad_o.stride(), D**-0.5)
    dq, delta, sums = torch.empty_like(q), torch.empty_like(lse), torch.empty_like(lse)
    _forget_dq[grid](
        q, k, v, total, o, grad_o, lse, delta, dq, sums, *sizes,
        BLOCK_M=own, BLOCK_N=other, BLOCK_D=BLOCK_D, num_warps=warps,
    )  # fmt: skip
    if not (need_k or need_v or need_gate):
        return dq, None, None, None
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    _forget_dkdv[grid](
        q, k, v, total, grad_o, lse, delta, dk, dv, sums, *sizes,
        BLOCK_M=other, BLOCK_N=own, BLOCK_D=BLOCK_D, num_warps=warps,
    )  # fmt: skip
    dgate = torch.empty_like(log_gate)
    _scan_gates[(B * H,)](sums, dgate, T, REVERSE=True, BLOCK_T=1024, num_warps=4)
    return dq, dk, dv, dgate


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "T": 64, "D": 32},
    {"B": 2, "H": 3, "T": 75, "D": 20},
    {"B": 1, "H": 2, "T": 50, "D": 16, "dtype": "bfloat16"},
)
BENCH = ({"B": 4, "H": 16, "T": 2048, "D": 64, "dtype": "bfloat16"},)


def make_args(B, H, T, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, H, T, D, generator=g).to(device, getattr(torch, dtype)) for _ in range(3))
    return q, k, v, torch.nn.functional.logsigmoid(torch.randn(B, H, T, generator=g) + 2.0).to(device)


def reference(q, k, v, log_gate):
    total = log_gate.float().cumsum(-1)
    s = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    s = s + total[..., :, None] - total[..., None, :]
    later = torch.ones(s.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return s.masked_fill(later, float("-inf")).softmax(-1).to(v.dtype) @ v
