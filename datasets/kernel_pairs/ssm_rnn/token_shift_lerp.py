"""RWKV's token shift: K mixtures of each token with the one before; dx looks one step ahead, dmu stays in registers.

out[k, t] = x[t] + mu[k] (x[t - 1] - x[t]),    x[-1] = state
dx[t] = sum over k of (1 - mu[k]) g[k, t] + mu[k] g[k, t + 1],    dmu[k] = sum over t of g[k, t] (x[t - 1] - x[t])
A program owns a stretch of steps of some columns and walks it backwards: what step t + 1 sends to the token before it
is carried in registers, and only the first step behind the stretch is read by two programs. All K mixtures of a step
are one tile, so that dmu is one tile too; every stretch leaves it as a partial. The first stretch also holds dstate.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "token_shift_lerp",
    "family": "ssm_rnn",
    "op": "token_shift",
    "schema": 1,
    "techniques": ("halo", "head-reduction", "two-stage-partials", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "mu", "state"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _token_shift_fwd(X, Mu, State, OUT, T, C, K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr):
    batch = tl.program_id(2).to(tl.int64)
    t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None]
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (t < T) & (c[None, :] < C)
    at = (batch * T + t) * C + c[None, :]
    x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
    before = tl.load(X + at - C, mask=inside & (t > 0), other=0.0).to(tl.float32)
    state = tl.load(State + batch * C + c, mask=c < C, other=0.0).to(tl.float32)
    step = tl.where(t == 0, state[None, :], before) - x
    plane = tl.num_programs(2).to(tl.int64) * T * C
    for k in tl.static_range(K):
        mu = tl.load(Mu + k * C + c, mask=c < C, other=0.0).to(tl.float32)
        tl.store(OUT + k * plane + at, x + mu[None, :] * step, mask=inside)


def forward(x, mu, state):
    # x (B, T, C), mu (K, C), state (B, C): the token before the first one. out (K, B, T, C).
    x, mu, state = x.contiguous(), mu.contiguous(), state.contiguous()
    B, T, C = x.shape
    K = mu.shape[0]
    out = torch.empty(K, B, T, C, device=x.device, dtype=x.dtype)
    BLOCK_C = min(256, triton.next_power_of_2(C))
    _token_shift_fwd[(triton.cdiv(T, 8), triton.cdiv(C, BLOCK_C), B)](
        x, mu, state, out, T, C, K=K, BLOCK_T=8, BLOCK_C=BLOCK_C, num_warps=4
    )
    return out, (x, mu, state)


# --- backward ---
@triton.jit
def _token_shift_bwd(
    DOut, X, Mu, State, DX, Parts, DState, T, C, do_k, do_b, do_t, do_c,
    K: tl.constexpr, BLOCK_K: tl.constexpr, STRETCH: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(2).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    first = tl.program_id(0) * STRETCH
    behind = tl.minimum(first + STRETCH, T)
    inside = (k[:, None] < K) & (c[None, :] < C)
    mu = tl.load(Mu + k[:, None] * C + c[None, :], mask=inside, other=0.0).to(tl.float32)
    source = DOut + batch * do_b + k[:, None].to(tl.int64) * do_k + c[None, :].to(tl.int64) * do_c
    # The halo: what the step behind the stretch sends to the stretch's last token.
    g = tl.load(source + behind.to(tl.int64) * do_t, mask=inside & (behind < T), other=0.0).to(tl.float32)
    sent = tl.sum(mu * g, 0)
    dmu = tl.zeros((BLOCK_K, BLOCK_C), tl.float32)
    at = (batch * T + behind - 1) * C + c
    x = tl.load(X + at, mask=c < C, other=0.0).to(tl.float32)
    for back in range(behind - first):
        t = behind - 1 - back
        g = tl.load(source + t.to(tl.int64) * do_t, mask=inside, other=0.0).to(tl.float32)
        before = tl.load(X + at - C, mask=(c < C) & (t > 0), other=0.0).to(tl.float32)
        if t == 0:
            before = tl.load(State + batch * C + c, mask=c < C, other=0.0).to(tl.float32)
        dmu += g * (before - x)[None, :]
        kept = tl.sum((1.0 - mu) * g, 0)
        tl.store(DX + at, kept + sent, mask=c < C)
        sent = tl.sum(mu * g, 0)
        x = before
        at -= C
    if first == 0:
        tl.store(DState + batch * C + c, sent, mask=c < C)
    part = (batch * tl.num_programs(0) + tl.program_id(0)) * K * C
    tl.store(Parts + part + k[:, None] * C + c[None, :], dmu, mask=inside)


def backward(saved, grad_out, needs=None):
    x, mu, state = saved
    B, T, C = x.shape
    K = mu.shape[0]
    dx, dstate = torch.empty_like(x), torch.empty_like(state)
    STRETCH = 128 if T > 256 else 16
    stretches = triton.cdiv(T, STRETCH)
    parts = torch.empty(B * stretches, K, C, device=x.device, dtype=torch.float32)
    BLOCK_C = min(256, triton.next_power_of_2(C))
    _token_shift_bwd[(stretches, triton.cdiv(C, BLOCK_C), B)](
        grad_out, x, mu, state, dx, parts, dstate, T, C, *grad_out.stride(),
        K=K, BLOCK_K=triton.next_power_of_2(K), STRETCH=STRETCH, BLOCK_C=BLOCK_C, num_warps=4,
    )  # fmt: skip
    return dx, parts.sum(0).to(mu.dtype), dstate


# --- check ---
SWEEP = (
    {"B": 2, "T": 32, "C": 64, "K": 4},
    {"B": 1, "T": 43, "C": 37, "K": 6},
    {"B": 2, "T": 17, "C": 32, "K": 5, "dtype": "bfloat16"},
    {"B": 1, "T": 9, "C": 16, "K": 2, "dtype": "float16"},
)
BENCH = ({"B": 8, "T": 4096, "C": 2048, "K": 5, "dtype": "bfloat16"},)


def make_args(B, T, C, K, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = (torch.randn(B, T, C, generator=g), torch.rand(K, C, generator=g), torch.randn(B, C, generator=g))
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors)


def reference(x, mu, state):
    xf = x.float()
    step = torch.cat((state.float()[:, None], xf[:, :-1]), 1) - xf
    return (xf + mu.float()[:, None, None] * step).to(x.dtype)
