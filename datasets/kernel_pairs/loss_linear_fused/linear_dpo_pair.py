"""DPO from hidden states of packed answers: two row sums make a pair's slope, which meets the softmax gradient late.

s[i] = sum over answer i's tokens of logp,    m = (s[chosen] - s[rejected]) - (ref[chosen] - ref[rejected]),
    L = mean of log(1 + exp(-beta m)),    c = -beta sigmoid(-beta m) for chosen, the opposite for rejected tokens.
The forward saves lse and one c per token. Backwards the vocabulary goes by in strips; a strip's scratch holds
onehot - softmax alone, numbers of order one in which no slope, however saturated the pair, is rounded. c scales the
rows of dX behind the product, and the rows of x before the product for dW. Both products are one launch per strip: the
first programs own tiles of dX, which strip after strip adds up in fp32, the others tiles of dW, which the strip ends.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "linear_dpo_pair",
    "family": "loss_linear_fused",
    "op": "linear_dpo_loss",
    "schema": 1,
    "techniques": (
        "saved-lse", "recompute", "chunked", "one-launch", "varlen", "prologue-fusion", "epilogue-fusion",
        "scalar-gradient",
    ),
    "saves": ("lse: fp32 (T,)", "slope: fp32 (T,)"),
    "grads": ("hidden", "weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}  # fmt: skip


# --- forward ---
@triton.jit
def _answer_logits(
    X, W, t, v, T, V, H, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr
):  # fmt: skip
    z = tl.zeros((BLOCK_T, BLOCK_V), tl.float32)
    for start in range(0, H, BLOCK_H):
        h = start + tl.arange(0, BLOCK_H)
        x = tl.load(X + t[:, None] * H + h[None, :], mask=(t[:, None] < T) & (h[None, :] < H), other=0.0)
        wt = tl.load(W + v[:, None] * H + h[None, :], mask=(v[:, None] < V) & (h[None, :] < H), other=0.0)
        z = tl.dot(x, tl.trans(wt), z)
    return z


@triton.jit
def _word_range(
    X, W, Label, Lse, LogP, T, V, H, words, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr
):
    # Over one range of words: the log-sum-exp, and the label's logit where the label is among them.
    t = tl.program_id(1).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    label = tl.load(Label + t, mask=t < T, other=-1)
    first = tl.program_id(0) * words
    last = tl.minimum(first + words, V)
    top = tl.full((BLOCK_T,), -1.0e30, tl.float32)
    norm = tl.zeros((BLOCK_T,), tl.float32)
    hit = tl.zeros((BLOCK_T,), tl.float32)
    for start in range(first, last, BLOCK_V):
        v = (start + tl.arange(0, BLOCK_V)).to(tl.int64)
        z = _answer_logits(X, W, t, v, T, V, H, BLOCK_T, BLOCK_V, BLOCK_H)
        hit += tl.sum(tl.where((v[None, :] == label[:, None]) & (v[None, :] < last), z, 0.0), 1)
        z = tl.where(v[None, :] < last, z, -1.0e30)
        higher = tl.maximum(top, tl.max(z, 1))
        norm = norm * tl.exp(top - higher) + tl.sum(tl.exp(z - higher[:, None]), 1)
        top = higher
    at = tl.program_id(0).to(tl.int64) * T + t
    tl.store(Lse + at, top + tl.log(norm), mask=t < T)
    tl.store(LogP + at, hit, mask=t < T)


@triton.jit
def _pair_sum(RangeLse, RangeHit, Lse, T, begin, end, BLOCK_T: tl.constexpr, RANGES: tl.constexpr):
    # The answer's log-probability. Ranges are joined here, token by token, into the lse that is saved.
    total = tl.zeros((BLOCK_T,), tl.float32)
    for start in range(begin, end, BLOCK_T):
        t = (start + tl.arange(0, BLOCK_T)).to(tl.int64)
        lse = tl.load(RangeLse + t, mask=t < end, other=0.0)
        hit = tl.load(RangeHit + t, mask=t < end, other=0.0)
        for other in range(1, RANGES):
            more = tl.load(RangeLse + other * T + t, mask=t < end, other=0.0)
            top = tl.maximum(lse, more)
            lse = top + tl.log(tl.exp(lse - top) + tl.exp(more - top))
            hit += tl.load(RangeHit + other * T + t, mask=t < end, other=0.0)
        tl.store(Lse + t, lse, mask=t < end)
        total += hit - lse
    return tl.sum(total, 0)


@triton.jit
def _pair_fwd(
    RangeLse, RangeHit, Offsets, Ref, Lse, Slope, Losses, T, B, beta, BLOCK_T: tl.constexpr, RANGES: tl.constexpr
):  # fmt: skip
    pair = tl.program_id(0)
    c0 = tl.load(Offsets + pair)
    c1 = tl.load(Offsets + pair + 1)
    r0 = tl.load(Offsets + B + pair)
    r1 = tl.load(Offsets + B + pair + 1)
    chosen = _pair_sum(RangeLse, RangeHit, Lse, T, c0, c1, BLOCK_T, RANGES) - tl.load(Ref + pair)
    rejected = _pair_sum(RangeLse, RangeHit, Lse, T, r0, r1, BLOCK_T, RANGES) - tl.load(Ref + B + pair)
    m = beta * (chosen - rejected)
    e = tl.exp(-tl.abs(m))
    tl.store(Losses + pair, tl.maximum(-m, 0.0) + tl.log(1.0 + e))
    slope = -beta * tl.where(m < 0.0, 1.0, e) / (1.0 + e) + tl.zeros((BLOCK_T,), tl.float32)
    for start in range(c0, c1, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        tl.store(Slope + t, slope, mask=t < c1)
    for start in range(r0, r1, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        tl.store(Slope + t, -slope, mask=t < r1)


def _edge(size, most=128):
    return max(16, min(most, triton.next_power_of_2(size)))


def forward(hidden, weight, label, offsets, ref, beta=0.1, strip=8192):
    # Answer i has the tokens offsets[i] to offsets[i + 1] of hidden (T, H): B chosen ones, then B rejected ones.
    hidden, weight, label = hidden.contiguous(), weight.contiguous(), label.contiguous()
    (T, H), V, B = hidden.shape, weight.shape[0], ref.numel() // 2
    BLOCK_T = _edge(T)
    ranges = max(1, min(528 // triton.cdiv(T, BLOCK_T), triton.cdiv(V, 128), 16))
    words = triton.cdiv(triton.cdiv(V, ranges), 128) * 128
    ranges = triton.cdiv(V, words)
    fp32 = {"device": hidden.device, "dtype": torch.float32}
    range_lse, range_hit = torch.empty(ranges, T, **fp32), torch.empty(ranges, T, **fp32)
    lse, slope, losses = torch.empty(T, **fp32), torch.empty(T, **fp32), torch.empty(B, **fp32)
    _word_range[(ranges, triton.cdiv(T, BLOCK_T))](
        hidden, weight, label, range_lse, range_hit, T, V, H, words,
        BLOCK_T=BLOCK_T, BLOCK_V=_edge(V), BLOCK_H=_edge(H, 128 // hidden.element_size()), num_warps=8, num_stages=3,
    )  # fmt: skip
    _pair_fwd[(B,)](range_lse, range_hit, offsets, ref, lse, slope, losses, T, B, beta, BLOCK_T=128, RANGES=ranges)
    return losses.mean(), (hidden, weight, label, lse, slope, B, strip)


# --- backward ---
@triton.jit
def _strip_residual(
    X, W, Label, Lse, Residual, first, width, T, V, H,
    BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    v = first + column
    p = tl.exp(
        _answer_logits(X, W, t, v.to(tl.int64), T, V, H, BLOCK_T, BLOCK_V, BLOCK_H)
        - tl.load(Lse + t, mask=t < T, other=0.0)[:, None]
    )
    hot = v[None, :] == tl.load(Label + t, mask=t < T, other=-1)[:, None]
    inside = (t[:, None] < T) & (column[None, :] < width)
    tl.store(Residual + t[:, None] * width + column[None, :], tl.where(hot, 1.0 - p, -p), mask=inside)


@triton.jit
def _strip_products(
    DLoss, Slope, Residual, X, W, DX, DW, first, width, dx_tiles, T, H, B, FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # BLOCK_M tokens for a tile of dX, BLOCK_M words for one of dW; BLOCK_K of the other kind at a time.
    h = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    g = tl.load(DLoss) / B
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_H), tl.float32)
    if tl.program_id(1) < dx_tiles:
        t = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        for start in range(0, width, BLOCK_K):
            column = start + k
            at = Residual + t[:, None] * width + column[None, :]
            residual = tl.load(at, mask=(t[:, None] < T) & (column[None, :] < width), other=0.0)
            w_at = W + (first + column).to(tl.int64)[:, None] * H + h[None, :]
            w = tl.load(w_at, mask=(column[:, None] < width) & (h[None, :] < H), other=0.0)
            acc = tl.dot(residual, w, acc)
        acc *= (g * tl.load(Slope + t, mask=t < T, other=0.0))[:, None]
        dx_at = DX + t[:, None] * H + h[None, :]
        inside = (t[:, None] < T) & (h[None, :] < H)
        if not FIRST:
            acc += tl.load(dx_at, mask=inside, other=0.0)
        tl.store(dx_at, acc, mask=inside)
    else:
        column = (tl.program_id(1) - dx_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
        for start in range(0, T, BLOCK_K):
            t = (start + k).to(tl.int64)
            at = Residual + t[None, :] * width + column[:, None]
            residual = tl.load(at, mask=(t[None, :] < T) & (column[:, None] < width), other=0.0)
            x_at = X + t[:, None] * H + h[None, :]
            x = tl.load(x_at, mask=(t[:, None] < T) & (h[None, :] < H), other=0.0)
            slope = tl.load(Slope + t, mask=t < T, other=0.0)
            acc = tl.dot(residual, (x * slope[:, None]).to(x.dtype), acc)
        dw_at = DW + (first + column).to(tl.int64)[:, None] * H + h[None, :]
        tl.store(dw_at, acc * g, mask=(column[:, None] < width) & (h[None, :] < H))


def backward(saved, grad_loss, needs=None):
    hidden, weight, label, lse, slope, B, strip = saved
    (T, H), V = hidden.shape, weight.shape[0]
    dx = torch.empty(T, H, device=hidden.device, dtype=torch.float32)
    dw = torch.empty_like(weight)
    residual = torch.empty(T * min(strip, V), device=hidden.device, dtype=hidden.dtype)
    BM, BH, BK = _edge(max(T, min(strip, V))), _edge(H), 128 // hidden.element_size()
    BT, BV = _edge(T), _edge(min(strip, V))
    for first in range(0, V, strip):
        width = min(strip, V - first)
        _strip_residual[(triton.cdiv(T, BT), triton.cdiv(width, BV))](
            hidden, weight, label, lse, residual, first, width, T, V, H,
            BLOCK_T=BT, BLOCK_V=BV, BLOCK_H=min(BH, BK), num_warps=8, num_stages=3,
        )  # fmt: skip
        dx_tiles, dw_tiles = triton.cdiv(T, BM), triton.cdiv(width, BM)
        _strip_products[(triton.cdiv(H, BH), dx_tiles + dw_tiles)](
            grad_loss, slope, residual, hidden, weight, dx, dw, first, width, dx_tiles, T, H, B, FIRST=first == 0,
            BLOCK_M=BM, BLOCK_H=BH, BLOCK_K=BK, num_warps=8, num_stages=3,
        )  # fmt: skip
    return dx.to(hidden.dtype), dw


# --- check ---
SWEEP = (
    {"B": 2, "longest": 16, "V": 64, "H": 32, "strip": 32},
    {"B": 3, "longest": 21, "V": 75, "H": 40, "strip": 32},
    {"B": 2, "longest": 12, "V": 48, "H": 16, "strip": 64, "dtype": "float16"},
    {"B": 4, "longest": 9, "V": 40, "H": 24, "strip": 16, "dtype": "bfloat16"},
)
BENCH = ({"B": 8, "longest": 512, "V": 32000, "H": 1024, "strip": 8192, "dtype": "bfloat16"},)


def make_args(B, longest, V, H, strip, dtype="float32", device="cpu", seed=0):
    if V < 2:
        raise ValueError("the only word's probability is one whatever the weights are")
    g = torch.Generator().manual_seed(seed)
    length = torch.randint((longest + 1) // 2, longest + 1, (2 * B,), generator=g)
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), length.cumsum(0)))
    T = int(offsets[-1])
    hidden, weight = torch.randn(T, H, generator=g), torch.randn(V, H, generator=g) / H**0.5
    hidden, weight = (t.to(getattr(torch, dtype)) for t in (hidden, weight))
    label = torch.randint(0, V, (T,), generator=g)
    # The reference is near the policy, whose lse is about log V + 1/2: no margin is saturated.
    logp = (hidden * weight[label]).float().sum(-1) - torch.tensor(float(V)).log() - 0.5
    answer = torch.repeat_interleave(torch.arange(2 * B), length)
    ref = torch.zeros(2 * B).index_add_(0, answer, logp) + 3.0 * torch.randn(2 * B, generator=g)
    return (
        hidden.to(device), weight.to(device), label.to(device), offsets.to(device=device, dtype=torch.int32),
        ref.to(device), 0.3, strip,
    )  # fmt: skip


def reference(hidden, weight, label, offsets, ref, beta=0.1, strip=8192):
    logp = torch.log_softmax((hidden @ weight.T).float(), -1).gather(-1, label[:, None])[:, 0]
    token = torch.arange(logp.shape[0], device=logp.device, dtype=offsets.dtype)
    answer = torch.searchsorted(offsets[1:].contiguous(), token, right=True)
    total = torch.zeros_like(ref, dtype=logp.dtype).index_add_(0, answer, logp)
    chosen, rejected = (total - ref).view(2, -1)
    return torch.nn.functional.softplus(-beta * (chosen - rejected)).mean()
