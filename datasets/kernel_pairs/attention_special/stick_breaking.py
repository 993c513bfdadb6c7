"""Stick-breaking attention: a key takes a sigmoid of what later keys left; both passes run cumulative sums along keys.

    log A_ij = z_ij - sum of softplus(z_ik) over j <= k < i,    o_i = sum over j < i of A_ij v_j

The forward walks keys from the newest to the oldest, carries the sum of softplus, and leaves the carry at every border
of key tiles: near the query, where the weights are, it is small and exact, while a total less what older keys spent
would be a difference of large numbers. With G = A dA, the gradient is dz_ij = G_ij - sigmoid(z_ij) (sum of G_ik over
k <= j): the dq kernel walks keys from the oldest on and leaves that sum at the borders too. With both carries a tile is
independent of its neighbours, and dk/dv have their own key tiles as owners.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "stick_breaking",
    "family": "attention_special",
    "op": "stick_breaking_attention",
    "schema": 1,
    "techniques": ("reverse-scan", "checkpointed-states", "causal-bounds", "loop-swap", "owner-grid", "recompute"),
    "saves": ("used: fp32 (B, H, key tiles, T)",),
    "grads": ("q", "k", "v"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _softplus(z):
    return tl.maximum(z, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(z)))


@triton.jit
def _stick_fwd(
    Q, K, V, Out, Used, T, D, scale, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    base = tl.program_id(1).to(tl.int64) * T
    m = first + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    in_q = (m[:, None] < T) & (d[None, :] < D)
    q = tl.load(Q + (base + m[:, None]) * D + d[None, :], mask=in_q, other=0.0)
    used = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    tiles = tl.cdiv(tl.minimum(first + BLOCK_M, T), BLOCK_N)
    # Rows of a query tile lie side by side.
    borders = Used + base * tl.cdiv(T, BLOCK_N) + m
    for back in range(tiles):
        tile = tiles - 1 - back
        tl.store(borders + tl.cast(tile, tl.int64) * T, used, mask=m < T)
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        in_kv = (n[:, None] < T) & (d[None, :] < D)
        k = tl.load(K + (base + n[:, None]) * D + d[None, :], mask=in_kv, other=0.0)
        v = tl.load(V + (base + n[:, None]) * D + d[None, :], mask=in_kv, other=0.0)
        z = tl.dot(q, tl.trans(k)) * scale
        seen = n[None, :] < m[:, None]
        spent = tl.where(seen, _softplus(z), 0.0)
        later = used[:, None] + tl.cumsum(spent, 1, reverse=True)
        weights = tl.exp(tl.where(seen, z - later, float("-inf")))
        acc = tl.dot(weights.to(v.dtype), v, acc)
        used += tl.sum(spent, 1)
    tl.store(Out + (base + m[:, None]) * D + d[None, :], acc, mask=in_q)


def _blocks(q):
    """(BLOCK_M, BLOCK_N, warps): one tiling for all kernels, since carries are kept per border of key tiles."""
    if q.shape[2] <= 256:
        return 16, 16, 4
    # Scans along keys keep whole rows of several tiles in registers.
    return (32, 32, 4) if q.element_size() == 4 or q.shape[3] > 64 else (64, 32, 4)


def forward(q, k, v):
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    B, H, T, D = q.shape
    out = torch.empty_like(q)
    BLOCK_M, BLOCK_N, warps = _blocks(q)
    used = torch.zeros(B, H, triton.cdiv(T, BLOCK_N), T, device=q.device, dtype=torch.float32)
    _stick_fwd[(triton.cdiv(T, BLOCK_M), B * H)](
        q, k, v, out, used, T, D, D**-0.5,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_D=max(16, triton.next_power_of_2(D)), num_warps=warps,
    )  # fmt: skip
    return out, (q, k, v, used)


# --- backward ---
@triton.jit
def _stick_tile(q, k, v, do, m, n, used, grad_before, scale):
    # Weights A, gradient of the scores, and what the tile adds to the sum of G along keys.
    z = tl.dot(q, tl.trans(k)) * scale
    seen = n[None, :] < m[:, None]
    spent = tl.where(seen, _softplus(z), 0.0)
    # The same sum from the newest key on as in the forward.
    later = used[:, None] + tl.cumsum(spent, 1, reverse=True)
    weights = tl.exp(tl.where(seen, z - later, float("-inf")))
    g = weights * tl.dot(do, tl.trans(v))
    up_to = grad_before[:, None] + tl.cumsum(g, 1)
    dz = tl.where(seen, g - tl.sigmoid(z) * up_to, 0.0) * scale
    return weights, dz, tl.sum(g, 1)


@triton.jit
def _stick_dq(
    Q, K, V, DO, Used, DQ, Grads, H, T, D, do_b, do_h, do_t, do_d, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    head = tl.program_id(1).to(tl.int64)
    base = head * T
    m = first + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    in_q = (m[:, None] < T) & (d[None, :] < D)
    q = tl.load(Q + (base + m[:, None]) * D + d[None, :], mask=in_q, other=0.0)
    do_at = head // H * do_b + head % H * do_h + m[:, None].to(tl.int64) * do_t + d[None, :] * do_d
    do = tl.load(DO + do_at, mask=in_q, other=0.0)
    grads = tl.zeros((BLOCK_M,), tl.float32)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    # The sums of G are laid out as the forward's carries.
    borders = base * tl.cdiv(T, BLOCK_N) + m
    for tile in range(tl.cdiv(tl.minimum(first + BLOCK_M, T), BLOCK_N)):
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        in_kv = (n[:, None] < T) & (d[None, :] < D)
        k = tl.load(K + (base + n[:, None]) * D + d[None, :], mask=in_kv, other=0.0)
        v = tl.load(V + (base + n[:, None]) * D + d[None, :], mask=in_kv, other=0.0)
        border = borders + tl.cast(tile, tl.int64) * T
        used = tl.load(Used + border, mask=m < T, other=0.0)
        tl.store(Grads + border, grads, mask=m < T)
        _, dz, more_grads = _stick_tile(q, k, v, do, m, n, used, grads, scale)
        dq = tl.dot(dz.to(k.dtype), k, dq)
        grads += more_grads
    tl.store(DQ + (base + m[:, None]) * D + d[None, :], dq, mask=in_q)


@triton.jit
def _stick_dkdv(
    Q, K, V, DO, Used, DK, DV, Grads, H, T, D, do_b, do_h, do_t, do_d, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    base = head * T
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    in_kv = (n[:, None] < T) & (d[None, :] < D)
    k = tl.load(K + (base + n[:, None]) * D + d[None, :], mask=in_kv, other=0.0)
    v = tl.load(V + (base + n[:, None]) * D + d[None, :], mask=in_kv, other=0.0)
    DO += head // H * do_b + head % H * do_h
    border = (head * tl.num_programs(0) + tile) * T
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for start in range(tile * BLOCK_N // BLOCK_M * BLOCK_M, T, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        in_q = (m[:, None] < T) & (d[None, :] < D)
        q = tl.load(Q + (base + m[:, None]) * D + d[None, :], mask=in_q, other=0.0)
        do = tl.load(DO + m[:, None].to(tl.int64) * do_t + d[None, :] * do_d, mask=in_q, other=0.0)
        # Rows past T have used up everything and have no weight.
        used = tl.load(Used + border + m, mask=m < T, other=float("inf"))
        grads = tl.load(Grads + border + m, mask=m < T, other=0.0)
        weights, dz, _ = _stick_tile(q, k, v, do, m, n, used, grads, scale)
        dv = tl.dot(tl.trans(weights.to(do.dtype)), do, dv)
        dk = tl.dot(tl.trans(dz.to(q.dtype)), q, dk)
    tl.store(DK + (base + n[:, None]) * D + d[None, :], dk, mask=in_kv)
    tl.store(DV + (base + n[:, None]) * D + d[None, :], dv, mask=in_kv)


def backward(saved, grad_out, needs=None):
    q, k, v, used = saved
    _, need_k, need_v = needs or (True, True, True)
    B, H, T, D = q.shape
    BLOCK_M, BLOCK_N, warps = _blocks(q)
    tiles = {"BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "BLOCK_D": max(16, triton.next_power_of_2(D))}
    grads = torch.empty_like(used)
    sizes = (grads, H, T, D, *grad_out.stride(), D**-0.5)
    dq = torch.empty_like(q)
    _stick_dq[(triton.cdiv(T, BLOCK_M), B * H)](q, k, v, grad_out, used, dq, *sizes, **tiles, num_warps=warps)
    if not (need_k or need_v):
        return dq, None, None
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    _stick_dkdv[(triton.cdiv(T, BLOCK_N), B * H)](q, k, v, grad_out, used, dk, dv, *sizes, **tiles, num_warps=warps)
    return dq, dk, dv


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "T": 64, "D": 32},
    {"B": 2, "H": 1, "T": 53, "D": 20},
    {"B": 1, "H": 2, "T": 40, "D": 16, "dtype": "bfloat16"},
)
BENCH = ({"B": 2, "H": 16, "T": 2048, "D": 64, "dtype": "bfloat16"},)


def make_args(B, H, T, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(B, H, T, D, generator=g).to(device, getattr(torch, dtype)) for _ in range(3))


def reference(q, k, v):
    z = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    seen = torch.ones(z.shape[-2:], dtype=torch.bool, device=q.device).tril(-1)
    spent = torch.nn.functional.softplus(z) * seen
    later = spent.flip(-1).cumsum(-1).flip(-1)
    return (z - later).masked_fill(~seen, float("-inf")).exp().to(v.dtype) @ v
