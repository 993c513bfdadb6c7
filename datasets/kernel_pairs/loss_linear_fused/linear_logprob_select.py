"""Log-probabilities of labels from hidden states at chosen tokens, for policy gradients: the rest costs nothing.

logp[a] = z[a, label] - lse[a],    z = x[index[a]] W^T / tau,    dz = g (onehot - softmax(z)) / tau.
Prompts and padding have no logp, so every kernel walks over the list of active tokens and gathers their rows of x. In
the forward splits of the vocabulary work side by side, and their log-sum-exps are joined in the end. Going back, the
vocabulary goes by in strips: the scratch is (active, strip), dx adds strip after strip at the gathered rows, whose
owners are unique, and a strip's rows of dW are complete when it ends. Rows of dx that nobody chose stay zero.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "linear_logprob_select",
    "family": "loss_linear_fused",
    "op": "linear_token_logprob",
    "schema": 1,
    "techniques": ("saved-lse", "recompute", "chunked", "inverse-map", "owner-grid"),
    "saves": ("lse: fp32 (A,)",),
    "grads": ("hidden", "weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _gathered_logits(X, W, token, live, v, V, H, BLOCK_A: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr):
    """Products of the tokens' rows of x with words v in fp32; `token` holds row numbers, not a range."""
    h = tl.arange(0, BLOCK_H)
    x_at = X + token[:, None] * H + h[None, :]
    w_at = W + v[None, :] * H + h[:, None]
    z = tl.zeros((BLOCK_A, BLOCK_V), tl.float32)
    for left in range(H, 0, -BLOCK_H):
        x = tl.load(x_at, mask=live[:, None] & (h[None, :] < left), other=0.0)
        w = tl.load(w_at, mask=(v[None, :] < V) & (h[:, None] < left), other=0.0)
        z = tl.dot(x, w, z)
        x_at += BLOCK_H
        w_at += BLOCK_H
    return z


@triton.jit
def _select_fwd(
    X, W, Label, Index, Chosen, PartLse, A, V, H, words, inv_tau,
    BLOCK_A: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    a = tl.program_id(0) * BLOCK_A + tl.arange(0, BLOCK_A)
    live = a < A
    token = tl.load(Index + a, mask=live, other=0).to(tl.int64)
    label = tl.load(Label + token, mask=live, other=-1)
    top = tl.full((BLOCK_A,), -1.0e30, tl.float32)
    norm = tl.zeros((BLOCK_A,), tl.float32)
    chosen = tl.zeros((BLOCK_A,), tl.float32)
    first = tl.program_id(1) * words
    last = tl.minimum(first + words, V)
    for start in range(first, last, BLOCK_V):
        v = (start + tl.arange(0, BLOCK_V)).to(tl.int64)
        z = _gathered_logits(X, W, token, live, v, V, H, BLOCK_A, BLOCK_V, BLOCK_H) * inv_tau
        chosen += tl.sum(tl.where(v[None, :] == label[:, None], z, 0.0), 1)
        z = tl.where(v[None, :] < last, z, -float("inf"))
        higher = tl.maximum(top, tl.max(z, 1))
        norm = norm * tl.exp(top - higher) + tl.sum(tl.exp(z - higher[:, None]), 1)
        top = higher
    tl.store(PartLse + tl.program_id(1).to(tl.int64) * A + a, top + tl.log(norm), mask=live)
    # One split alone holds the label.
    tl.store(Chosen + a, chosen, mask=live & (label >= first) & (label < last))


def _side(size, most=128):
    return max(16, min(most, triton.next_power_of_2(size)))


def forward(hidden, weight, label, index, tau=1.0, strip=8192):
    # index lists the active tokens, each once.
    hidden, weight = hidden.contiguous(), weight.contiguous()
    H, V, A = hidden.shape[1], weight.shape[0], index.numel()
    BLOCK_A, BLOCK_V = _side(A, 64), _side(V)
    # Token tiles times splits: two programs for each of 132 processors.
    words = triton.cdiv(triton.cdiv(V, max(1, 264 // triton.cdiv(A, BLOCK_A))), BLOCK_V) * BLOCK_V
    chosen = torch.empty(A, device=hidden.device, dtype=torch.float32)
    part_lse = torch.empty(triton.cdiv(V, words), A, device=hidden.device, dtype=torch.float32)
    _select_fwd[(triton.cdiv(A, BLOCK_A), triton.cdiv(V, words))](
        hidden, weight, label, index, chosen, part_lse, A, V, H, words, 1.0 / tau,
        BLOCK_A=BLOCK_A, BLOCK_V=BLOCK_V, BLOCK_H=_side(H, 128 // hidden.element_size()), num_warps=8, num_stages=3,
    )  # fmt: skip
    lse = part_lse.logsumexp(0)
    return chosen - lse, (hidden, weight, label, index, lse, tau, strip)


# --- backward ---
@triton.jit
def _select_strip(
    X, W, Label, Index, Lse, DZ, first, A, V, H, width, inv_tau,
    BLOCK_A: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    a = tl.program_id(0).to(tl.int64) * BLOCK_A + tl.arange(0, BLOCK_A)
    c = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    v = (first + c).to(tl.int64)
    live = a < A
    token = tl.load(Index + a, mask=live, other=0).to(tl.int64)
    label = tl.load(Label + token, mask=live, other=-1)
    z = _gathered_logits(X, W, token, live, v, V, H, BLOCK_A, BLOCK_V, BLOCK_H) * inv_tau
    p = tl.exp(z - tl.load(Lse + a, mask=live, other=0.0)[:, None])
    # The cotangent waits for the products: a mean's 1/A would flush probabilities to zero in fp16.
    dz = tl.where(v[None, :] == label[:, None], 1.0, 0.0) - p
    tl.store(DZ + a[:, None] * width + c[None, :], dz, mask=live[:, None] & (c[None, :] < width))


@triton.jit
def _select_dx(
    DZ, W, Index, DLogP, DX, first, A, H, width, inv_tau, stride_g,
    BLOCK_A: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    a = tl.program_id(0).to(tl.int64) * BLOCK_A + tl.arange(0, BLOCK_A)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    token = tl.load(Index + a, mask=a < A, other=0).to(tl.int64)
    out = DX + token[:, None] * H + h[None, :]
    inside = (a[:, None] < A) & (h[None, :] < H)
    dx = tl.zeros((BLOCK_A, BLOCK_H), tl.float32)
    for start in range(0, width, BLOCK_V):
        c = start + tl.arange(0, BLOCK_V)
        dz = tl.load(DZ + a[:, None] * width + c[None, :], mask=(a[:, None] < A) & (c[None, :] < width), other=0.0)
        w_at = W + (first + c)[:, None].to(tl.int64) * H + h[None, :]
        w = tl.load(w_at, mask=(c[:, None] < width) & (h[None, :] < H), other=0.0)
        dx = tl.dot(dz, w, dx)
    g = tl.load(DLogP + a * stride_g, mask=a < A, other=0.0) * inv_tau
    # Adds to what earlier strips left, or to the zeros of the fill.
    tl.store(out, tl.load(out, mask=inside, other=0.0) + g[:, None] * dx, mask=inside)


@triton.jit
def _select_dw(
    DZ, X, Index, DLogP, DW, first, A, H, width, inv_tau, stride_g,
    BLOCK_A: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    dw = tl.zeros((BLOCK_V, BLOCK_H), tl.float32)
    for start in range(0, A, BLOCK_A):
        a = (start + tl.arange(0, BLOCK_A)).to(tl.int64)
        token = tl.load(Index + a, mask=a < A, other=0).to(tl.int64)
        dz = tl.load(DZ + a[None, :] * width + c[:, None], mask=(a[None, :] < A) & (c[:, None] < width), other=0.0)
        x = tl.load(X + token[:, None] * H + h[None, :], mask=(a[:, None] < A) & (h[None, :] < H), other=0.0)
        g = tl.load(DLogP + a * stride_g, mask=a < A, other=0.0) * inv_tau
        dw = tl.dot(dz, (x * g[:, None]).to(x.dtype), dw)
    out = DW + (first + c)[:, None].to(tl.int64) * H + h[None, :]
    tl.store(out, dw, mask=(c[:, None] < width) & (h[None, :] < H))


def backward(saved, grad_logp, needs=(True, True)):
    hidden, weight, label, index, lse, tau, strip = saved
    H, V, A = hidden.shape[1], weight.shape[0], index.numel()
    dx = torch.zeros(hidden.shape, device=hidden.device, dtype=torch.float32) if needs[0] else None
    dw = torch.empty_like(weight) if needs[1] else None
    scratch = torch.empty(A * min(strip, V), device=hidden.device, dtype=hidden.dtype)
    BA, BV, BH, step = _side(A), _side(min(strip, V)), _side(H), 128 // hidden.element_size()
    for first in range(0, V, strip):
        width = min(strip, V - first)
        _select_strip[(triton.cdiv(A, BA), triton.cdiv(width, BV))](
            hidden, weight, label, index, lse, scratch, first, A, V, H, width, 1.0 / tau,
            BLOCK_A=BA, BLOCK_V=BV, BLOCK_H=min(BH, step), num_warps=8, num_stages=3,
        )  # fmt: skip
        if needs[0]:
            _select_dx[(triton.cdiv(A, BA), triton.cdiv(H, BH))](
                scratch, weight, index, grad_logp, dx, first, A, H, width, 1.0 / tau, grad_logp.stride(0),
                BLOCK_A=BA, BLOCK_V=min(BV, step), BLOCK_H=BH, num_warps=8, num_stages=3,
            )  # fmt: skip
        if needs[1]:
            _select_dw[(triton.cdiv(width, BV), triton.cdiv(H, BH))](
                scratch, hidden, index, grad_logp, dw, first, A, H, width, 1.0 / tau, grad_logp.stride(0),
                BLOCK_A=min(BA, step), BLOCK_V=BV, BLOCK_H=BH, num_warps=8, num_stages=3,
            )  # fmt: skip
    return dx.to(hidden.dtype) if needs[0] else None, dw


# --- check ---
SWEEP = (
    {"T": 32, "V": 64, "H": 32, "strip": 32},
    {"T": 41, "V": 75, "H": 40, "strip": 32},
    {"T": 24, "V": 48, "H": 16, "strip": 64, "dtype": "float16"},
    {"T": 30, "V": 40, "H": 24, "strip": 16, "dtype": "bfloat16"},
)
BENCH = ({"T": 8192, "V": 32000, "H": 2048, "strip": 8192, "dtype": "bfloat16"},)


def make_args(T, V, H, strip, dtype="float32", device="cpu", seed=0):
    if V < 2:
        raise ValueError("the only word's probability is one whatever the weights are")
    g = torch.Generator().manual_seed(seed)
    dt = getattr(torch, dtype)
    hidden, weight = torch.randn(T, H, generator=g), torch.randn(V, H, generator=g) / H**0.5
    label = torch.randint(0, V, (T,), generator=g)
    # Half of the tokens are answers; the rest is prompt.
    index = torch.randperm(T, generator=g)[: (T + 1) // 2].sort().values
    return hidden.to(device, dt), weight.to(device, dt), label.to(device), index.to(device), 0.8, strip


def reference(hidden, weight, label, index, tau=1.0, strip=8192):
    logits = (hidden[index] @ weight.T).float() / tau
    return torch.log_softmax(logits, -1).gather(-1, label[index][:, None])[:, 0]
