"""Scalar-decay state space layer in its quadratic dual form: y = (L * (c b^T)) x with L_ij = exp(sum of a over (j, i]).

x is (B, T, H, P), the log decays a are (B, T, H), b and c (B, T, N) are shared by all heads. The backward:

    dx      owner of x rows, per head: the transposed product
    db, dc  owner of shared rows: the weights exp(A_i - A_j) (dy_i . x_j) of all heads are added up in one (i, j)
            tile first, so that a tile pays for one product with c or b, not for one per head
    da      row sums of weights times scores are y . dy, column sums x . dx: a suffix sum of their difference

A, the running sum of a, is saved; masked differences are -inf before exp, never after. y is kept in fp32 for da, and
x . dx is taken before dx is rounded: over a long sequence the suffix sum would collect the rounding of both.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "mamba2_like_dual",
    "family": "linear_attention",
    "op": "state_space_dual",
    "schema": 1,
    "techniques": ("loop-swap", "owner-grid", "head-reduction", "saved-output", "causal-bounds", "reverse-scan"),
    "saves": ("total: fp32 (B, H, T)", "y: fp32 (B, T, H, P)"),
    "grads": ("x", "a", "b", "c"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _running_sum(A, Total, H, T, BLOCK_T: tl.constexpr):
    bh = tl.program_id(0).to(tl.int64)
    carry = 0.0
    for start in range(0, T, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        a = tl.load(A + (bh // H * T + t) * H + bh % H, mask=t < T, other=0.0).to(tl.float32)
        tl.store(Total + bh * T + t, carry + tl.cumsum(a, 0), mask=t < T)
        carry += tl.sum(a, 0)


@triton.jit
def _token_tile(X, token, row_stride, W, T, ROWS: tl.constexpr, BLOCK: tl.constexpr, first):
    t = first + tl.arange(0, ROWS)
    w = tl.arange(0, BLOCK)
    at = (token + t[:, None]) * row_stride + w[None, :]
    return tl.load(X + at, mask=(t[:, None] < T) & (w[None, :] < W), other=0.0)


@triton.jit
def _segment_decay(Total, row, first_i, first_j, T, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr):
    # exp(A_i - A_j) for j <= i < T, else 0.
    i = first_i + tl.arange(0, BLOCK_I)
    j = first_j + tl.arange(0, BLOCK_J)
    till_i = tl.load(Total + row + i, mask=i < T, other=0.0)
    till_j = tl.load(Total + row + j, mask=j < T, other=0.0)
    seen = (i[:, None] >= j[None, :]) & (i[:, None] < T)
    return tl.exp(tl.where(seen, till_i[:, None] - till_j[None, :], float("-inf")))


@triton.jit
def _dual_fwd(
    X, Bs, Cs, Total, Y, Exact, H, T, N, P, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_I
    bh = tl.program_id(1).to(tl.int64)
    token, head = bh // H * T, bh % H
    c = _token_tile(Cs, token, N, N, T, BLOCK_I, BLOCK_N, first)
    y = tl.zeros((BLOCK_I, BLOCK_P), tl.float32)
    for start in range(0, tl.minimum(first + BLOCK_I, T), BLOCK_J):
        b = _token_tile(Bs, token, N, N, T, BLOCK_J, BLOCK_N, start)
        x = _token_tile(X + head * P, token, H * P, P, T, BLOCK_J, BLOCK_P, start)
        scores = tl.dot(c, tl.trans(b)) * _segment_decay(Total, bh * T, first, start, T, BLOCK_I, BLOCK_J)
        y = tl.dot(scores.to(x.dtype), x, y)
    t = first + tl.arange(0, BLOCK_I)
    w = tl.arange(0, BLOCK_P)
    at = ((token + t[:, None]) * H + head) * P + w[None, :]
    inside = (t[:, None] < T) & (w[None, :] < P)
    tl.store(Y + at, y, mask=inside)
    tl.store(Exact + at, y, mask=inside)


def _blocks(x):
    """(rows of the owner's tile, rows of the other, warps)."""
    if x.shape[1] <= 256:
        return 32, 16, 4
    return (64, 32, 4) if x.element_size() == 4 else (128, 64, 8)


def forward(x, a, b, c):
    x, a, b, c = x.contiguous(), a.contiguous(), b.contiguous(), c.contiguous()
    B, T, H, P = x.shape
    N = b.shape[2]
    total = torch.empty(B, H, T, device=x.device, dtype=torch.float32)
    _running_sum[(B * H,)](a, total, H, T, BLOCK_T=512, num_warps=4)
    y = torch.empty_like(x)
    exact = torch.empty_like(x, dtype=torch.float32)
    own, other, warps = _blocks(x)
    BLOCK_N, BLOCK_P = (max(16, triton.next_power_of_2(n)) for n in (N, P))
    _dual_fwd[(triton.cdiv(T, own), B * H)](
        x, b, c, total, y, exact, H, T, N, P,
        BLOCK_I=own, BLOCK_J=other, BLOCK_N=BLOCK_N, BLOCK_P=BLOCK_P, num_warps=warps,
    )  # fmt: skip
    return y, (x, a, b, c, total, exact)


# --- backward ---
@triton.jit
def _dual_dx(
    X, DY, Bs, Cs, Total, DX, Columns, H, T, N, P, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK_J
    bh = tl.program_id(1).to(tl.int64)
    token, head = bh // H * T, bh % H
    b = _token_tile(Bs, token, N, N, T, BLOCK_J, BLOCK_N, first)
    dx = tl.zeros((BLOCK_J, BLOCK_P), tl.float32)
    for start in range(first // BLOCK_I * BLOCK_I, T, BLOCK_I):
        c = _token_tile(Cs, token, N, N, T, BLOCK_I, BLOCK_N, start)
        dy = _token_tile(DY + head * P, token, H * P, P, T, BLOCK_I, BLOCK_P, start)
        scores = tl.dot(c, tl.trans(b)) * _segment_decay(Total, bh * T, start, first, T, BLOCK_I, BLOCK_J)
        dx = tl.dot(tl.trans(scores.to(dy.dtype)), dy, dx)
    t = first + tl.arange(0, BLOCK_J)
    w = tl.arange(0, BLOCK_P)
    at = ((token + t[:, None]) * H + head) * P + w[None, :]
    tl.store(DX + at, dx, mask=(t[:, None] < T) & (w[None, :] < P))
    x = _token_tile(X + head * P, token, H * P, P, T, BLOCK_J, BLOCK_P, first).to(tl.float32)
    tl.store(Columns + bh * T + t, tl.sum(x * dx, 1), mask=t < T)


@triton.jit
def _weights_of_heads(
    X, DY, Total, batch, H, T, P, first_i, first_j, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_P: tl.constexpr
):
    # What all heads together put on the score c_i . b_j.
    weights = tl.zeros((BLOCK_I, BLOCK_J), tl.float32)
    for head in range(H):
        x = _token_tile(X + head * P, batch * T, H * P, P, T, BLOCK_J, BLOCK_P, first_j)
        dy = _token_tile(DY + head * P, batch * T, H * P, P, T, BLOCK_I, BLOCK_P, first_i)
        decay = _segment_decay(Total, (batch * H + head) * T, first_i, first_j, T, BLOCK_I, BLOCK_J)
        weights += tl.dot(dy, tl.trans(x)) * decay
    return weights


@triton.jit
def _dual_dc(
    X, DY, Bs, Total, DC, H, T, N, P, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_I
    batch = tl.program_id(1).to(tl.int64)
    dc = tl.zeros((BLOCK_I, BLOCK_N), tl.float32)
    for start in range(0, tl.minimum(first + BLOCK_I, T), BLOCK_J):
        weights = _weights_of_heads(X, DY, Total, batch, H, T, P, first, start, BLOCK_I, BLOCK_J, BLOCK_P)
        b = _token_tile(Bs, batch * T, N, N, T, BLOCK_J, BLOCK_N, start)
        dc = tl.dot(weights.to(b.dtype), b, dc)
    t = first + tl.arange(0, BLOCK_I)
    n = tl.arange(0, BLOCK_N)
    tl.store(DC + (batch * T + t[:, None]) * N + n[None, :], dc, mask=(t[:, None] < T) & (n[None, :] < N))


@triton.jit
def _dual_db(
    X, DY, Cs, Total, DB, H, T, N, P, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK_J
    batch = tl.program_id(1).to(tl.int64)
    db = tl.zeros((BLOCK_J, BLOCK_N), tl.float32)
    for start in range(first // BLOCK_I * BLOCK_I, T, BLOCK_I):
        weights = _weights_of_heads(X, DY, Total, batch, H, T, P, start, first, BLOCK_I, BLOCK_J, BLOCK_P)
        c = _token_tile(Cs, batch * T, N, N, T, BLOCK_I, BLOCK_N, start)
        db = tl.dot(tl.trans(weights.to(c.dtype)), c, db)
    t = first + tl.arange(0, BLOCK_J)
    n = tl.arange(0, BLOCK_N)
    tl.store(DB + (batch * T + t[:, None]) * N + n[None, :], db, mask=(t[:, None] < T) & (n[None, :] < N))


@triton.jit
def _dual_da(Columns, Y, DY, DA, H, T, P, BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr):
    # a_t lies between every j < t and i >= t: suffix sum of (what i gets) - (what j gives), from the last token on.
    bh = tl.program_id(0).to(tl.int64)
    token, head = bh // H * T, bh % H
    carry = 0.0
    tiles = tl.cdiv(T, BLOCK_T)
    for back in range(tiles):
        first = (tiles - 1 - back) * BLOCK_T
        y = _token_tile(Y + head * P, token, H * P, P, T, BLOCK_T, BLOCK_P, first)
        dy = _token_tile(DY + head * P, token, H * P, P, T, BLOCK_T, BLOCK_P, first).to(tl.float32)
        t = first + tl.arange(0, BLOCK_T)
        dtotal = tl.sum(y * dy, 1) - tl.load(Columns + bh * T + t, mask=t < T, other=0.0)
        tl.store(DA + (token + t) * H + head, carry + tl.cumsum(dtotal, 0, reverse=True), mask=t < T)
        carry += tl.sum(dtotal, 0)


def backward(saved, grad_y, needs=None):
    x, a, b, c, total, y = saved
    need_x, need_a, need_b, need_c = needs or (True,) * 4
    B, T, H, P = x.shape
    N = b.shape[2]
    # All four kernels read the cotangent in tiles of the same kind as x.
    dy = grad_y.contiguous()
    own, other, warps = _blocks(x)
    sizes = (H, T, N, P)
    tiles = {"BLOCK_N": max(16, triton.next_power_of_2(N)), "BLOCK_P": max(16, triton.next_power_of_2(P))}
    dx = da = db = dc = None
    if need_x or need_a:
        dx, columns = torch.empty_like(x), torch.empty_like(total)
        _dual_dx[(triton.cdiv(T, own), B * H)](
            x, dy, b, c, total, dx, columns, *sizes, BLOCK_I=other, BLOCK_J=own, **tiles, num_warps=warps
        )
    # Shared gradients have no head in their grid: smaller tiles make more programs of them.
    side = min(own, 16)
    if need_c:
        dc = torch.empty_like(c)
        _dual_dc[(triton.cdiv(T, side), B)](
            x, dy, b, total, dc, *sizes, BLOCK_I=side, BLOCK_J=other, **tiles, num_warps=4
        )
    if need_b:
        db = torch.empty_like(b)
        _dual_db[(triton.cdiv(T, side), B)](
            x, dy, c, total, db, *sizes, BLOCK_I=other, BLOCK_J=side, **tiles, num_warps=4
        )
    if need_a:
        da = torch.empty_like(a)
        _dual_da[(B * H,)](columns, y, dy, da, H, T, P, BLOCK_T=32, BLOCK_P=tiles["BLOCK_P"], num_warps=4)
    return dx, da, db, dc


# --- check ---
SWEEP = (
    {"B": 1, "T": 64, "H": 2, "P": 16, "N": 32},
    {"B": 2, "T": 43, "H": 3, "P": 12, "N": 20},
    {"B": 1, "T": 50, "H": 2, "P": 16, "N": 16, "dtype": "bfloat16"},
)
BENCH = ({"B": 8, "T": 1024, "H": 16, "P": 64, "N": 64, "dtype": "bfloat16"},)


def make_args(B, T, H, P, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, b, c = (torch.randn(shape, generator=g) for shape in ((B, T, H, P), (B, T, N), (B, T, N)))
    # Log decays are negative, and stay in fp32.
    a = -torch.nn.functional.softplus(torch.randn(B, T, H, generator=g) - 2.0)
    x, b, c = (t.to(device, getattr(torch, dtype)) for t in (x, b, c))
    return x, a.to(device), b, c


def reference(x, a, b, c):
    total = a.float().cumsum(1).transpose(1, 2)
    later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(later, float("-inf")).exp()
    scores = (c @ b.transpose(-1, -2)).float()[:, None] * decay
    return torch.einsum("bhij,bjhp->bihp", scores.to(x.dtype), x)
