"""Mamba's whole scan: dt = softplus(raw + bias), the D skip and the z gate inside; states are looped, not tiled.

h[t] = exp(dt a) h[t - 1] + dt b[t] u[t],    out = (sum over n of c[t] h[t] + d u) z sigmoid(z)
Channels are the last axis. A program owns some channels and loops over chunks of time, inside them over the states n:
one state of a chunk is a tile (time, channels), scanned in parallel over time. What passes from chunk to chunk would be
(states, channels) registers; it waits in memory, where the forward's copies are the checkpoints. The backward rebuilds
a state's tile, scans its adjoint in reverse, and has all that needs both at once: the terms of dt, u and y add up over
n in registers. Of the five parameters' gradients dbias and dd stay in registers, da in the owner's row of a partial;
db and dc, shared by all channels, are atomic adds of one column of time for each tile.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "selective_scan_dt_softplus_z",
    "family": "ssm_rnn",
    "op": "mamba_selective_scan",
    "schema": 1,
    "techniques": (
        "reverse-scan", "checkpointed-states", "chunked", "recompute", "atomics", "two-stage-partials",
        "strided-cotangent",
    ),
    "saves": ("leaving: fp32 (B, chunks, N, D)",),
    "grads": ("u", "raw", "a", "b", "c", "d", "z", "bias"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}  # fmt: skip


# --- forward ---
@triton.jit
def _softplus(x):
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _then(decay1, added1, decay2, added2):
    # Step 1, then step 2, of h -> decay h + added.
    return decay1 * decay2, decay2 * added1 + added2


@triton.jit
def _gated_scan_fwd(
    U, Raw, A, Bs, Cs, Ds, Z, Bias, OUT, Leaving, T, D, N, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr
):
    batch = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    live = channel < D
    bias = tl.load(Bias + channel, mask=live, other=0.0)
    skip = tl.load(Ds + channel, mask=live, other=0.0)
    last = (tl.arange(0, BLOCK_T) == BLOCK_T - 1)[:, None]
    chunks = tl.cdiv(T, BLOCK_T)
    for chunk in range(chunks):
        t = chunk * BLOCK_T + tl.arange(0, BLOCK_T)
        at = (batch * T + t[:, None]) * D + channel[None, :]
        inside = (t[:, None] < T) & live[None, :]
        u = tl.load(U + at, mask=inside, other=0.0).to(tl.float32)
        raw = tl.load(Raw + at, mask=inside, other=0.0).to(tl.float32)
        # Steps behind the end have dt 0: they keep the state.
        dt = tl.where(inside, _softplus(raw + bias[None, :]), 0.0)
        y = skip[None, :] * u
        row = (batch * T + t) * N
        slot = (batch * chunks + chunk) * N * D + channel
        for n in range(N):
            a = tl.load(A + channel * N + n, mask=live, other=0.0)
            b = tl.load(Bs + row + n, mask=t < T, other=0.0).to(tl.float32)
            c = tl.load(Cs + row + n, mask=t < T, other=0.0).to(tl.float32)
            h = tl.load(Leaving + slot + (n - N) * D, mask=live & (chunk > 0), other=0.0)
            total, local = tl.associative_scan((tl.exp(dt * a[None, :]), dt * u * b[:, None]), 0, _then)
            states = local + total * h[None, :]
            y += c[:, None] * states
            tl.store(Leaving + slot + n * D, tl.sum(tl.where(last, states, 0.0), 0), mask=live)
        z = tl.load(Z + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(OUT + at, y * z * tl.sigmoid(z), mask=inside)
        # The next chunk reads what this one has left.
        tl.debug_barrier()


BLOCK_T = 32


def forward(u, raw, a, b, c, d, z, bias):
    # u, raw, z (B, T, D); b, c (B, T, N); a (D, N), d and bias (D) are fp32, a negative.
    u, raw, a, b, c, z = (x.contiguous() for x in (u, raw, a, b, c, z))
    (B, T, D), N = u.shape, a.shape[1]
    out = torch.empty_like(u)
    leaving = torch.empty(B, triton.cdiv(T, BLOCK_T), N, D, device=u.device, dtype=torch.float32)
    BLOCK_D = min(32, triton.next_power_of_2(D))
    _gated_scan_fwd[(triton.cdiv(D, BLOCK_D), B)](
        u, raw, a, b, c, d, z, bias, out, leaving, T, D, N, BLOCK_T=BLOCK_T, BLOCK_D=BLOCK_D, num_warps=4
    )
    return out, (u, raw, a, b, c, d, z, bias, leaving)


# --- backward ---
@triton.jit
def _then_kept(decay1, kept1, state1, decay2, kept2, state2):
    # As `_then`, with the share of the last step's state that came from before: a difference would cancel.
    passed = decay2 * state1
    return decay1 * decay2, passed + kept2, passed + state2


@triton.jit
def _gated_scan_bwd(
    DOut, U, Raw, A, Bs, Cs, Ds, Z, Bias, Leaving, Carry, DU, DRaw, DZ, DA, DB, DC, Params, T, D, N, do_b, do_t, do_d,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    live = channel < D
    bias = tl.load(Bias + channel, mask=live, other=0.0)
    skip = tl.load(Ds + channel, mask=live, other=0.0)
    dskip = tl.zeros((BLOCK_D,), tl.float32)
    dbias = tl.zeros((BLOCK_D,), tl.float32)
    step = tl.arange(0, BLOCK_T)
    first = (step == 0)[:, None]
    chunks = tl.cdiv(T, BLOCK_T)
    for back in range(chunks):
        chunk = chunks - 1 - back
        t = chunk * BLOCK_T + step
        at = (batch * T + t[:, None]) * D + channel[None, :]
        inside = (t[:, None] < T) & live[None, :]
        u = tl.load(U + at, mask=inside, other=0.0).to(tl.float32)
        raw = tl.load(Raw + at, mask=inside, other=0.0).to(tl.float32)
        dt = tl.where(inside, _softplus(raw + bias[None, :]), 0.0)
        # The adjoint decays by the following step's factor; across the border the carry has it already.
        within = inside & (t[:, None] + 1 < T) & (step < BLOCK_T - 1)[:, None]
        raw = tl.load(Raw + at + D, mask=within, other=0.0).to(tl.float32)
        dt_after = tl.where(within, _softplus(raw + bias[None, :]), 0.0)
        z = tl.load(Z + at, mask=inside, other=0.0).to(tl.float32)
        out_at = batch * do_b + t[:, None].to(tl.int64) * do_t + channel[None, :].to(tl.int64) * do_d
        dout = tl.load(DOut + out_at, mask=inside, other=0.0).to(tl.float32)
        dy = dout * z * tl.sigmoid(z)
        y = skip[None, :] * u
        into = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
        ddt = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
        row = (batch * T + t) * N
        slot = (batch * chunks + chunk) * N * D + channel
        for n in range(N):
            own = (batch * N + n) * D + channel
            a = tl.load(A + channel * N + n, mask=live, other=0.0)
            b = tl.load(Bs + row + n, mask=t < T, other=0.0).to(tl.float32)
            c = tl.load(Cs + row + n, mask=t < T, other=0.0).to(tl.float32)
            h = tl.load(Leaving + slot + (n - N) * D, mask=live & (chunk > 0), other=0.0)
            decay = tl.exp(dt * a[None, :])
            inflow = dt * u * b[:, None]
            total, local, _ = tl.associative_scan((decay, tl.zeros_like(decay), inflow), 0, _then_kept)
            kept = local + total * h[None, :]
            y += c[:, None] * (kept + inflow)
            carry = tl.load(Carry + own, mask=live & (back > 0), other=0.0)
            total, local = tl.associative_scan((tl.exp(dt_after * a[None, :]), dy * c[:, None]), 0, _then, reverse=True)
            dh = local + total * carry[None, :]
            tl.store(Carry + own, tl.sum(tl.where(first, decay * dh, 0.0), 0), mask=live)
            through_decay = dh * kept
            into += dh * b[:, None]
            ddt += through_decay * a[None, :]
            da = tl.load(DA + own, mask=live & (back > 0), other=0.0)
            tl.store(DA + own, da + tl.sum(through_decay * dt, 0), mask=live)
            # One column of time for each state: neighbouring addresses.
            time = (batch * N + n) * T + t
            tl.atomic_add(DB + time, tl.sum(dh * dt * u, 1), mask=t < T, sem="relaxed")
            tl.atomic_add(DC + time, tl.sum(dy * (kept + inflow), 1), mask=t < T, sem="relaxed")
        tl.store(DU + at, dt * into + skip[None, :] * dy, mask=inside)
        # Read once more: through the loop over n these tiles would only have taken registers.
        z = tl.load(Z + at, mask=inside, other=0.0).to(tl.float32)
        dout = tl.load(DOut + out_at, mask=inside, other=0.0).to(tl.float32)
        gate = tl.sigmoid(z)
        tl.store(DZ + at, dout * y * gate * (1.0 + z * (1.0 - gate)), mask=inside)
        raw = tl.load(Raw + at, mask=inside, other=0.0).to(tl.float32)
        draw = tl.where(inside, (ddt + u * into) * tl.sigmoid(raw + bias[None, :]), 0.0)
        tl.store(DRaw + at, draw, mask=inside)
        dskip += tl.sum(dy * u, 0)
        dbias += tl.sum(draw, 0)
        # The chunk before reads the carries and the sums of da.
        tl.debug_barrier()
    tl.store(Params + 2 * batch * D + channel, dskip, mask=live)
    tl.store(Params + (2 * batch + 1) * D + channel, dbias, mask=live)


def backward(saved, grad_out, needs=None):
    u, raw, a, b, c, d, z, bias, leaving = saved
    (B, T, D), N = u.shape, a.shape[1]
    du, draw, dz = torch.empty_like(u), torch.empty_like(raw), torch.empty_like(z)
    carry, da_parts = (torch.empty(B, N, D, device=u.device, dtype=torch.float32) for _ in range(2))
    params = torch.empty(B, 2, D, device=u.device, dtype=torch.float32)
    shared = torch.zeros(2, B, N, T, device=u.device, dtype=torch.float32)
    BLOCK_D = min(32, triton.next_power_of_2(D))
    _gated_scan_bwd[(triton.cdiv(D, BLOCK_D), B)](
        grad_out, u, raw, a, b, c, d, z, bias, leaving, carry, du, draw, dz, da_parts, shared[0], shared[1], params,
        T, D, N, *grad_out.stride(), BLOCK_T=BLOCK_T, BLOCK_D=BLOCK_D, num_warps=4,
    )  # fmt: skip
    dd, dbias = params.sum(0)
    db, dc = (part.transpose(1, 2).to(b.dtype) for part in shared)
    return du, draw, da_parts.sum(0).t(), db, dc, dd, dz, dbias


# --- check ---
SWEEP = (
    {"B": 1, "T": 64, "D": 8, "N": 4},
    {"B": 2, "T": 45, "D": 11, "N": 3, "dtype": "float16"},
    {"B": 1, "T": 70, "D": 16, "N": 2, "dtype": "bfloat16"},
)
BENCH = ({"B": 4, "T": 1024, "D": 2048, "N": 16, "dtype": "bfloat16"},)


def make_args(B, T, D, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    u, raw, z = (torch.randn(B, T, D, generator=g) for _ in range(3))
    b, c = (torch.randn(B, T, N, generator=g) for _ in range(2))
    # As Mamba is initialised: a from -1 to -N, dt mostly between 0.01 and 0.5.
    a = -torch.arange(1, N + 1).float().repeat(D, 1)
    d, bias = torch.randn(D, generator=g), torch.randn(D, generator=g) * 0.5 - 2.0
    u, raw, b, c, z = (t.to(device=device, dtype=getattr(torch, dtype)) for t in (u, raw, b, c, z))
    return u, raw, a.to(device), b, c, d.to(device), z, bias.to(device)


def reference(u, raw, a, b, c, d, z, bias):
    # A scan by doubling inside chunks of 32 steps, and the states that pass between the chunks.
    (B, T, D), N, K = u.shape, a.shape[1], 32
    uf, zf = u.float(), z.float()
    dt = torch.nn.functional.softplus(raw.float() + bias)
    pad = (0, 0, 0, -T % K)
    dt_c, u_c = (torch.nn.functional.pad(x, pad).view(B, -1, K, D, 1) for x in (dt, uf))
    b_c, c_c = (torch.nn.functional.pad(x.float(), pad).view(B, -1, K, 1, N) for x in (b, c))
    state, ys = torch.zeros(B, D, N, device=u.device), []
    for chunk in range(dt_c.shape[1]):
        decay = torch.exp(dt_c[:, chunk] * a)
        h = dt_c[:, chunk] * u_c[:, chunk] * b_c[:, chunk]
        reach = 1
        while reach < K:
            h = torch.cat((h[:, :reach], h[:, reach:] + decay[:, reach:] * h[:, :-reach]), 1)
            decay = torch.cat((decay[:, :reach], decay[:, reach:] * decay[:, :-reach]), 1)
            reach *= 2
        h = h + decay * state[:, None]
        ys.append((h * c_c[:, chunk]).sum(-1))
        state = h[:, -1]
    y = torch.cat(ys, 1)[:, :T] + d * uf
    return (y * torch.nn.functional.silu(zf)).to(u.dtype)
