"""Linear head and cross-entropy without a logit matrix: the log-sum-exp is kept, the softmax returns strip by strip."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "linear_ce_lse_recompute",
    "family": "loss_linear_fused",
    "op": "linear_cross_entropy",
    "schema": 1,
    "techniques": ("saved-lse", "recompute", "chunked", "owner-grid"),
    "saves": ("lse: fp32 (T,)",),
    "grads": ("hidden", "weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _logit_tile(X, W, t, v, T, V, H, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr):
    """Logits of BLOCK_T tokens against BLOCK_V words, fp32; zero where either runs over its end."""
    acc = tl.zeros((BLOCK_T, BLOCK_V), tl.float32)
    for start in range(0, H, BLOCK_H):
        h = start + tl.arange(0, BLOCK_H)
        x = tl.load(X + t[:, None] * H + h[None, :], mask=(t[:, None] < T) & (h[None, :] < H), other=0.0)
        w = tl.load(W + v[None, :] * H + h[:, None], mask=(v[None, :] < V) & (h[:, None] < H), other=0.0)
        acc = tl.dot(x, w, acc)
    return acc


@triton.jit
def _linear_ce_fwd(
    X, W, Target, Loss, Lse, T, V, H, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    target = tl.load(Target + t, mask=t < T, other=0)
    top = tl.full((BLOCK_T,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_T,), tl.float32)
    picked = tl.zeros((BLOCK_T,), tl.float32)
    for start in range(0, V, BLOCK_V):
        v = (start + tl.arange(0, BLOCK_V)).to(tl.int64)
        logits = _logit_tile(X, W, t, v, T, V, H, BLOCK_T, BLOCK_V, BLOCK_H)
        logits = tl.where(v[None, :] < V, logits, -float("inf"))
        higher = tl.maximum(top, tl.max(logits, 1))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(logits - higher[:, None]), 1)
        top = higher
        picked += tl.sum(tl.where(v[None, :] == target[:, None], logits, 0.0), 1)
    lse = top + tl.log(total)
    tl.store(Lse + t, lse, mask=t < T)
    tl.store(Loss + t, lse - picked, mask=t < T)


def _side(n, most):
    return max(16, min(most, triton.next_power_of_2(n)))


def forward(hidden, weight, target, strip=8192):
    hidden, weight = hidden.contiguous(), weight.contiguous()
    (T, H), V = hidden.shape, weight.shape[0]
    loss = torch.empty(T, device=hidden.device, dtype=torch.float32)
    lse = torch.empty_like(loss)
    BLOCK_T = _side(T, 64)
    _linear_ce_fwd[(triton.cdiv(T, BLOCK_T),)](
        hidden, weight, target, loss, lse, T, V, H,
        BLOCK_T=BLOCK_T, BLOCK_V=_side(V, 128), BLOCK_H=_side(H, 128 // hidden.element_size()), num_warps=8,
    )  # fmt: skip
    return loss, (hidden, weight, target, lse, strip)


# --- backward ---
@triton.jit
def _dlogits_strip(
    X, W, Target, Lse, DLoss, DL, first, T, V, H, width, stride_g,
    BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    # (softmax - onehot) * g for the words first .. first+width of every token: the only scratch, T x width.
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    c = tl.program_id(1).to(tl.int64) * BLOCK_V + tl.arange(0, BLOCK_V)
    v = first + c
    logits = _logit_tile(X, W, t, v, T, V, H, BLOCK_T, BLOCK_V, BLOCK_H)
    lse = tl.load(Lse + t, mask=t < T, other=0.0)
    target = tl.load(Target + t, mask=t < T, other=0)
    g = tl.load(DLoss + t * stride_g, mask=t < T, other=0.0)
    p = tl.exp(logits - lse[:, None])
    dl = (p - tl.where(v[None, :] == target[:, None], 1.0, 0.0)) * g[:, None]
    tl.store(DL + t[:, None] * width + c[None, :], dl, mask=(t[:, None] < T) & (c[None, :] < width))


@triton.jit
def _dhidden_add(
    DL, W, DX, first, T, H, width, FIRST: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    # dX is owned by tokens and sums over words: each strip adds to it, in launch order, without atomics.
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    acc = tl.zeros((BLOCK_T, BLOCK_H), tl.float32)
    for start in range(0, width, BLOCK_V):
        c = (start + tl.arange(0, BLOCK_V)).to(tl.int64)
        dl = tl.load(DL + t[:, None] * width + c[None, :], mask=(t[:, None] < T) & (c[None, :] < width), other=0.0)
        in_w = (c[:, None] < width) & (h[None, :] < H)
        acc = tl.dot(dl, tl.load(W + (first + c)[:, None] * H + h[None, :], mask=in_w, other=0.0), acc)
    at = DX + t[:, None] * H + h[None, :]
    out = (t[:, None] < T) & (h[None, :] < H)
    if not FIRST:
        acc += tl.load(at, mask=out, other=0.0)
    tl.store(at, acc, mask=out)


@triton.jit
def _dweight_strip(DL, X, DW, first, T, H, width, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr):
    # dW is owned by words and sums over tokens: a strip finishes its rows at once.
    c = tl.program_id(0).to(tl.int64) * BLOCK_V + tl.arange(0, BLOCK_V)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    acc = tl.zeros((BLOCK_V, BLOCK_H), tl.float32)
    for start in range(0, T, BLOCK_T):
        t = (start + tl.arange(0, BLOCK_T)).to(tl.int64)
        dl = tl.load(DL + t[None, :] * width + c[:, None], mask=(t[None, :] < T) & (c[:, None] < width), other=0.0)
        x = tl.load(X + t[:, None] * H + h[None, :], mask=(t[:, None] < T) & (h[None, :] < H), other=0.0)
        acc = tl.dot(dl, x, acc)
    out = (c[:, None] < width) & (h[None, :] < H)
    tl.store(DW + (first + c)[:, None] * H + h[None, :], acc, mask=out)


def backward(saved, grad_loss, needs=None):
    hidden, weight, target, lse, strip = saved
    (T, H), V = hidden.shape, weight.shape[0]
    dx = torch.empty(T, H, device=hidden.device, dtype=torch.float32)
    dw = torch.empty_like(weight)
    scratch = torch.empty(T * min(strip, V), device=hidden.device, dtype=hidden.dtype)
    BT, BV, BH = _side(T, 128), _side(min(strip, V), 128), _side(H, 128)
    for first in range(0, V, strip):
        width = min(strip, V - first)
        _dlogits_strip[(triton.cdiv(T, BT), triton.cdiv(width, BV))](
            hidden, weight, target, lse, grad_loss, scratch, first, T, V, H, width, grad_loss.stride(0),
            BLOCK_T=BT, BLOCK_V=BV, BLOCK_H=min(BH, 64), num_warps=8,
        )  # fmt: skip
        _dhidden_add[(triton.cdiv(T, BT), triton.cdiv(H, BH))](
            scratch, weight, dx, first, T, H, width, FIRST=first == 0,
            BLOCK_T=BT, BLOCK_V=min(BV, 64), BLOCK_H=BH, num_warps=8,
        )  # fmt: skip
        _dweight_strip[(triton.cdiv(width, BV), triton.cdiv(H, BH))](
            scratch, hidden, dw, first, T, H, width, BLOCK_T=min(BT, 64), BLOCK_V=BV, BLOCK_H=BH, num_warps=8
        )
    return dx.to(hidden.dtype), dw


# --- check ---
SWEEP = (
    {"T": 16, "V": 64, "H": 32, "strip": 32},
    {"T": 21, "V": 75, "H": 40, "strip": 32, "dtype": "bfloat16"},
    {"T": 16, "V": 48, "H": 16, "strip": 64, "dtype": "float16"},
)
BENCH = ({"T": 4096, "V": 32000, "H": 1024, "strip": 4096, "dtype": "float16"},)


def make_args(T, V, H, strip, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    dt = getattr(torch, dtype)
    hidden, weight = torch.randn(T, H, generator=g), torch.randn(V, H, generator=g) / H**0.5
    target = torch.randint(0, V, (T,), generator=g)
    return hidden.to(device, dt), weight.to(device, dt), target.to(device), strip


def reference(hidden, weight, target, strip=8192):
    logits = hidden.float() @ weight.float().T
    return torch.nn.functional.cross_entropy(logits, target, reduction="none")
