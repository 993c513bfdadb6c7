"""Binary cross-entropy on logits with a positive weight per class: its optional gradient changes the walk.

With r = 1 + (w - 1) y and n = log(1 + exp(-x)):    L = (1 - y) x + r n,    dx = g ((1 - y) - r sigmoid(-x)),
dw[c] = sum over rows of g y n.    n is max(-x, 0) + log(1 + exp(-|x|)), and exp(-|x|) serves the sigmoid too.
A frozen weight leaves an elementwise pass with programs as short as possible. A learned one wants column sums, so that
a program walks down a band of rows with its columns' sums in registers and leaves one partial row. The backward counts
in units of log 2, where exponential and logarithm are single instructions, and takes sigmoid(-x) as exp(-(x + n)).
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

META = {
    "slug": "bce_logits_posweight",
    "family": "loss_ce",
    "op": "bce_with_logits",
    "schema": 1,
    "techniques": ("recompute", "two-stage-partials", "one-launch", "strided-cotangent"),
    "saves": (),
    "grads": ("logits", "pos_weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": False,
}


# --- forward ---
@triton.jit
def _tail(x):
    """exp(-|x|) and log(1 + exp(-x)): neither overflows for any x."""
    e = tl.exp(-tl.abs(x))
    return e, tl.where(x < 0.0, -x, 0.0) + tl.log(1.0 + e)


@triton.jit
def _bce_fwd(X, Y, W, Loss, numel, C, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < numel
    x = tl.load(X + at, mask=live, other=0.0).to(tl.float32)
    y = tl.load(Y + at, mask=live, other=0.0).to(tl.float32)
    w = tl.load(W + at % C, mask=live, other=1.0)
    _, n = _tail(x)
    tl.store(Loss + at, (1.0 - y) * x + (1.0 + (w - 1.0) * y) * n, mask=live)


def forward(logits, target, pos_weight):
    logits, target, pos_weight = logits.contiguous(), target.contiguous(), pos_weight.contiguous()
    loss = torch.empty(logits.shape, device=logits.device, dtype=torch.float32)
    numel = logits.numel()
    _bce_fwd[(triton.cdiv(numel, 1024),)](
        logits, target, pos_weight, loss, numel, logits.shape[1], BLOCK=1024, num_warps=4
    )
    return loss, (logits, target, pos_weight)


# --- backward ---
@triton.jit
def _bce_bwd(
    DLoss, X, Y, W, DX, Parts, M, groups, g_groups, g_c, band,
    NEED_X: tl.constexpr, NEED_W: tl.constexpr, LANES: tl.constexpr, G_LANES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    # Classes come in groups of LANES that exist as a whole: rows then are aligned, and a mask never cuts a wide load.
    C = groups * LANES
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    real = c // LANES < groups
    first = tl.program_id(0).to(tl.int64) * band
    last = tl.minimum(first + band, M)
    w = tl.load(W + c, mask=real, other=1.0)
    dw = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    for start in tl.range(first, last, BLOCK_M, num_stages=4):
        m = start + tl.arange(0, BLOCK_M)
        inside = (m[:, None] < last) & real[None, :]
        at = m[:, None] * C + c[None, :]
        x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(Y + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(DLoss + m[:, None] * (g_groups * G_LANES) + c[None, :].to(tl.int64) * g_c, mask=inside, other=0.0)
        z = x * 1.4426950408889634
        n = tl.maximum(-z, 0.0) + libdevice.fast_log2f(1.0 + tl.exp2(-tl.abs(z)))
        if NEED_X:
            miss = tl.exp2(-(z + n))
            slope = (1.0 - y) - (1.0 + (w[None, :] - 1.0) * y) * miss
            tl.store(DX + at, g * slope, mask=inside)
        if NEED_W:
            dw += g * y * n
    if NEED_W:
        tl.store(Parts + tl.program_id(0).to(tl.int64) * C + c, 0.6931471805599453 * tl.sum(dw, 0), mask=real)


def backward(saved, grad_loss, needs=(True, True)):
    logits, target, pos_weight = saved
    M, C = logits.shape
    LANES = 4 if C % 8 == 0 else 1
    g_row, g_column = grad_loss.stride()
    G_LANES = 4 if g_row % 4 == 0 else 1
    BLOCK_C = max(16, min(256, triton.next_power_of_2(C)))
    BLOCK_M = 512 // BLOCK_C
    columns = triton.cdiv(C, BLOCK_C)
    # Column sums: six programs for each of 132 processors. Without them a band is a single tile.
    bands = min(triton.cdiv(M, BLOCK_M), max(1, 792 // columns)) if needs[1] else triton.cdiv(M, BLOCK_M)
    band = triton.cdiv(M, bands)
    bands = triton.cdiv(M, band)
    dx = torch.empty_like(logits) if needs[0] else None
    parts = torch.empty(bands, C, device=logits.device, dtype=torch.float32) if needs[1] else None
    _bce_bwd[(bands, columns)](
        grad_loss, logits, target, pos_weight, dx, parts, M, C // LANES, g_row // G_LANES, g_column, band,
        NEED_X=needs[0], NEED_W=needs[1], LANES=LANES, G_LANES=G_LANES,
        BLOCK_M=BLOCK_M, BLOCK_C=BLOCK_C, num_warps=4,
    )  # fmt: skip
    return dx, parts.sum(0).to(pos_weight.dtype) if needs[1] else None


# --- check ---
SWEEP = (
    {"M": 64, "C": 32},
    {"M": 75, "C": 301},
    {"M": 130, "C": 40, "dtype": "bfloat16"},
    {"M": 33, "C": 72, "dtype": "float16"},
)
BENCH = ({"M": 65536, "C": 1000, "dtype": "bfloat16"},)


def make_args(M, C, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    dt = getattr(torch, dtype)
    logits = (3 * torch.randn(M, C, generator=g)).to(device, dt)
    target = (torch.rand(M, C, generator=g) < 0.3).to(device, dt)
    return logits, target, (0.5 + 2.0 * torch.rand(C, generator=g)).to(device)


def reference(logits, target, pos_weight):
    return torch.nn.functional.binary_cross_entropy_with_logits(
        logits.float(), target.float(), pos_weight=pos_weight, reduction="none"
    )
