"""Diagonal state space model, real and constant: sensitivities run forwards, only dx needs a reverse loop.

h_t = a h_(t-1) + b x_t,    y_t = sum over n of c h_t + d x_t    for every channel with its states n.
A coefficient of one state acts on that state alone, so its derivative is a recurrence of the same size: with r = h / b,
    r_t = a r_(t-1) + x_t,    s_t = dr_t / da = a s_(t-1) + r_(t-1),
    da = b c sum of dy_t s_t,    db = c sum of dy_t r_t,    dc = b sum of dy_t r_t.
These sums need no state of the forward, saved or replayed, and no order but that of time. What must go backwards is
q_t = dy_t + a q_(t+1), dx_t = sum over n of b c q_t + d dy_t. The two loops have nothing to exchange: one launch runs
both side by side. Each loop loads its next step before it works on this one.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "diag_ssm_real",
    "family": "ssm_rnn",
    "op": "diagonal_ssm",
    "schema": 1,
    "techniques": ("reverse-scan", "recompute", "one-launch", "two-stage-partials", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "a", "b", "c", "d"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _diag_ssm_fwd(X, A, Bs, Cs, Ds, Y, T, D, N, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr):
    c = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    at = c[:, None] * N + n[None, :]
    ok = (c[:, None] < D) & (n[None, :] < N)
    a = tl.load(A + at, mask=ok, other=0.0)
    gain = tl.load(Bs + at, mask=ok, other=0.0) * tl.load(Cs + at, mask=ok, other=0.0)
    skip = tl.load(Ds + c, mask=c < D, other=0.0)
    row = tl.program_id(1).to(tl.int64) * T * D + c
    r = tl.zeros((BLOCK_D, BLOCK_N), tl.float32)
    x = tl.load(X + row, mask=c < D, other=0.0).to(tl.float32)
    for t in range(T):
        ahead = tl.load(X + row + D, mask=(c < D) & (t + 1 < T), other=0.0).to(tl.float32)
        r = a * r + x[:, None]
        tl.store(Y + row, tl.sum(gain * r, 1) + skip * x, mask=c < D)
        x = ahead
        row += D


def _tile(D, N):
    # A warp has 32 channels of 16 states at most: 16 numbers for each thread.
    BLOCK_N = triton.next_power_of_2(N)
    BLOCK_D = max(1, min(16, 512 // BLOCK_N, triton.next_power_of_2(D)))
    return {"BLOCK_D": BLOCK_D, "BLOCK_N": BLOCK_N, "num_warps": 1}


def forward(x, a, b, c, d):
    # x (B, T, D); a, b, c (D, N) and d (D), in fp32, with |a| below 1.
    x, a, b, c = x.contiguous(), a.contiguous(), b.contiguous(), c.contiguous()
    B, T, D = x.shape
    y = torch.empty_like(x)
    tile = _tile(D, a.shape[1])
    _diag_ssm_fwd[(triton.cdiv(D, tile["BLOCK_D"]), B)](x, a, b, c, d, y, T, D, a.shape[1], **tile)
    return y, (x, a, b, c, d)


# --- backward ---
@triton.jit
def _forward_sensitivities(
    DY, X, a, b, c, Parts, row, channel, n, T, D, N, dy_t, part, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr
):
    r = tl.zeros((BLOCK_D, BLOCK_N), tl.float32)
    s = tl.zeros((BLOCK_D, BLOCK_N), tl.float32)
    by_s = tl.zeros((BLOCK_D, BLOCK_N), tl.float32)
    by_r = tl.zeros((BLOCK_D, BLOCK_N), tl.float32)
    by_x = tl.zeros((BLOCK_D,), tl.float32)
    live = channel < D
    x = tl.load(X + row, mask=live, other=0.0).to(tl.float32)
    dy = tl.load(DY, mask=live, other=0.0).to(tl.float32)
    for t in range(T):
        row += D
        DY += dy_t
        x_ahead = tl.load(X + row, mask=live & (t + 1 < T), other=0.0).to(tl.float32)
        dy_ahead = tl.load(DY, mask=live & (t + 1 < T), other=0.0).to(tl.float32)
        s = a * s + r
        r = a * r + x[:, None]
        by_s += dy[:, None] * s
        by_r += dy[:, None] * r
        by_x += dy * x
        x = x_ahead
        dy = dy_ahead
    # Rows of a partial: da, db, dc, each (D, N), then dd.
    at = Parts + part + channel[:, None] * N + n[None, :]
    ok = live[:, None] & (n[None, :] < N)
    tl.store(at, b * c * by_s, mask=ok)
    tl.store(at + D * N, c * by_r, mask=ok)
    tl.store(at + 2 * D * N, b * by_r, mask=ok)
    tl.store(Parts + part + 3 * D * N + channel, by_x, mask=live)


@triton.jit
def _reverse_inputs(
    DY, a, gain, skip, DX, row, channel, T, D, dy_t, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    q = tl.zeros((BLOCK_D, BLOCK_N), tl.float32)
    live = channel < D
    row += (T - 1) * D
    DY += (T - 1) * dy_t
    dy = tl.load(DY, mask=live, other=0.0).to(tl.float32)
    for back in range(T):
        DY -= dy_t
        ahead = tl.load(DY, mask=live & (back + 1 < T), other=0.0).to(tl.float32)
        q = a * q + dy[:, None]
        tl.store(DX + row, tl.sum(gain * q, 1) + skip * dy, mask=live)
        dy = ahead
        row -= D


@triton.jit
def _diag_ssm_bwd(
    DY, X, A, Bs, Cs, Ds, DX, Parts, T, D, N, dy_b, dy_t, dy_d, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr
):
    channel = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    batch = tl.program_id(1).to(tl.int64)
    at = channel[:, None] * N + n[None, :]
    ok = (channel[:, None] < D) & (n[None, :] < N)
    a = tl.load(A + at, mask=ok, other=0.0)
    b = tl.load(Bs + at, mask=ok, other=0.0)
    c = tl.load(Cs + at, mask=ok, other=0.0)
    row = batch * T * D + channel
    cotangent = DY + batch * dy_b + channel.to(tl.int64) * dy_d
    step = tl.cast(dy_t, tl.int64)
    if tl.program_id(2) == 0:
        part = batch * (3 * N + 1) * D
        _forward_sensitivities(cotangent, X, a, b, c, Parts, row, channel, n, T, D, N, step, part, BLOCK_D, BLOCK_N)
    else:
        skip = tl.load(Ds + channel, mask=channel < D, other=0.0)
        _reverse_inputs(cotangent, a, b * c, skip, DX, row, channel, T, D, step, BLOCK_D, BLOCK_N)


def backward(saved, grad_y, needs=None):
    x, a, b, c, d = saved
    (B, T, D), N = x.shape, a.shape[1]
    dx = torch.empty_like(x)
    parts = torch.empty(B, (3 * N + 1) * D, device=x.device, dtype=torch.float32)
    tile = _tile(D, N)
    _diag_ssm_bwd[(triton.cdiv(D, tile["BLOCK_D"]), B, 2)](
        grad_y, x, a, b, c, d, dx, parts, T, D, N, *grad_y.stride(), **tile
    )
    totals = parts.sum(0)
    da, db, dc = totals[: 3 * D * N].view(3, D, N)
    return dx, da, db, dc, totals[3 * D * N :]


# --- check ---
SWEEP = (
    {"B": 2, "T": 32, "D": 16, "N": 8},
    {"B": 1, "T": 45, "D": 21, "N": 5, "dtype": "float16"},
    {"B": 2, "T": 20, "D": 8, "N": 16, "dtype": "bfloat16"},
)
BENCH = ({"B": 16, "T": 2048, "D": 1024, "N": 16, "dtype": "bfloat16"},)


def make_args(B, T, D, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(B, T, D, generator=g).to(device=device, dtype=getattr(torch, dtype))
    a = torch.exp(-0.2 * torch.rand(D, N, generator=g))
    b, c, d = torch.randn(D, N, generator=g), torch.randn(D, N, generator=g), torch.randn(D, generator=g)
    return x, *(t.to(device) for t in (a, b, c, d))


def reference(x, a, b, c, d):
    # Chunks of 64 steps: a matrix of powers inside, the states between.
    (B, T, D), K = x.shape, 64
    chunks = torch.nn.functional.pad(x.float(), (0, 0, 0, -T % K)).view(B, -1, K, D)
    step = torch.arange(K, device=x.device)
    powers = a[None] ** step[:, None, None]
    response = torch.einsum("kdn,dn->kd", powers, b * c)
    lag = step[:, None] - step[None, :]
    toeplitz = torch.where((lag >= 0)[..., None], response[lag.clamp(min=0)], 0.0)
    y = torch.einsum("tsd,bksd->bktd", toeplitz, chunks)
    gained = torch.einsum("kdn,bckd->bcdn", powers.flip(0) * b, chunks)
    state, entering = torch.zeros_like(gained[:, 0]), []
    for chunk in range(chunks.shape[1]):
        entering.append(state)
        state = a**K * state + gained[:, chunk]
    y = y + torch.einsum("kdn,bcdn->bckd", powers * (a * c), torch.stack(entering, 1))
    return (y.reshape(B, -1, D)[:, :T] + d * x.float()).to(x.dtype)
