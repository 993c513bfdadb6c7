"""Generalised Jensen-Shannon divergence from the hidden states of student and teacher, in chunks of tokens.

With p = softmax(y U^T) of the frozen teacher, q = softmax(x W^T), m = beta p + (1 - beta) q:
    L = sum of beta p log(p / m) + (1 - beta) q log(q / m),
    r = (1 - beta) q log(q / m),  R = sum r,    slopes = r - q R,    dlogits = g slopes.
A chunk's logits of both models lie in scratch, which the next chunk overwrites. The forward leaves both log-sum-exps
and R for each token: the backward, which multiplies the logits again, forms m per element and needs no row sum. Then
dx of the chunk is complete, and dW adds up over chunks in fp32.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

META = {
    "slug": "linear_jsd",
    "family": "loss_linear_fused",
    "op": "linear_js_divergence",
    "schema": 1,
    "techniques": ("chunked", "recompute", "saved-lse", "saved-statistics", "partial-gradient"),
    "saves": ("stats: fp32 (3, T)",),
    "grads": ("hidden", "weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _chunk_matmul(
    L, R, Factor, OUT, M, N, K, l_m, l_k, r_k, r_n, stride_f,
    ADD: tl.constexpr, SCALED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # OUT (M, N) = L (M, K) R (K, N), or OUT += L R. Row tiles are the fast axis: the long operand R is read once.
    # SCALED multiplies the rows of the product, or those of R, by a factor per token.
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    l_at = L + m[:, None] * l_m + k[None, :] * l_k
    r_at = R + k[:, None] * r_k + n[None, :] * r_n
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for left in range(K, 0, -BLOCK_K):
        x = tl.load(l_at, mask=(m[:, None] < M) & (k[None, :] < left), other=0.0)
        y = tl.load(r_at, mask=(k[:, None] < left) & (n[None, :] < N), other=0.0)
        if SCALED == "summed":
            y = (y * tl.load(Factor + (K - left + k) * stride_f, mask=k < left, other=0.0)[:, None]).to(y.dtype)
        acc = tl.dot(x, y, acc)
        l_at += BLOCK_K * l_k
        r_at += BLOCK_K * r_k
    out = OUT + m[:, None] * N + n[None, :]
    inside = (m[:, None] < M) & (n[None, :] < N)
    if SCALED == "rows":
        acc *= tl.load(Factor + m * stride_f, mask=m < M, other=0.0)[:, None]
    if ADD:
        acc += tl.load(out, mask=inside, other=0.0)
    tl.store(out, acc, mask=inside)


def _side(size, most=128):
    return max(16, min(most, triton.next_power_of_2(size)))


def _matmul(left, right, out, add=False, factor=None, scaled=""):
    (M, K), N = left.shape, right.shape[1]
    BM, BN = _side(M), _side(N)
    _chunk_matmul[(triton.cdiv(M, BM), triton.cdiv(N, BN))](
        left, right, factor, out, M, N, K, *left.stride(), *right.stride(), factor.stride(0) if scaled else 0,
        ADD=add, SCALED=scaled, BLOCK_M=BM, BLOCK_N=BN, BLOCK_K=_side(K, 128 // left.element_size()),
        num_warps=8, num_stages=3,
    )  # fmt: skip


@triton.jit
def _log_m_over_q(lead, beta):
    """log(m / q) where lead = log(p / q), with an exponent that is never positive."""
    ahead = lead > 0.0
    e = tl.exp(tl.where(ahead, -lead, lead))
    return tl.where(ahead, lead, 0.0) + tl.log(tl.where(ahead, beta + (1.0 - beta) * e, (1.0 - beta) + beta * e))


@triton.jit
def _jsd_rows(Student, Teacher, Loss, Stats, T, V, beta, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    top_q = tl.full((BLOCK,), -1.0e30, tl.float32)
    top_p = tl.full((BLOCK,), -1.0e30, tl.float32)
    sum_q = tl.zeros((BLOCK,), tl.float32)
    sum_p = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        live = lane < V - start
        s = tl.load(Student + row * V + start + lane, mask=live, other=-float("inf"))
        t = tl.load(Teacher + row * V + start + lane, mask=live, other=-float("inf"))
        new_q, new_p = tl.maximum(top_q, s), tl.maximum(top_p, t)
        sum_q = sum_q * tl.exp(top_q - new_q) + tl.exp(s - new_q)
        sum_p = sum_p * tl.exp(top_p - new_p) + tl.exp(t - new_p)
        top_q, top_p = new_q, new_p
    best_q, best_p = tl.max(top_q, 0), tl.max(top_p, 0)
    lse_q = best_q + tl.log(tl.sum(sum_q * tl.exp(top_q - best_q), 0))
    lse_p = best_p + tl.log(tl.sum(sum_p * tl.exp(top_p - best_p), 0))
    loss = tl.zeros((BLOCK,), tl.float32)
    centre = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        live = lane < V - start
        log_q = tl.load(Student + row * V + start + lane, mask=live, other=0.0) - lse_q
        log_p = tl.load(Teacher + row * V + start + lane, mask=live, other=0.0) - lse_p
        lead = log_p - log_q
        log_m = _log_m_over_q(lead, beta)
        own = tl.where(live, -(1.0 - beta) * tl.exp(log_q) * log_m, 0.0)
        loss += own + tl.where(live, beta * tl.exp(log_p) * (lead - log_m), 0.0)
        centre += own
    tl.store(Loss + row, tl.sum(loss, 0))
    tl.store(Stats + row, lse_q)
    tl.store(Stats + T + row, lse_p)
    tl.store(Stats + 2 * T + row, tl.sum(centre, 0))


def forward(hidden, weight, teacher_hidden, teacher_weight, beta=0.5, chunk=1024):
    hidden, weight = hidden.contiguous(), weight.contiguous()
    teacher_hidden, teacher_weight = teacher_hidden.contiguous(), teacher_weight.contiguous()
    T, V = hidden.shape[0], weight.shape[0]
    loss = torch.empty(T, device=hidden.device, dtype=torch.float32)
    stats = torch.empty(3, T, device=hidden.device, dtype=torch.float32)
    student, teacher = torch.empty(2, min(chunk, T), V, device=hidden.device, dtype=torch.float32)
    for first in range(0, T, chunk):
        x, y = hidden[first : first + chunk], teacher_hidden[first : first + chunk]
        _matmul(x, weight.t(), student)
        _matmul(y, teacher_weight.t(), teacher)
        _jsd_rows[(x.shape[0],)](
            student, teacher, loss[first:], stats[:, first:], T, V, beta, BLOCK=_side(V, 2048), num_warps=4
        )
    return loss, (hidden, weight, teacher_hidden, teacher_weight, stats, beta, chunk)


# --- backward ---
@triton.jit
def _jsd_slopes(Student, Teacher, Stats, Slopes, T, V, slopes_row, beta, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    log_q = tl.load(Student + row * V + v, mask=v < V, other=0.0) - tl.load(Stats + row)
    log_p = tl.load(Teacher + row * V + v, mask=v < V, other=0.0) - tl.load(Stats + T + row)
    log_m = _log_m_over_q(log_p - log_q, beta)
    slope = tl.exp(log_q) * (-(1.0 - beta) * log_m - tl.load(Stats + 2 * T + row))
    tl.store(Slopes + row * slopes_row + v, slope, mask=v < V)


@triton.jit
def _weighted_rows(X, DLoss, GX, H, gx_t, stride_g, BLOCK: tl.constexpr):
    # The cotangent joins the products: slopes times 1/T would flush to zero in fp16.
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + t * H + h, mask=h < H, other=0.0).to(tl.float32)
    tl.store(GX + t * gx_t + h, x * tl.load(DLoss + t * stride_g), mask=h < H)


@triton.jit
def _chunk_out(acc, OUT, Factor, m, n, M, N, stride_g, SCALE: tl.constexpr, ADD: tl.constexpr):
    out = OUT + m[:, None] * N + n[None, :]
    inside = (m[:, None] < M) & (n[None, :] < N)
    if SCALE:
        acc *= tl.load(Factor + m * stride_g, mask=m < M, other=0.0)[:, None]
    if ADD:
        acc += tl.load(out, mask=inside, other=0.0)
    tl.store(out, acc, mask=inside)


@triton.jit
def _chunk_product(
    L, R, OUT, Factor, M, N, K, stride_g, TURN_L: tl.constexpr, TURN_R: tl.constexpr,
    SCALE: tl.constexpr, ADD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Row tiles are the fast axis: a chunk has few of them, and they share a column tile of the wide operand.
    row, col = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        left = L.load([k, row]).T if TURN_L else L.load([row, k])
        right = R.load([col, k]).T if TURN_R else R.load([k, col])
        acc = tl.dot(left, right, acc)
    # The tile leaves in halves of its columns, which need half the registers each.
    one, other = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
    m, n = row.to(tl.int64) + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N // 2)
    _chunk_out(one, OUT, Factor, m, n, M, N, stride_g, SCALE, ADD)
    _chunk_out(other, OUT, Factor, m, n + BLOCK_N // 2, M, N, stride_g, SCALE, ADD)


def _room(rows, cols, like):
    """A matrix whose rows start on sixteen bytes, as descriptors need them."""
    step = 16 // like.element_size()
    return like.new_empty(rows, triton.cdiv(cols, step) * step)[:, :cols]


def _tiles(matrix, rows, cols):
    """A descriptor of (rows, cols) tiles of a matrix, or of a copy where its rows are not dense or not aligned."""
    starts = (matrix.stride(0) | matrix.storage_offset()) * matrix.element_size()
    if matrix.stride(1) != 1 or matrix.stride(0) < matrix.shape[1] or starts % 16:
        dense = _room(*matrix.shape, matrix)
        dense.copy_(matrix)
        matrix = dense
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, cols])


def _up(size):
    return max(16, triton.next_power_of_2(size))


def _multiplied(left, right, out, turn_left=False, turn_right=False, add=False, factor=None):
    """out (M, N) of left (M, K), or (K, M) if it is to be turned, and right (K, N), or (N, K)."""
    M, K = left.shape[::-1] if turn_left else left.shape
    N = out.shape[1]
    BM, BN, BK = min(128, _up(M)), min(256, _up(N)), min(128 // left.element_size(), _up(K))
    _chunk_product[(triton.cdiv(M, BM), triton.cdiv(N, BN))](
        _tiles(left, *((BK, BM) if turn_left else (BM, BK))), _tiles(right, *((BN, BK) if turn_right else (BK, BN))),
        out, factor, M, N, K, 0 if factor is None else factor.stride(0), TURN_L=turn_left, TURN_R=turn_right,
        SCALE=factor is not None, ADD=add, BLOCK_M=BM, BLOCK_N=BN, BLOCK_K=BK, num_warps=8, num_stages=4,
    )  # fmt: skip


def backward(saved, grad_loss, needs=(True, True)):
    hidden, weight, teacher_hidden, teacher_weight, stats, beta, chunk = saved
    T, V = hidden.shape[0], weight.shape[0]
    student, teacher = torch.empty(2, min(chunk, T), V, device=hidden.device, dtype=torch.float32)
    slopes = _room(min(chunk, T), V, hidden)
    weighted = _room(*hidden.shape, hidden)
    _weighted_rows[(T, triton.cdiv(hidden.shape[1], 1024))](
        hidden, grad_loss, weighted, hidden.shape[1], weighted.stride(0), grad_loss.stride(0), BLOCK=1024, num_warps=4
    )
    dx = torch.empty_like(hidden) if needs[0] else None
    dw = torch.empty(weight.shape, device=weight.device, dtype=torch.float32) if needs[1] else None
    BLOCK = _side(V, 1024)
    for first in range(0, T, chunk):
        x, y = hidden[first : first + chunk], teacher_hidden[first : first + chunk]
        _multiplied(x, weight, student, turn_right=True)
        _multiplied(y, teacher_weight, teacher, turn_right=True)
        _jsd_slopes[(x.shape[0], triton.cdiv(V, BLOCK))](
            student, teacher, stats[:, first:], slopes, T, V, slopes.stride(0), beta, BLOCK=BLOCK, num_warps=4
        )
        mine = slopes[: x.shape[0]]
        if needs[0]:
            _multiplied(mine, weight, dx[first:], factor=grad_loss[first : first + chunk])
        if needs[1]:
            _multiplied(mine, weighted[first : first + chunk], dw, turn_left=True, add=first > 0)
    return dx, dw.to(weight.dtype) if needs[1] else None


# --- check ---
SWEEP = (
    {"T": 16, "V": 64, "H": 32, "G": 48, "chunk": 8},
    {"T": 21, "V": 75, "H": 40, "G": 23, "chunk": 13},
    {"T": 16, "V": 48, "H": 16, "G": 32, "chunk": 64, "dtype": "float16"},
    {"T": 18, "V": 40, "H": 24, "G": 16, "chunk": 8, "dtype": "bfloat16"},
)
BENCH = ({"T": 4096, "V": 32000, "H": 1024, "G": 2048, "chunk": 1024, "dtype": "bfloat16"},)


def make_args(T, V, H, G, chunk, dtype="float32", device="cpu", seed=0):
    if V < 2:
        raise ValueError("distributions over one word cannot differ")
    g = torch.Generator().manual_seed(seed)
    tensors = (
        torch.randn(T, H, generator=g),
        torch.randn(V, H, generator=g) / H**0.5,
        torch.randn(T, G, generator=g),
        torch.randn(V, G, generator=g) / G**0.5,
    )
    return *(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors), 0.3, chunk


def reference(hidden, weight, teacher_hidden, teacher_weight, beta=0.5, chunk=1024):
    log_q = torch.log_softmax((hidden @ weight.T).float(), -1)
    log_p = torch.log_softmax((teacher_hidden @ teacher_weight.T).float(), -1)
    p, q = log_p.exp(), log_q.exp()
    log_m = torch.log(beta * p + (1.0 - beta) * q)
    return (beta * p * (log_p - log_m) + (1.0 - beta) * q * (log_q - log_m)).sum(-1)
