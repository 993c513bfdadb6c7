"""Mamba-2 chunk states: each chunk's decayed sum of x b^T, with dx, ddt, da by head and db by group of heads.

With A the cumulative log decay inside a chunk and s[l] = exp(A[last] - A[l]) dt[l],

    S[p, n] = sum over l of s[l] x[l, p] b[l, n].

One backward launch owns a chunk of one head: dS stays in registers, dS b gives dx and, against x, ds, hence ddt and
dA; A of the last step gathers the terms of all steps. b is shared by the heads of a group: a second launch owns its
tiles and adds the heads in a loop, so that nothing is added through memory.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "ssd_chunk_state",
    "family": "ssm_rnn",
    "op": "ssd_chunk_state",
    "schema": 1,
    "techniques": ("chunked", "owner-grid", "head-reduction", "recompute", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "b", "dt", "da_cumsum"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _scales(DaCumsum, Dt, at, last_at, inside):
    """The decay from each step to the chunk's end and dt; zero behind the chunk."""
    a = tl.load(DaCumsum + at, mask=inside, other=0.0)
    a_last = tl.load(DaCumsum + last_at)
    dt = tl.load(Dt + at, mask=inside, other=0.0)
    return tl.where(inside, tl.exp(a_last - a), 0.0), dt


@triton.jit
def _chunk_state_fwd(
    X, Bs, Dt, DaCumsum, States, H, G, chunks, LEN: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    cell = tl.program_id(1).to(tl.int64)
    p = tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    # dt and A are (B, H, chunks, LEN); x and b (B, chunks, LEN, heads or groups, features).
    scale_at = ((cell // chunks * H + head) * chunks + cell % chunks) * LEN
    acc = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    for start in range(0, LEN, BLOCK_L):
        step = start + tl.arange(0, BLOCK_L)
        inside = step < LEN
        decay, dt = _scales(DaCumsum, Dt, scale_at + step, scale_at + LEN - 1, inside)
        x_at = ((cell * LEN + step[None, :]) * H + head) * P + p[:, None]
        xt = tl.load(X + x_at, mask=inside[None, :] & (p[:, None] < P), other=0.0)
        b_at = ((cell * LEN + step[:, None]) * G + head // (H // G)) * N + n[None, :]
        b = tl.load(Bs + b_at, mask=inside[:, None] & (n[None, :] < N), other=0.0)
        acc = tl.dot(xt, (b * (decay * dt)[:, None]).to(xt.dtype), acc)
    at = ((cell * H + head) * P + p[:, None]) * N + n[None, :]
    tl.store(States + at, acc, mask=(p[:, None] < P) & (n[None, :] < N))


def _blocks(P, N, element_size):
    return {
        "BLOCK_L": 64 if element_size == 2 else 32,
        "BLOCK_P": max(16, triton.next_power_of_2(P)),
        "BLOCK_N": max(16, triton.next_power_of_2(N)),
    }


def forward(x, b, dt, da_cumsum):
    x, b, dt, da_cumsum = (tensor.contiguous() for tensor in (x, b, dt, da_cumsum))
    B, chunks, LEN, H, P = x.shape
    G, N = b.shape[3:]
    states = torch.empty(B, chunks, H, P, N, device=x.device, dtype=torch.float32)
    _chunk_state_fwd[(H, B * chunks)](
        x, b, dt, da_cumsum, states, H, G, chunks, LEN=LEN, P=P, N=N, **_blocks(P, N, x.element_size()), num_warps=4
    )
    return states, (x, b, dt, da_cumsum)


# --- backward ---
@triton.jit
def _load_dstate(DS, cell, head, chunks, p, n, ds_b, ds_c, ds_h, ds_p, ds_n, P: tl.constexpr, N: tl.constexpr):
    source = DS + cell // chunks * ds_b + cell % chunks * ds_c + head.to(tl.int64) * ds_h
    at = p.to(tl.int64)[:, None] * ds_p + n.to(tl.int64)[None, :] * ds_n
    return tl.load(source + at, mask=(p[:, None] < P) & (n[None, :] < N), other=0.0)


@triton.jit
def _chunk_state_dx(
    DS, X, Bs, Dt, DaCumsum, DX, DDt, DDa, H, G, chunks, ds_b, ds_c, ds_h, ds_p, ds_n,
    LEN: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    cell = tl.program_id(1).to(tl.int64)
    p = tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    dstate = _load_dstate(DS, cell, head, chunks, p, n, ds_b, ds_c, ds_h, ds_p, ds_n, P, N)
    scale_at = ((cell // chunks * H + head) * chunks + cell % chunks) * LEN
    # d/dA[last] of all decays so far; the last tile adds it to the last step.
    through_last = 0.0
    for start in range(0, LEN, BLOCK_L):
        step = start + tl.arange(0, BLOCK_L)
        inside = step < LEN
        decay, dt = _scales(DaCumsum, Dt, scale_at + step, scale_at + LEN - 1, inside)
        b_at = ((cell * LEN + step[:, None]) * G + head // (H // G)) * N + n[None, :]
        b = tl.load(Bs + b_at, mask=inside[:, None] & (n[None, :] < N), other=0.0)
        x_at = ((cell * LEN + step[:, None]) * H + head) * P + p[None, :]
        x_ok = inside[:, None] & (p[None, :] < P)
        x = tl.load(X + x_at, mask=x_ok, other=0.0).to(tl.float32)
        pulled = tl.dot(b, tl.trans(dstate.to(b.dtype)))
        tl.store(DX + x_at, pulled * (decay * dt)[:, None], mask=x_ok)
        ddt = tl.sum(pulled * x, 1) * decay
        dexponent = ddt * dt
        through_last += tl.sum(dexponent, 0)
        tl.store(DDt + scale_at + step, ddt, mask=inside)
        tl.store(DDa + scale_at + step, tl.where(step == LEN - 1, through_last, 0.0) - dexponent, mask=inside)


@triton.jit
def _chunk_state_db(
    DS, X, Dt, DaCumsum, DB, H, G, chunks, ds_b, ds_c, ds_h, ds_p, ds_n,
    LEN: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    step = tl.program_id(1) * BLOCK_L + tl.arange(0, BLOCK_L)
    cell = tl.program_id(2).to(tl.int64)
    p = tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    inside = step < LEN
    acc = tl.zeros((BLOCK_L, BLOCK_N), tl.float32)
    for head in range(group * (H // G), (group + 1) * (H // G)):
        scale_at = ((cell // chunks * H + head) * chunks + cell % chunks) * LEN
        decay, dt = _scales(DaCumsum, Dt, scale_at + step, scale_at + LEN - 1, inside)
        x_at = ((cell * LEN + step[:, None]) * H + head) * P + p[None, :]
        x = tl.load(X + x_at, mask=inside[:, None] & (p[None, :] < P), other=0.0)
        dstate = _load_dstate(DS, cell, head, chunks, p, n, ds_b, ds_c, ds_h, ds_p, ds_n, P, N)
        acc = tl.dot((x * (decay * dt)[:, None]).to(x.dtype), dstate.to(x.dtype), acc)
    b_at = ((cell * LEN + step[:, None]) * G + group) * N + n[None, :]
    tl.store(DB + b_at, acc, mask=inside[:, None] & (n[None, :] < N))


def backward(saved, grad_states, needs=None):
    x, b, dt, da_cumsum = saved
    need_x, need_b, need_dt, need_da = needs or (True, True, True, True)
    B, chunks, LEN, H, P = x.shape
    G, N = b.shape[3:]
    blocks = _blocks(P, N, x.element_size())
    dx = ddt = dda = db = None
    if need_x or need_dt or need_da:
        dx, ddt, dda = torch.empty_like(x), torch.empty_like(dt), torch.empty_like(da_cumsum)
        _chunk_state_dx[(H, B * chunks)](
            grad_states, x, b, dt, da_cumsum, dx, ddt, dda, H, G, chunks, *grad_states.stride(),
            LEN=LEN, P=P, N=N, **blocks, num_warps=4,
        )  # fmt: skip
    if need_b:
        db = torch.empty_like(b)
        _chunk_state_db[(G, triton.cdiv(LEN, blocks["BLOCK_L"]), B * chunks)](
            grad_states, x, dt, da_cumsum, db, H, G, chunks, *grad_states.stride(),
            LEN=LEN, P=P, N=N, **blocks, num_warps=4,
        )  # fmt: skip
    return dx, db, ddt, dda


# --- check ---
SWEEP = (
    {"B": 1, "chunks": 2, "LEN": 64, "G": 1, "SHARE": 2, "P": 16, "N": 32},
    {"B": 2, "chunks": 1, "LEN": 75, "G": 2, "SHARE": 1, "P": 12, "N": 18},
    {"B": 1, "chunks": 1, "LEN": 40, "G": 1, "SHARE": 3, "P": 16, "N": 16, "dtype": "bfloat16"},
    {"B": 1, "chunks": 2, "LEN": 20, "G": 1, "SHARE": 1, "P": 16, "N": 16, "dtype": "float16"},
)
BENCH = ({"B": 4, "chunks": 16, "LEN": 256, "G": 1, "SHARE": 32, "P": 64, "N": 128, "dtype": "bfloat16"},)


def make_args(B, chunks, LEN, G, SHARE, P, N, dtype="float32", device="cpu", seed=0):
    # SHARE heads for each of G groups. Step sizes and decays are in fp32, as they are kept in training.
    g = torch.Generator().manual_seed(seed)
    H = G * SHARE
    x, b = (torch.randn(B, chunks, LEN, *tail, generator=g) for tail in ((H, P), (G, N)))
    dt = torch.nn.functional.softplus(torch.randn(B, H, chunks, LEN, generator=g) - 2.0)
    x, b = (tensor.to(device=device, dtype=getattr(torch, dtype)) for tensor in (x, b))
    return x, b, dt.to(device), (-dt).cumsum(-1).to(device)


def reference(x, b, dt, da_cumsum):
    scale = (torch.exp(da_cumsum[..., -1:] - da_cumsum) * dt).permute(0, 2, 3, 1)
    b = b.float().repeat_interleave(x.shape[3] // b.shape[3], 3)
    return torch.einsum("bclhp,bclhn->bchpn", x, (scale[..., None] * b).to(x.dtype)).float()
