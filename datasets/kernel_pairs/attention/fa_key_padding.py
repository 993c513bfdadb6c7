"""Attention to padded keys: each sequence has its own number of keys, and every loop over keys ends there.

The lengths bound, they do not mask: whole key tiles run without a comparison, one last tile is masked, and padding
behind it is never loaded. dk and dv of padding are zeros that somebody has to write: in the launch over key tiles a
program behind the length stores zeros and leaves, which spares the fill of two buffers that would mostly be
overwritten. A sequence without keys gives zeros. The heads of a sequence are processed by length: programs of
the longest sequences start first, through an order computed on the device.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "fa_key_padding",
    "family": "attention",
    "op": "padded_attention",
    "schema": 1,
    "techniques": (
        "varlen", "masking", "saved-lse", "delta-preprocess", "loop-swap", "owner-grid", "recompute",
        "strided-cotangent",
    ),
    "saves": ("o: fp32 or bf16 or fp16 (B, T, H, D)", "lse: fp32 (B, H, T)", "order: i64 (B,)"),
    "grads": ("q", "k", "v"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}  # fmt: skip


# --- forward ---
@triton.jit
def _sequence(Order, H):
    """(sequence, head) of this program on axis 0: sequences from long to short."""
    return tl.load(Order + tl.program_id(0) // H), tl.program_id(0) % H


@triton.jit
def _whole(X, first, s_t, s_d, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows that all exist."""
    t = first + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    at = t[:, None].to(tl.int64) * s_t + d[None, :] * s_d
    if BLOCK_D == D:
        return tl.load(X + at)
    return tl.load(X + at, mask=d[None, :] < D, other=0.0)


@triton.jit
def _partial(X, first, end, s_t, s_d, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    t = first + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    inside = (t[:, None] < end) & (d[None, :] < D)
    return tl.load(X + t[:, None].to(tl.int64) * s_t + d[None, :] * s_d, mask=inside, other=0.0)


@triton.jit
def _update(s, v, top, norm, acc):
    higher = tl.maximum(top, tl.max(s, 1))
    p = tl.exp2(s - higher[:, None])
    fade = tl.exp2(top - higher)
    return higher, norm * fade + tl.sum(p, 1), tl.dot(p.to(v.dtype), v, acc * fade[:, None])


@triton.jit
def _padded_fwd(
    Q, K, V, Lengths, Order, Out, LSE, H, T, S, scale_log2, D: tl.constexpr, BLOCK_D: tl.constexpr,
    OWN: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    batch, head = _sequence(Order, H)
    length = tl.load(Lengths + batch)
    first = tl.program_id(1) * OWN
    K += (batch * S * H + head) * D
    V += (batch * S * H + head) * D
    q = _partial(Q + (batch * T * H + head) * D, first, T, H * D, 1, D, OWN, BLOCK_D)
    top = tl.full((OWN,), float("-inf"), tl.float32)
    norm = tl.zeros((OWN,), tl.float32)
    acc = tl.zeros((OWN, BLOCK_D), tl.float32)
    whole = length // STEP * STEP
    for start in range(0, whole, STEP):
        s = tl.dot(q, tl.trans(_whole(K, start, H * D, 1, D, STEP, BLOCK_D))) * scale_log2
        top, norm, acc = _update(s, _whole(V, start, H * D, 1, D, STEP, BLOCK_D), top, norm, acc)
    if whole < length:
        s = tl.dot(q, tl.trans(_partial(K, whole, length, H * D, 1, D, STEP, BLOCK_D))) * scale_log2
        s = tl.where((whole + tl.arange(0, STEP))[None, :] < length, s, float("-inf"))
        top, norm, acc = _update(s, _partial(V, whole, length, H * D, 1, D, STEP, BLOCK_D), top, norm, acc)
    # Without a key nothing was added.
    norm = tl.where(norm == 0.0, 1.0, norm)
    m = first + tl.arange(0, OWN)
    d = tl.arange(0, BLOCK_D)
    at = ((batch * T + m[:, None]) * H + head) * D + d[None, :]
    tl.store(Out + at, acc / norm[:, None], mask=(m[:, None] < T) & (d[None, :] < D))
    tl.store(LSE + (batch * H + head) * T + m, top + tl.log2(norm), mask=m < T)


def _tiles(rows, q):
    sizes = {"D": q.shape[3], "BLOCK_D": max(16, triton.next_power_of_2(q.shape[3]))}
    if rows <= 256:
        return sizes | {"OWN": 32, "STEP": 16, "num_warps": 4}
    if q.element_size() == 4:
        return sizes | {"OWN": 64, "STEP": 32, "num_warps": 8}
    return sizes | {"OWN": 128, "STEP": 64 if q.shape[3] <= 64 else 32, "num_warps": 8}


def forward(q, k, v, lengths):
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    (B, T, H, D), S = q.shape, k.shape[1]
    o = torch.empty_like(q)
    lse = torch.empty(B, H, T, device=q.device, dtype=torch.float32)
    order = lengths.argsort(descending=True)
    tiles = _tiles(T, q)
    _padded_fwd[(B * H, triton.cdiv(T, tiles["OWN"]))](
        q, k, v, lengths, order, o, lse, H, T, S, D**-0.5 * 1.4426950408889634, **tiles
    )
    return o, (q, k, v, lengths, o, lse, order)


# --- backward ---
@triton.jit
def _padded_dq(
    Q, K, V, Lengths, Order, Out, DO, LSE, Delta, DQ, H, T, S, do_b, do_t, do_h, do_d, scale, scale_log2,
    D: tl.constexpr, BLOCK_D: tl.constexpr, OWN: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    batch, head = _sequence(Order, H)
    length = tl.load(Lengths + batch)
    first = tl.program_id(1) * OWN
    base = (batch * T * H + head) * D
    K += (batch * S * H + head) * D
    V += (batch * S * H + head) * D
    q = _partial(Q + base, first, T, H * D, 1, D, OWN, BLOCK_D)
    o = _partial(Out + base, first, T, H * D, 1, D, OWN, BLOCK_D)
    do = _partial(DO + batch * do_b + head.to(tl.int64) * do_h, first, T, do_t, do_d, D, OWN, BLOCK_D)
    m = first + tl.arange(0, OWN)
    row = (batch * H + head) * T + m
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(Delta + row, delta, mask=m < T)
    lse = tl.load(LSE + row, mask=m < T, other=float("inf"))
    dq = tl.zeros((OWN, BLOCK_D), tl.float32)
    whole = length // STEP * STEP
    for start in range(0, whole, STEP):
        k = _whole(K, start, H * D, 1, D, STEP, BLOCK_D)
        p = tl.exp2(tl.dot(q, tl.trans(k)) * scale_log2 - lse[:, None])
        ds = p * (tl.dot(do, tl.trans(_whole(V, start, H * D, 1, D, STEP, BLOCK_D))) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    if whole < length:
        k = _partial(K, whole, length, H * D, 1, D, STEP, BLOCK_D)
        s = tl.dot(q, tl.trans(k)) * scale_log2 - lse[:, None]
        p = tl.exp2(tl.where((whole + tl.arange(0, STEP))[None, :] < length, s, float("-inf")))
        ds = p * (tl.dot(do, tl.trans(_partial(V, whole, length, H * D, 1, D, STEP, BLOCK_D))) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    d = tl.arange(0, BLOCK_D)
    at = base + m[:, None].to(tl.int64) * (H * D) + d[None, :]
    tl.store(DQ + at, dq * scale, mask=(m[:, None] < T) & (d[None, :] < D))


@triton.jit
def _padded_dkdv(
    Q, K, V, Lengths, Order, DO, LSE, Delta, DK, DV, H, T, S, do_b, do_t, do_h, do_d, scale, scale_log2,
    D: tl.constexpr, BLOCK_D: tl.constexpr, OWN: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    batch, head = _sequence(Order, H)
    length = tl.load(Lengths + batch)
    first = tl.program_id(1) * OWN
    n = first + tl.arange(0, OWN)
    d = tl.arange(0, BLOCK_D)
    at = ((batch * S + n[:, None]) * H + head) * D + d[None, :]
    inside = (n[:, None] < S) & (d[None, :] < D)
    if first >= length:
        nothing = tl.zeros((OWN, BLOCK_D), DK.dtype.element_ty)
        tl.store(DK + at, nothing, mask=inside)
        tl.store(DV + at, nothing, mask=inside)
        return
    k = _partial(K + (batch * S * H + head) * D, first, length, H * D, 1, D, OWN, BLOCK_D)
    v = _partial(V + (batch * S * H + head) * D, first, length, H * D, 1, D, OWN, BLOCK_D)
    Q += (batch * T * H + head) * D
    DO += batch * do_b + head.to(tl.int64) * do_h
    row = (batch * H + head) * T
    dk = tl.zeros((OWN, BLOCK_D), tl.float32)
    dv = tl.zeros((OWN, BLOCK_D), tl.float32)
    for start in range(0, T, STEP):
        m = start + tl.arange(0, STEP)
        q = _partial(Q, start, T, H * D, 1, D, STEP, BLOCK_D)
        do = _partial(DO, start, T, do_t, do_d, D, STEP, BLOCK_D)
        lse = tl.load(LSE + row + m, mask=m < T, other=float("inf"))
        delta = tl.load(Delta + row + m, mask=m < T, other=0.0)
        p = tl.exp2(tl.dot(k, tl.trans(q)) * scale_log2 - lse[None, :])
        dv = tl.dot(p.to(do.dtype), do, dv)
        ds = p * (tl.dot(v, tl.trans(do)) - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk)
    # A row of padding inside the last tile has gathered sums of its own, which nothing else has seen.
    real = (n < length)[:, None]
    tl.store(DK + at, tl.where(real, dk * scale, 0.0), mask=inside)
    tl.store(DV + at, tl.where(real, dv, 0.0), mask=inside)


def backward(saved, grad_o, needs=None):
    q, k, v, lengths, o, lse, order = saved
    _, need_k, need_v = needs or (True, True, True)
    (B, T, H, D), S = q.shape, k.shape[1]
    sizes = (H, T, S, *grad_o.stride(), D**-0.5, D**-0.5 * 1.4426950408889634)
    dq, delta = torch.empty_like(q), torch.empty_like(lse)
    tiles = _tiles(T, q)
    _padded_dq[(B * H, triton.cdiv(T, tiles["OWN"]))](
        q, k, v, lengths, order, o, grad_o, lse, delta, dq, *sizes, **tiles
    )
    if not (need_k or need_v):
        return dq, None, None
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    tiles = _tiles(S, q)
    _padded_dkdv[(B * H, triton.cdiv(S, tiles["OWN"]))](
        q, k, v, lengths, order, grad_o, lse, delta, dk, dv, *sizes, **tiles, num_stages=4
    )
    return dq, dk, dv


# --- check ---
SWEEP = (
    {"B": 2, "T": 40, "S": 64, "H": 2, "D": 16},
    {"B": 4, "T": 21, "S": 75, "H": 1, "D": 20, "dtype": "float16"},
    {"B": 2, "T": 33, "S": 48, "H": 1, "D": 16, "dtype": "bfloat16"},
)
BENCH = ({"B": 16, "T": 1024, "S": 2048, "H": 16, "D": 64, "dtype": "bfloat16"},)


def make_args(B, T, S, H, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, n, H, D, generator=g).to(device, getattr(torch, dtype)) for n in (T, S, S))
    lengths = torch.randint(1, S + 1, (B,), generator=g)
    # One sequence is padding as a whole.
    lengths[-1] = 0
    return q, k, v, lengths.to(device, torch.int32)


def reference(q, k, v, lengths):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    keep = torch.arange(k.shape[2], device=q.device)[None, :] < lengths[:, None]
    # Without keys the softmax is over nothing: such a sequence looks at its first key, and that is taken out again.
    some = lengths > 0
    first_only = torch.nn.functional.one_hot(torch.zeros_like(lengths).long(), k.shape[2]).bool()
    seen = torch.where(some[:, None], keep, first_only)[:, None, None, :]
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    return (o * some[:, None, None, None]).transpose(1, 2)
