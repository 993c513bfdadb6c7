"""Gated row attention of the Evoformer: one pair bias for all rows of the alignment, a key mask, a sigmoid gate behind.

    out = sigmoid(gate) softmax(scale q k^T + bias, masked) v

The gate costs the backward nothing of its own: with the gated output saved, dgate = dout out (1 - sigmoid) and delta =
sum of dout out, so that the ungated output is never stored. The bias (B, H, L, L) is shared by R rows: its gradient
has owners, too, programs that keep one tile of it in registers and walk the rows; R is split until they fill the GPU.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "evoformer_row_gate",
    "family": "attention",
    "op": "gated_row_attention",
    "schema": 1,
    "techniques": (
        "broadcast-reduction", "two-stage-partials", "saved-lse", "saved-output", "delta-preprocess", "owner-grid",
        "loop-swap", "masking",
    ),
    "saves": ("out: fp32 or bf16 (B, R, L, H, D)", "lse: fp32 (B, R, H, L)"),
    "grads": ("q", "k", "v", "gate", "bias"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}  # fmt: skip


# --- forward ---
@triton.jit
def _residues(X, first, L, H, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """ROWS residues of one row and head; X points at its first residue, residues are H * D apart."""
    t = first + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    return tl.load(X + t[:, None] * (H * D) + d[None, :], mask=(t[:, None] < L) & (d[None, :] < D), other=0.0)


@triton.jit
def _biased_scores(q, k, Bias, keep, m, n, L, scale_log2):
    """Scores in units of log 2, -inf where the key is masked; keep is False past L."""
    inside = (m[:, None] < L) & (n[None, :] < L)
    bias = tl.load(Bias + m[:, None] * L + n[None, :], mask=inside, other=0.0).to(tl.float32)
    s = tl.dot(q, tl.trans(k)) * scale_log2 + bias * 1.4426950408889634
    return tl.where(keep[None, :], s, float("-inf"))


@triton.jit
def _row_gate_fwd(
    Q, K, V, Gate, Bias, Mask, Out, LSE, R, L, H, scale_log2, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(1) * BLOCK_M
    row = (tl.program_id(0) // H).to(tl.int64)
    head = tl.program_id(0) % H
    base = row * L * H * D + head * D
    Bias += (row // R * H + head) * L * L
    m = first + tl.arange(0, BLOCK_M)
    q = _residues(Q + base, first, L, H, D, BLOCK_M, BLOCK_D)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    norm = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(0, L, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        keep = tl.load(Mask + row * L + n, mask=n < L, other=0) != 0
        k = _residues(K + base, start, L, H, D, BLOCK_N, BLOCK_D)
        v = _residues(V + base, start, L, H, D, BLOCK_N, BLOCK_D)
        s = _biased_scores(q, k, Bias, keep, m, n, L, scale_log2)
        higher = tl.maximum(top, tl.max(s, 1))
        # As long as every key was masked the maximum is -inf: any finite base does.
        base_of = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(s - base_of[:, None])
        fade = tl.exp2(top - base_of)
        norm = norm * fade + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None])
        top = higher
    # A row of the alignment without any key gives zeros, and infinity here gives it zero probabilities.
    empty = norm == 0.0
    gate = _residues(Gate + base, first, L, H, D, BLOCK_M, BLOCK_D).to(tl.float32)
    out = acc / tl.where(empty, 1.0, norm)[:, None] * tl.sigmoid(gate)
    d = tl.arange(0, BLOCK_D)
    tl.store(Out + base + m[:, None] * (H * D) + d[None, :], out, mask=(m[:, None] < L) & (d[None, :] < D))
    lse = tl.where(empty, float("inf"), top + tl.log2(tl.where(empty, 1.0, norm)))
    tl.store(LSE + (row * H + head) * L + m, lse, mask=m < L)


def _tiles(L, q):
    """(rows of the owned tile, rows of a step, widths, warps)."""
    sizes = {"D": q.shape[4], "BLOCK_D": max(16, triton.next_power_of_2(q.shape[4]))}
    if L <= 128:
        return 32, 16, sizes | {"num_warps": 4}
    return (64, 64, sizes | {"num_warps": 4}) if q.element_size() == 2 else (64, 32, sizes | {"num_warps": 8})


def forward(q, k, v, gate, bias, mask):
    q, k, v, gate, bias, mask = (x.contiguous() for x in (q, k, v, gate, bias, mask))
    B, R, L, H, D = q.shape
    out = torch.empty_like(q)
    lse = torch.empty(B, R, H, L, device=q.device, dtype=torch.float32)
    BLOCK_M, BLOCK_N, sizes = _tiles(L, q)
    # Programs that follow one another share the bias tile: rows and heads on the first axis.
    _row_gate_fwd[(B * R * H, triton.cdiv(L, BLOCK_M))](
        q, k, v, gate, bias, mask, out, lse, R, L, H, D**-0.5 * 1.4426950408889634,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, **sizes,
    )  # fmt: skip
    return out, (q, k, v, gate, bias, mask, out, lse)


# --- backward ---
@triton.jit
def _gate_grads(
    Gate, Out, DOut, DGate, DInner, Delta, L, H, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr
):
    first = tl.program_id(1) * BLOCK_M
    row = (tl.program_id(0) // H).to(tl.int64)
    head = tl.program_id(0) % H
    base = row * L * H * D + head * D
    opened = tl.sigmoid(_residues(Gate + base, first, L, H, D, BLOCK_M, BLOCK_D).to(tl.float32))
    dout = _residues(DOut + base, first, L, H, D, BLOCK_M, BLOCK_D).to(tl.float32)
    out = _residues(Out + base, first, L, H, D, BLOCK_M, BLOCK_D).to(tl.float32)
    # What is taken from products with v is made of the same rounded numbers as they: where one key is nearly the whole
    # softmax, the difference is small.
    inner = (dout * opened).to(DInner.dtype.element_ty)
    behind = tl.where(opened > 0.0, inner.to(tl.float32) / opened, dout)
    m = first + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    at = base + m[:, None] * (H * D) + d[None, :]
    inside = (m[:, None] < L) & (d[None, :] < D)
    tl.store(DGate + at, dout * out * (1.0 - opened), mask=inside)
    tl.store(DInner + at, inner, mask=inside)
    tl.store(Delta + (row * H + head) * L + m, tl.sum(behind * out, 1), mask=m < L)


@triton.jit
def _score_grads(q, k, v, do, Bias, Mask, LSE, Delta, m, n, L, scale_log2):
    """(p, ds) of one tile, queries along the rows; the pointers point at the row's and head's first element."""
    keep = tl.load(Mask + n, mask=n < L, other=0) != 0
    lse = tl.load(LSE + m, mask=m < L, other=float("inf"))
    delta = tl.load(Delta + m, mask=m < L, other=0.0)
    p = tl.exp2(_biased_scores(q, k, Bias, keep, m, n, L, scale_log2) - lse[:, None])
    return p, p * (tl.dot(do, tl.trans(v)) - delta[:, None])


@triton.jit
def _row_gate_dq(
    Q, K, V, DO, Bias, Mask, LSE, Delta, DQ, R, L, H, scale, scale_log2, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(1) * BLOCK_M
    row = (tl.program_id(0) // H).to(tl.int64)
    head = tl.program_id(0) % H
    base = row * L * H * D + head * D
    at_row = (row * H + head) * L
    Bias += (row // R * H + head) * L * L
    m = first + tl.arange(0, BLOCK_M)
    q = _residues(Q + base, first, L, H, D, BLOCK_M, BLOCK_D)
    do = _residues(DO + base, first, L, H, D, BLOCK_M, BLOCK_D)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(0, L, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        k = _residues(K + base, start, L, H, D, BLOCK_N, BLOCK_D)
        v = _residues(V + base, start, L, H, D, BLOCK_N, BLOCK_D)
        _, ds = _score_grads(q, k, v, do, Bias, Mask + row * L, LSE + at_row, Delta + at_row, m, n, L, scale_log2)
        dq = tl.dot(ds.to(k.dtype), k, dq)
    d = tl.arange(0, BLOCK_D)
    tl.store(DQ + base + m[:, None] * (H * D) + d[None, :], dq * scale, mask=(m[:, None] < L) & (d[None, :] < D))


@triton.jit
def _row_gate_dkdv(
    Q, K, V, DO, Bias, Mask, LSE, Delta, DK, DV, R, L, H, scale, scale_log2, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(1) * BLOCK_N
    row = (tl.program_id(0) // H).to(tl.int64)
    head = tl.program_id(0) % H
    base = row * L * H * D + head * D
    at_row = (row * H + head) * L
    Bias += (row // R * H + head) * L * L
    n = first + tl.arange(0, BLOCK_N)
    k = _residues(K + base, first, L, H, D, BLOCK_N, BLOCK_D)
    v = _residues(V + base, first, L, H, D, BLOCK_N, BLOCK_D)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for start in range(0, L, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        q = _residues(Q + base, start, L, H, D, BLOCK_M, BLOCK_D)
        do = _residues(DO + base, start, L, H, D, BLOCK_M, BLOCK_D)
        p, ds = _score_grads(q, k, v, do, Bias, Mask + row * L, LSE + at_row, Delta + at_row, m, n, L, scale_log2)
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv)
        dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk)
    d = tl.arange(0, BLOCK_D)
    at = base + n[:, None] * (H * D) + d[None, :]
    inside = (n[:, None] < L) & (d[None, :] < D)
    tl.store(DK + at, dk * scale, mask=inside)
    tl.store(DV + at, dv, mask=inside)


@triton.jit
def _row_gate_dbias(
    Q, K, V, DO, Bias, Mask, LSE, Delta, DBiasParts, R, L, H, rows_each, scale_log2, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(L, BLOCK_N)
    first_m = tl.program_id(0) // across * BLOCK_M
    first_n = tl.program_id(0) % across * BLOCK_N
    split = tl.program_id(1)
    batch = (tl.program_id(2) // H).to(tl.int64)
    head = tl.program_id(2) % H
    Bias += (batch * H + head) * L * L
    m = first_m + tl.arange(0, BLOCK_M)
    n = first_n + tl.arange(0, BLOCK_N)
    dbias = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for r in range(split * rows_each, tl.minimum((split + 1) * rows_each, R)):
        row = batch * R + r
        base = row * L * H * D + head * D
        at_row = (row * H + head) * L
        q = _residues(Q + base, first_m, L, H, D, BLOCK_M, BLOCK_D)
        do = _residues(DO + base, first_m, L, H, D, BLOCK_M, BLOCK_D)
        k = _residues(K + base, first_n, L, H, D, BLOCK_N, BLOCK_D)
        v = _residues(V + base, first_n, L, H, D, BLOCK_N, BLOCK_D)
        _, ds = _score_grads(q, k, v, do, Bias, Mask + row * L, LSE + at_row, Delta + at_row, m, n, L, scale_log2)
        dbias += ds
    at = (split * tl.num_programs(2) + tl.program_id(2)).to(tl.int64) * L * L + m[:, None] * L + n[None, :]
    tl.store(DBiasParts + at, dbias, mask=(m[:, None] < L) & (n[None, :] < L))


def backward(saved, grad_out, needs=None):
    q, k, v, gate, bias, mask, out, lse = saved
    need_q, need_k, need_v, _, need_bias = needs or (True,) * 5
    B, R, L, H, D = q.shape
    scale = D**-0.5
    own, step, sizes = _tiles(L, q)
    dgate, inner, delta = torch.empty_like(q), torch.empty_like(q), torch.empty_like(lse)
    _gate_grads[(B * R * H, triton.cdiv(L, own))](
        gate, out, grad_out.contiguous(), dgate, inner, delta, L, H, BLOCK_M=own, **sizes
    )
    common = (q, k, v, inner, bias, mask, lse, delta)
    dq = dk = dv = dbias = None
    if need_q:
        dq = torch.empty_like(q)
        _row_gate_dq[(B * R * H, triton.cdiv(L, own))](
            *common, dq, R, L, H, scale, scale * 1.4426950408889634, BLOCK_M=own, BLOCK_N=step, **sizes
        )
    if need_k or need_v:
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        _row_gate_dkdv[(B * R * H, triton.cdiv(L, own))](
            *common, dk, dv, R, L, H, scale, scale * 1.4426950408889634, BLOCK_M=step, BLOCK_N=own, **sizes
        )
    if need_bias:
        tiles = triton.cdiv(L, own) * triton.cdiv(L, step)
        # Some eight programs for each of 132 processors, each with several rows to add.
        splits = max(1, min(triton.cdiv(R, 8), 1056 // (tiles * B * H)))
        rows_each = triton.cdiv(R, splits)
        splits = triton.cdiv(R, rows_each)
        parts = torch.empty(splits, *bias.shape, device=q.device, dtype=torch.float32)
        _row_gate_dbias[(tiles, splits, B * H)](
            *common, parts, R, L, H, rows_each, scale * 1.4426950408889634, BLOCK_M=own, BLOCK_N=step, **sizes
        )
        dbias = parts.sum(0).to(bias.dtype)
    return dq, dk, dv, dgate, dbias


# --- check ---
SWEEP = (
    {"B": 1, "R": 3, "L": 32, "H": 2, "D": 16},
    {"B": 2, "R": 9, "L": 37, "H": 1, "D": 20},
    {"B": 1, "R": 2, "L": 40, "H": 2, "D": 16, "dtype": "bfloat16"},
)
BENCH = ({"B": 1, "R": 256, "L": 256, "H": 8, "D": 32, "dtype": "bfloat16"},)


def make_args(B, R, L, H, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = (*((B, R, L, H, D) for _ in range(4)), (B, H, L, L))
    q, k, v, gate, bias = (torch.randn(shape, generator=g).to(device, getattr(torch, dtype)) for shape in shapes)
    mask = torch.rand(B, R, L, generator=g) < 0.8
    # The last row of the alignment is padding as a whole.
    mask[:, -1] = False
    return q, k, v, gate, bias, mask.to(device, torch.int8)


def reference(q, k, v, gate, bias, mask):
    s = torch.einsum("brqhd,brkhd->brhqk", q, k).float() * q.shape[-1] ** -0.5 + bias.float()[:, None]
    # softmax of a row of -inf is nan; what is masked gets zero either way.
    keep = mask.bool()[:, :, None, None, :]
    p = s.masked_fill(~keep, -1e30).softmax(-1) * keep
    return torch.einsum("brhqk,brkhd->brqhd", p.to(v.dtype), v) * gate.sigmoid()
