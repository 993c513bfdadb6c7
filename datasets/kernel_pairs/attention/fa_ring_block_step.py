"""One step of ring attention: a visiting block of keys joins the running (o, lse), and its gradient needs only the new.

With L the old and L' the new log-sum-exp of a row, the step is o' = exp(L - L') o + sum over j of exp(s_j - L') v_j,
L' = log(exp(L) + sum over j of exp(s_j)). Backward, p_j = exp(s_j - L') is the block's share of the new softmax:

    ds_j = p_j (do' . v_j - do' . o' + dL'),    dL = w (do' . o - do' . o' + dL'),    do = w do',    w = exp(L - L')

so the block's gradients take the form of plain attention with a shifted delta. Around a ring every rank repeats this
step; since probabilities refer to what the row will have seen in the end, the dk and dv of a block are sums over ranks.
A rank's `shift` is how far its queries lie behind the block: tiles in the past need no mask, tiles ahead are skipped.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "fa_ring_block_step",
    "family": "attention",
    "op": "ring_attention_step",
    "schema": 1,
    "techniques": (
        "saved-lse", "saved-output", "delta-preprocess", "owner-grid", "loop-swap", "causal-bounds",
        "optional-cotangent",
    ),
    "saves": ("out: fp32 (B, H, T, D)", "new_lse: fp32 (B, H, T), natural logarithm"),
    "grads": ("q", "k", "v", "o", "lse"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}  # fmt: skip


# --- forward ---
@triton.jit
def _block_rows(X, row, first, length, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    t = first + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    return tl.load(X + (row + t[:, None]) * D + d[None, :], mask=(t[:, None] < length) & (d[None, :] < D), other=0.0)


@triton.jit
def _ring_join(
    Q, K, V, Old, LSE, Out, NewLSE, T, S, shift, scale, D: tl.constexpr,
    BLOCK_D: tl.constexpr, OWN: tl.constexpr, OTHER: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * OWN
    head = tl.program_id(1).to(tl.int64)
    m = first + tl.arange(0, OWN)
    d = tl.arange(0, BLOCK_D)
    q = _block_rows(Q, head * T, first, T, D, OWN, BLOCK_D)
    # The running state enters as one more key with score L and value o. A row that has seen nothing has L = -inf.
    top = tl.load(LSE + head * T + m, mask=m < T, other=0.0)
    norm = tl.where(top == float("-inf"), 0.0, 1.0)
    acc = _block_rows(Old, head * T, first, T, D, OWN, BLOCK_D) * norm[:, None]
    for start in range(0, tl.minimum(first + OWN + shift, S), OTHER):
        n = start + tl.arange(0, OTHER)
        k = _block_rows(K, head * S, start, S, D, OTHER, BLOCK_D)
        v = _block_rows(V, head * S, start, S, D, OTHER, BLOCK_D)
        s = tl.dot(q, tl.trans(k)) * scale
        if (start + OTHER > S) | (start + OTHER - 1 > first + shift):
            s = tl.where((n[None, :] < S) & (n[None, :] <= m[:, None] + shift), s, float("-inf"))
        raised = tl.maximum(top, tl.max(s, 1))
        # Where all is -inf any finite base will do.
        base = tl.where(raised == float("-inf"), 0.0, raised)
        p = tl.exp(s - base[:, None])
        fade = tl.exp(top - base)
        norm = norm * fade + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None])
        top = raised
    seen = norm > 0.0
    at = (head * T + m[:, None]) * D + d[None, :]
    tl.store(Out + at, acc / tl.where(seen, norm, 1.0)[:, None], mask=(m[:, None] < T) & (d[None, :] < D))
    tl.store(NewLSE + head * T + m, tl.where(seen, top + tl.log(norm), float("-inf")), mask=m < T)


def _tiles(q, length):
    """Rows of the owned tile and of a step, warps."""
    sizes = {"D": q.shape[3], "BLOCK_D": max(16, triton.next_power_of_2(q.shape[3]))}
    if length <= 512:
        return sizes | {"OWN": 32, "OTHER": 16, "num_warps": 4}
    if q.element_size() == 4:
        return sizes | {"OWN": 64, "OTHER": 32, "num_warps": 8}
    return sizes | {"OWN": 128, "OTHER": 64 if q.shape[3] <= 64 else 32, "num_warps": 8}


def forward(q, k, v, o, lse, shift):
    q, k, v, o, lse = (x.contiguous() for x in (q, k, v, o, lse))
    (B, H, T, D), S = q.shape, k.shape[2]
    out, new_lse = torch.empty_like(o), torch.empty_like(lse)
    tiles = _tiles(q, T)
    _ring_join[(triton.cdiv(T, tiles["OWN"]), B * H)](q, k, v, o, lse, out, new_lse, T, S, shift, D**-0.5, **tiles)
    return (out, new_lse), (q, k, v, o, lse, out, new_lse, shift)


# --- backward ---
@triton.jit
def _ring_state_grads(
    Old, LSE, Out, NewLSE, DOut, DNew, Delta, DO, DLSE, D: tl.constexpr, rows, HAS_DOUT: tl.constexpr,
    HAS_DNEW: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    # What the running state gets, and the delta of the block's rows.
    first = tl.program_id(0).to(tl.int64) * ROWS
    r = first + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    new_lse = tl.load(NewLSE + r, mask=r < rows, other=0.0)
    old_lse = tl.load(LSE + r, mask=r < rows, other=0.0)
    kept = tl.where(new_lse == float("-inf"), 0.0, tl.exp(old_lse - tl.where(new_lse == float("-inf"), 0.0, new_lse)))
    delta = tl.zeros((ROWS,), tl.float32)
    if HAS_DNEW:
        delta -= tl.load(DNew + r, mask=r < rows, other=0.0)
    ahead = tl.zeros((ROWS,), tl.float32)
    dout = tl.zeros((ROWS, BLOCK_D), tl.float32)
    if HAS_DOUT:
        dout = _block_rows(DOut, 0, first, rows, D, ROWS, BLOCK_D)
        delta += tl.sum(_block_rows(Out, 0, first, rows, D, ROWS, BLOCK_D) * dout, 1)
        ahead += tl.sum(_block_rows(Old, 0, first, rows, D, ROWS, BLOCK_D) * dout, 1)
    tl.store(Delta + r, delta, mask=r < rows)
    tl.store(DLSE + r, kept * (ahead - delta), mask=r < rows)
    tl.store(DO + r[:, None] * D + d[None, :], dout * kept[:, None], mask=(r[:, None] < rows) & (d[None, :] < D))


@triton.jit
def _ring_dq(
    Q, K, V, DOut, NewLSE, Delta, DQ, T, S, shift, scale, HAS_DOUT: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, OWN: tl.constexpr, OTHER: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * OWN
    head = tl.program_id(1).to(tl.int64)
    m = first + tl.arange(0, OWN)
    d = tl.arange(0, BLOCK_D)
    q = _block_rows(Q, head * T, first, T, D, OWN, BLOCK_D)
    # A row that has seen nothing has no visible key here either: any finite base will do.
    lse = tl.load(NewLSE + head * T + m, mask=m < T, other=float("inf"))
    lse = tl.where(lse == float("-inf"), 0.0, lse)
    delta = tl.load(Delta + head * T + m, mask=m < T, other=0.0)
    if HAS_DOUT:
        do = _block_rows(DOut, head * T, first, T, D, OWN, BLOCK_D).to(q.dtype)
    dq = tl.zeros((OWN, BLOCK_D), tl.float32)
    for start in range(0, tl.minimum(first + OWN + shift, S), OTHER):
        n = start + tl.arange(0, OTHER)
        k = _block_rows(K, head * S, start, S, D, OTHER, BLOCK_D)
        s = tl.dot(q, tl.trans(k)) * scale
        if (start + OTHER > S) | (start + OTHER - 1 > first + shift):
            s = tl.where((n[None, :] < S) & (n[None, :] <= m[:, None] + shift), s, float("-inf"))
        p = tl.exp(s - lse[:, None])
        ds = p * -delta[:, None]
        if HAS_DOUT:
            v = _block_rows(V, head * S, start, S, D, OTHER, BLOCK_D)
            ds += p * tl.dot(do, tl.trans(v))
        dq = tl.dot(ds.to(k.dtype), k, dq)
    tl.store(DQ + (head * T + m[:, None]) * D + d[None, :], dq * scale, mask=(m[:, None] < T) & (d[None, :] < D))


@triton.jit
def _ring_dkdv(
    Q, K, V, DOut, NewLSE, Delta, DK, DV, T, S, shift, scale, HAS_DOUT: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, OWN: tl.constexpr, OTHER: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * OWN
    head = tl.program_id(1).to(tl.int64)
    n = first + tl.arange(0, OWN)
    d = tl.arange(0, BLOCK_D)
    k = _block_rows(K, head * S, first, S, D, OWN, BLOCK_D)
    v = _block_rows(V, head * S, first, S, D, OWN, BLOCK_D)
    dk = tl.zeros((OWN, BLOCK_D), tl.float32)
    dv = tl.zeros((OWN, BLOCK_D), tl.float32)
    for start in range(tl.maximum(first - shift, 0) // OTHER * OTHER, T, OTHER):
        m = start + tl.arange(0, OTHER)
        q = _block_rows(Q, head * T, start, T, D, OTHER, BLOCK_D)
        lse = tl.load(NewLSE + head * T + m, mask=m < T, other=float("inf"))
        lse = tl.where(lse == float("-inf"), 0.0, lse)
        delta = tl.load(Delta + head * T + m, mask=m < T, other=0.0)
        s = tl.dot(k, tl.trans(q)) * scale - lse[None, :]
        if first + OWN - 1 > start + shift:
            s = tl.where(n[:, None] <= m[None, :] + shift, s, float("-inf"))
        p = tl.exp(s)
        ds = p * -delta[None, :]
        if HAS_DOUT:
            do = _block_rows(DOut, head * T, start, T, D, OTHER, BLOCK_D).to(q.dtype)
            dv = tl.dot(p.to(do.dtype), do, dv)
            ds += p * tl.dot(v, tl.trans(do))
        dk = tl.dot(ds.to(q.dtype), q, dk)
    at = (head * S + n[:, None]) * D + d[None, :]
    inside = (n[:, None] < S) & (d[None, :] < D)
    tl.store(DK + at, dk * scale, mask=inside)
    tl.store(DV + at, dv, mask=inside)


def backward(saved, grad_out, grad_new_lse, needs=None):
    q, k, v, o, lse, out, new_lse, shift = saved
    need_q, need_k, need_v, _, _ = needs or (True,) * 5
    (B, H, T, D), S = q.shape, k.shape[2]
    # The cotangents are read by every tile: copies are cheaper than strided reads. A missing one is never read.
    dout = out if grad_out is None else grad_out.contiguous()
    dnew = new_lse if grad_new_lse is None else grad_new_lse.contiguous()
    has = {"HAS_DOUT": grad_out is not None}
    delta, do, dlse = torch.empty_like(lse), torch.empty_like(o), torch.empty_like(lse)
    BLOCK_D = max(16, triton.next_power_of_2(D))
    _ring_state_grads[(triton.cdiv(B * H * T, 32),)](
        o, lse, out, new_lse, dout, dnew, delta, do, dlse, D, B * H * T, **has,
        HAS_DNEW=grad_new_lse is not None, BLOCK_D=BLOCK_D, ROWS=32,
    )  # fmt: skip
    dq = dk = dv = None
    if need_q:
        dq = torch.empty_like(q)
        tiles = _tiles(q, T)
        _ring_dq[(triton.cdiv(T, tiles["OWN"]), B * H)](
            q, k, v, dout, new_lse, delta, dq, T, S, shift, D**-0.5, **has, **tiles
        )
    if need_k or need_v:
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        tiles = _tiles(q, S)
        _ring_dkdv[(triton.cdiv(S, tiles["OWN"]), B * H)](
            q, k, v, dout, new_lse, delta, dk, dv, T, S, shift, D**-0.5, **has, **tiles
        )
    return dq, dk, dv, do, dlse


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "T": 64, "S": 64, "D": 32, "shift": 0},
    {"B": 2, "H": 1, "T": 45, "S": 71, "D": 20, "shift": 19},
    {"B": 1, "H": 2, "T": 40, "S": 33, "D": 16, "shift": 100, "dtype": "bfloat16"},
)
BENCH = ({"B": 2, "H": 16, "T": 2048, "S": 2048, "D": 64, "shift": 2048, "dtype": "bfloat16"},)


def make_args(B, H, T, S, D, shift, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, H, n, D, generator=g).to(device, getattr(torch, dtype)) for n in (T, S, S))
    # The running state of the steps before stays in fp32.
    o = torch.randn(B, H, T, D, generator=g)
    lse = 3.0 + torch.randn(B, H, T, generator=g)
    return q, k, v, o.to(device), lse.to(device), shift


def reference(q, k, v, o, lse, shift):
    T, S = q.shape[2], k.shape[2]
    s = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    s = s.masked_fill(torch.ones(T, S, dtype=torch.bool, device=q.device).triu(shift + 1), float("-inf"))
    new_lse = torch.logaddexp(lse, s.logsumexp(-1))
    p = torch.exp(s - new_lse[..., None])
    return torch.exp(lse - new_lse)[..., None] * o + (p.to(v.dtype) @ v).float(), new_lse
