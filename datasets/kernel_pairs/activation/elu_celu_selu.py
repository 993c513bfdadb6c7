"""ELU, CELU and SELU as one function of three constants, whose derivative is linear in the output that is saved.

y = scale * x for positive x, else scale * alpha * (exp(x / width) - 1). Below zero the derivative is (y + scale *
alpha) divided by width: no exponential, and no x. alpha must be positive, or y would not tell the sides apart.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

META = {
    "slug": "elu_celu_selu",
    "family": "activation",
    "op": "elu",
    "schema": 1,
    "techniques": ("elementwise", "saved-output", "strided-cotangent"),
    "saves": ("y: fp32 or bf16 or fp16 (M, N)",),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": False,
}


# --- forward ---
@triton.jit
def _elu_fwd(X, Y, M, N, scale, alpha, width, x_row, x_col, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    m = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    n = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    mask = (m < M) & (n < N)
    x = tl.load(X + m * x_row + n.to(tl.int64) * x_col, mask=mask, other=0.0).to(tl.float32)
    # The branch that is not taken must not overflow either.
    low = alpha * libdevice.expm1(tl.minimum(x, 0.0) / width)
    tl.store(Y + m * N + n, scale * tl.where(x > 0, x, low), mask=mask)


def _constants(kind, alpha):
    """scale, alpha and width of a member of the family. SELU's are those of Klambauer et al., 2017."""
    if alpha <= 0:
        raise ValueError(f"alpha is {alpha}: only a positive one leaves the sign of x in y")
    if kind == "selu":
        return 1.0507009873554805, 1.6732632423543772, 1.0
    return 1.0, alpha, alpha if kind == "celu" else 1.0


def _tile(N):
    BLOCK = max(16, min(1024, triton.next_power_of_2(N)))
    return 1024 // BLOCK, BLOCK


def forward(x, kind="elu", alpha=1.0):
    constants = _constants(kind, alpha)
    M, N = x.shape
    y = torch.empty(M, N, device=x.device, dtype=x.dtype)
    ROWS, BLOCK = _tile(N)
    _elu_fwd[(triton.cdiv(M, ROWS), triton.cdiv(N, BLOCK))](x, y, M, N, *constants, *x.stride(), ROWS=ROWS, BLOCK=BLOCK)
    return y, (y, constants)


# --- backward ---
@triton.jit
def _elu_bwd(DY, Y, DX, M, N, scale, alpha, width, dy_row, dy_col, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    m = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    n = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    mask = (m < M) & (n < N)
    y = tl.load(Y + m * N + n, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(DY + m * dy_row + n.to(tl.int64) * dy_col, mask=mask, other=0.0).to(tl.float32)
    slope = tl.where(y > 0, scale, (y + scale * alpha) / width)
    tl.store(DX + m * N + n, dy * slope, mask=mask)


def backward(saved, grad_y, needs=None):
    y, constants = saved
    M, N = y.shape
    dx = torch.empty_like(y)
    ROWS, BLOCK = _tile(N)
    _elu_bwd[(triton.cdiv(M, ROWS), triton.cdiv(N, BLOCK))](
        grad_y, y, dx, M, N, *constants, *grad_y.stride(), ROWS=ROWS, BLOCK=BLOCK
    )
    return dx


# --- check ---
SWEEP = (
    {"M": 16, "N": 128, "kind": "selu", "dtype": "float16"},
    {"M": 13, "N": 101, "kind": "elu", "alpha": 0.7},
    {"M": 9, "N": 70, "kind": "celu", "alpha": 1.5},
    {"M": 4, "N": 256, "kind": "elu", "dtype": "bfloat16"},
)
BENCH = ({"M": 16384, "N": 8192, "kind": "elu", "alpha": 1.0, "dtype": "bfloat16"},)


def make_args(M, N, kind="elu", alpha=1.0, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(M, N, generator=g).to(device=device, dtype=getattr(torch, dtype)), kind, alpha


def reference(x, kind="elu", alpha=1.0):
    if kind == "selu":
        return torch.selu(x.float()).to(x.dtype)
    member = torch.nn.functional.celu if kind == "celu" else torch.nn.functional.elu
    return member(x.float(), alpha).to(x.dtype)
