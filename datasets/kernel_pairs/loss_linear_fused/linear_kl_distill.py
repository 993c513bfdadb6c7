"""KL(teacher || student) straight from the hidden states of both: neither model's logits are ever stored.

With q = softmax(y U^T) of the frozen teacher and p = softmax(x W^T) of the student:
    L = sum q (log q - log p),    dlogits = g (p - q),    dx = dlogits W,    dW = dlogits^T x.
The forward runs both normalisers and the mean of z_teacher - z_student under q online over tiles of words; splits of
the vocabulary work side by side, and their three numbers per token are joined in the end. The backward
goes through the vocabulary in strips: one launch forms both logit tiles again and keeps p - q of a strip as scratch, a
second does both products of the strip with g in them, the tiles of dW in its first programs, those of dx in the rest.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

META = {
    "slug": "linear_kl_distill",
    "family": "loss_linear_fused",
    "op": "linear_kl_div",
    "schema": 1,
    "techniques": ("saved-lse", "recompute", "chunked", "one-launch", "partial-gradient"),
    "saves": ("lse: fp32 (2, T)",),
    "grads": ("hidden", "weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _head_tile(X, W, t, v, T, V, H, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr):
    """Logits of tokens t and words v of one head in fp32."""
    z = tl.zeros((BLOCK_T, BLOCK_V), tl.float32)
    for start in range(0, H, BLOCK_H):
        h = start + tl.arange(0, BLOCK_H)
        x = tl.load(X + t[:, None] * H + h[None, :], mask=(t[:, None] < T) & (h[None, :] < H), other=0.0)
        w = tl.load(W + v[:, None] * H + h[None, :], mask=(v[:, None] < V) & (h[None, :] < H), other=0.0)
        z = tl.dot(x, tl.trans(w), z)
    return z


@triton.jit
def _distill_fwd(
    X, W, Y, U, Parts, T, V, H, G, words, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    top_p = tl.full((BLOCK_T,), -1.0e30, tl.float32)
    top_q = tl.full((BLOCK_T,), -1.0e30, tl.float32)
    sum_p = tl.zeros((BLOCK_T,), tl.float32)
    sum_q = tl.zeros((BLOCK_T,), tl.float32)
    gap = tl.zeros((BLOCK_T,), tl.float32)
    last = tl.minimum((tl.program_id(1) + 1) * words, V)
    for start in range(tl.program_id(1) * words, last, BLOCK_V):
        v = (start + tl.arange(0, BLOCK_V)).to(tl.int64)
        student = _head_tile(X, W, t, v, T, V, H, BLOCK_T, BLOCK_V, BLOCK_H)
        teacher = _head_tile(Y, U, t, v, T, V, G, BLOCK_T, BLOCK_V, BLOCK_H)
        ahead = teacher - student
        student = tl.where(v[None, :] < last, student, -float("inf"))
        teacher = tl.where(v[None, :] < last, teacher, -float("inf"))
        new_p = tl.maximum(top_p, tl.max(student, 1))
        new_q = tl.maximum(top_q, tl.max(teacher, 1))
        e = tl.exp(teacher - new_q[:, None])
        shrink = tl.exp(top_q - new_q)
        sum_p = sum_p * tl.exp(top_p - new_p) + tl.sum(tl.exp(student - new_p[:, None]), 1)
        sum_q = sum_q * shrink + tl.sum(e, 1)
        gap = gap * shrink + tl.sum(e * ahead, 1)
        top_p = new_p
        top_q = new_q
    part = Parts + tl.program_id(1).to(tl.int64) * T + t
    side = tl.num_programs(1).to(tl.int64) * T
    tl.store(part, top_p + tl.log(sum_p), mask=t < T)
    tl.store(part + side, top_q + tl.log(sum_q), mask=t < T)
    tl.store(part + 2 * side, gap / sum_q, mask=t < T)


def _side(size, most=128):
    return max(16, min(most, triton.next_power_of_2(size)))


def forward(hidden, weight, teacher_hidden, teacher_weight, strip=8192):
    hidden, weight = hidden.contiguous(), weight.contiguous()
    teacher_hidden, teacher_weight = teacher_hidden.contiguous(), teacher_weight.contiguous()
    (T, H), V, G = hidden.shape, weight.shape[0], teacher_hidden.shape[1]
    BLOCK_T, BLOCK_V = _side(T, 64), _side(V)
    # Token tiles times splits: two programs for each of 132 processors.
    words = triton.cdiv(triton.cdiv(V, max(1, 264 // triton.cdiv(T, BLOCK_T))), BLOCK_V) * BLOCK_V
    splits = triton.cdiv(V, words)
    parts = torch.empty(3, splits, T, device=hidden.device, dtype=torch.float32)
    _distill_fwd[(triton.cdiv(T, BLOCK_T), splits)](
        hidden, weight, teacher_hidden, teacher_weight, parts, T, V, H, G, words,
        BLOCK_T=BLOCK_T, BLOCK_V=BLOCK_V, BLOCK_H=_side(H, 128 // hidden.element_size()), num_warps=8,
    )  # fmt: skip
    lse = parts[:2].logsumexp(1)
    loss = ((parts[1] - lse[1]).exp() * parts[2]).sum(0) - lse[1] + lse[0]
    return loss, (hidden, weight, teacher_hidden, teacher_weight, lse, strip)


# --- backward ---
@triton.jit
def _weighted_rows(X, DLoss, GX, H, gx_t, stride_g, BLOCK: tl.constexpr):
    # x times the cotangent, once for all strips: it is an operand of dW.
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + t * H + h, mask=h < H, other=0.0).to(tl.float32)
    tl.store(GX + t * gx_t + h, x * tl.load(DLoss + t * stride_g), mask=h < H)


@triton.jit
def _strip_logits(X, W, t, v, H, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr):
    z = tl.zeros((BLOCK_T, BLOCK_V), tl.float32)
    for h in range(0, H, BLOCK_H):
        z = tl.dot(X.load([t, h]), W.load([v, h]).T, z)
    return z


@triton.jit
def _distill_strip(
    X, Y, W, U, Lse, DZ, first, T, H, G, width, dz_t,
    BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    # Token tiles are the fast axis: programs that run together share their words of both heads.
    row, column = tl.program_id(0) * BLOCK_T, tl.program_id(1) * BLOCK_V
    t, c = row.to(tl.int64) + tl.arange(0, BLOCK_T), column + tl.arange(0, BLOCK_V)
    # One tile becomes probabilities before the other is formed: two accumulators would not fit the registers.
    q = _strip_logits(Y, U, row, first + column, G, BLOCK_T, BLOCK_V, BLOCK_H)
    q = tl.exp(q - tl.load(Lse + T + t, mask=t < T, other=0.0)[:, None])
    p = _strip_logits(X, W, row, first + column, H, BLOCK_T, BLOCK_V, BLOCK_H)
    p = tl.exp(p - tl.load(Lse + t, mask=t < T, other=0.0)[:, None])
    # Without the cotangent: p - q times 1/T would flush to zero in fp16.
    tl.store(DZ + t[:, None] * dz_t + c[None, :], p - q, mask=(t[:, None] < T) & (c[None, :] < width))


@triton.jit
def _dx_out(dx, DX, g, t, h, T, H, FIRST: tl.constexpr):
    """Add a piece of dx: strips follow one another on the stream, and the owner adds to what the last one left."""
    out = DX + t[:, None] * H + h[None, :]
    inside = (t[:, None] < T) & (h[None, :] < H)
    dx *= g[:, None]
    if not FIRST:
        dx += tl.load(out, mask=inside, other=0.0)
    tl.store(out, dx, mask=inside)


@triton.jit
def _distill_products(
    DZW, GX, DZX, W, DLoss, DX, DW, first, T, H, width, stride_g,
    FIRST: tl.constexpr, NEED_X: tl.constexpr, NEED_W: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    columns = tl.cdiv(H, WIDE)
    tile = tl.program_id(0)
    column, row = tile % columns * WIDE, tile // columns
    word_rows = 0
    if NEED_W:
        word_rows = tl.cdiv(width, HIGH)
        if row < word_rows:
            # The strip finishes its rows of dW: they sum over all tokens.
            dw = tl.zeros((HIGH, WIDE), tl.float32)
            for t in range(0, T, STEP):
                dw = tl.dot(DZW.load([t, row * HIGH]).T, GX.load([t, column]), dw)
            c = row * HIGH + tl.arange(0, HIGH)
            h = column + tl.arange(0, WIDE)
            out = DW + (first + c).to(tl.int64)[:, None] * H + h[None, :]
            tl.store(out, dw, mask=(c[:, None] < width) & (h[None, :] < H))
    if NEED_X:
        token_row = row - word_rows
        if token_row >= 0:
            dx = tl.zeros((HIGH, WIDE), tl.float32)
            # Words past the strip meet a dz of zeros.
            for c in range(0, width, STEP):
                dx = tl.dot(DZX.load([token_row * HIGH, c]), W.load([first + c, column]), dx)
            t = token_row.to(tl.int64) * HIGH + tl.arange(0, HIGH)
            g = tl.load(DLoss + t * stride_g, mask=t < T, other=0.0)
            # The tile leaves in halves of its columns, which need half the registers each.
            left, right = tl.split(tl.permute(tl.reshape(dx, (HIGH, 2, WIDE // 2)), (0, 2, 1)))
            h = column + tl.arange(0, WIDE // 2)
            _dx_out(left, DX, g, t, h, T, H, FIRST)
            _dx_out(right, DX, g, t, h + WIDE // 2, T, H, FIRST)


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


def backward(saved, grad_loss, needs=(True, True)):
    hidden, weight, teacher_hidden, teacher_weight, lse, strip = saved
    (T, H), V, G = hidden.shape, weight.shape[0], teacher_hidden.shape[1]
    need_x, need_w = needs
    dx = torch.empty(T, H, device=hidden.device, dtype=torch.float32) if need_x else None
    dw = torch.empty_like(weight) if need_w else None
    depth, strip = 128 // hidden.element_size(), min(strip, V)
    weighted = _room(T, H, hidden)
    _weighted_rows[(T, triton.cdiv(H, 1024))](
        hidden, grad_loss, weighted, H, weighted.stride(0), grad_loss.stride(0), BLOCK=1024, num_warps=4
    )
    scratch = _room(T, strip, hidden)
    BT, BV, BH = min(128, _up(T)), min(128, _up(strip)), min(depth, _up(min(H, G)))
    HIGH, WIDE, STEP = min(128, _up(min(T, strip))), min(256, _up(H)), min(depth, _up(min(T, strip)))
    states, words = (hidden, teacher_hidden), (weight, teacher_weight)
    heads = (*(_tiles(t, BT, BH) for t in states), *(_tiles(t, BV, BH) for t in words))
    factors = _tiles(weighted, STEP, WIDE), _tiles(weight, STEP, WIDE)
    for first in range(0, V, strip):
        width = min(strip, V - first)
        _distill_strip[(triton.cdiv(T, BT), triton.cdiv(width, BV))](
            *heads, lse, scratch, first, T, H, G, width, scratch.stride(0),
            BLOCK_T=BT, BLOCK_V=BV, BLOCK_H=BH, num_warps=8, num_stages=3,
        )  # fmt: skip
        rows = need_w * triton.cdiv(width, HIGH) + need_x * triton.cdiv(T, HIGH)
        dz = scratch[:, :width]
        _distill_products[(rows * triton.cdiv(H, WIDE),)](
            _tiles(dz, STEP, HIGH), factors[0], _tiles(dz, HIGH, STEP), factors[1], grad_loss, dx, dw,
            first, T, H, width, grad_loss.stride(0), FIRST=first == 0, NEED_X=need_x, NEED_W=need_w,
            HIGH=HIGH, WIDE=WIDE, STEP=STEP, num_warps=8, num_stages=4,
        )  # fmt: skip
    return dx.to(hidden.dtype) if need_x else None, dw


# --- check ---
SWEEP = (
    {"T": 16, "V": 64, "H": 32, "G": 48, "strip": 32},
    {"T": 21, "V": 75, "H": 40, "G": 23, "strip": 32},
    {"T": 16, "V": 48, "H": 16, "G": 32, "strip": 64, "dtype": "float16"},
    {"T": 18, "V": 40, "H": 24, "G": 16, "strip": 16, "dtype": "bfloat16"},
)
BENCH = ({"T": 4096, "V": 32000, "H": 1024, "G": 2048, "strip": 8192, "dtype": "bfloat16"},)


def make_args(T, V, H, G, strip, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = (
        torch.randn(T, H, generator=g),
        torch.randn(V, H, generator=g) / H**0.5,
        torch.randn(T, G, generator=g),
        torch.randn(V, G, generator=g) / G**0.5,
    )
    return *(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors), strip


def reference(hidden, weight, teacher_hidden, teacher_weight, strip=8192):
    log_p = torch.log_softmax((hidden @ weight.T).float(), -1)
    log_q = torch.log_softmax((teacher_hidden @ teacher_weight.T).float(), -1)
    return (log_q.exp() * (log_q - log_p)).sum(-1)
