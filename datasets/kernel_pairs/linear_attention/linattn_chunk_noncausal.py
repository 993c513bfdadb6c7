"""Linear attention over all keys, phi(q) (phi(k)^T v) with phi = elu + 1: the adjoint keeps the cheap order.

With S = phi(k)^T v of shape (K, V), small enough to stay on chip:

    dphi(q) = do S^T    dS = phi(q)^T do    dphi(k) = v dS^T    dv = phi(k) dS

Queries are read once for dq and for partial sums of dS, keys and values once for dk and dv: two launches, no (T, T)
product anywhere. phi'(x) = min(phi(x), 1), so that phi is all the epilogue needs.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "linattn_chunk_noncausal",
    "family": "linear_attention",
    "op": "linear_attention",
    "schema": 1,
    "techniques": ("split-k", "two-stage-partials", "prologue-fusion", "epilogue-fusion", "strided-cotangent"),
    "saves": ("state: fp32 (B, H, K, V)",),
    "grads": ("q", "k", "v"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _phi(x):
    x = x.to(tl.float32)
    return tl.where(x > 0, x + 1.0, tl.exp(tl.minimum(x, 0.0)))


@triton.jit
def _key_value_sums(
    K, V, Parts, T, DK, DV, rows_each, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr
):
    # The share of phi(k)^T v that one split of the sequence contributes.
    head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(0)
    i = tl.arange(0, BLOCK_K)
    j = tl.arange(0, BLOCK_V)
    acc = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    end = tl.minimum((split + 1) * rows_each, T)
    for start in range(split * rows_each, end, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        in_k = (t[:, None] < end) & (i[None, :] < DK)
        k = tl.load(K + (head * T + t[:, None]) * DK + i[None, :], mask=in_k, other=0.0)
        in_v = (t[:, None] < end) & (j[None, :] < DV)
        v = tl.load(V + (head * T + t[:, None]) * DV + j[None, :], mask=in_v, other=0.0)
        # phi(0) is 1, but rows past the end meet v = 0, and columns past DK are never stored.
        acc = tl.dot(tl.trans(_phi(k).to(v.dtype)), v, acc)
    at = ((head * tl.num_programs(0) + split) * DK + i[:, None]) * DV + j[None, :]
    tl.store(Parts + at, acc, mask=(i[:, None] < DK) & (j[None, :] < DV))


@triton.jit
def _apply_state(Q, State, Out, T, DK, DV, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):
    head = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    i = tl.arange(0, BLOCK_K)
    j = tl.arange(0, BLOCK_V)
    in_q = (t[:, None] < T) & (i[None, :] < DK)
    q = tl.load(Q + (head * T + t[:, None]) * DK + i[None, :], mask=in_q, other=0.0)
    in_s = (i[:, None] < DK) & (j[None, :] < DV)
    state = tl.load(State + (head * DK + i[:, None]) * DV + j[None, :], mask=in_s, other=0.0)
    out = tl.dot(_phi(q).to(q.dtype), state.to(q.dtype))
    tl.store(Out + (head * T + t[:, None]) * DV + j[None, :], out, mask=(t[:, None] < T) & (j[None, :] < DV))


def _tiles(q, v):
    """(BLOCK_T, BLOCK_K, BLOCK_V): the state takes whole K and V, so both stay at or below 128."""
    block_t = 16 if q.shape[2] <= 256 else 128 // q.element_size()
    return block_t, *(max(16, triton.next_power_of_2(x.shape[-1])) for x in (q, v))


def _splits(heads, T, block_t):
    """(programs per head, rows of each): two waves on 132 processors together."""
    splits = max(1, min(triton.cdiv(T, block_t), triton.cdiv(264, heads)))
    rows = triton.cdiv(triton.cdiv(T, splits), block_t) * block_t
    return triton.cdiv(T, rows), rows


def forward(q, k, v):
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    (B, H, T, DK), DV = q.shape, v.shape[-1]
    S = k.shape[2]
    BT, BK, BV = _tiles(q, v)
    warps = 8 if BK * BV > 4096 else 4
    splits, rows = _splits(B * H, S, BT)
    parts = torch.empty(B, H, splits, DK, DV, device=q.device, dtype=torch.float32)
    _key_value_sums[(splits, B * H)](k, v, parts, S, DK, DV, rows, BLOCK_T=BT, BLOCK_K=BK, BLOCK_V=BV, num_warps=warps)
    state = parts.sum(2)
    out = torch.empty(B, H, T, DV, device=v.device, dtype=v.dtype)
    _apply_state[(triton.cdiv(T, BT), B * H)](
        q, state, out, T, DK, DV, BLOCK_T=BT, BLOCK_K=BK, BLOCK_V=BV, num_warps=warps
    )
    return out, (q, k, v, state)


# --- backward ---
@triton.jit
def _query_side(
    Q, DO, State, DQ, Parts, H, T, DK, DV, rows_each, do_b, do_h, do_t, do_v,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(0)
    i = tl.arange(0, BLOCK_K)
    j = tl.arange(0, BLOCK_V)
    in_s = (i[:, None] < DK) & (j[None, :] < DV)
    DO += head // H * do_b + head % H * do_h
    state = tl.load(State + (head * DK + i[:, None]) * DV + j[None, :], mask=in_s, other=0.0).to(Q.dtype.element_ty)
    dstate = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    end = tl.minimum((split + 1) * rows_each, T)
    for start in range(split * rows_each, end, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        in_q = (t[:, None] < end) & (i[None, :] < DK)
        at = (head * T + t[:, None]) * DK + i[None, :]
        phi = _phi(tl.load(Q + at, mask=in_q, other=0.0))
        in_o = (t[:, None] < end) & (j[None, :] < DV)
        do = tl.load(DO + t[:, None].to(tl.int64) * do_t + j[None, :] * do_v, mask=in_o, other=0.0)
        dphi = tl.dot(do, tl.trans(state))
        tl.store(DQ + at, dphi * tl.minimum(phi, 1.0), mask=in_q)
        dstate = tl.dot(tl.trans(phi.to(do.dtype)), do, dstate)
    at = ((head * tl.num_programs(0) + split) * DK + i[:, None]) * DV + j[None, :]
    tl.store(Parts + at, dstate, mask=in_s)


@triton.jit
def _key_side(K, V, DState, DKey, DVal, T, DK, DV, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):
    head = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    i = tl.arange(0, BLOCK_K)
    j = tl.arange(0, BLOCK_V)
    in_s = (i[:, None] < DK) & (j[None, :] < DV)
    dstate = tl.load(DState + (head * DK + i[:, None]) * DV + j[None, :], mask=in_s, other=0.0).to(K.dtype.element_ty)
    in_k = (t[:, None] < T) & (i[None, :] < DK)
    in_v = (t[:, None] < T) & (j[None, :] < DV)
    at_k = (head * T + t[:, None]) * DK + i[None, :]
    at_v = (head * T + t[:, None]) * DV + j[None, :]
    phi = _phi(tl.load(K + at_k, mask=in_k, other=0.0))
    v = tl.load(V + at_v, mask=in_v, other=0.0)
    tl.store(DKey + at_k, tl.dot(v, tl.trans(dstate)) * tl.minimum(phi, 1.0), mask=in_k)
    tl.store(DVal + at_v, tl.dot(phi.to(v.dtype), dstate), mask=in_v)


def backward(saved, grad_out, needs=None):
    q, k, v, state = saved
    (B, H, T, DK), DV = q.shape, v.shape[-1]
    S = k.shape[2]
    _, need_k, need_v = needs or (True, True, True)
    BT, BK, BV = _tiles(q, v)
    warps = 8 if BK * BV > 4096 else 4
    splits, rows = _splits(B * H, T, BT)
    dq = torch.empty_like(q)
    parts = torch.empty(B, H, splits, DK, DV, device=q.device, dtype=torch.float32)
    _query_side[(splits, B * H)](
        q, grad_out, state, dq, parts, H, T, DK, DV, rows, *grad_out.stride(),
        BLOCK_T=BT, BLOCK_K=BK, BLOCK_V=BV, num_warps=warps,
    )  # fmt: skip
    if not (need_k or need_v):
        return dq, None, None
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    _key_side[(triton.cdiv(S, BT), B * H)](
        k, v, parts.sum(2), dk, dv, S, DK, DV, BLOCK_T=BT, BLOCK_K=BK, BLOCK_V=BV, num_warps=warps
    )
    return dq, dk, dv


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "T": 64, "S": 48, "K": 16, "V": 32},
    {"B": 2, "H": 3, "T": 37, "S": 53, "K": 12, "V": 20},
    {"B": 1, "H": 1, "T": 80, "S": 75, "K": 24, "V": 16, "dtype": "bfloat16"},
)
BENCH = ({"B": 4, "H": 16, "T": 4096, "S": 4096, "K": 64, "V": 64, "dtype": "bfloat16"},)


def make_args(B, H, T, S, K, V, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = ((B, H, T, K), (B, H, S, K), (B, H, S, V))
    return tuple(torch.randn(shape, generator=g).to(device, getattr(torch, dtype)) for shape in shapes)


def reference(q, k, v):
    phi_q, phi_k = ((torch.nn.functional.elu(x.float()) + 1).to(x.dtype) for x in (q, k))
    return phi_q @ (phi_k.transpose(-1, -2) @ v)
