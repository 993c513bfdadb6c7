"""Linear recurrent unit: one complex eigenvalue per channel, whose powers join chunks that are scanned side by side.

h_t = lambda h_(t-1) + gamma u_t,   lambda = exp(-exp(nu) + i exp(theta)),   gamma = sqrt(1 - |lambda|^2)
g_t = dh_t + conj(lambda) g_(t+1),  du_t = gamma g_t,  dgamma = Re sum g_t conj(u_t),  dlambda = sum g_t conj(h_(t-1))
The eigenvalue does not change with time: a chunk's total decay is lambda^64, known beforehand, and the chunk's own part
of the state behind it is a sum against a table of powers. So the backward finds what every chunk asks of the one before
by a plain reduction, passes it on in a short loop over the chunks, and then scans all chunks at once. dnu and dtheta
come from one sum over time: with lambda's exponent e, de = conj(lambda) dlambda. Each chunk leaves a partial row.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "lru_complex",
    "family": "ssm_rnn",
    "op": "lru",
    "schema": 1,
    "techniques": ("reverse-scan", "chunked", "closed-form", "saved-output", "two-stage-partials", "strided-cotangent"),
    "saves": ("h: fp32 or bf16 or fp16 (B, T, D, 2)",),
    "grads": ("u", "nu", "theta"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}

CHUNK = 64


# --- forward ---
@triton.jit
def _eigenvalue(Nu, Theta, d, D):
    """log |lambda|, its angle, and gamma; channels that do not exist have some value."""
    log_size = -tl.exp(tl.load(Nu + d, mask=d < D, other=0.0))
    angle = tl.exp(tl.load(Theta + d, mask=d < D, other=0.0))
    return log_size, angle, tl.sqrt(1.0 - tl.exp(2.0 * log_size))


@triton.jit
def _power(log_size, angle, steps):
    size = tl.exp(log_size * steps)
    return size * tl.cos(angle * steps), size * tl.sin(angle * steps)


@triton.jit
def _pairs(source, inside, part_stride):
    """Real and imaginary parts, which lie side by side: whole pairs are loaded and split in registers."""
    part = tl.arange(0, 2)
    pair = tl.load(source[:, :, None] + part[None, None, :] * part_stride, mask=inside[:, :, None], other=0.0)
    return tl.split(pair.to(tl.float32))


@triton.jit
def _chunk_ends(
    X, Nu, Theta, Ends, T, D, x_b, x_t, x_d, x_p, BACK: tl.constexpr, CHUNK: tl.constexpr, BLOCK_D: tl.constexpr
):
    # What a chunk alone makes of its border state: sum of lambda^(63 - t) gamma u, backwards of conj(lambda)^t dh.
    batch = tl.program_id(2).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    step = tl.arange(0, CHUNK)
    t = tl.program_id(0) * CHUNK + step
    inside = (t[:, None] < T) & (d[None, :] < D)
    log_size, angle, gamma = _eigenvalue(Nu, Theta, d, D)
    at = batch * x_b + t[:, None].to(tl.int64) * x_t + d[None, :].to(tl.int64) * x_d
    xr, xi = _pairs(X + at, inside, x_p)
    steps = step
    if not BACK:
        steps = CHUNK - 1 - step
    pr, pi = _power(log_size[None, :], angle[None, :], steps[:, None].to(tl.float32))
    if BACK:
        pi = -pi
        gamma = gamma * 0.0 + 1.0
    to = ((batch * tl.num_programs(0) + tl.program_id(0)) * D + d) * 2
    tl.store(Ends + to, gamma * tl.sum(pr * xr - pi * xi, 0), mask=d < D)
    tl.store(Ends + to + 1, gamma * tl.sum(pr * xi + pi * xr, 0), mask=d < D)


@triton.jit
def _pass_on(
    Ends, Nu, Theta, Borders, chunks, D, BACK: tl.constexpr, CHUNK: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    # Borders[k] enters chunk k: from the chunk before it, or backwards from the one behind it.
    batch = tl.program_id(1).to(tl.int64)
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    log_size, angle, _ = _eigenvalue(Nu, Theta, d, D)
    pr, pi = _power(log_size, angle, CHUNK * 1.0)
    if BACK:
        pi = -pi
    sr = tl.zeros((BLOCK_D,), tl.float32)
    si = tl.zeros((BLOCK_D,), tl.float32)
    for number in range(chunks):
        chunk = number
        if BACK:
            chunk = chunks - 1 - number
        at = ((batch * chunks + chunk) * D + d) * 2
        tl.store(Borders + at, sr, mask=d < D)
        tl.store(Borders + at + 1, si, mask=d < D)
        onward = pr * sr - pi * si + tl.load(Ends + at, mask=d < D, other=0.0)
        si = pr * si + pi * sr + tl.load(Ends + at + 1, mask=d < D, other=0.0)
        sr = onward


@triton.jit
def _complex_then(a1r, a1i, b1r, b1i, a2r, a2i, b2r, b2i):
    # Step 1, then step 2, of h -> a h + b.
    return (
        a2r * a1r - a2i * a1i,
        a2r * a1i + a2i * a1r,
        a2r * b1r - a2i * b1i + b2r,
        a2r * b1i + a2i * b1r + b2i,
    )


@triton.jit
def _lru_chunk(U, Nu, Theta, Borders, OUT, T, D, CHUNK: tl.constexpr, BLOCK_D: tl.constexpr):
    batch = tl.program_id(2).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    step = tl.arange(0, CHUNK)
    t = tl.program_id(0) * CHUNK + step
    inside = (t[:, None] < T) & (d[None, :] < D)
    at = ((batch * T + t[:, None]) * D + d[None, :]) * 2
    log_size, angle, gamma = _eigenvalue(Nu, Theta, d, D)
    lr, li = _power(log_size, angle, 1.0)
    ur, ui = _pairs(U + at, inside, 1)
    border = ((batch * tl.num_programs(0) + tl.program_id(0)) * D + d) * 2
    sr = tl.load(Borders + border, mask=d < D, other=0.0)[None, :]
    si = tl.load(Borders + border + 1, mask=d < D, other=0.0)[None, :]
    ar = lr[None, :] + tl.zeros_like(ur)
    ai = li[None, :] + tl.zeros_like(ur)
    pr, pi, hr, hi = tl.associative_scan((ar, ai, gamma[None, :] * ur, gamma[None, :] * ui), 0, _complex_then)
    part = tl.arange(0, 2)
    h = tl.join(hr + pr * sr - pi * si, hi + pr * si + pi * sr)
    tl.store(OUT + at[:, :, None] + part[None, None, :], h, mask=inside[:, :, None])


def _borders(x, nu, theta, back):
    """What enters each chunk (B, chunks, D, 2), from a source (B, T, D, 2) of any strides."""
    B, T, D, _ = x.shape
    chunks = triton.cdiv(T, CHUNK)
    ends, borders = (torch.empty(B, chunks, D, 2, device=x.device, dtype=torch.float32) for _ in range(2))
    _chunk_ends[(chunks, triton.cdiv(D, 16), B)](
        x, nu, theta, ends, T, D, *x.stride(), BACK=back, CHUNK=CHUNK, BLOCK_D=16, num_warps=4
    )
    _pass_on[(triton.cdiv(D, 32), B)](
        ends, nu, theta, borders, chunks, D, BACK=back, CHUNK=CHUNK, BLOCK_D=32, num_warps=1
    )
    return borders


def forward(u, nu, theta):
    # u (B, T, D, 2), pairs of real and imaginary part; nu and theta (D) in fp32.
    u = u.contiguous()
    B, T, D, _ = u.shape
    h = torch.empty_like(u)
    borders = _borders(u, nu, theta, back=False)
    _lru_chunk[(triton.cdiv(T, CHUNK), triton.cdiv(D, 16), B)](
        u, nu, theta, borders, h, T, D, CHUNK=CHUNK, BLOCK_D=16, num_warps=4
    )
    return h, (u, nu, theta, h)


# --- backward ---
@triton.jit
def _lru_chunk_bwd(
    DH, U, Nu, Theta, States, Borders, DU, Parts, T, D, dh_b, dh_t, dh_d, dh_p,
    CHUNK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(2).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    step = tl.arange(0, CHUNK)
    t = tl.program_id(0) * CHUNK + step
    inside = (t[:, None] < T) & (d[None, :] < D)
    at = ((batch * T + t[:, None]) * D + d[None, :]) * 2
    log_size, angle, gamma = _eigenvalue(Nu, Theta, d, D)
    lr, li = _power(log_size, angle, 1.0)
    source = DH + batch * dh_b + t[:, None].to(tl.int64) * dh_t + d[None, :].to(tl.int64) * dh_d
    gr, gi = _pairs(source, inside, dh_p)
    border = ((batch * tl.num_programs(0) + tl.program_id(0)) * D + d) * 2
    sr = tl.load(Borders + border, mask=d < D, other=0.0)[None, :]
    si = tl.load(Borders + border + 1, mask=d < D, other=0.0)[None, :]
    ar = lr[None, :] + tl.zeros_like(gr)
    ai = tl.zeros_like(gr) - li[None, :]
    # The border is the gradient of the following chunk's first state: the powers count the step across.
    pr, pi, gr, gi = tl.associative_scan((ar, ai, gr, gi), 0, _complex_then, reverse=True)
    gr += pr * sr - pi * si
    gi += pr * si + pi * sr
    ur, ui = _pairs(U + at, inside, 1)
    hr, hi = _pairs(States + at - 2 * D, inside & (t[:, None] > 0), 1)
    part = tl.arange(0, 2)
    du = tl.join(gamma[None, :] * gr, gamma[None, :] * gi)
    tl.store(DU + at[:, :, None] + part[None, None, :], du, mask=inside[:, :, None])
    # Behind the sequence's end u and h are zero.
    dgamma = tl.sum(gr * ur + gi * ui, 0)
    dl_r = tl.sum(gr * hr + gi * hi, 0)
    dl_i = tl.sum(gi * hr - gr * hi, 0)
    # Exponent e = -exp(nu) + i exp(theta): de = conj(lambda) dlambda; gamma depends on nu alone.
    squared = tl.exp(2.0 * log_size)
    dnu = (lr * dl_r + li * dl_i) * log_size - dgamma * squared / gamma * log_size
    dtheta = (lr * dl_i - li * dl_r) * angle
    to = (batch * tl.num_programs(0) + tl.program_id(0)) * 2 * D + d
    tl.store(Parts + to, dnu, mask=d < D)
    tl.store(Parts + to + D, dtheta, mask=d < D)


def backward(saved, grad_h, needs=None):
    u, nu, theta, h = saved
    B, T, D, _ = u.shape
    chunks = triton.cdiv(T, CHUNK)
    borders = _borders(grad_h, nu, theta, back=True)
    du = torch.empty_like(u)
    parts = torch.empty(B * chunks, 2, D, device=u.device, dtype=torch.float32)
    _lru_chunk_bwd[(chunks, triton.cdiv(D, 16), B)](
        grad_h, u, nu, theta, h, borders, du, parts, T, D, *grad_h.stride(), CHUNK=CHUNK, BLOCK_D=16, num_warps=4
    )
    dnu, dtheta = parts.sum(0)
    return du, dnu, dtheta


# --- check ---
SWEEP = (
    {"B": 2, "T": 128, "D": 8},
    {"B": 1, "T": 151, "D": 19},
    {"B": 1, "T": 70, "D": 4, "dtype": "bfloat16"},
    {"B": 1, "T": 90, "D": 3, "dtype": "float16"},
)
BENCH = ({"B": 8, "T": 4096, "D": 512, "dtype": "float32"},)


def make_args(B, T, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    u = torch.randn(B, T, D, 2, generator=g).to(device=device, dtype=getattr(torch, dtype))
    # |lambda| between 0.9 and 0.999, angles up to pi / 10.
    size, angle = 0.9 + 0.099 * torch.rand(D, generator=g), 0.314 * torch.rand(D, generator=g) + 1e-3
    return u, (-size.log()).log().to(device), angle.log().to(device)


def reference(u, nu, theta):
    # Chunks of 64 steps: a Toeplitz matrix of powers for each channel inside, the states between.
    (B, T, D, _), K = u.shape, 64
    exponent = torch.complex(-nu.exp(), theta.exp())
    gamma = torch.sqrt(1.0 - torch.exp(-2.0 * nu.exp()))
    x = gamma * torch.view_as_complex(u.to(nu.dtype).contiguous())
    x = torch.nn.functional.pad(x, (0, 0, 0, -T % K)).view(B, -1, K, D)
    step = torch.arange(K, device=u.device)
    lag = step[:, None] - step[None, :]
    inside = torch.where((lag >= 0)[..., None], torch.exp(lag.clamp(min=0)[..., None] * exponent), 0.0)
    h = torch.einsum("tsd,bcsd->bctd", inside, x)
    onward, state, entering = torch.exp(K * exponent), torch.zeros_like(h[:, 0, 0]), []
    for chunk in range(h.shape[1]):
        entering.append(state)
        state = onward * state + h[:, chunk, -1]
    h = h + torch.exp((step[:, None] + 1) * exponent) * torch.stack(entering, 1)[:, :, None]
    return torch.view_as_real(h.reshape(B, -1, D)[:, :T]).to(u.dtype)
