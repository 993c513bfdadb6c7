"""Causal attention behind a learned prefix of keys and values, one for the whole batch: its gradient reduces over it.

Every query of every sequence sees all M prefix rows, then its own past, in one softmax. Keys have B * H owners, each
with the queries behind it; the prefix has H owners only, but B * T queries each. Its launch therefore flattens batch
and query tiles to one walk, splits that until the GPU is full, and leaves one partial prefix gradient per split. The
prefix needs no mask but its end, and no causal bound, so its loops stay apart from those of the sequence.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "memory_kv_prefix",
    "family": "attention_special",
    "op": "prefix_attention",
    "schema": 1,
    "techniques": (
        "broadcast-reduction", "two-stage-partials", "split-k", "owner-grid", "saved-lse", "causal-bounds",
        "recompute", "strided-cotangent",
    ),
    "saves": ("o: fp32 or bf16 (B, H, T, D)", "lse: fp32 (B, H, T)"),
    "grads": ("q", "k", "v", "prefix_k", "prefix_v"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}  # fmt: skip


# --- forward ---
@triton.jit
def _rows(X, t, end, s_t, s_d, D: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    inside = (t[:, None] < end) & (d[None, :] < D)
    return tl.load(X + t[:, None].to(tl.int64) * s_t + d[None, :] * s_d, mask=inside, other=0.0)


@triton.jit
def _absorb(s, v, top, norm, acc):
    """One step of the running softmax: scores s (M, N) of values v (N, D)."""
    higher = tl.maximum(top, tl.max(s, 1))
    p = tl.exp2(s - higher[:, None])
    fade = tl.exp2(top - higher)
    return higher, norm * fade + tl.sum(p, 1), tl.dot(p.to(v.dtype), v, acc * fade[:, None])


@triton.jit
def _prefixed_fwd(
    Q, K, V, PK, PV, Out, LSE, H, T, M, scale_log2, D: tl.constexpr, BLOCK_D: tl.constexpr,
    OWN: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    K += head * T * D
    V += head * T * D
    PK += head % H * M * D
    PV += head % H * M * D
    m = tile * OWN + tl.arange(0, OWN)
    q = _rows(Q + head * T * D, m, T, D, 1, D, BLOCK_D)
    top = tl.full((OWN,), float("-inf"), tl.float32)
    norm = tl.zeros((OWN,), tl.float32)
    acc = tl.zeros((OWN, BLOCK_D), tl.float32)
    for start in range(0, M, STEP):
        n = start + tl.arange(0, STEP)
        s = tl.dot(q, tl.trans(_rows(PK, n, M, D, 1, D, BLOCK_D))) * scale_log2
        s = tl.where(n[None, :] < M, s, float("-inf"))
        top, norm, acc = _absorb(s, _rows(PV, n, M, D, 1, D, BLOCK_D), top, norm, acc)
    for start in range(0, tl.minimum(tile * OWN + OWN, T), STEP):
        n = start + tl.arange(0, STEP)
        s = tl.dot(q, tl.trans(_rows(K, n, T, D, 1, D, BLOCK_D))) * scale_log2
        s = tl.where(m[:, None] >= n[None, :], s, float("-inf"))
        top, norm, acc = _absorb(s, _rows(V, n, T, D, 1, D, BLOCK_D), top, norm, acc)
    d = tl.arange(0, BLOCK_D)
    at = (head * T + m[:, None]) * D + d[None, :]
    tl.store(Out + at, acc / norm[:, None], mask=(m[:, None] < T) & (d[None, :] < D))
    tl.store(LSE + head * T + m, top + tl.log2(norm), mask=m < T)


def _tiles(q):
    T, D = q.shape[2:]
    sizes = {"D": D, "BLOCK_D": max(16, triton.next_power_of_2(D))}
    if T <= 256:
        return sizes | {"OWN": 32, "STEP": 16, "num_warps": 4}
    if q.element_size() == 4:
        return sizes | {"OWN": 64, "STEP": 32, "num_warps": 8}
    return sizes | {"OWN": 128, "STEP": 64 if D <= 64 else 32, "num_warps": 8}


def forward(q, k, v, prefix_k, prefix_v):
    q, k, v, prefix_k, prefix_v = (x.contiguous() for x in (q, k, v, prefix_k, prefix_v))
    (B, H, T, D), M = q.shape, prefix_k.shape[1]
    o = torch.empty_like(q)
    lse = torch.empty(B, H, T, device=q.device, dtype=torch.float32)
    tiles = _tiles(q)
    _prefixed_fwd[(triton.cdiv(T, tiles["OWN"]), B * H)](
        q, k, v, prefix_k, prefix_v, o, lse, H, T, M, D**-0.5 * 1.4426950408889634, **tiles
    )
    return o, (q, k, v, prefix_k, prefix_v, o, lse)


# --- backward ---
@triton.jit
def _row_deltas(
    Out, DO, Delta, H, T, do_b, do_h, do_t, do_d, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr
):
    head = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o = _rows(Out + head * T * D, m, T, D, 1, D, BLOCK_D).to(tl.float32)
    do = _rows(DO + head // H * do_b + head % H * do_h, m, T, do_t, do_d, D, BLOCK_D).to(tl.float32)
    tl.store(Delta + head * T + m, tl.sum(o * do, 1), mask=m < T)


@triton.jit
def _prefixed_dq(
    Q, K, V, PK, PV, DO, LSE, Delta, DQ, H, T, M, do_b, do_h, do_t, do_d, scale, scale_log2,
    D: tl.constexpr, BLOCK_D: tl.constexpr, OWN: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    K += head * T * D
    V += head * T * D
    PK += head % H * M * D
    PV += head % H * M * D
    m = tile * OWN + tl.arange(0, OWN)
    q = _rows(Q + head * T * D, m, T, D, 1, D, BLOCK_D)
    do = _rows(DO + head // H * do_b + head % H * do_h, m, T, do_t, do_d, D, BLOCK_D)
    lse = tl.load(LSE + head * T + m, mask=m < T, other=float("inf"))
    delta = tl.load(Delta + head * T + m, mask=m < T, other=0.0)
    dq = tl.zeros((OWN, BLOCK_D), tl.float32)
    for start in range(0, M, STEP):
        n = start + tl.arange(0, STEP)
        k = _rows(PK, n, M, D, 1, D, BLOCK_D)
        # Rows past M are zero keys: whatever weight they get, they add nothing to dq.
        p = tl.exp2(tl.where(n[None, :] < M, tl.dot(q, tl.trans(k)) * scale_log2 - lse[:, None], float("-inf")))
        ds = p * (tl.dot(do, tl.trans(_rows(PV, n, M, D, 1, D, BLOCK_D))) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    for start in range(0, tl.minimum(tile * OWN + OWN, T), STEP):
        n = start + tl.arange(0, STEP)
        k = _rows(K, n, T, D, 1, D, BLOCK_D)
        p = tl.exp2(tl.dot(q, tl.trans(k)) * scale_log2 - lse[:, None])
        p = tl.where(m[:, None] >= n[None, :], p, 0.0)
        ds = p * (tl.dot(do, tl.trans(_rows(V, n, T, D, 1, D, BLOCK_D))) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    d = tl.arange(0, BLOCK_D)
    at = (head * T + m[:, None]) * D + d[None, :]
    tl.store(DQ + at, dq * scale, mask=(m[:, None] < T) & (d[None, :] < D))


@triton.jit
def _prefixed_dkdv(
    Q, K, V, DO, LSE, Delta, DK, DV, H, T, do_b, do_h, do_t, do_d, scale, scale_log2,
    D: tl.constexpr, BLOCK_D: tl.constexpr, OWN: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    # The saved lse covers prefix and sequence: seen from a key of the sequence, the prefix is not there.
    first = tl.program_id(0) * OWN
    head = tl.program_id(1).to(tl.int64)
    DO += head // H * do_b + head % H * do_h
    n = first + tl.arange(0, OWN)
    k = _rows(K + head * T * D, n, T, D, 1, D, BLOCK_D)
    v = _rows(V + head * T * D, n, T, D, 1, D, BLOCK_D)
    dk = tl.zeros((OWN, BLOCK_D), tl.float32)
    dv = tl.zeros((OWN, BLOCK_D), tl.float32)
    for start in range(first, T, STEP):
        m = start + tl.arange(0, STEP)
        q = _rows(Q + head * T * D, m, T, D, 1, D, BLOCK_D)
        do = _rows(DO, m, T, do_t, do_d, D, BLOCK_D)
        lse = tl.load(LSE + head * T + m, mask=m < T, other=float("inf"))
        delta = tl.load(Delta + head * T + m, mask=m < T, other=0.0)
        p = tl.exp2(tl.dot(k, tl.trans(q)) * scale_log2 - lse[None, :])
        p = tl.where(m[None, :] >= n[:, None], p, 0.0)
        dv = tl.dot(p.to(do.dtype), do, dv)
        ds = p * (tl.dot(v, tl.trans(do)) - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk)
    d = tl.arange(0, BLOCK_D)
    at = (head * T + n[:, None]) * D + d[None, :]
    inside = (n[:, None] < T) & (d[None, :] < D)
    tl.store(DK + at, dk * scale, mask=inside)
    tl.store(DV + at, dv, mask=inside)


@triton.jit
def _prefix_grads(
    Q, PK, PV, DO, LSE, Delta, Parts, B, H, T, M, steps_each, do_b, do_h, do_t, do_d, scale, scale_log2,
    D: tl.constexpr, BLOCK_D: tl.constexpr, OWN: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(1)
    head = tl.program_id(2)
    n = tl.program_id(0) * OWN + tl.arange(0, OWN)
    k = _rows(PK + head * M * D, n, M, D, 1, D, BLOCK_D)
    v = _rows(PV + head * M * D, n, M, D, 1, D, BLOCK_D)
    dk = tl.zeros((OWN, BLOCK_D), tl.float32)
    dv = tl.zeros((OWN, BLOCK_D), tl.float32)
    tiles = tl.cdiv(T, STEP)
    # All query tiles of all sequences in one walk. Queries past T are zero rows of q and do.
    for step in range(split * steps_each, tl.minimum((split + 1) * steps_each, B * tiles)):
        batch = (step // tiles).to(tl.int64)
        m = step % tiles * STEP + tl.arange(0, STEP)
        row = batch * H + head
        q = _rows(Q + row * T * D, m, T, D, 1, D, BLOCK_D)
        do = _rows(DO + batch * do_b + head * do_h, m, T, do_t, do_d, D, BLOCK_D)
        lse = tl.load(LSE + row * T + m, mask=m < T, other=float("inf"))
        delta = tl.load(Delta + row * T + m, mask=m < T, other=0.0)
        p = tl.exp2(tl.dot(k, tl.trans(q)) * scale_log2 - lse[None, :])
        dv = tl.dot(p.to(do.dtype), do, dv)
        ds = p * (tl.dot(v, tl.trans(do)) - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk)
    # Parts is (2, splits, H, M, D): dk, then dv.
    d = tl.arange(0, BLOCK_D)
    at = ((split * H + head) * M + n[:, None]) * D + d[None, :]
    inside = (n[:, None] < M) & (d[None, :] < D)
    tl.store(Parts + at, dk * scale, mask=inside)
    tl.store(Parts + tl.num_programs(1) * H * M * D + at, dv, mask=inside)


def backward(saved, grad_o, needs=None):
    q, k, v, prefix_k, prefix_v, o, lse = saved
    need_q, need_k, need_v, need_pk, need_pv = needs or (True,) * 5
    (B, H, T, D), M = q.shape, prefix_k.shape[1]
    strides, scale = grad_o.stride(), D**-0.5
    scales = (scale, scale * 1.4426950408889634)
    tiles = _tiles(q)
    delta = torch.empty_like(lse)
    _row_deltas[(triton.cdiv(T, 64), B * H)](o, grad_o, delta, H, T, *strides, D=D, BLOCK_D=tiles["BLOCK_D"], ROWS=64)
    dq = dk = dv = dprefix_k = dprefix_v = None
    if need_q:
        dq = torch.empty_like(q)
        _prefixed_dq[(triton.cdiv(T, tiles["OWN"]), B * H)](
            q, k, v, prefix_k, prefix_v, grad_o, lse, delta, dq, H, T, M, *strides, *scales, **tiles
        )
    if need_k or need_v:
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        _prefixed_dkdv[(triton.cdiv(T, tiles["OWN"]), B * H)](
            q, k, v, grad_o, lse, delta, dk, dv, H, T, *strides, *scales, **tiles
        )
    if need_pk or need_pv:
        tiles |= {"OWN": min(tiles["OWN"], max(16, triton.next_power_of_2(M)))}
        blocks, steps = triton.cdiv(M, tiles["OWN"]), B * triton.cdiv(T, tiles["STEP"])
        # Two programs for each of 132 processors, and at least four query tiles for each program.
        splits = max(1, min(steps // 4, 264 // (blocks * H)))
        steps_each = triton.cdiv(steps, splits)
        parts = torch.empty(2, triton.cdiv(steps, steps_each), H, M, D, device=q.device, dtype=torch.float32)
        _prefix_grads[(blocks, parts.shape[1], H)](
            q, prefix_k, prefix_v, grad_o, lse, delta, parts, B, H, T, M, steps_each, *strides, *scales, **tiles
        )
        dprefix_k, dprefix_v = parts.sum(1).to(prefix_k.dtype)
    return dq, dk, dv, dprefix_k, dprefix_v


# --- check ---
SWEEP = (
    {"B": 2, "H": 2, "T": 48, "M": 16, "D": 16},
    {"B": 3, "H": 1, "T": 53, "M": 21, "D": 20},
    {"B": 2, "H": 2, "T": 40, "M": 5, "D": 32, "dtype": "bfloat16"},
)
BENCH = ({"B": 4, "H": 16, "T": 2048, "M": 128, "D": 64, "dtype": "bfloat16"},)


def make_args(B, H, T, M, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = (*((B, H, T, D) for _ in range(3)), *((H, M, D) for _ in range(2)))
    return tuple(torch.randn(shape, generator=g).to(device, getattr(torch, dtype)) for shape in shapes)


def reference(q, k, v, prefix_k, prefix_v):
    B, T, M = q.shape[0], q.shape[2], prefix_k.shape[1]
    k, v = (torch.cat((p.expand(B, -1, -1, -1), x), 2) for p, x in ((prefix_k, k), (prefix_v, v)))
    seen = torch.ones(T, M + T, dtype=torch.bool, device=q.device).tril(M)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
