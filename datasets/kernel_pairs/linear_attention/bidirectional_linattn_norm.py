"""Normalised linear attention over all keys: the quotient turns into one more column of the cotangent.

    o_i = phi(q_i)^T S / (phi(q_i) . z),    S = sum of phi(k_j) v_j^T,    z = sum of phi(k_j),    phi = elu + 1

With n_i the divisor, the numerator's cotangent is do_i / n_i and the divisor's is -(do_i . o_i) / n_i. A query pass
applies both row by row, gives dq, and adds its share of dS and dz to fp32 sums atomically, once per program; a key
pass reads the sums and gives dk and dv.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "bidirectional_linattn_norm",
    "family": "linear_attention",
    "op": "linear_attention",
    "schema": 1,
    "techniques": ("saved-statistics", "saved-output", "atomics", "split-k", "epilogue-fusion", "strided-cotangent"),
    "saves": (
        "o: fp32 or bf16 (B, T, H, V)", "divisor: fp32 (B, H, T)", "sums: fp32 (B, H, K, V)",
        "z: fp32 (B, H, K)",
    ),
    "grads": ("q", "k", "v"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
    "spills": "nine words of a query tile do not fit four warps, which are faster than eight",
}  # fmt: skip


# --- forward ---
@triton.jit
def _elu_plus_one(x, inside):
    # Zero outside, where phi(0) would be 1.
    x = x.to(tl.float32)
    return tl.where(inside, tl.where(x > 0, x + 1.0, tl.exp(tl.minimum(x, 0.0))), 0.0)


@triton.jit
def _sum_keys(
    K, V, Sums, Z, H, T, DK, DV, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr
):  # fmt: skip
    bh = tl.program_id(1).to(tl.int64)
    token, head = bh // H * T, bh % H
    i = tl.arange(0, BLOCK_K)
    j = tl.arange(0, BLOCK_V)
    sums = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    z = tl.zeros((BLOCK_K,), tl.float32)
    for start in range(tl.program_id(0) * BLOCK_T, T, tl.num_programs(0) * BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        in_k = (t[:, None] < T) & (i[None, :] < DK)
        in_v = (t[:, None] < T) & (j[None, :] < DV)
        row = (token + t[:, None]) * H + head
        phi = _elu_plus_one(tl.load(K + row * DK + i[None, :], mask=in_k, other=0.0), in_k)
        v = tl.load(V + row * DV + j[None, :], mask=in_v, other=0.0)
        sums = tl.dot(tl.trans(phi.to(v.dtype)), v, sums)
        z += tl.sum(phi, 0)
    in_s = (i[:, None] < DK) & (j[None, :] < DV)
    tl.atomic_add(Sums + (bh * DK + i[:, None]) * DV + j[None, :], sums, mask=in_s, sem="relaxed")
    tl.atomic_add(Z + bh * DK + i, z, mask=i < DK, sem="relaxed")


@triton.jit
def _divide(
    Q, Sums, Z, Out, Divisor, H, T, DK, DV, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr
):
    bh = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    i = tl.arange(0, BLOCK_K)
    j = tl.arange(0, BLOCK_V)
    row = (bh // H * T + t[:, None]) * H + bh % H
    in_q = (t[:, None] < T) & (i[None, :] < DK)
    phi = _elu_plus_one(tl.load(Q + row * DK + i[None, :], mask=in_q, other=0.0), in_q)
    in_s = (i[:, None] < DK) & (j[None, :] < DV)
    sums = tl.load(Sums + (bh * DK + i[:, None]) * DV + j[None, :], mask=in_s, other=0.0)
    z = tl.load(Z + bh * DK + i, mask=i < DK, other=0.0)
    # Rows past T have phi = 0, whose divisor would be 0.
    divisor = tl.where(t < T, tl.sum(phi * z[None, :], 1), 1.0)
    out = tl.dot(phi.to(Q.dtype.element_ty), sums.to(Q.dtype.element_ty)) / divisor[:, None]
    tl.store(Out + row * DV + j[None, :], out, mask=(t[:, None] < T) & (j[None, :] < DV))
    tl.store(Divisor + bh * T + t, divisor, mask=t < T)


def _blocks(q, v):
    """(BLOCK_T, BLOCK_K, BLOCK_V): the sums take whole K and V, so both stay at or below 128."""
    block_t = 16 if q.shape[1] <= 256 else 128 // q.element_size()
    return block_t, *(max(16, triton.next_power_of_2(x.shape[3])) for x in (q, v))


def forward(q, k, v):
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    (B, T, H, DK), S, DV = q.shape, k.shape[1], v.shape[3]
    BT, BK, BV = _blocks(q, v)
    tiles = {"BLOCK_T": BT, "BLOCK_K": BK, "BLOCK_V": BV, "num_warps": 8 if BK * BV > 4096 else 4}
    sums = torch.zeros(B, H, DK, DV, device=q.device, dtype=torch.float32)
    z = torch.zeros(B, H, DK, device=q.device, dtype=torch.float32)
    _sum_keys[(min(triton.cdiv(S, BT), triton.cdiv(264, B * H)), B * H)](k, v, sums, z, H, S, DK, DV, **tiles)
    o = torch.empty(B, T, H, DV, device=q.device, dtype=v.dtype)
    divisor = torch.empty(B, H, T, device=q.device, dtype=torch.float32)
    _divide[(triton.cdiv(T, BT), B * H)](q, sums, z, o, divisor, H, T, DK, DV, **tiles)
    return o, (q, k, v, o, divisor, sums, z)


# --- backward ---
@triton.jit
def _query_pass(
    Q, Out, Divisor, Sums, Z, DO, DQ, DSums, DZ, H, T, DK, DV, do_b, do_t, do_h, do_d,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    bh = tl.program_id(1).to(tl.int64)
    token, head = bh // H * T, bh % H
    i = tl.arange(0, BLOCK_K)
    j = tl.arange(0, BLOCK_V)
    DO += bh // H * do_b + head * do_h
    in_s = (i[:, None] < DK) & (j[None, :] < DV)
    s_at = (bh * DK + i[:, None]) * DV + j[None, :]
    sums = tl.load(Sums + s_at, mask=in_s, other=0.0).to(Q.dtype.element_ty)
    z = tl.load(Z + bh * DK + i, mask=i < DK, other=0.0)
    dsums = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    dz = tl.zeros((BLOCK_K,), tl.float32)
    for start in range(tl.program_id(0) * BLOCK_T, T, tl.num_programs(0) * BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        in_q = (t[:, None] < T) & (i[None, :] < DK)
        in_o = (t[:, None] < T) & (j[None, :] < DV)
        row = (token + t[:, None]) * H + head
        phi = _elu_plus_one(tl.load(Q + row * DK + i[None, :], mask=in_q, other=0.0), in_q)
        o = tl.load(Out + row * DV + j[None, :], mask=in_o, other=0.0).to(tl.float32)
        do = tl.load(DO + t[:, None].to(tl.int64) * do_t + j[None, :] * do_d, mask=in_o, other=0.0).to(tl.float32)
        divisor = tl.load(Divisor + bh * T + t, mask=t < T, other=1.0)
        dnumerator = do / divisor[:, None]
        ddivisor = -tl.sum(dnumerator * o, 1)
        dnumerator = dnumerator.to(Q.dtype.element_ty)
        dphi = tl.dot(dnumerator, tl.trans(sums)) + ddivisor[:, None] * z[None, :]
        tl.store(DQ + row * DK + i[None, :], dphi * tl.minimum(phi, 1.0), mask=in_q)
        dsums = tl.dot(tl.trans(phi.to(dnumerator.dtype)), dnumerator, dsums)
        dz += tl.sum(phi * ddivisor[:, None], 0)
    tl.atomic_add(DSums + s_at, dsums, mask=in_s, sem="relaxed")
    tl.atomic_add(DZ + bh * DK + i, dz, mask=i < DK, sem="relaxed")


@triton.jit
def _key_pass(
    K, V, DSums, DZ, DKey, DVal, H, T, DK, DV, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr
):
    bh = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    i = tl.arange(0, BLOCK_K)
    j = tl.arange(0, BLOCK_V)
    row = (bh // H * T + t[:, None]) * H + bh % H
    in_k = (t[:, None] < T) & (i[None, :] < DK)
    in_v = (t[:, None] < T) & (j[None, :] < DV)
    phi = _elu_plus_one(tl.load(K + row * DK + i[None, :], mask=in_k, other=0.0), in_k)
    v = tl.load(V + row * DV + j[None, :], mask=in_v, other=0.0)
    in_s = (i[:, None] < DK) & (j[None, :] < DV)
    dsums = tl.load(DSums + (bh * DK + i[:, None]) * DV + j[None, :], mask=in_s, other=0.0).to(v.dtype)
    dz = tl.load(DZ + bh * DK + i, mask=i < DK, other=0.0)
    dphi = tl.dot(v, tl.trans(dsums)) + dz[None, :]
    tl.store(DKey + row * DK + i[None, :], dphi * tl.minimum(phi, 1.0), mask=in_k)
    tl.store(DVal + row * DV + j[None, :], tl.dot(phi.to(v.dtype), dsums), mask=in_v)


def backward(saved, grad_o, needs=None):
    q, k, v, o, divisor, sums, z = saved
    _, need_k, need_v = needs or (True, True, True)
    (B, T, H, DK), S, DV = q.shape, k.shape[1], v.shape[3]
    BT, BK, BV = _blocks(q, v)
    tiles = {"BLOCK_T": BT, "BLOCK_K": BK, "BLOCK_V": BV, "num_warps": 4}
    dq, dsums, dz = torch.empty_like(q), torch.zeros_like(sums), torch.zeros_like(z)
    _query_pass[(min(triton.cdiv(T, BT), triton.cdiv(264, B * H)), B * H)](
        q, o, divisor, sums, z, grad_o, dq, dsums, dz, H, T, DK, DV, *grad_o.stride(), **tiles, num_stages=2
    )
    if not (need_k or need_v):
        return dq, None, None
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    _key_pass[(triton.cdiv(S, BT), B * H)](k, v, dsums, dz, dk, dv, H, S, DK, DV, **tiles)
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
    shapes = ((B, T, H, K), (B, S, H, K), (B, S, H, V))
    return tuple(torch.randn(shape, generator=g).to(device, getattr(torch, dtype)) for shape in shapes)


def reference(q, k, v):
    phi_q, phi_k = (torch.nn.functional.elu(x.float()) + 1 for x in (q, k))
    divisor = torch.einsum("bthk,bhk->bth", phi_q, phi_k.sum(1))
    phi_q, phi_k = phi_q.to(q.dtype), phi_k.to(k.dtype)
    sums = torch.einsum("bshk,bshv->bhkv", phi_k, v)
    return (torch.einsum("bthk,bhkv->bthv", phi_q, sums).float() / divisor[..., None]).to(v.dtype)
