"""Triangle attention of a pair representation: whole score rows in registers give dq and the shared bias's gradient.

q, k and v are (R, N, H, D), as a projection of the pair representation leaves them. Row i of the pairs attends within
itself, score (i, h, j, k) = q_ij . k_ik / sqrt(D) + bias[h, j, k], and the bias is the same for all rows i. Rows are
short (N of a few hundred), so a program of the backward owns (head, tile of j) with all N keys and a group of rows i:
softmax and its row sum need no second look and no saved statistics, dbias sums over the group in registers, and one
partial (H, N, N) per group is added at the end. It leaves the softmax statistics for the owners of key tiles, who sum
over j for dk and dv.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "triangle_attention_bias",
    "family": "geometry",
    "op": "triangle_attention",
    "schema": 1,
    "techniques": ("broadcast-reduction", "two-stage-partials", "loop-swap", "recompute", "strided-cotangent"),
    "saves": (),
    "grads": ("q", "k", "v", "bias"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _load_tile(X, base, at, N, stride, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows `at` of one head of one row of pairs; `stride` lies between them."""
    d = tl.arange(0, BLOCK_D)
    offset = base + at.to(tl.int64)[:, None] * stride + d[None, :]
    return tl.load(X + offset, mask=(at[:, None] < N) & (d[None, :] < D), other=0.0)


@triton.jit
def _row_softmax(q, k, bias, scale):
    """Probabilities of whole rows, their maxima and sums; columns outside have bias -inf."""
    s = tl.dot(q, tl.trans(k)) * scale + bias
    top = tl.max(s, 1)
    weight = tl.exp2(s - top[:, None])
    norm = tl.sum(weight, 1)
    return weight / norm[:, None], top, norm


@triton.jit
def _load_bias(Bias, j, n, N):
    """In units of log 2, as the scores are."""
    inside = (j[:, None] < N) & (n[None, :] < N)
    bias = tl.load(Bias + j[:, None] * N + n[None, :], mask=inside, other=0.0).to(tl.float32)
    return tl.where(n[None, :] < N, bias * 1.4426950408889634, float("-inf"))


@triton.jit
def _triangle_fwd(
    Q, K, V, Bias, Out, R, N, H, D: tl.constexpr, scale, rows_each,
    BLOCK_J: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    j = tl.program_id(0) * BLOCK_J + tl.arange(0, BLOCK_J)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    # The tile of the bias is read once for a whole group of rows.
    bias = _load_bias(Bias + head * N * N, j, n, N)
    first = tl.program_id(2) * rows_each
    for i in range(first, tl.minimum(first + rows_each, R)):
        base = tl.cast(i, tl.int64) * N * H * D + head * D
        q = _load_tile(Q, base, j, N, H * D, D, BLOCK_D)
        k = _load_tile(K, base, n, N, H * D, D, BLOCK_D)
        v = _load_tile(V, base, n, N, H * D, D, BLOCK_D)
        p, _, _ = _row_softmax(q, k, bias, scale)
        out = tl.dot(p.to(v.dtype), v)
        at = base + j.to(tl.int64)[:, None] * H * D + d[None, :]
        tl.store(Out + at, out, mask=(j[:, None] < N) & (d[None, :] < D))


BLOCK_J = 16
"""Score rows of a program. Three tiles of this height and the width of all keys have to stay in registers."""


def _schedule(R, N, H):
    """(groups of rows, rows in a group): some 264 programs, two for each of 132 processors."""
    groups = max(1, min(R, 264 // (triton.cdiv(N, BLOCK_J) * H)))
    rows_each = triton.cdiv(R, groups)
    return triton.cdiv(R, rows_each), rows_each


def forward(q, k, v, bias):
    q, k, v, bias = q.contiguous(), k.contiguous(), v.contiguous(), bias.contiguous()
    R, N, H, D = q.shape
    out = torch.empty_like(q)
    BLOCK_N = max(16, triton.next_power_of_2(N))
    groups, rows_each = _schedule(R, N, H)
    _triangle_fwd[(triton.cdiv(N, BLOCK_J), H, groups)](
        q, k, v, bias, out, R, N, H, D, D**-0.5 * 1.4426950408889634, rows_each,
        BLOCK_J=BLOCK_J, BLOCK_N=BLOCK_N, BLOCK_D=max(16, triton.next_power_of_2(D)),
        num_warps=4 if BLOCK_N <= 256 else 8, num_stages=2,
    )  # fmt: skip
    return out, (q, k, v, bias)


# --- backward ---
@triton.jit
def _triangle_dq_dbias(
    DO, Q, K, V, Bias, DQ, Parts, LSE, Delta, R, N, H, D: tl.constexpr, scale_log2, scale, rows_each,
    do_i, do_j, do_h, do_d, BLOCK_J: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    j = tl.program_id(0) * BLOCK_J + tl.arange(0, BLOCK_J)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    dbias = tl.zeros((BLOCK_J, BLOCK_N), tl.float32)
    inside = (j[:, None] < N) & (d[None, :] < D)
    first = tl.program_id(2) * rows_each
    for i in range(first, tl.minimum(first + rows_each, R)):
        row = tl.cast(i, tl.int64)
        base = row * N * H * D + head * D
        q = _load_tile(Q, base, j, N, H * D, D, BLOCK_D)
        k = _load_tile(K, base, n, N, H * D, D, BLOCK_D)
        v = _load_tile(V, base, n, N, H * D, D, BLOCK_D)
        at = row * do_i + j.to(tl.int64)[:, None] * do_j + head * do_h + d[None, :] * do_d
        do = tl.load(DO + at, mask=inside, other=0.0)
        # dbias has taken the registers that could have kept the bias: it is read again, from the cache.
        p, top, norm = _row_softmax(q, k, _load_bias(Bias + head * N * N, j, n, N), scale_log2)
        # All of a row's probabilities are here: what the softmax takes off needs neither the output nor a launch.
        dp = tl.dot(do, tl.trans(v))
        delta = tl.sum(p * dp, 1)
        ds = p * (dp - delta[:, None])
        dbias += ds
        dq = tl.dot(ds.to(k.dtype), k)
        tl.store(DQ + base + j.to(tl.int64)[:, None] * H * D + d[None, :], scale * dq, mask=inside)
        left = (row * H + head) * N + j
        tl.store(LSE + left, top + tl.log2(norm), mask=j < N)
        tl.store(Delta + left, delta, mask=j < N)
    own = ((tl.program_id(2).to(tl.int64) * H + head) * N + j[:, None]) * N + n[None, :]
    tl.store(Parts + own, dbias, mask=(j[:, None] < N) & (n[None, :] < N))


@triton.jit
def _triangle_dk_dv(
    DO, Q, K, V, Bias, LSE, Delta, DK, DV, N, H, D: tl.constexpr, scale_log2, scale,
    do_i, do_j, do_h, do_d, BLOCK_J: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    n = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    base = row * N * H * D + head * D
    k = _load_tile(K, base, n, N, H * D, D, BLOCK_D)
    v = _load_tile(V, base, n, N, H * D, D, BLOCK_D)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for start in range(0, N, BLOCK_J):
        j = start + tl.arange(0, BLOCK_J)
        q = _load_tile(Q, base, j, N, H * D, D, BLOCK_D)
        at = row * do_i + j.to(tl.int64)[:, None] * do_j + head * do_h + d[None, :] * do_d
        do = tl.load(DO + at, mask=(j[:, None] < N) & (d[None, :] < D), other=0.0)
        left = (row * H + head) * N + j
        lse = tl.load(LSE + left, mask=j < N, other=float("inf"))
        delta = tl.load(Delta + left, mask=j < N, other=0.0)
        bias = _load_bias(Bias + head * N * N, j, n, N)
        p = tl.exp2(tl.dot(q, tl.trans(k)) * scale_log2 + bias - lse[:, None])
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv)
        ds = p * (tl.dot(do, tl.trans(v)) - delta[:, None])
        dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk)
    at = base + n.to(tl.int64)[:, None] * H * D + d[None, :]
    inside = (n[:, None] < N) & (d[None, :] < D)
    tl.store(DK + at, scale * dk, mask=inside)
    tl.store(DV + at, dv, mask=inside)


def backward(saved, grad_o, needs=None):
    q, k, v, bias = saved
    _, need_k, need_v, _ = needs or (True,) * 4
    R, N, H, D = q.shape
    BLOCK_D, BLOCK_N = max(16, triton.next_power_of_2(D)), max(16, triton.next_power_of_2(N))
    groups, rows_each = _schedule(R, N, H)
    scale = D**-0.5
    scale_log2 = scale * 1.4426950408889634
    dq = torch.empty_like(q)
    parts = torch.empty(groups, H, N, N, device=q.device, dtype=torch.float32)
    lse, delta = torch.empty(2, R, H, N, device=q.device, dtype=torch.float32)
    _triangle_dq_dbias[(triton.cdiv(N, BLOCK_J), H, groups)](
        grad_o, q, k, v, bias, dq, parts, lse, delta, R, N, H, D, scale_log2, scale, rows_each, *grad_o.stride(),
        BLOCK_J=BLOCK_J, BLOCK_N=BLOCK_N, BLOCK_D=BLOCK_D, num_warps=4 if BLOCK_N <= 256 else 8, num_stages=2,
    )  # fmt: skip
    dk = dv = None
    if need_k or need_v:
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        side = min(64, BLOCK_N)
        _triangle_dk_dv[(R, H, triton.cdiv(N, side))](
            grad_o, q, k, v, bias, lse, delta, dk, dv, N, H, D, scale_log2, scale, *grad_o.stride(),
            BLOCK_J=min(side, 32), BLOCK_N=side, BLOCK_D=BLOCK_D, num_warps=4, num_stages=2,
        )  # fmt: skip
    return dq, dk, dv, parts.sum(0).to(bias.dtype)


# --- check ---
SWEEP = (
    {"N": 32, "H": 2, "D": 16},
    {"N": 27, "H": 1, "D": 12, "dtype": "float16"},
    {"N": 40, "H": 2, "D": 16, "dtype": "bfloat16"},
)
BENCH = ({"N": 256, "H": 4, "D": 32, "dtype": "bfloat16"},)


def make_args(N, H, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = (*((N, N, H, D),) * 3, (H, N, N))
    return tuple(torch.randn(shape, generator=g).to(device, getattr(torch, dtype)) for shape in shapes)


def reference(q, k, v, bias):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias[None]).transpose(1, 2).contiguous()
