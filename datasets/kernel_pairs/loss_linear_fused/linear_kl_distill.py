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
def _distill_strip(
    X, W, Y, U, Lse, DZ, first, T, V, H, G, width,
    BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    c = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    v = (first + c).to(tl.int64)
    # One tile becomes probabilities before the other is formed: two accumulators would not fit the registers.
    q = tl.exp(_head_tile(Y, U, t, v, T, V, G, BLOCK_T, BLOCK_V, BLOCK_H)
               - tl.load(Lse + T + t, mask=t < T, other=0.0)[:, None])  # fmt: skip
    p = tl.exp(_head_tile(X, W, t, v, T, V, H, BLOCK_T, BLOCK_V, BLOCK_H)
               - tl.load(Lse + t, mask=t < T, other=0.0)[:, None])  # fmt: skip
    # Without the cotangent: p - q times 1/T would flush to zero in fp16.
    tl.store(DZ + t[:, None] * width + c[None, :], p - q, mask=(t[:, None] < T) & (c[None, :] < width))


@triton.jit
def _distill_products(
    DZ, X, W, DLoss, DX, DW, first, T, H, width, stride_g,
    FIRST: tl.constexpr, NEED_X: tl.constexpr, NEED_W: tl.constexpr, BLOCK: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    columns = tl.cdiv(H, BLOCK)
    tile = tl.program_id(0)
    h = (tile % columns) * BLOCK + tl.arange(0, BLOCK)
    row = tile // columns
    word_rows = 0
    if NEED_W:
        word_rows = tl.cdiv(width, BLOCK)
        if row < word_rows:
            # The strip finishes its rows of dW: they sum over all tokens.
            c = row * BLOCK + tl.arange(0, BLOCK)
            dw = tl.zeros((BLOCK, BLOCK), tl.float32)
            for start in range(0, T, BLOCK_S):
                t = (start + tl.arange(0, BLOCK_S)).to(tl.int64)
                dz = tl.load(
                    DZ + t[None, :] * width + c[:, None], mask=(t[None, :] < T) & (c[:, None] < width), other=0.0
                )
                x = tl.load(X + t[:, None] * H + h[None, :], mask=(t[:, None] < T) & (h[None, :] < H), other=0.0)
                g = tl.load(DLoss + t * stride_g, mask=t < T, other=0.0)
                dw = tl.dot(dz, (x * g[:, None]).to(x.dtype), dw)
            v = (first + c).to(tl.int64)
            tl.store(DW + v[:, None] * H + h[None, :], dw, mask=(c[:, None] < width) & (h[None, :] < H))
    if NEED_X:
        token_row = row - word_rows
        if token_row >= 0:
            t = token_row.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            out = DX + t[:, None] * H + h[None, :]
            inside = (t[:, None] < T) & (h[None, :] < H)
            dx = tl.zeros((BLOCK, BLOCK), tl.float32)
            for start in range(0, width, BLOCK_S):
                c = start + tl.arange(0, BLOCK_S)
                v = (first + c).to(tl.int64)
                dz = tl.load(
                    DZ + t[:, None] * width + c[None, :], mask=(t[:, None] < T) & (c[None, :] < width), other=0.0
                )
                w = tl.load(W + v[:, None] * H + h[None, :], mask=(c[:, None] < width) & (h[None, :] < H), other=0.0)
                dx = tl.dot(dz, w, dx)
            dx *= tl.load(DLoss + t * stride_g, mask=t < T, other=0.0)[:, None]
            # Strips follow one another on the stream: the owner adds to what the last one left.
            if not FIRST:
                dx += tl.load(out, mask=inside, other=0.0)
            tl.store(out, dx, mask=inside)


def backward(saved, grad_loss, needs=(True, True)):
    hidden, weight, teacher_hidden, teacher_weight, lse, strip = saved
    (T, H), V, G = hidden.shape, weight.shape[0], teacher_hidden.shape[1]
    need_x, need_w = needs
    dx = torch.empty(T, H, device=hidden.device, dtype=torch.float32) if need_x else None
    dw = torch.empty_like(weight) if need_w else None
    scratch = torch.empty(T * min(strip, V), device=hidden.device, dtype=hidden.dtype)
    step = 128 // hidden.element_size()
    BT, BV, side = _side(T), _side(min(strip, V)), _side(min(T, H, strip))
    for first in range(0, V, strip):
        width = min(strip, V - first)
        _distill_strip[(triton.cdiv(T, BT), triton.cdiv(width, BV))](
            hidden, weight, teacher_hidden, teacher_weight, lse, scratch, first, T, V, H, G, width,
            BLOCK_T=BT, BLOCK_V=BV, BLOCK_H=_side(H, step), num_warps=8, num_stages=3,
        )  # fmt: skip
        rows = need_w * triton.cdiv(width, side) + need_x * triton.cdiv(T, side)
        _distill_products[(rows * triton.cdiv(H, side),)](
            scratch, hidden, weight, grad_loss, dx, dw, first, T, H, width, grad_loss.stride(0),
            FIRST=first == 0, NEED_X=need_x, NEED_W=need_w,
            BLOCK=side, BLOCK_S=min(side, step), num_warps=8 if side == 128 else 4, num_stages=3,
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
