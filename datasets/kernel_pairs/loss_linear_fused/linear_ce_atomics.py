"""Cross-entropy over a large catalogue with a narrow hidden size: one kernel recomputes logits and gives dX and dW.

A program owns BLOCK_V rows of W, as the whole hidden axis fits one tile. It walks over the tokens once: logits of the
tile, softmax - onehot by the saved log-sum-exp, dW += dl^T x in registers, and dl W added atomically to the tokens' dX.
Nothing is locked. Programs start at different tokens, so that they do not queue for the same rows of dX.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "linear_ce_atomics",
    "family": "loss_linear_fused",
    "op": "linear_cross_entropy",
    "schema": 1,
    "techniques": ("one-launch", "atomics", "loop-swap", "saved-lse", "recompute"),
    "saves": ("lse: fp32 (T,)",),
    "grads": ("hidden", "weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _narrow_ce_fwd(
    X, W, Target, Loss, Lse, T, V, H, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr
):
    # The tokens' tile stays where it is while the catalogue streams past.
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    h = tl.arange(0, BLOCK_H)
    x = tl.load(X + t[:, None] * H + h[None, :], mask=(t[:, None] < T) & (h[None, :] < H), other=0.0)
    target = tl.load(Target + t, mask=t < T, other=-1)
    top = tl.full((BLOCK_T,), -1.0e30, tl.float32)
    norm = tl.zeros((BLOCK_T,), tl.float32)
    hit = tl.zeros((BLOCK_T,), tl.float32)
    for start in range(0, V, BLOCK_V):
        v = (start + tl.arange(0, BLOCK_V)).to(tl.int64)
        w = tl.load(W + v[None, :] * H + h[:, None], mask=(v[None, :] < V) & (h[:, None] < H), other=0.0)
        z = tl.where(v[None, :] < V, tl.dot(x, w), -float("inf"))
        hit += tl.sum(tl.where(v[None, :] == target[:, None], z, 0.0), 1)
        new_top = tl.maximum(top, tl.max(z, 1))
        norm = norm * tl.exp(top - new_top) + tl.sum(tl.exp(z - new_top[:, None]), 1)
        top = new_top
    lse = top + tl.log(norm)
    tl.store(Lse + t, lse, mask=t < T)
    tl.store(Loss + t, lse - hit, mask=t < T)


def forward(hidden, weight, target):
    hidden, weight, target = hidden.contiguous(), weight.contiguous(), target.contiguous()
    (T, H), V = hidden.shape, weight.shape[0]
    if H > 256:
        raise ValueError("the hidden axis must fit one tile: at most 256")
    loss = torch.empty(T, device=hidden.device, dtype=torch.float32)
    lse = torch.empty_like(loss)
    BLOCK_H = max(16, triton.next_power_of_2(H))
    _narrow_ce_fwd[(triton.cdiv(T, 64),)](
        hidden, weight, target, loss, lse, T, V, H,
        BLOCK_T=64, BLOCK_V=128 if BLOCK_H <= 128 else 64, BLOCK_H=BLOCK_H, num_warps=4, num_stages=2,
    )  # fmt: skip
    return loss, (hidden, weight, target, lse)


# --- backward ---
@triton.jit
def _narrow_ce_bwd(
    DLoss, X, W, Target, Lse, DX, DW, T, V, H, stride_g,
    BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    owner = tl.program_id(0)
    v = owner.to(tl.int64) * BLOCK_V + tl.arange(0, BLOCK_V)
    h = tl.arange(0, BLOCK_H)
    w_at = v[:, None] * H + h[None, :]
    w_in = (v[:, None] < V) & (h[None, :] < H)
    w = tl.load(W + w_at, mask=w_in, other=0.0)
    dw = tl.zeros((BLOCK_V, BLOCK_H), tl.float32)
    steps = tl.cdiv(T, BLOCK_T)
    for step in range(steps):
        t = ((step + owner) % steps).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
        x_at = t[:, None] * H + h[None, :]
        x_in = (t[:, None] < T) & (h[None, :] < H)
        x = tl.load(X + x_at, mask=x_in, other=0.0)
        target = tl.load(Target + t, mask=t < T, other=-1)
        # Infinity for tokens past the end makes their probabilities zero; their target matches no word.
        lse = tl.load(Lse + t, mask=t < T, other=float("inf"))
        g = tl.load(DLoss + t * stride_g, mask=t < T, other=0.0)
        # Kept with words as rows, as dW needs it; words past the end get rows that nobody stores.
        z = tl.dot(w, tl.trans(x))
        p = tl.exp(z - lse[None, :])
        dl = p - tl.where(v[:, None] == target[None, :], 1.0, 0.0)
        dl = tl.where(v[:, None] < V, dl, 0.0).to(x.dtype)
        # The cotangent joins x and the finished product: small as 1/T, it would flush dl's probabilities in fp16.
        dw = tl.dot(dl, (x * g[:, None]).to(x.dtype), dw)
        tl.atomic_add(DX + x_at, g[:, None] * tl.dot(tl.trans(dl), w), mask=x_in, sem="relaxed")
    tl.store(DW + w_at, dw, mask=w_in)


def backward(saved, grad_loss, needs=None):
    hidden, weight, target, lse = saved
    (T, H), V = hidden.shape, weight.shape[0]
    BLOCK_H = max(16, triton.next_power_of_2(H))
    dx = torch.zeros(T, H, device=hidden.device, dtype=torch.float32)
    dw = torch.empty_like(weight)
    BLOCK_V = 128
    _narrow_ce_bwd[(triton.cdiv(V, BLOCK_V),)](
        grad_loss, hidden, weight, target, lse, dx, dw, T, V, H, grad_loss.stride(0),
        BLOCK_T=128 // hidden.element_size(), BLOCK_V=BLOCK_V, BLOCK_H=BLOCK_H, num_warps=8, num_stages=3,
    )  # fmt: skip
    return dx.to(hidden.dtype), dw


# --- check ---
SWEEP = (
    {"T": 64, "V": 128, "H": 32},
    {"T": 75, "V": 201, "H": 41},
    {"T": 100, "V": 96, "H": 16, "dtype": "bfloat16"},
    {"T": 40, "V": 72, "H": 24, "dtype": "float16"},
)
BENCH = ({"T": 8192, "V": 100000, "H": 128, "dtype": "bfloat16"},)


def make_args(T, V, H, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    dt = getattr(torch, dtype)
    hidden, weight = torch.randn(T, H, generator=g), torch.randn(V, H, generator=g) / H**0.5
    target = torch.randint(0, V, (T,), generator=g)
    return hidden.to(device, dt), weight.to(device, dt), target.to(device)


def reference(hidden, weight, target):
    logits = (hidden @ weight.T).float()
    return torch.nn.functional.cross_entropy(logits, target, reduction="none")
