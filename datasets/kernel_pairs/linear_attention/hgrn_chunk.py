"""HGRN with a learned lower bound of the forget gate, by chunks: totals, a carry pass over chunks, and the scan proper.

    h_t = f_t h_(t - 1) + (1 - f_t) silu(x_t),    f = low + (1 - low) sigmoid(z),    low one number per channel

One long sequence with few channels would leave most of the GPU idle in a single scan. Instead every chunk reduces
itself to (decay, last state), a scan over these pairs gives each chunk the state before it, and all chunks scan again
with that. The backward has the same three passes from the end: r_t = f_t (dh_t + r_(t + 1)) is what step t asks of the
state before it, and needs no gate of another step. The bound's gradient sums over time, one partial row per chunk.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "hgrn_chunk",
    "family": "linear_attention",
    "op": "gated_scan_lower_bound",
    "schema": 1,
    "techniques": (
        "chunked", "reverse-scan", "saved-output", "recompute", "broadcast-reduction", "two-stage-partials",
        "strided-cotangent",
    ),
    "saves": ("h: fp32 or bf16 (B, T, C)",),
    "grads": ("x", "z", "low"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}  # fmt: skip


# --- forward ---
@triton.jit
def _then(f1, h1, f2, h2):
    # First step 1, then step 2, of h -> f h + added.
    return f1 * f2, f2 * h1 + h2


@triton.jit
def _channels(C, BLOCK_C: tl.constexpr):
    return tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)


@triton.jit
def _time_tile(X, T, C, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr):
    """This program's (CHUNK, BLOCK_C) of a dense (B, T, C), in fp32."""
    t = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    c = _channels(C, BLOCK_C)
    at = (tl.program_id(2).to(tl.int64) * T + t[:, None]) * C + c[None, :]
    return tl.load(X + at, mask=(t[:, None] < T) & (c[None, :] < C), other=0.0).to(tl.float32)


@triton.jit
def _put_time_tile(X, tile, T, C, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr):
    t = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    c = _channels(C, BLOCK_C)
    at = (tl.program_id(2).to(tl.int64) * T + t[:, None]) * C + c[None, :]
    tl.store(X + at, tile, mask=(t[:, None] < T) & (c[None, :] < C))


@triton.jit
def _forget(Z, Low, T, C, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr):
    """(f, sigmoid(z), low); steps past T keep the state."""
    c = _channels(C, BLOCK_C)
    low = tl.load(Low + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    opened = tl.sigmoid(_time_tile(Z, T, C, CHUNK, BLOCK_C))
    t = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    return tl.where(t[:, None] < T, low + (1.0 - low) * opened, 1.0), opened, low


@triton.jit
def _put_total(Decay, Added, decay, added, C, BLOCK_C: tl.constexpr):
    # (B, chunks, C) each.
    c = _channels(C, BLOCK_C)
    at = (tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * C + c
    tl.store(Decay + at, decay, mask=c < C)
    tl.store(Added + at, added, mask=c < C)


@triton.jit
def _hgrn_totals(X, Z, Low, Decay, Added, T, C, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr):
    f, _, _ = _forget(Z, Low, T, C, CHUNK, BLOCK_C)
    x = _time_tile(X, T, C, CHUNK, BLOCK_C)
    passed, added = tl.associative_scan((f, (1.0 - f) * x * tl.sigmoid(x)), 0, _then)
    last = tl.arange(0, CHUNK)[:, None] == CHUNK - 1
    decay, state = tl.sum(tl.where(last, passed, 0.0), 0), tl.sum(tl.where(last, added, 0.0), 0)
    _put_total(Decay, Added, decay, state, C, BLOCK_C)


@triton.jit
def _carry_pass(Decay, Added, chunks, C, FROM_END: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr):
    # `Added` becomes what the chunks before each chunk (FROM_END: behind it) hand to it.
    base = tl.program_id(0).to(tl.int64) * chunks * C
    c = _channels(C, BLOCK_C)
    i = tl.arange(0, BLOCK_N)
    carry = tl.zeros((BLOCK_C,), tl.float32)
    for start in range(0, chunks, BLOCK_N):
        n = start + i
        if FROM_END:
            n = chunks - 1 - n
        inside = ((n >= 0) & (n < chunks))[:, None] & (c[None, :] < C)
        at = base + n[:, None] * C + c[None, :]
        decay = tl.load(Decay + at, mask=inside, other=1.0)
        added = tl.load(Added + at, mask=inside, other=0.0)
        passed, reached = tl.associative_scan((decay, added), 0, _then)
        states = reached + passed * carry[None, :]
        # The state behind chunk n is what chunk n + 1 gets; the first of this tile gets the carry.
        n_next = n - 1 if FROM_END else n + 1
        has_next = (i[:, None] < BLOCK_N - 1) & inside & ((n_next >= 0) & (n_next < chunks))[:, None]
        # All rows of this tile must have been read before neighbours overwrite them.
        tl.debug_barrier()
        tl.store(Added + base + n_next[:, None] * C + c[None, :], states, mask=has_next)
        head = base + (chunks - 1 - start if FROM_END else start) * C
        tl.store(Added + head + c, carry, mask=c < C)
        carry = tl.sum(tl.where(i[:, None] == BLOCK_N - 1, states, 0.0), 0)


@triton.jit
def _hgrn_apply(X, Z, Low, Added, Out, T, C, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr):
    f, _, _ = _forget(Z, Low, T, C, CHUNK, BLOCK_C)
    x = _time_tile(X, T, C, CHUNK, BLOCK_C)
    passed, added = tl.associative_scan((f, (1.0 - f) * x * tl.sigmoid(x)), 0, _then)
    c = _channels(C, BLOCK_C)
    at = (tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * C + c
    before = tl.load(Added + at, mask=c < C, other=0.0)
    _put_time_tile(Out, added + passed * before[None, :], T, C, CHUNK, BLOCK_C)


def _carries(decay, added, from_end):
    B, chunks, C = decay.shape
    _carry_pass[(B, triton.cdiv(C, 32))](
        decay, added, chunks, C, FROM_END=from_end, BLOCK_N=min(128, triton.next_power_of_2(chunks)), BLOCK_C=32,
        num_warps=4,
    )  # fmt: skip


def _schedule(x):
    """(grid of chunks, tile sizes, two buffers for the chunks' totals)."""
    B, T, C = x.shape
    tiles = {"CHUNK": 16 if T <= 128 else 64, "BLOCK_C": 32, "num_warps": 4}
    chunks = triton.cdiv(T, tiles["CHUNK"])
    totals = (torch.empty(B, chunks, C, device=x.device, dtype=torch.float32) for _ in range(2))
    return (chunks, triton.cdiv(C, 32), B), tiles, *totals


def forward(x, z, low):
    x, z, low = x.contiguous(), z.contiguous(), low.contiguous()
    _, T, C = x.shape
    grid, tiles, decay, added = _schedule(x)
    h = torch.empty_like(x)
    _hgrn_totals[grid](x, z, low, decay, added, T, C, **tiles)
    _carries(decay, added, from_end=False)
    _hgrn_apply[grid](x, z, low, added, h, T, C, **tiles)
    return h, (x, z, low, h)


# --- backward ---
@triton.jit
def _cotangent_tile(DH, T, C, dh_b, dh_t, dh_c, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr):
    t = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    c = _channels(C, BLOCK_C)
    at = tl.program_id(2).to(tl.int64) * dh_b + t[:, None].to(tl.int64) * dh_t + c[None, :].to(tl.int64) * dh_c
    return tl.load(DH + at, mask=(t[:, None] < T) & (c[None, :] < C), other=0.0).to(tl.float32)


@triton.jit
def _reverse_totals(DH, Z, Low, Decay, Added, T, C, dh_b, dh_t, dh_c, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr):
    f, _, _ = _forget(Z, Low, T, C, CHUNK, BLOCK_C)
    dh = _cotangent_tile(DH, T, C, dh_b, dh_t, dh_c, CHUNK, BLOCK_C)
    passed, asked = tl.associative_scan((f, f * dh), 0, _then, reverse=True)
    first = tl.arange(0, CHUNK)[:, None] == 0
    decay, asks = tl.sum(tl.where(first, passed, 0.0), 0), tl.sum(tl.where(first, asked, 0.0), 0)
    _put_total(Decay, Added, decay, asks, C, BLOCK_C)


@triton.jit
def _hgrn_grads(
    DH, X, Z, Low, H, Added, DX, DZ, LowParts, T, C, dh_b, dh_t, dh_c, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr
):
    t = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    c = _channels(C, BLOCK_C)
    batch = tl.program_id(2).to(tl.int64)
    inside = (t[:, None] < T) & (c[None, :] < C)
    f, opened, low = _forget(Z, Low, T, C, CHUNK, BLOCK_C)
    dh = _cotangent_tile(DH, T, C, dh_b, dh_t, dh_c, CHUNK, BLOCK_C)
    # The gradient of state t scans the gates of the steps behind it; across the border the carry holds them.
    border = (t % CHUNK == CHUNK - 1)[:, None]
    at = (batch * T + t[:, None]) * C + c[None, :]
    behind = tl.load(Z + at + C, mask=(t[:, None] + 1 < T) & (c[None, :] < C) & (~border), other=0.0).to(tl.float32)
    gate = tl.where(border | (t[:, None] + 1 >= T), 1.0, low + (1.0 - low) * tl.sigmoid(behind))
    passed, reached = tl.associative_scan((gate, dh), 0, _then, reverse=True)
    chunk_row = batch * tl.num_programs(0) + tl.program_id(0)
    asked = tl.load(Added + chunk_row * C + c, mask=c < C, other=0.0)
    grad = reached + passed * asked[None, :]

    x = _time_tile(X, T, C, CHUNK, BLOCK_C)
    before = tl.load(H + at - C, mask=inside & (t[:, None] > 0), other=0.0).to(tl.float32)
    sig = tl.sigmoid(x)
    tl.store(DX + at, grad * (1.0 - f) * sig * (1.0 + x * (1.0 - sig)), mask=inside)
    df = tl.where(inside, grad * (before - x * sig), 0.0)
    tl.store(DZ + at, df * (1.0 - low) * opened * (1.0 - opened), mask=inside)
    tl.store(LowParts + chunk_row * C + c, tl.sum(df * (1.0 - opened), 0), mask=c < C)


def backward(saved, grad_h, needs=None):
    x, z, low, h = saved
    _, T, C = x.shape
    grid, tiles, decay, added = _schedule(x)
    strides = grad_h.stride()
    _reverse_totals[grid](grad_h, z, low, decay, added, T, C, *strides, **tiles)
    _carries(decay, added, from_end=True)
    dx, dz = torch.empty_like(x), torch.empty_like(z)
    # The decays have served: their buffer takes the bound's partial rows.
    _hgrn_grads[grid](grad_h, x, z, low, h, added, dx, dz, decay, T, C, *strides, **tiles)
    return dx, dz, decay.sum((0, 1)).to(low.dtype)


# --- check ---
SWEEP = (
    {"B": 1, "T": 48, "C": 32},
    {"B": 2, "T": 43, "C": 37},
    {"B": 1, "T": 150, "C": 24},
    {"B": 2, "T": 27, "C": 32, "dtype": "bfloat16"},
)
BENCH = ({"B": 2, "T": 32768, "C": 1024, "dtype": "bfloat16"},)


def make_args(B, T, C, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, z = torch.randn(B, T, C, generator=g), torch.randn(B, T, C, generator=g) + 1.0
    low = torch.rand(C, generator=g) * 0.9
    return tuple(a.to(device=device, dtype=getattr(torch, dtype)) for a in (x, z, low))


def reference(x, z, low):
    f = low.float() + (1.0 - low.float()) * torch.sigmoid(z.float())
    h = (1.0 - f) * torch.nn.functional.silu(x.float())
    # The scan by doubling: after a round each step has taken in twice as many of those before it.
    span = 1
    while span < x.shape[1]:
        h = torch.cat((h[:, :span], h[:, span:] + f[:, span:] * h[:, :-span]), 1)
        f = torch.cat((f[:, :span], f[:, span:] * f[:, :-span]), 1)
        span *= 2
    return h.to(x.dtype)
