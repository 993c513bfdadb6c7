"""Runge-Kutta steps of y' = tanh(w y + b) - y per channel: the adjoint runs stages and steps backwards in registers.

The forward saves the state before each step. The backward rebuilds the four slopes of a step from it and applies their
derivatives last to first; the channel parameters w and b take a share of every stage of every step, and these shares
stay in registers until a program has walked its rows.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "ode_rk4_elementwise",
    "family": "mixing_misc",
    "op": "ode_rk4",
    "schema": 1,
    "techniques": ("reverse-scan", "checkpointed-states", "recompute", "two-stage-partials", "strided-cotangent"),
    "saves": ("states: fp32 or bf16 (steps, M, N)",),
    "grads": ("y0", "w", "b"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _rk4_fwd(Y0, W, B, States, Y, M, N, h, STEPS, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    ok = (m < M) & (n < N)
    w = tl.load(W + n, mask=n < N, other=0.0).to(tl.float32)
    b = tl.load(B + n, mask=n < N, other=0.0).to(tl.float32)
    y = tl.load(Y0 + m * N + n, mask=ok, other=0.0).to(tl.float32)
    state_at = States + m * N + n
    for _ in range(STEPS):
        tl.store(state_at, y, mask=ok)
        state_at += tl.cast(M, tl.int64) * N
        k1 = _tanh(w * y + b) - y
        z = y + 0.5 * h * k1
        k2 = _tanh(w * z + b) - z
        z = y + 0.5 * h * k2
        k3 = _tanh(w * z + b) - z
        z = y + h * k3
        k4 = _tanh(w * z + b) - z
        y += h / 6.0 * (k1 + 2.0 * k2 + 2.0 * k3 + k4)
    tl.store(Y + m * N + n, y, mask=ok)


def forward(y0, w, b, steps=8, h=0.25):
    """y0 (M, N), w and b (N)."""
    y0, w, b = y0.contiguous(), w.contiguous(), b.contiguous()
    M, N = y0.shape
    y = torch.empty_like(y0)
    states = torch.empty(steps, M, N, device=y0.device, dtype=y0.dtype)
    BLOCK_N = min(128, triton.next_power_of_2(N))
    BLOCK_M = 1024 // BLOCK_N
    _rk4_fwd[(triton.cdiv(M, BLOCK_M), triton.cdiv(N, BLOCK_N))](
        y0, w, b, states, y, M, N, h, steps, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=4
    )
    return y, (states, w, b, h)


# --- backward ---
@triton.jit
def _stage_bwd(dk, z, t, w, dw, db):
    """Adjoint of k = tanh(w z + b) - z with t the tanh: dz, and the running sums of dw and db."""
    inner = dk * (1.0 - t * t)
    return inner * w - dk, dw + inner * z, db + inner


@triton.jit
def _rk4_bwd(
    DY, States, W, B, DY0, Parts, M, N, h, STEPS, rows_each, dy_m, dy_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    share = tl.program_id(1).to(tl.int64)
    last = tl.minimum((share + 1) * rows_each, M)
    w = tl.load(W + n, mask=n < N, other=0.0).to(tl.float32)
    b = tl.load(B + n, mask=n < N, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    db = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(share * rows_each, last, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)[:, None]
        ok = (m < last) & (n < N)
        dy = tl.load(DY + m * dy_m + n.to(tl.int64) * dy_n, mask=ok, other=0.0).to(tl.float32)
        for back in range(STEPS):
            state_at = States + ((STEPS - 1 - back) * tl.cast(M, tl.int64) + m) * N + n
            y = tl.load(state_at, mask=ok, other=0.0).to(tl.float32)
            t1 = _tanh(w * y + b)
            z2 = y + 0.5 * h * (t1 - y)
            t2 = _tanh(w * z2 + b)
            z3 = y + 0.5 * h * (t2 - z2)
            t3 = _tanh(w * z3 + b)
            z4 = y + h * (t3 - z3)
            t4 = _tanh(w * z4 + b)
            # Each slope enters the sum of the step and the argument of the next stage.
            sixth = h / 6.0 * dy
            dz4, dw, db = _stage_bwd(sixth, z4, t4, w, dw, db)
            dz3, dw, db = _stage_bwd(2.0 * sixth + h * dz4, z3, t3, w, dw, db)
            dz2, dw, db = _stage_bwd(2.0 * sixth + 0.5 * h * dz3, z2, t2, w, dw, db)
            dz1, dw, db = _stage_bwd(sixth + 0.5 * h * dz2, y, t1, w, dw, db)
            dy += dz1 + dz2 + dz3 + dz4
        tl.store(DY0 + m * N + n, dy, mask=ok)
    tl.store(Parts + 2 * share * N + n, tl.sum(dw, 0)[None, :], mask=n < N)
    tl.store(Parts + (2 * share + 1) * N + n, tl.sum(db, 0)[None, :], mask=n < N)


def backward(saved, grad_y, needs=None):
    states, w, b, h = saved
    steps, M, N = states.shape
    dy0 = torch.empty(M, N, device=states.device, dtype=states.dtype)
    BLOCK_N = min(128, triton.next_power_of_2(N))
    BLOCK_M = 1024 // BLOCK_N
    tiles = triton.cdiv(N, BLOCK_N)
    # About eight programs for each of 132 processors, but at least four tiles of rows for every partial sum.
    rows_each = max(4 * BLOCK_M, triton.cdiv(M * tiles, 1056))
    shares = triton.cdiv(M, rows_each)
    parts = torch.empty(shares, 2, N, device=states.device, dtype=torch.float32)
    _rk4_bwd[(tiles, shares)](
        grad_y, states, w, b, dy0, parts, M, N, h, steps, rows_each, *grad_y.stride(),
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=4,
    )  # fmt: skip
    dw, db = parts.sum(0).to(w.dtype).unbind()
    return dy0, dw, db


# --- check ---
SWEEP = ({"M": 16, "N": 64, "steps": 3}, {"M": 203, "N": 37, "steps": 2}, {"M": 9, "N": 140, "dtype": "bfloat16"})
BENCH = ({"M": 8192, "N": 2048, "dtype": "bfloat16"},)


def make_args(M, N, steps=8, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = (torch.randn(*shape, generator=g) for shape in ((M, N), (N,), (N,)))
    return *(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors), steps


def reference(y0, w, b, steps=8, h=0.25):
    y, w32, b32 = y0.float(), w.float(), b.float()

    def slope(z):
        return torch.tanh(w32 * z + b32) - z

    for _ in range(steps):
        k1 = slope(y)
        k2 = slope(y + 0.5 * h * k1)
        k3 = slope(y + 0.5 * h * k2)
        k4 = slope(y + h * k3)
        y = y + h / 6.0 * (k1 + 2.0 * k2 + 2.0 * k3 + k4)
    return y.to(y0.dtype)
