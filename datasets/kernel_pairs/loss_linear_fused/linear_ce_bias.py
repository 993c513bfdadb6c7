"""Cross-entropy of x W^T + b with a narrow hidden axis: tokens own dX, words own dW and db, and no partial sum leaves.

Like flash attention, with words for keys: the logits are formed once for each of the two owners. The kernel of the
words keeps dW and db in registers while the tokens stream past; db is the column sum of the tile of softmax - onehot
that dW multiplies anyway. Two recomputations cost less here than atomics on dX, and the result is bitwise reproducible.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "linear_ce_bias",
    "family": "loss_linear_fused",
    "op": "linear_cross_entropy",
    "schema": 1,
    "techniques": ("owner-grid", "loop-swap", "column-owner", "saved-lse", "recompute"),
    "saves": ("lse: fp32 (T,)",),
    "grads": ("hidden", "weight", "bias"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _biased_ce_fwd(
    X, W, Bias, Target, Loss, Lse, T, V, H, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    h = tl.arange(0, BLOCK_H)
    live = t < T
    x = tl.load(X + t[:, None] * H + h[None, :], mask=live[:, None] & (h[None, :] < H), other=0.0)
    target = tl.load(Target + t, mask=live, other=0)
    top = tl.full((BLOCK_T,), -1.0e30, tl.float32)
    total = tl.zeros((BLOCK_T,), tl.float32)
    wanted = tl.zeros((BLOCK_T,), tl.float32)
    v = tl.arange(0, BLOCK_V)
    w_at = W + v[None, :].to(tl.int64) * H + h[:, None]
    for left in range(V, 0, -BLOCK_V):
        w = tl.load(w_at, mask=(v[None, :] < left) & (h[:, None] < H), other=0.0)
        # Minus infinity as the bias of words past the end takes them out of every sum.
        bias = tl.load(Bias + V - left + v, mask=v < left, other=-float("inf")).to(tl.float32)
        z = tl.dot(x, w) + bias[None, :]
        wanted += tl.sum(tl.where(v[None, :] + (V - left) == target[:, None], z, 0.0), 1)
        high = tl.maximum(top, tl.max(z, 1))
        total = total * tl.exp(top - high) + tl.sum(tl.exp(z - high[:, None]), 1)
        top = high
        w_at += BLOCK_V * H
    lse = top + tl.log(total)
    tl.store(Lse + t, lse, mask=live)
    tl.store(Loss + t, lse - wanted, mask=live)


def _wide(H):
    if H > 256:
        raise ValueError("the hidden axis must fit one tile: at most 256")
    return max(16, triton.next_power_of_2(H))


def forward(hidden, weight, bias, target):
    hidden, weight, bias, target = (x.contiguous() for x in (hidden, weight, bias, target))
    (T, H), V = hidden.shape, weight.shape[0]
    BLOCK_H = _wide(H)
    loss, lse = (torch.empty(T, device=hidden.device, dtype=torch.float32) for _ in range(2))
    _biased_ce_fwd[(triton.cdiv(T, 64),)](
        hidden, weight, bias, target, loss, lse, T, V, H,
        BLOCK_T=64, BLOCK_V=64, BLOCK_H=BLOCK_H, num_warps=4, num_stages=2,
    )  # fmt: skip
    return loss, (hidden, weight, bias, target, lse)


# --- backward ---
@triton.jit
def _biased_ce_dx(
    DLoss, X, W, Bias, Target, Lse, DX, T, V, H, stride_g,
    BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    h = tl.arange(0, BLOCK_H)
    x_at = t[:, None] * H + h[None, :]
    x_in = (t[:, None] < T) & (h[None, :] < H)
    x = tl.load(X + x_at, mask=x_in, other=0.0)
    target = tl.load(Target + t, mask=t < T, other=-1)
    lse = tl.load(Lse + t, mask=t < T, other=float("inf"))
    dx = tl.zeros((BLOCK_T, BLOCK_H), tl.float32)
    for start in range(0, V, BLOCK_V):
        v = (start + tl.arange(0, BLOCK_V)).to(tl.int64)
        w = tl.load(W + v[:, None] * H + h[None, :], mask=(v[:, None] < V) & (h[None, :] < H), other=0.0)
        bias = tl.load(Bias + v, mask=v < V, other=-float("inf")).to(tl.float32)
        p = tl.exp(tl.dot(x, tl.trans(w)) + bias[None, :] - lse[:, None])
        dz = p - tl.where(v[None, :] == target[:, None], 1.0, 0.0)
        dx = tl.dot(dz.to(w.dtype), w, dx)
    # The cotangent is one factor per token: it waits until all words are summed.
    g = tl.load(DLoss + t * stride_g, mask=t < T, other=0.0)
    tl.store(DX + x_at, dx * g[:, None], mask=x_in)


@triton.jit
def _biased_ce_dw_db(
    DLoss, X, W, Bias, Target, Lse, DW, DB, T, V, H, stride_g,
    BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    v = tl.program_id(0).to(tl.int64) * BLOCK_V + tl.arange(0, BLOCK_V)
    h = tl.arange(0, BLOCK_H)
    w_at = v[:, None] * H + h[None, :]
    w_in = (v[:, None] < V) & (h[None, :] < H)
    w = tl.load(W + w_at, mask=w_in, other=0.0)
    bias = tl.load(Bias + v, mask=v < V, other=-float("inf")).to(tl.float32)
    dw = tl.zeros((BLOCK_V, BLOCK_H), tl.float32)
    db = tl.zeros((BLOCK_V,), tl.float32)
    for start in range(0, T, BLOCK_T):
        t = (start + tl.arange(0, BLOCK_T)).to(tl.int64)
        x = tl.load(X + t[:, None] * H + h[None, :], mask=(t[:, None] < T) & (h[None, :] < H), other=0.0)
        target = tl.load(Target + t, mask=t < T, other=-1)
        lse = tl.load(Lse + t, mask=t < T, other=float("inf"))
        g = tl.load(DLoss + t * stride_g, mask=t < T, other=0.0)
        # Words are rows, so that the tile is the left operand as it stands.
        p = tl.exp(tl.dot(w, tl.trans(x)) + bias[:, None] - lse[None, :])
        dz = p - tl.where(v[:, None] == target[None, :], 1.0, 0.0)
        # The cotangent joins x: small as 1/T, it would flush the probabilities of dz in fp16.
        dw = tl.dot(dz.to(x.dtype), (x * g[:, None]).to(x.dtype), dw)
        db += tl.sum(dz * g[None, :], 1)
    tl.store(DW + w_at, dw, mask=w_in)
    tl.store(DB + v, db, mask=v < V)


def backward(saved, grad_loss, needs=(True, True, True)):
    hidden, weight, bias, target, lse = saved
    (T, H), V = hidden.shape, weight.shape[0]
    BLOCK_H = _wide(H)
    # The owned tile's accumulator is the largest thing in registers: half the rows at 256 columns.
    own = 128 if BLOCK_H <= 128 and hidden.element_size() == 2 else 64
    inputs = grad_loss, hidden, weight, bias, target, lse
    dx = dw = db = None
    if needs[0]:
        dx = torch.empty_like(hidden)
        _biased_ce_dx[(triton.cdiv(T, own),)](
            *inputs, dx, T, V, H, grad_loss.stride(0),
            BLOCK_T=own, BLOCK_V=32, BLOCK_H=BLOCK_H, num_warps=8, num_stages=2,
        )  # fmt: skip
    if needs[1] or needs[2]:
        dw, db = torch.empty_like(weight), torch.empty_like(bias)
        _biased_ce_dw_db[(triton.cdiv(V, own),)](
            *inputs, dw, db, T, V, H, grad_loss.stride(0),
            BLOCK_T=32, BLOCK_V=own, BLOCK_H=BLOCK_H, num_warps=8, num_stages=2,
        )  # fmt: skip
    return dx, dw, db


# --- check ---
SWEEP = (
    {"T": 64, "V": 128, "H": 32},
    {"T": 75, "V": 201, "H": 41},
    {"T": 50, "V": 96, "H": 16, "dtype": "bfloat16"},
    {"T": 40, "V": 72, "H": 24, "dtype": "float16"},
)
BENCH = ({"T": 16384, "V": 50000, "H": 128, "dtype": "bfloat16"},)


def make_args(T, V, H, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    dt = getattr(torch, dtype)
    hidden, weight = torch.randn(T, H, generator=g), torch.randn(V, H, generator=g) / H**0.5
    bias = torch.randn(V, generator=g)
    target = torch.randint(0, V, (T,), generator=g)
    return hidden.to(device, dt), weight.to(device, dt), bias.to(device, dt), target.to(device)


def reference(hidden, weight, bias, target):
    logits = (hidden @ weight.T).float() + bias.float()
    return torch.nn.functional.cross_entropy(logits, target, reduction="none")
