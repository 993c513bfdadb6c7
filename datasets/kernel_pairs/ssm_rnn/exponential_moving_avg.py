"""MEGA's multi-dimensional moving average as products: a channel's program has its taps, and dtaps in one square tile.

h_t = q h_(t-1) + p beta x_t,  y_t = sum over n of eta h_t / sqrt(N) + omega x_t,  p = sigmoid(a),  q = 1 - p sigmoid(d)
The coefficients of a channel are the same for all sequences and steps. With b = p beta, e = eta / sqrt(N), a chunk of
64 steps for 16 sequences side by side is four small products,

    Y = K X + P H,  H' = q^64 H + G X,    K[t, s] = [t = s] omega + sum of e b q^(t-s),  P = e q^(t+1),  G = b q^(63-s),

and so is its adjoint: dX = K^T dY + G^T dH', dH = q^64 dH' + P^T dY. The parameters ask for dK = sum of dY X^T, dP and
dG, which stay in registers over all chunks and sequences; behind the loop a few sums over them are all gradients of the
channel, complete, without partials. States between chunks are saved.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "exponential_moving_avg",
    "family": "ssm_rnn",
    "op": "multi_dim_ema",
    "schema": 1,
    "techniques": (
        "reverse-scan",
        "chunked",
        "checkpointed-states",
        "column-owner",
        "closed-form",
        "strided-cotangent",
    ),
    "saves": ("states: fp32 (D, tiles of sequences, chunks, N, 16)",),
    "grads": ("x", "a", "d", "beta", "eta", "omega"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _coefficients(A, Damp, Beta, Eta, at, ok, N):
    """p, the damping, log q, p beta and eta / sqrt(N); states that do not exist have no weight, and q = 1/2."""
    p = tl.sigmoid(tl.load(A + at, mask=ok, other=40.0))
    damp = tl.sigmoid(tl.load(Damp + at, mask=ok, other=0.0))
    b = p * tl.load(Beta + at, mask=ok, other=0.0)
    e = tl.load(Eta + at, mask=ok, other=0.0) * tl.rsqrt(N * 1.0)
    return p, damp, tl.log(1.0 - p * damp), b, e


@triton.jit
def _taps(A, Damp, Beta, Eta, Omega, channel, N, CHUNK: tl.constexpr):
    """K as a tile (t, s), zero above the diagonal."""
    t = tl.arange(0, CHUNK)
    lag = t[:, None] - t[None, :]
    taps = tl.where(lag == 0, tl.load(Omega + channel), 0.0)
    for n in range(N):
        _, _, log_q, b, e = _coefficients(A, Damp, Beta, Eta, channel * N + n, n < N, N)
        taps += tl.where(lag >= 0, e * b * tl.exp(lag.to(tl.float32) * log_q), 0.0)
    return taps


@triton.jit
def _ema_fwd(
    X, A, Damp, Beta, Eta, Omega, Y, States, B, D, T, N,
    CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0).to(tl.int64)
    t = tl.arange(0, CHUNK)
    n = tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_B)
    _, _, log_q, b, e = _coefficients(A, Damp, Beta, Eta, channel * N + n, n < N, N)
    taps = _taps(A, Damp, Beta, Eta, Omega, channel, N, CHUNK).to(X.dtype.element_ty)
    steps = t.to(tl.float32)
    out = (e[None, :] * tl.exp((steps[:, None] + 1.0) * log_q[None, :])).to(X.dtype.element_ty)
    into = (b[:, None] * tl.exp((CHUNK - 1.0 - steps[None, :]) * log_q[:, None])).to(X.dtype.element_ty)
    decay = tl.exp(CHUNK * log_q)
    slot = (
        States + channel * tl.cdiv(B, BLOCK_B) * tl.cdiv(T, CHUNK) * N * BLOCK_B + n[:, None] * BLOCK_B + lane[None, :]
    )
    for first in range(0, B, BLOCK_B):
        sequence = ((first + lane) * D + channel) * T
        h = tl.zeros((BLOCK_N, BLOCK_B), tl.float32)
        for start in range(0, T, CHUNK):
            tl.store(slot, h, mask=(n < N)[:, None])
            at = sequence[None, :] + start + t[:, None]
            inside = (first + lane < B)[None, :] & (start + t < T)[:, None]
            x = tl.load(X + at, mask=inside, other=0.0)
            y = tl.dot(out, h.to(x.dtype), tl.dot(taps, x))
            tl.store(Y + at, y, mask=inside)
            h = tl.dot(into, x, decay[:, None] * h)
            slot += N * BLOCK_B


def _tile(N):
    return {"CHUNK": 64, "BLOCK_N": max(16, triton.next_power_of_2(N)), "BLOCK_B": 16, "num_warps": 4}


def forward(x, a, d, beta, eta, omega):
    # x (B, D, T); a, d, beta, eta (D, N) and omega (D) in fp32.
    x, a, d, beta, eta = (tensor.contiguous() for tensor in (x, a, d, beta, eta))
    (B, D, T), N = x.shape, a.shape[1]
    y = torch.empty_like(x)
    states = torch.empty(D, triton.cdiv(B, 16), triton.cdiv(T, 64), N, 16, device=x.device, dtype=torch.float32)
    _ema_fwd[(D,)](x, a, d, beta, eta, omega, y, states, B, D, T, N, **_tile(N))
    return y, (x, a, d, beta, eta, omega, states)


# --- backward ---
@triton.jit
def _correlations(dtaps, A, Damp, Beta, Eta, channel, n, N, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr):
    """Sums over the lower triangle of dK q^lag and of dK lag q^lag, for every state."""
    t = tl.arange(0, CHUNK)
    lag = t[:, None] - t[None, :]
    lower = tl.where(lag >= 0, dtaps, 0.0)
    by_power = tl.zeros((BLOCK_N,), tl.float32)
    by_lag = tl.zeros((BLOCK_N,), tl.float32)
    for state in range(N):
        _, _, log_q, _, _ = _coefficients(A, Damp, Beta, Eta, channel * N + state, state < N, N)
        powers = lower * tl.exp(tl.maximum(lag, 0).to(tl.float32) * log_q)
        by_power += tl.where(n == state, tl.sum(tl.sum(powers, 1), 0), 0.0)
        by_lag += tl.where(n == state, tl.sum(tl.sum(powers * lag.to(tl.float32), 1), 0), 0.0)
    return by_power, by_lag


@triton.jit
def _ema_bwd(
    DY, X, A, Damp, Beta, Eta, Omega, States, DX, DA, DDamp, DBeta, DEta, DOmega, B, D, T, N, dy_b, dy_d, dy_t,
    CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0).to(tl.int64)
    t = tl.arange(0, CHUNK)
    n = tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_B)
    of_n = channel * N + n
    p, damp, log_q, b, e = _coefficients(A, Damp, Beta, Eta, of_n, n < N, N)
    taps = tl.trans(_taps(A, Damp, Beta, Eta, Omega, channel, N, CHUNK)).to(X.dtype.element_ty)
    steps = t.to(tl.float32)
    out_powers = tl.exp((steps[None, :] + 1.0) * log_q[:, None])
    in_powers = tl.exp((CHUNK - 1.0 - steps[:, None]) * log_q[None, :])
    out = (e[:, None] * out_powers).to(X.dtype.element_ty)
    into = (b[None, :] * in_powers).to(X.dtype.element_ty)
    decay = tl.exp(CHUNK * log_q)
    dtaps = tl.zeros((CHUNK, CHUNK), tl.float32)
    dout = tl.zeros((BLOCK_N, CHUNK), tl.float32)
    dinto = tl.zeros((CHUNK, BLOCK_N), tl.float32)
    ddecay = tl.zeros((BLOCK_N, BLOCK_B), tl.float32)
    chunks = tl.cdiv(T, CHUNK)
    slot = States + channel * tl.cdiv(B, BLOCK_B) * chunks * N * BLOCK_B + n[:, None] * BLOCK_B + lane[None, :]
    for first in range(0, B, BLOCK_B):
        number = (first + lane).to(tl.int64)
        dh = tl.zeros((BLOCK_N, BLOCK_B), tl.float32)
        for back in range(chunks):
            chunk = chunks - 1 - back
            step = chunk * CHUNK + t
            inside = (number < B)[None, :] & (step < T)[:, None]
            at = ((number * D + channel) * T)[None, :] + step[:, None]
            source = DY + (number * dy_b + channel * dy_d)[None, :] + step[:, None].to(tl.int64) * dy_t
            dy = tl.load(source, mask=inside, other=0.0)
            x = tl.load(X + at, mask=inside, other=0.0)
            place = first // BLOCK_B * chunks + chunk
            h = tl.load(slot + place.to(tl.int64) * N * BLOCK_B, mask=(n < N)[:, None], other=0.0)
            low = dh.to(x.dtype)
            tl.store(DX + at, tl.dot(into, low, tl.dot(taps, dy)), mask=inside)
            dtaps = tl.dot(dy, tl.trans(x), dtaps)
            dout = tl.dot(h.to(x.dtype), tl.trans(dy), dout)
            dinto = tl.dot(x, tl.trans(low), dinto)
            ddecay += dh * h
            dh = tl.dot(out, dy, decay[:, None] * dh)
    by_power, by_lag = _correlations(dtaps, A, Damp, Beta, Eta, channel, n, N, CHUNK, BLOCK_N)
    dout *= out_powers
    dinto *= in_powers
    de = b * by_power + tl.sum(dout, 1)
    db = e * by_power + tl.sum(dinto, 0)
    dlog_q = e * b * by_lag + CHUNK * decay * tl.sum(ddecay, 1)
    dlog_q += e * tl.sum(dout * (steps[None, :] + 1.0), 1) + b * tl.sum(dinto * (CHUNK - 1.0 - steps[:, None]), 0)
    # q = 1 - p damp.
    dq = dlog_q / (1.0 - p * damp)
    beta = tl.load(Beta + of_n, mask=n < N, other=0.0)
    tl.store(DEta + of_n, de * tl.rsqrt(N * 1.0), mask=n < N)
    tl.store(DBeta + of_n, db * p, mask=n < N)
    tl.store(DA + of_n, (db * beta - dq * damp) * p * (1.0 - p), mask=n < N)
    tl.store(DDamp + of_n, -dq * p * damp * (1.0 - damp), mask=n < N)
    diagonal = t[:, None] == t[None, :]
    tl.store(DOmega + channel, tl.sum(tl.sum(tl.where(diagonal, dtaps, 0.0), 1), 0))


def backward(saved, grad_y, needs=None):
    x, a, d, beta, eta, omega, states = saved
    (B, D, T), N = x.shape, a.shape[1]
    dx, da, dd, dbeta, deta, domega = (torch.empty_like(tensor) for tensor in (x, a, d, beta, eta, omega))
    _ema_bwd[(D,)](
        grad_y, x, a, d, beta, eta, omega, states, dx, da, dd, dbeta, deta, domega, B, D, T, N, *grad_y.stride(),
        **_tile(N),
    )  # fmt: skip
    return dx, da, dd, dbeta, deta, domega


# --- check ---
SWEEP = (
    {"B": 16, "D": 2, "T": 128, "N": 4},
    {"B": 19, "D": 3, "T": 150, "N": 5},
    {"B": 3, "D": 2, "T": 70, "N": 3, "dtype": "bfloat16"},
    {"B": 4, "D": 2, "T": 40, "N": 2, "dtype": "float16"},
)
BENCH = ({"B": 16, "D": 2048, "T": 2048, "N": 16, "dtype": "bfloat16"},)


def make_args(B, D, T, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(B, D, T, generator=g).to(device=device, dtype=getattr(torch, dtype))
    a, d, beta, eta = (torch.randn(D, N, generator=g) for _ in range(4))
    # Decays q mostly between 0.7 and 0.99.
    return x, *(t.to(device) for t in (a - 1.0, d - 1.0, beta, eta, torch.randn(D, generator=g)))


def reference(x, a, d, beta, eta, omega):
    # The taps by powers, then a convolution by FFT.
    T, N = x.shape[2], a.shape[1]
    p = torch.sigmoid(a)
    log_q = torch.log1p(-p * torch.sigmoid(d))
    powers = torch.exp(log_q[..., None] * torch.arange(T, device=x.device))
    taps = torch.einsum("dn,dnt->dt", p * beta * eta * N**-0.5, powers)
    xf = x.to(taps.dtype)
    spectrum = torch.fft.rfft(taps, 2 * T) * torch.fft.rfft(xf, 2 * T)
    return (torch.fft.irfft(spectrum, 2 * T)[..., :T] + omega[:, None] * xf).to(x.dtype)
