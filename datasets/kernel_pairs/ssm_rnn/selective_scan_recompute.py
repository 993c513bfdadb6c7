"""Selective scan (S6) by parallel scans of time chunks: only chunk states are saved, the rest is scanned again.

h[t] = exp(delta[t] A) h[t - 1] + delta[t] b[t] u[t],    y[t] = sum over n of c[t] h[t]
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "selective_scan_recompute",
    "family": "ssm_rnn",
    "op": "selective_scan",
    "schema": 1,
    "techniques": (
        "reverse-scan", "checkpointed-states", "chunked", "recompute", "atomics", "two-stage-partials",
        "strided-cotangent",
    ),
    "saves": ("states: fp32 (B, chunks, D, N)",),
    "grads": ("u", "delta", "a", "b", "c"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}  # fmt: skip


# --- forward ---
@triton.jit
def _after(decay1, state1, decay2, state2):
    # First step 1, then step 2, of h -> decay h + state.
    return decay1 * decay2, decay2 * state1 + state2


@triton.jit
def _selective_scan_fwd(
    X, Delta, A, Bs, Cs, Y, States, D, T, N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # Tiles (channel, time, state): time is scanned in parallel inside a chunk, chunks follow one another.
    batch = tl.program_id(1).to(tl.int64)
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    dn = d[:, None] * N + n[None, :]
    dn_ok = (d[:, None] < D) & (n[None, :] < N)
    a = tl.load(A + dn, mask=dn_ok, other=0.0).to(tl.float32)
    last = (tl.arange(0, BLOCK_T) == BLOCK_T - 1)[None, :, None]
    h = tl.zeros((BLOCK_D, BLOCK_N), tl.float32)
    chunks = tl.cdiv(T, BLOCK_T)
    for chunk in range(chunks):
        tl.store(States + (batch * chunks + chunk) * D * N + dn, h, mask=dn_ok)
        t = chunk * BLOCK_T + tl.arange(0, BLOCK_T)
        dt = (batch * D + d[:, None]) * T + t[None, :]
        dt_ok = (d[:, None] < D) & (t[None, :] < T)
        tn = (batch * T + t[:, None]) * N + n[None, :]
        tn_ok = (t[:, None] < T) & (n[None, :] < N)
        x = tl.load(X + dt, mask=dt_ok, other=0.0).to(tl.float32)
        delta = tl.load(Delta + dt, mask=dt_ok, other=0.0).to(tl.float32)
        b = tl.load(Bs + tn, mask=tn_ok, other=0.0).to(tl.float32)
        c = tl.load(Cs + tn, mask=tn_ok, other=0.0).to(tl.float32)
        # Steps past T have delta 0: they keep the state.
        decay = tl.exp(delta[:, :, None] * a[:, None, :])
        inflow = (delta * x)[:, :, None] * b[None, :, :]
        total, local = tl.associative_scan((decay, inflow), 1, _after)
        states = local + total * h[:, None, :]
        tl.store(Y + dt, tl.sum(states * c[None, :, :], 2), mask=dt_ok)
        h = tl.sum(tl.where(last, states, 0.0), 1)


def _tile():
    # Channels and steps: with 16 states the tile of the backward leaves registers for four programs on a processor.
    return 4, 16


def forward(u, delta, a, b, c):
    u, delta, a, b, c = (x.contiguous() for x in (u, delta, a, b, c))
    B, D, T = u.shape
    N = a.shape[1]
    BLOCK_D, BLOCK_T = _tile()
    y = torch.empty_like(u)
    states = torch.empty(B, triton.cdiv(T, BLOCK_T), D, N, device=u.device, dtype=torch.float32)
    _selective_scan_fwd[(triton.cdiv(D, BLOCK_D), B)](
        u, delta, a, b, c, y, states, D, T, N=N,
        BLOCK_D=BLOCK_D, BLOCK_T=BLOCK_T, BLOCK_N=triton.next_power_of_2(N), num_warps=4,
    )  # fmt: skip
    return y, (u, delta, a, b, c, states)


# --- backward ---
@triton.jit
def _kept_after(decay1, kept1, state1, decay2, kept2, state2):
    # As `_after`, with the share of the last step's state that it did not add itself.
    passed = decay2 * state1
    return decay1 * decay2, passed + kept2, passed + state2


@triton.jit
def _selective_scan_bwd(
    DY, X, Delta, A, Bs, Cs, States, DX, DDelta, DA, DB, DC, D, T, dy_b, dy_d, dy_t, N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(1).to(tl.int64)
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    dn = d[:, None] * N + n[None, :]
    dn_ok = (d[:, None] < D) & (n[None, :] < N)
    a = tl.load(A + dn, mask=dn_ok, other=0.0).to(tl.float32)
    first = (tl.arange(0, BLOCK_T) == 0)[None, :, None]
    da = tl.zeros((BLOCK_D, BLOCK_N), tl.float32)
    # Gradient of the state that leaves this chunk, already multiplied by the decay of the step behind it.
    carry = tl.zeros((BLOCK_D, BLOCK_N), tl.float32)
    chunks = tl.cdiv(T, BLOCK_T)
    for back in range(chunks):
        chunk = chunks - 1 - back
        t = chunk * BLOCK_T + tl.arange(0, BLOCK_T)
        dt = (batch * D + d[:, None]) * T + t[None, :]
        dt_ok = (d[:, None] < D) & (t[None, :] < T)
        tn = (batch * T + t[:, None]) * N + n[None, :]
        tn_ok = (t[:, None] < T) & (n[None, :] < N)
        x = tl.load(X + dt, mask=dt_ok, other=0.0).to(tl.float32)
        delta = tl.load(Delta + dt, mask=dt_ok, other=0.0).to(tl.float32)
        b = tl.load(Bs + tn, mask=tn_ok, other=0.0).to(tl.float32)
        c = tl.load(Cs + tn, mask=tn_ok, other=0.0).to(tl.float32)
        dy_at = batch * dy_b + d[:, None].to(tl.int64) * dy_d + t[None, :].to(tl.int64) * dy_t
        dy = tl.load(DY + dy_at, mask=dt_ok, other=0.0).to(tl.float32)
        h = tl.load(States + (batch * chunks + chunk) * D * N + dn, mask=dn_ok, other=0.0)
        decay = tl.exp(delta[:, :, None] * a[:, None, :])
        inflow = (delta * x)[:, :, None] * b[None, :, :]
        total, local, _ = tl.associative_scan((decay, tl.zeros_like(decay), inflow), 1, _kept_after)
        # What each step keeps of the state before it. Taking the inflow off the new state instead would cancel.
        kept = local + total * h[:, None, :]
        states = kept + inflow

        # Backwards, dh[t] = c[t] dy[t] + decay[t + 1] dh[t + 1]: scan with the decay of the following step.
        after_ok = (d[:, None] < D) & (t[None, :] + 1 < T)
        delta_after = tl.load(Delta + dt + 1, mask=after_ok, other=0.0).to(tl.float32)
        # The carry holds the decay across the border already.
        border = t[None, :, None] == chunk * BLOCK_T + BLOCK_T - 1
        decay_after = tl.where(border, 1.0, tl.exp(delta_after[:, :, None] * a[:, None, :]))
        total, local = tl.associative_scan((decay_after, dy[:, :, None] * c[None, :, :]), 1, _after, reverse=True)
        dh = local + total * carry[:, None, :]
        carry = tl.sum(tl.where(first, decay * dh, 0.0), 1)

        ddecay = dh * kept
        da += tl.sum(ddecay * delta[:, :, None], 1)
        into = tl.sum(dh * b[None, :, :], 2)
        tl.store(DX + dt, delta * into, mask=dt_ok)
        tl.store(DDelta + dt, x * into + tl.sum(ddecay * a[:, None, :], 2), mask=dt_ok)
        # b and c are shared by all channels, whose programs run side by side.
        tl.atomic_add(DB + tn, tl.sum(dh * (delta * x)[:, :, None], 0), mask=tn_ok, sem="relaxed")
        tl.atomic_add(DC + tn, tl.sum(states * dy[:, :, None], 0), mask=tn_ok, sem="relaxed")
    tl.store(DA + batch * D * N + dn, da, mask=dn_ok)


def backward(saved, grad_y, needs=None):
    u, delta, a, b, c, states = saved
    B, D, T = u.shape
    N = a.shape[1]
    BLOCK_D, BLOCK_T = _tile()
    du, ddelta = torch.empty_like(u), torch.empty_like(delta)
    da_parts = torch.empty(B, D, N, device=u.device, dtype=torch.float32)
    shared = torch.zeros(2, B, T, N, device=u.device, dtype=torch.float32)
    _selective_scan_bwd[(triton.cdiv(D, BLOCK_D), B)](
        grad_y, u, delta, a, b, c, states, du, ddelta, da_parts, shared[0], shared[1], D, T, *grad_y.stride(), N=N,
        BLOCK_D=BLOCK_D, BLOCK_T=BLOCK_T, BLOCK_N=triton.next_power_of_2(N), num_warps=4,
    )  # fmt: skip
    return du, ddelta, da_parts.sum(0).to(a.dtype), shared[0].to(b.dtype), shared[1].to(c.dtype)


# --- check ---
SWEEP = (
    {"B": 1, "D": 4, "T": 64, "N": 16},
    {"B": 2, "D": 6, "T": 45, "N": 5, "dtype": "float16"},
    {"B": 1, "D": 8, "T": 40, "N": 8, "dtype": "bfloat16"},
)
BENCH = ({"B": 4, "D": 2048, "T": 512, "N": 16, "dtype": "float32"},)


def make_args(B, D, T, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    u = torch.randn(B, D, T, generator=g)
    delta = torch.nn.functional.softplus(torch.randn(B, D, T, generator=g) - 1.0)
    b, c = (torch.randn(B, T, N, generator=g) for _ in range(2))
    # A is negative, -1 to -N as it is initialised, and stays in fp32.
    a = -torch.arange(1, N + 1).float().repeat(D, 1)
    u, delta, b, c = (t.to(device=device, dtype=getattr(torch, dtype)) for t in (u, delta, b, c))
    return u, delta, a.to(device), b, c


def reference(u, delta, a, b, c):
    # Scan by doubling: after each turn every step has taken in twice as many steps before it.
    uf, df, bf, cf = (x.float() for x in (u, delta, b, c))
    decay, h = torch.exp(df[..., None] * a[:, None]), (df * uf)[..., None] * bf[:, None]
    reach = 1
    while reach < u.shape[2]:
        h = torch.cat((h[:, :, :reach], h[:, :, reach:] + decay[:, :, reach:] * h[:, :, :-reach]), 2)
        decay = torch.cat((decay[:, :, :reach], decay[:, :, reach:] * decay[:, :, :-reach]), 2)
        reach *= 2
    return (h * cf[:, None]).sum(-1).to(u.dtype)
