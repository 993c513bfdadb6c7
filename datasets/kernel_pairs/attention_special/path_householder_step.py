"""PaTH attention within blocks: between key j and query i lie Householder steps, replayed backwards without an inverse.

    s_ij = scale k_j^T H_(j+1) ... H_i q_i,    H_t = I - beta_t w_t w_t^T,    o_i = softmax(s_i) V over j <= i

A program carries the keys of its block along: at step t row t joins, all earlier rows become a_j - beta_t c_j w_t^T
with c_j = a_j . w_t, and a_j . q_t are the scores of query t. The backward walks t downwards. A step need not be
invertible (beta |w|^2 = 1 projects), but with the coefficients c saved it is undone exactly by adding beta_t c w_t^T
back: one tile of keys and one of their gradients in registers, no state per step. Scores and values take a launch of
plain products before it.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "path_householder_step",
    "family": "attention_special",
    "op": "path_attention",
    "schema": 1,
    "techniques": ("reverse-scan", "chunked", "saved-statistics", "row-local"),
    "saves": (
        "probs: fp32 (B, H, T, C)", "coefs: fp32 (B, H, T, C)", "ends: fp32 (B, H, T, D)",
    ),
    "grads": ("q", "k", "v", "w", "beta"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}  # fmt: skip


# --- forward ---
@triton.jit
def _carry_keys(Q, K, W, Beta, Scores, Coefs, Ends, T, D, scale, C: tl.constexpr, BLOCK_D: tl.constexpr):
    first = tl.program_id(0) * C
    row = tl.program_id(1).to(tl.int64) * T + first
    j = tl.arange(0, C)
    d = tl.arange(0, BLOCK_D)
    at = (row + j[:, None]) * D + d[None, :]
    inside = (first + j[:, None] < T) & (d[None, :] < D)
    k = tl.load(K + at, mask=inside, other=0.0).to(tl.float32)
    # Rows behind t are zero: they take part in nothing until their key joins.
    keys = tl.zeros((C, BLOCK_D), tl.float32)
    for t in range(tl.minimum(C, T - first)):
        w = tl.load(W + (row + t) * D + d, mask=d < D, other=0.0).to(tl.float32)
        q = tl.load(Q + (row + t) * D + d, mask=d < D, other=0.0).to(tl.float32)
        beta = tl.load(Beta + row + t).to(tl.float32)
        coef = tl.sum(keys * w[None, :], 1)
        keys = tl.where(j[:, None] == t, k, keys - (beta * coef)[:, None] * w[None, :])
        tl.store(Coefs + (row + t) * C + j, coef)
        tl.store(Scores + (row + t) * C + j, tl.sum(keys * q[None, :], 1) * scale)
    tl.store(Ends + at, keys, mask=inside)


@triton.jit
def _block_softmax(Scores, V, Out, T, D, C: tl.constexpr, BLOCK_D: tl.constexpr):
    # Scores become probabilities in place.
    first = tl.program_id(0) * C
    row = tl.program_id(1).to(tl.int64) * T + first
    i = tl.arange(0, C)
    d = tl.arange(0, BLOCK_D)
    square = (row + i[:, None]) * C + i[None, :]
    inside = (first + i[:, None] < T) & (d[None, :] < D)
    s = tl.load(Scores + square, mask=first + i[:, None] < T, other=0.0)
    s = tl.where(i[:, None] >= i[None, :], s, float("-inf"))
    p = tl.exp(s - tl.max(s, 1)[:, None])
    p = p / tl.sum(p, 1)[:, None]
    tl.store(Scores + square, p, mask=first + i[:, None] < T)
    at = (row + i[:, None]) * D + d[None, :]
    v = tl.load(V + at, mask=inside, other=0.0)
    tl.store(Out + at, tl.dot(p.to(v.dtype), v), mask=inside)


def _tiles(q):
    """Positions of a block, and the channels' tile."""
    return {"C": 16 if q.shape[2] <= 128 else 64, "BLOCK_D": max(16, triton.next_power_of_2(q.shape[3]))}


def forward(q, k, v, w, beta):
    q, k, v, w, beta = (x.contiguous() for x in (q, k, v, w, beta))
    B, H, T, D = q.shape
    tiles = _tiles(q)
    probs, coefs = (torch.empty(B, H, T, tiles["C"], device=q.device, dtype=torch.float32) for _ in range(2))
    ends = torch.empty(B, H, T, D, device=q.device, dtype=torch.float32)
    o = torch.empty_like(v)
    grid = (triton.cdiv(T, tiles["C"]), B * H)
    _carry_keys[grid](q, k, w, beta, probs, coefs, ends, T, D, D**-0.5, **tiles, num_warps=4)
    _block_softmax[grid](probs, v, o, T, D, **tiles, num_warps=4)
    return o, (q, k, v, w, beta, probs, coefs, ends)


# --- backward ---
@triton.jit
def _score_and_value_grads(
    V, Probs, DO, DScores, DV, H, T, D, do_b, do_h, do_t, do_d, scale, C: tl.constexpr, BLOCK_D: tl.constexpr
):
    first = tl.program_id(0) * C
    head = tl.program_id(1).to(tl.int64)
    row = head * T + first
    i = tl.arange(0, C)
    d = tl.arange(0, BLOCK_D)
    in_block = first + i[:, None] < T
    inside = in_block & (d[None, :] < D)
    square = (row + i[:, None]) * C + i[None, :]
    at = (row + i[:, None]) * D + d[None, :]
    p = tl.load(Probs + square, mask=in_block, other=0.0)
    v = tl.load(V + at, mask=inside, other=0.0)
    do_at = head // H * do_b + head % H * do_h + (first + i[:, None]).to(tl.int64) * do_t + d[None, :] * do_d
    do = tl.load(DO + do_at, mask=inside, other=0.0)
    tl.store(DV + at, tl.dot(tl.trans(p.to(do.dtype)), do), mask=inside)
    dp = tl.dot(do, tl.trans(v))
    ds = p * (dp - tl.sum(p * dp, 1)[:, None])
    tl.store(DScores + square, ds * scale, mask=in_block)


@triton.jit
def _replay_steps(Q, K, W, Beta, DScores, Coefs, Ends, DQ, DK, DW, DBeta, T, D, C: tl.constexpr, BLOCK_D: tl.constexpr):
    first = tl.program_id(0) * C
    row = tl.program_id(1).to(tl.int64) * T + first
    j = tl.arange(0, C)
    d = tl.arange(0, BLOCK_D)
    inside = (first + j[:, None] < T) & (d[None, :] < D)
    keys = tl.load(Ends + (row + j[:, None]) * D + d[None, :], mask=inside, other=0.0)
    dkeys = tl.zeros((C, BLOCK_D), tl.float32)
    steps = tl.minimum(C, T - first)
    for back in range(steps):
        t = steps - 1 - back
        at = (row + t) * D + d
        w = tl.load(W + at, mask=d < D, other=0.0).to(tl.float32)
        q = tl.load(Q + at, mask=d < D, other=0.0).to(tl.float32)
        beta = tl.load(Beta + row + t).to(tl.float32)
        ds = tl.load(DScores + (row + t) * C + j)
        coef = tl.load(Coefs + (row + t) * C + j)
        tl.store(DQ + at, tl.sum(ds[:, None] * keys, 0), mask=d < D)
        dkeys += ds[:, None] * q[None, :]
        # Row t leaves: what it has gathered is dk_t. The others lose the step.
        here = j[:, None] == t
        tl.store(DK + at, tl.sum(tl.where(here, dkeys, 0.0), 0), mask=d < D)
        dkeys = tl.where(here, 0.0, dkeys)
        keys = tl.where(here, 0.0, keys + (beta * coef)[:, None] * w[None, :])
        along = tl.sum(dkeys * w[None, :], 1)
        tl.store(DBeta + row + t, -tl.sum(coef * along, 0))
        dw = -beta * tl.sum(coef[:, None] * dkeys + along[:, None] * keys, 0)
        tl.store(DW + at, dw, mask=d < D)
        # The adjoint of a Householder step is the same step.
        dkeys -= (beta * along)[:, None] * w[None, :]


def backward(saved, grad_o, needs=None):
    q, k, v, w, beta, probs, coefs, ends = saved
    B, H, T, D = q.shape
    tiles = _tiles(q)
    grid = (triton.cdiv(T, tiles["C"]), B * H)
    dscores = torch.empty_like(probs)
    dq, dk, dv, dw, dbeta = (torch.empty_like(x) for x in (q, k, v, w, beta))
    _score_and_value_grads[grid](
        v, probs, grad_o, dscores, dv, H, T, D, *grad_o.stride(), D**-0.5, **tiles, num_warps=4
    )
    _replay_steps[grid](q, k, w, beta, dscores, coefs, ends, dq, dk, dw, dbeta, T, D, **tiles, num_warps=8)
    return dq, dk, dv, dw, dbeta


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "T": 32, "D": 16},
    {"B": 2, "H": 1, "T": 43, "D": 20},
    {"B": 1, "H": 1, "T": 24, "D": 32, "dtype": "bfloat16"},
)
BENCH = ({"B": 4, "H": 16, "T": 4096, "D": 64, "dtype": "bfloat16"},)


def make_args(B, H, T, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    q, k, v, w = (torch.randn(B, H, T, D, generator=g) for _ in range(4))
    w = torch.nn.functional.normalize(w, dim=-1)
    # A true reflection is 2; the steps of PaTH lie between 0 and 2.
    beta = 2.0 * torch.sigmoid(torch.randn(B, H, T, generator=g))
    return tuple(x.to(device, getattr(torch, dtype)) for x in (q, k, v, w, beta))


def reference(q, k, v, w, beta):
    B, H, T, D = q.shape
    C = _tiles(q)["C"]
    blocks = -(-T // C)
    pad = blocks * C - T
    q, k, v, w = (torch.nn.functional.pad(x, (0, 0, 0, pad)).view(B, H, blocks, C, D) for x in (q, k, v, w))
    beta = torch.nn.functional.pad(beta, (0, pad)).view(B, H, blocks, C, 1).float()
    # The product of the steps from s to t is I - sum of w_s inverse_ts w_t^T, from one triangular inverse per block.
    wf = w.float()
    system = (beta * (wf @ wf.transpose(-1, -2))).tril(-1) + torch.eye(C, device=q.device)
    inverse = torch.linalg.solve_triangular(system, torch.diag_embed(beta[..., 0]), upper=False)
    crossed = (q @ w.transpose(-1, -2)).float().tril() @ inverse @ (w @ k.transpose(-1, -2)).float().tril(-1)
    s = ((q @ k.transpose(-1, -2)).float() - crossed) * D**-0.5
    later = torch.ones(C, C, dtype=torch.bool, device=q.device).triu(1)
    p = s.masked_fill(later, float("-inf")).softmax(-1)
    return (p.to(v.dtype) @ v).view(B, H, blocks * C, D)[:, :, :T]
