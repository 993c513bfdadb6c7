"""Binary weights mean |x| * sign(x) per row: sign and window of every element are saved as two bits, sixteen a word.

The sign passes its gradient straight through where |x| <= 1, and the row's scale a = mean |x| is differentiated as it
is: dx = a dy 1{|x| <= 1} + sign(x) / N * sum over the row of dy sign(x). Both terms need two bits of x, not x: the
backward reads dy, an eighth or a sixteenth of what x would be, and one scale per row. A row stays in registers between
its sum and its store.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "binary_sign_ste_window",
    "family": "quant",
    "op": "binarize",
    "schema": 1,
    "techniques": ("straight-through", "packed-bits", "row-local", "saved-statistics", "strided-cotangent"),
    "saves": ("bits: int32 (M, N / 16)", "scale: fp32 (M)"),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "gradient": "custom",
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _binarize_fwd(X, Y, Bits, Scale, N, words, BLOCK_W: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    w = tl.arange(0, BLOCK_W)
    place = tl.arange(0, 16)[None, :]
    c = w[:, None] * 16 + place
    x = tl.load(X + row * N + c, mask=c < N, other=0.0).to(tl.float32)
    scale = tl.sum(tl.abs(x)) / N
    # Zero counts as positive: a weight is one of two values.
    negative = x < 0.0
    tl.store(Y + row * N + c, tl.where(negative, -scale, scale), mask=c < N)
    code = tl.where(negative, 1, 0) + tl.where(tl.abs(x) <= 1.0, 2, 0)
    # Codes of a word do not overlap, so that their sum is their union; the last one reaches into the sign.
    tl.store(Bits + row * words + w, tl.sum(code << (2 * place), 1), mask=w < words)
    tl.store(Scale + row, scale)


def _tile(N):
    """Words of a row, words of a tile that covers it, warps."""
    words = triton.cdiv(N, 16)
    BLOCK_W = triton.next_power_of_2(words)
    return words, BLOCK_W, max(1, min(16, BLOCK_W // 32))


def forward(x):
    x = x.contiguous()
    M, N = x.shape
    words, BLOCK_W, warps = _tile(N)
    y = torch.empty_like(x)
    bits = torch.empty(M, words, device=x.device, dtype=torch.int32)
    scale = torch.empty(M, device=x.device, dtype=torch.float32)
    _binarize_fwd[(M,)](x, y, bits, scale, N, words, BLOCK_W=BLOCK_W, num_warps=warps)
    return y, (bits, scale)


# --- backward ---
@triton.jit
def _binarize_bwd(DY, Bits, Scale, DX, N, words, dy_row, dy_col, BLOCK_W: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    w = tl.arange(0, BLOCK_W)
    place = tl.arange(0, 16)[None, :]
    c = w[:, None] * 16 + place
    word = tl.load(Bits + row * words + w, mask=w < words, other=0)[:, None]
    dy = tl.load(DY + row * dy_row + c.to(tl.int64) * dy_col, mask=c < N, other=0.0).to(tl.float32)
    # Arithmetic shifts copy the sign of the word; the 3 cuts the copies off.
    code = (word >> (2 * place)) & 3
    signed = tl.where((code & 1) != 0, -dy, dy)
    shared = tl.sum(signed) / N
    through = tl.where(code >= 2, tl.load(Scale + row) * dy, 0.0)
    dx = through + tl.where((code & 1) != 0, -shared, shared)
    tl.store(DX + row * N + c, dx, mask=c < N)


def backward(saved, grad_y, needs=None):
    bits, scale = saved
    M, N = grad_y.shape
    words, BLOCK_W, warps = _tile(N)
    dx = torch.empty(M, N, device=grad_y.device, dtype=grad_y.dtype)
    _binarize_bwd[(M,)](grad_y, bits, scale, dx, N, words, *grad_y.stride(), BLOCK_W=BLOCK_W, num_warps=warps)
    return dx


# --- check ---
SWEEP = ({"M": 7, "N": 128}, {"M": 5, "N": 173, "dtype": "float16"}, {"M": 6, "N": 91, "dtype": "bfloat16"})
BENCH = ({"M": 16384, "N": 4096, "dtype": "bfloat16"},)


def make_args(M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    # A third of the elements lies outside the window.
    return (torch.randn(M, N, generator=g).to(device=device, dtype=getattr(torch, dtype)),)


def reference(x):
    xf = x.float()
    window = xf.clamp(-1.0, 1.0)
    sign = window + (torch.where(xf < 0, -1.0, 1.0) - window).detach()
    return (xf.abs().mean(1, keepdim=True) * sign).to(x.dtype)


def surrogate(x):
    window = x.clamp(-1.0, 1.0)
    return x.abs().mean(1, keepdim=True) * (window + (torch.where(x < 0, -1.0, 1.0) - window).detach())
