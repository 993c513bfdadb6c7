"""S4D's convolution kernel: a Vandermonde product whose powers are rebuilt tile by tile from a table and one factor.

A = -exp(log_decay) + i freq,  z = dt A,  w = exp(z),  c' = c (w - 1) / A,    k[l] = 2 Re sum over n of c'[n] w[n]^l.
A program owns a head with all of its states. It makes w^j for one tile of steps by exp, cos and sin; from tile to tile
only one complex factor per state moves on, so that no angle grows with l. Gradients of a complex number are pairs of
gradients of its parts: dc' = 2 sum of dk[l] conj(w^l) and dz = conj(c') 2 sum of l dk[l] conj(w^l). Both sums are
polynomials in conj(w^tile), whose coefficients are sums over one tile: Horner's rule from the last tile to the first
needs no running power. The chain to the parameters is a few numbers per state, all in the same program.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "s4d_kernel_gen",
    "family": "ssm_rnn",
    "op": "s4d_kernel",
    "schema": 1,
    "techniques": ("reverse-scan", "recompute", "chunked", "one-launch", "strided-cotangent"),
    "saves": (),
    "grads": ("log_dt", "log_decay", "freq", "c"),
    "dtypes": ("float32",),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _modes(LogDt, LogDecay, Freq, C, head, n, N):
    """dt, A, w = exp(dt A) and c of a head's states, complex numbers as pairs."""
    dt = tl.exp(tl.load(LogDt + head))
    at = head * N + n
    # States that do not exist have A = -1 and c = 0.
    a_r = -tl.exp(tl.load(LogDecay + at, mask=n < N, other=0.0))
    a_i = tl.load(Freq + at, mask=n < N, other=0.0)
    c_r = tl.load(C + 2 * at, mask=n < N, other=0.0)
    c_i = tl.load(C + 2 * at + 1, mask=n < N, other=0.0)
    size = tl.exp(dt * a_r)
    return dt, a_r, a_i, size * tl.cos(dt * a_i), size * tl.sin(dt * a_i), c_r, c_i


@triton.jit
def _input_factor(a_r, a_i, w_r, w_i):
    """(w - 1) / A, the integral of exp(A t) over one step."""
    norm = a_r * a_r + a_i * a_i
    return ((w_r - 1.0) * a_r + w_i * a_i) / norm, (w_i * a_r - (w_r - 1.0) * a_i) / norm


@triton.jit
def _powers(dt, a_r, a_i, j):
    """w^j as a tile (steps, states)."""
    size = tl.exp(dt * a_r[None, :] * j[:, None])
    angle = dt * a_i[None, :] * j[:, None]
    return size * tl.cos(angle), size * tl.sin(angle)


@triton.jit
def _s4d_kernel_fwd(LogDt, LogDecay, Freq, C, OUT, L, N, BLOCK_L: tl.constexpr, BLOCK_N: tl.constexpr):
    head = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    j = tl.arange(0, BLOCK_L)
    dt, a_r, a_i, w_r, w_i, c_r, c_i = _modes(LogDt, LogDecay, Freq, C, head, n, N)
    f_r, f_i = _input_factor(a_r, a_i, w_r, w_i)
    # 2 c' w^start, and the factor by which it moves on.
    run_r = 2.0 * (c_r * f_r - c_i * f_i)
    run_i = 2.0 * (c_r * f_i + c_i * f_r)
    size = tl.exp(dt * a_r * BLOCK_L)
    step_r = size * tl.cos(dt * a_i * BLOCK_L)
    step_i = size * tl.sin(dt * a_i * BLOCK_L)
    p_r, p_i = _powers(dt, a_r, a_i, j.to(tl.float32))
    for start in range(0, L, BLOCK_L):
        k = tl.sum(p_r * run_r[None, :] - p_i * run_i[None, :], 1)
        tl.store(OUT + head * L + start + j, k, mask=start + j < L)
        onward = run_r * step_r - run_i * step_i
        run_i = run_r * step_i + run_i * step_r
        run_r = onward


def _tile(L, N):
    BLOCK_L, BLOCK_N = max(16, min(64, triton.next_power_of_2(L))), triton.next_power_of_2(N)
    return {"BLOCK_L": BLOCK_L, "BLOCK_N": BLOCK_N, "num_warps": max(1, min(4, BLOCK_L * BLOCK_N // 512))}


def forward(log_dt, log_decay, freq, c, length):
    # log_dt (H), log_decay and freq (H, N), c (H, N, 2): parameters, fp32. The kernel is (H, length).
    log_dt, log_decay, freq, c = log_dt.contiguous(), log_decay.contiguous(), freq.contiguous(), c.contiguous()
    H, N = freq.shape
    out = torch.empty(H, length, device=freq.device, dtype=freq.dtype)
    _s4d_kernel_fwd[(H,)](log_dt, log_decay, freq, c, out, length, N, **_tile(length, N))
    return out, (log_dt, log_decay, freq, c, length)


# --- backward ---
@triton.jit
def _s4d_kernel_bwd(
    DK, LogDt, LogDecay, Freq, C, DLogDt, DLogDecay, DFreq, DC, L, N, dk_h, dk_l,
    BLOCK_L: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    j = tl.arange(0, BLOCK_L)
    dt, a_r, a_i, w_r, w_i, c_r, c_i = _modes(LogDt, LogDecay, Freq, C, head, n, N)
    size = tl.exp(dt * a_r * BLOCK_L)
    step_r = size * tl.cos(dt * a_i * BLOCK_L)
    step_i = size * tl.sin(dt * a_i * BLOCK_L)
    p_r, p_i = _powers(dt, a_r, a_i, j.to(tl.float32))
    # S = sum of dk[l] w^l and R = sum of l dk[l] w^l; conjugates are taken behind the loop.
    s_r = tl.zeros((BLOCK_N,), tl.float32)
    s_i = tl.zeros((BLOCK_N,), tl.float32)
    r_r = tl.zeros((BLOCK_N,), tl.float32)
    r_i = tl.zeros((BLOCK_N,), tl.float32)
    tiles = tl.cdiv(L, BLOCK_L)
    for back in range(tiles):
        step = (tiles - 1 - back) * BLOCK_L + j
        dk = tl.load(DK + head * dk_h + step.to(tl.int64) * dk_l, mask=step < L, other=0.0).to(tl.float32)
        weighted = dk * step.to(tl.float32)
        onward = s_r * step_r - s_i * step_i + tl.sum(dk[:, None] * p_r, 0)
        s_i = s_r * step_i + s_i * step_r + tl.sum(dk[:, None] * p_i, 0)
        s_r = onward
        onward = r_r * step_r - r_i * step_i + tl.sum(weighted[:, None] * p_r, 0)
        r_i = r_r * step_i + r_i * step_r + tl.sum(weighted[:, None] * p_i, 0)
        r_r = onward
    f_r, f_i = _input_factor(a_r, a_i, w_r, w_i)
    k_r = c_r * f_r - c_i * f_i
    k_i = c_r * f_i + c_i * f_r
    # dc' = 2 conj(S), dz = 2 conj(c' R) from the powers.
    d_r = 2.0 * s_r
    d_i = -2.0 * s_i
    z_r = 2.0 * (k_r * r_r - k_i * r_i)
    z_i = -2.0 * (k_r * r_i + k_i * r_r)
    at = head * N + n
    tl.store(DC + 2 * at, d_r * f_r + d_i * f_i, mask=n < N)
    tl.store(DC + 2 * at + 1, d_i * f_r - d_r * f_i, mask=n < N)
    # Through c' = c (w - 1) / A: e = dc' conj(c / A), then dz += e conj(w), dA = -e conj((w - 1) / A).
    norm = a_r * a_r + a_i * a_i
    q_r = (c_r * a_r + c_i * a_i) / norm
    q_i = (c_i * a_r - c_r * a_i) / norm
    e_r = d_r * q_r + d_i * q_i
    e_i = d_i * q_r - d_r * q_i
    z_r += e_r * w_r + e_i * w_i
    z_i += e_i * w_r - e_r * w_i
    da_r = dt * z_r - (e_r * f_r + e_i * f_i)
    da_i = dt * z_i - (e_i * f_r - e_r * f_i)
    tl.store(DLogDecay + at, da_r * a_r, mask=n < N)
    tl.store(DFreq + at, da_i, mask=n < N)
    # z = dt A: the states share dt. Those that do not exist have c = 0, hence z = 0.
    tl.store(DLogDt + head, dt * tl.sum(z_r * a_r + z_i * a_i, 0))


def backward(saved, grad_k, needs=None):
    log_dt, log_decay, freq, c, length = saved
    H, N = freq.shape
    dlog_dt, dlog_decay = torch.empty_like(log_dt), torch.empty_like(log_decay)
    dfreq, dc = torch.empty_like(freq), torch.empty_like(c)
    _s4d_kernel_bwd[(H,)](
        grad_k, log_dt, log_decay, freq, c, dlog_dt, dlog_decay, dfreq, dc, length, N, *grad_k.stride(),
        **_tile(length, N),
    )  # fmt: skip
    return dlog_dt, dlog_decay, dfreq, dc


# --- check ---
SWEEP = (
    {"H": 4, "N": 16, "length": 128},
    {"H": 3, "N": 11, "length": 201},
    {"H": 5, "N": 8, "length": 37},
)
BENCH = ({"H": 2048, "N": 32, "length": 8192, "dtype": "float32"},)


def make_args(H, N, length, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    # As S4D-Lin is initialised: decay 1/2, frequencies pi n, steps between 0.001 and 0.1.
    log_dt = torch.rand(H, generator=g) * 4.6 - 6.9
    log_decay = 0.3 * torch.randn(H, N, generator=g) - 0.7
    freq = 3.14159 * torch.arange(N) * torch.ones(H, 1) + 0.1 * torch.randn(H, N, generator=g)
    c = torch.randn(H, N, 2, generator=g)
    return *(t.to(device=device, dtype=getattr(torch, dtype)) for t in (log_dt, log_decay, freq, c)), length


def reference(log_dt, log_decay, freq, c, length):
    a = torch.complex(-log_decay.exp(), freq)
    z = log_dt.exp()[:, None] * a
    weight = torch.view_as_complex(c) * (torch.exp(z) - 1.0) / a
    # Steps as 64 fast and length / 64 slow ones: powers of both are small tables, and their product is a matmul.
    fast = torch.exp(z[:, :, None] * torch.arange(64, device=c.device))
    slow = torch.exp(z[:, :, None] * (64 * torch.arange((length + 63) // 64, device=c.device)))
    k = 2.0 * torch.einsum("hn,hns,hnf->hsf", weight, slow, fast).real
    return k.flatten(1)[:, :length]
