"""Long first-order recurrence y_t = a_t y_{t-1} + x_t, parallel in time too: chunk maps, a scan of carries, chunks.

With few channels and a long time, one program per channel tile leaves processors idle. Here each chunk is reduced to
its affine map, a small kernel passes the carry through all maps, then all chunks are scanned at once. Backwards the
same steps run from the end: q_t = a_t g_t obeys q_t = a_t q_{t+1} + a_t dy_t, so a chunk's decay is the forward's, and
is saved.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "scan_chunk_carry",
    "family": "ssm_rnn",
    "op": "linear_recurrence",
    "schema": 1,
    "techniques": ("reverse-scan", "chunked", "two-stage-partials", "saved-output", "strided-cotangent"),
    "saves": ("y: fp32 or bf16 or fp16 (B, L, C)", "decays: fp32 (B, chunks, C)"),
    "grads": ("a", "x"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}

BLOCK_L, BLOCK_C = 64, 32


# --- forward ---
@triton.jit
def _affine(decay1, shift1, decay2, shift2):
    # Map 1, then map 2, of y -> decay y + shift.
    return decay1 * decay2, decay2 * shift1 + shift2


@triton.jit
def _chunk_maps(A, X, Decays, Shifts, L, C, BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr):
    # The map from the state before a chunk to the state after it.
    b = tl.program_id(1).to(tl.int64)
    chunk = tl.program_id(0)
    c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    t = chunk * BLOCK_L + tl.arange(0, BLOCK_L)
    at = (b * L + t[:, None]) * C + c[None, :]
    inside = (t[:, None] < L) & (c[None, :] < C)
    a = tl.load(A + at, mask=inside, other=1.0).to(tl.float32)
    x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
    decay, state = tl.associative_scan((a, x), 0, _affine)
    last = (tl.arange(0, BLOCK_L) == BLOCK_L - 1)[:, None]
    to = (b * tl.num_programs(0) + chunk) * C + c
    tl.store(Decays + to, tl.sum(tl.where(last, decay, 0.0), 0), mask=c < C)
    tl.store(Shifts + to, tl.sum(tl.where(last, state, 0.0), 0), mask=c < C)


@triton.jit
def _pass_carries(
    Decays, Shifts, Carries, chunks, C, REVERSE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr
):
    # Carries[k] is what enters chunk k, in the order of time or against it. Tiles of BLOCK_K chunks follow one another.
    b = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    step = tl.arange(0, BLOCK_K)
    carry = tl.zeros((BLOCK_C,), tl.float32)
    first = 0
    if REVERSE:
        first = chunks - 1
    tl.store(Carries + (b * chunks + first) * C + c, carry, mask=c < C)
    for start in range(0, chunks, BLOCK_K):
        k = start + step
        onward = k + 1
        if REVERSE:
            k = chunks - 1 - k
            onward = k - 1
        known = ((k >= 0) & (k < chunks))[:, None] & (c[None, :] < C)
        at = (b * chunks + k[:, None]) * C + c[None, :]
        decay = tl.load(Decays + at, mask=known, other=1.0)
        shift = tl.load(Shifts + at, mask=known, other=0.0)
        total, local = tl.associative_scan((decay, shift), 0, _affine)
        leaving = local + total * carry[None, :]
        taken = ((onward >= 0) & (onward < chunks))[:, None] & (c[None, :] < C)
        tl.store(Carries + (b * chunks + onward[:, None]) * C + c[None, :], leaving, mask=taken)
        carry = tl.sum(tl.where((step == BLOCK_K - 1)[:, None], leaving, 0.0), 0)


@triton.jit
def _chunk_states(A, X, Carries, Y, L, C, BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr):
    b = tl.program_id(1).to(tl.int64)
    chunk = tl.program_id(0)
    c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    t = chunk * BLOCK_L + tl.arange(0, BLOCK_L)
    at = (b * L + t[:, None]) * C + c[None, :]
    inside = (t[:, None] < L) & (c[None, :] < C)
    a = tl.load(A + at, mask=inside, other=1.0).to(tl.float32)
    x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
    carry = tl.load(Carries + (b * tl.num_programs(0) + chunk) * C + c, mask=c < C, other=0.0)
    decay, local = tl.associative_scan((a, x), 0, _affine)
    tl.store(Y + at, local + decay * carry[None, :], mask=inside)


def forward(a, x):
    a, x = a.contiguous(), x.contiguous()
    B, L, C = x.shape
    chunks, columns = triton.cdiv(L, BLOCK_L), triton.cdiv(C, BLOCK_C)
    y = torch.empty_like(x)
    decays, shifts, carries = (torch.empty(B, chunks, C, device=x.device, dtype=torch.float32) for _ in range(3))
    _chunk_maps[(chunks, B, columns)](a, x, decays, shifts, L, C, BLOCK_L=BLOCK_L, BLOCK_C=BLOCK_C)
    _pass_carries[(B, triton.cdiv(C, 16))](decays, shifts, carries, chunks, C, REVERSE=False, BLOCK_K=64, BLOCK_C=16)
    _chunk_states[(chunks, B, columns)](a, x, carries, y, L, C, BLOCK_L=BLOCK_L, BLOCK_C=BLOCK_C)
    return y, (a, y, decays)


# --- backward ---
@triton.jit
def _chunk_pulls(DY, A, Shifts, L, C, dy_b, dy_t, dy_c, BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr):
    # q at a chunk's first step when nothing enters from behind.
    b = tl.program_id(1).to(tl.int64)
    chunk = tl.program_id(0)
    c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    t = chunk * BLOCK_L + tl.arange(0, BLOCK_L)
    inside = (t[:, None] < L) & (c[None, :] < C)
    a = tl.load(A + (b * L + t[:, None]) * C + c[None, :], mask=inside, other=1.0).to(tl.float32)
    source = DY + b * dy_b + t[:, None].to(tl.int64) * dy_t + c[None, :].to(tl.int64) * dy_c
    dy = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    _, q = tl.associative_scan((a, a * dy), 0, _affine, reverse=True)
    first = (tl.arange(0, BLOCK_L) == 0)[:, None]
    to = (b * tl.num_programs(0) + chunk) * C + c
    tl.store(Shifts + to, tl.sum(tl.where(first, q, 0.0), 0), mask=c < C)


@triton.jit
def _chunk_gradients(DY, A, Y, Carries, DA, DX, L, C, dy_b, dy_t, dy_c, BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr):
    b = tl.program_id(1).to(tl.int64)
    # Last chunks first: the first launch read them last, and L2 has them.
    chunk = tl.num_programs(0) - 1 - tl.program_id(0)
    c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    t = chunk * BLOCK_L + tl.arange(0, BLOCK_L)
    at = (b * L + t[:, None]) * C + c[None, :]
    live = c[None, :] < C
    inside = (t[:, None] < L) & live
    # g_t = dy_t + a_{t+1} g_{t+1}. The carry is multiplied by the decay across the border already.
    within = (t[:, None] + 1 < L) & (tl.arange(0, BLOCK_L) < BLOCK_L - 1)[:, None] & live
    a_next = tl.load(A + at + C, mask=within, other=1.0).to(tl.float32)
    source = DY + b * dy_b + t[:, None].to(tl.int64) * dy_t + c[None, :].to(tl.int64) * dy_c
    dy = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    carry = tl.load(Carries + (b * tl.num_programs(0) + chunk) * C + c, mask=c < C, other=0.0)
    decay, local = tl.associative_scan((a_next, dy), 0, _affine, reverse=True)
    g = local + decay * carry[None, :]
    y_before = tl.load(Y + at - C, mask=inside & (t[:, None] > 0), other=0.0).to(tl.float32)
    tl.store(DX + at, g, mask=inside)
    tl.store(DA + at, g * y_before, mask=inside)


def backward(saved, grad_y, needs=None):
    a, y, decays = saved
    B, L, C = y.shape
    chunks, columns = triton.cdiv(L, BLOCK_L), triton.cdiv(C, BLOCK_C)
    da, dx = torch.empty_like(a), torch.empty_like(y)
    shifts, carries = torch.empty_like(decays), torch.empty_like(decays)
    strides = grad_y.stride()
    _chunk_pulls[(chunks, B, columns)](grad_y, a, shifts, L, C, *strides, BLOCK_L=BLOCK_L, BLOCK_C=BLOCK_C, num_warps=1)
    _pass_carries[(B, triton.cdiv(C, 16))](decays, shifts, carries, chunks, C, REVERSE=True, BLOCK_K=256, BLOCK_C=16)
    _chunk_gradients[(chunks, B, columns)](
        grad_y, a, y, carries, da, dx, L, C, *strides, BLOCK_L=BLOCK_L, BLOCK_C=BLOCK_C
    )
    return da, dx


# --- check ---
SWEEP = (
    {"B": 2, "L": 256, "C": 8},
    {"B": 1, "L": 333, "C": 37},
    {"B": 1, "L": 4300, "C": 2},
    {"B": 1, "L": 150, "C": 8, "dtype": "bfloat16"},
    {"B": 1, "L": 70, "C": 8, "dtype": "float16"},
)
BENCH = ({"B": 1, "L": 65536, "C": 512, "dtype": "float32"},)


def make_args(B, L, C, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    # Decays near 1, so that carries live through several chunks.
    a, x = torch.sigmoid(torch.randn(B, L, C, generator=g) + 4.0), torch.randn(B, L, C, generator=g)
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (a, x))


def reference(a, x):
    # Scan by doubling: after each turn every step has taken in twice as many steps before it.
    decay, y = a.float(), x.float()
    reach = 1
    while reach < x.shape[1]:
        y = torch.cat((y[:, :reach], y[:, reach:] + decay[:, reach:] * y[:, :-reach]), 1)
        decay = torch.cat((decay[:, :reach], decay[:, reach:] * decay[:, :-reach]), 1)
        reach *= 2
    return y.to(x.dtype)
