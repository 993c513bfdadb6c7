"""RWKV-7's recurrence, diagonal plus low rank: the reverse loop carries dS through diag(w) + a b^T.

    S_t = S_(t - 1) (diag(exp(w_t)) + a_t b_t^T) + v_t k_t^T,    o_t = S_t r_t,    S is (V, K)

Decays cannot be undone, so the forward saves the state at chunk borders; the backward replays a chunk into a buffer
that stays in cache and runs back over it. With c = S_(t - 1) a and dc = dS b:

    dr = S^T do    dv = dS k    dk = dS^T v    db = dS^T c    da = S_(t - 1)^T dc    dw = exp(w) colsum(dS S_(t - 1))
    dS <- dS diag(exp(w)) + dc a^T

Rows of the state never mix: a program owns a slab of value channels, and its shares of the five key-side gradients
are added afterwards.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "dplr_rwkv7_recurrent",
    "family": "linear_attention",
    "op": "dplr_recurrence",
    "schema": 1,
    "techniques": ("reverse-scan", "checkpointed-states", "recompute", "two-stage-partials", "strided-cotangent"),
    "saves": ("states: fp32 (B, H, chunks, V, K)",),
    "grads": ("r", "w", "k", "v", "a", "b"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _vector(X, row, D, first, BLOCK: tl.constexpr):
    d = first + tl.arange(0, BLOCK)
    return tl.load(X + row * D + d, mask=d < D, other=0.0).to(tl.float32)


@triton.jit
def _step(state, w, k, v, a, b):
    # One token: decay per column, then two rank-1 terms.
    removed = tl.sum(state * a[None, :], 1)
    return state * tl.exp(w)[None, :] + removed[:, None] * b[None, :] + v[:, None] * k[None, :]


@triton.jit
def _dplr_fwd(
    R, W, K, V, A, B, Out, States, T, DK, DV, CHUNK, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    first_v = tl.program_id(0) * BLOCK_V
    i = first_v + tl.arange(0, BLOCK_V)
    j = tl.arange(0, BLOCK_K)
    in_state = (i[:, None] < DV) & (j[None, :] < DK)
    States += head * tl.cdiv(T, CHUNK) * DV * DK
    state = tl.zeros((BLOCK_V, BLOCK_K), tl.float32)
    for t in range(T):
        if t % CHUNK == 0:
            tl.store(States + t // CHUNK * DV * DK + i[:, None] * DK + j[None, :], state, mask=in_state)
        row = head * T + t
        k, w = _vector(K, row, DK, 0, BLOCK_K), _vector(W, row, DK, 0, BLOCK_K)
        a, b = _vector(A, row, DK, 0, BLOCK_K), _vector(B, row, DK, 0, BLOCK_K)
        state = _step(state, w, k, _vector(V, row, DV, first_v, BLOCK_V), a, b)
        out = tl.sum(state * _vector(R, row, DK, 0, BLOCK_K)[None, :], 1)
        tl.store(Out + row * DV + i, out, mask=i < DV)


def _slab(k, v):
    """(BLOCK_K, BLOCK_V): few rows of the state per program, since the loop over time is serial."""
    return triton.next_power_of_2(k.shape[3]), min(16, triton.next_power_of_2(v.shape[3]))


def forward(r, w, k, v, a, b):
    r, w, k, v, a, b = (x.contiguous() for x in (r, w, k, v, a, b))
    (batch, H, T, DK), DV = k.shape, v.shape[3]
    chunk = 16
    out = torch.empty_like(v)
    states = torch.empty(batch, H, triton.cdiv(T, chunk), DV, DK, device=k.device, dtype=torch.float32)
    BLOCK_K, BLOCK_V = _slab(k, v)
    _dplr_fwd[(triton.cdiv(DV, BLOCK_V), batch * H)](
        r, w, k, v, a, b, out, states, T, DK, DV, chunk, BLOCK_K=BLOCK_K, BLOCK_V=BLOCK_V, num_warps=1
    )
    return out, (r, w, k, v, a, b, states, chunk)


# --- backward ---
@triton.jit
def _dplr_bwd(
    R, W, K, V, A, B, DO, States, Replay, Parts, DVal, H, T, DK, DV, CHUNK, gradient, do_b, do_h, do_t, do_d,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    slab = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + head
    first_v = tl.program_id(0) * BLOCK_V
    i = first_v + tl.arange(0, BLOCK_V)
    j = tl.arange(0, BLOCK_K)
    in_state = (i[:, None] < DV) & (j[None, :] < DK)
    chunks = tl.cdiv(T, CHUNK)
    States += head * chunks * DV * DK + i[:, None] * DK + j[None, :]
    Replay += slab * CHUNK * BLOCK_V * BLOCK_K + tl.arange(0, BLOCK_V)[:, None] * BLOCK_K + j[None, :]
    # Parts is (5, slabs, B * H, T, K): dr, dw, dk, da, db, each `gradient` elements apart.
    Parts += slab * T * DK + j
    DO += head // H * do_b + head % H * do_h + i.to(tl.int64) * do_d
    dstate = tl.zeros((BLOCK_V, BLOCK_K), tl.float32)
    for back in range(chunks):
        chunk = chunks - 1 - back
        first = chunk * CHUNK
        last = tl.minimum(first + CHUNK, T)
        state = tl.load(States + chunk * DV * DK, mask=in_state, other=0.0)
        for t in range(first, last):
            tl.store(Replay + (t - first) * BLOCK_V * BLOCK_K, state)
            row = head * T + t
            k, w = _vector(K, row, DK, 0, BLOCK_K), _vector(W, row, DK, 0, BLOCK_K)
            a, b = _vector(A, row, DK, 0, BLOCK_K), _vector(B, row, DK, 0, BLOCK_K)
            state = _step(state, w, k, _vector(V, row, DV, first_v, BLOCK_V), a, b)
        tl.debug_barrier()
        for ago in range(last - first):
            t = last - 1 - ago
            row = head * T + t
            r, k = _vector(R, row, DK, 0, BLOCK_K), _vector(K, row, DK, 0, BLOCK_K)
            a, b = _vector(A, row, DK, 0, BLOCK_K), _vector(B, row, DK, 0, BLOCK_K)
            decay = tl.exp(_vector(W, row, DK, 0, BLOCK_K))
            v = _vector(V, row, DV, first_v, BLOCK_V)
            do = tl.load(DO + t.to(tl.int64) * do_t, mask=i < DV, other=0.0).to(tl.float32)
            before = tl.load(Replay + (t - first) * BLOCK_V * BLOCK_K)
            # `state` is S_t: the replay ended there, and each step goes one back.
            at = Parts + t * DK
            tl.store(at, tl.sum(state * do[:, None], 0), mask=j < DK)
            dstate += do[:, None] * r[None, :]
            removed = tl.sum(before * a[None, :], 1)
            dremoved = tl.sum(dstate * b[None, :], 1)
            tl.store(at + gradient, decay * tl.sum(dstate * before, 0), mask=j < DK)
            tl.store(at + 2 * gradient, tl.sum(dstate * v[:, None], 0), mask=j < DK)
            tl.store(at + 3 * gradient, tl.sum(before * dremoved[:, None], 0), mask=j < DK)
            tl.store(at + 4 * gradient, tl.sum(dstate * removed[:, None], 0), mask=j < DK)
            tl.store(DVal + row * DV + i, tl.sum(dstate * k[None, :], 1), mask=i < DV)
            dstate = dstate * decay[None, :] + dremoved[:, None] * a[None, :]
            state = before
        # The next chunk overwrites the replayed states.
        tl.debug_barrier()


def backward(saved, grad_out, needs=None):
    r, w, k, v, a, b, states, chunk = saved
    (batch, H, T, DK), DV = k.shape, v.shape[3]
    BLOCK_K, BLOCK_V = _slab(k, v)
    slabs = triton.cdiv(DV, BLOCK_V)
    replay = torch.empty(slabs, batch, H, chunk, BLOCK_V, BLOCK_K, device=k.device, dtype=torch.float32)
    parts = torch.empty(5, slabs, batch, H, T, DK, device=k.device, dtype=torch.float32)
    dv = torch.empty_like(v)
    _dplr_bwd[(slabs, batch * H)](
        r, w, k, v, a, b, grad_out, states, replay, parts, dv, H, T, DK, DV, chunk, parts.stride(0),
        *grad_out.stride(), BLOCK_K=BLOCK_K, BLOCK_V=BLOCK_V, num_warps=1,
    )  # fmt: skip
    dr, dw, dk, da, db = parts.sum(1).to(k.dtype).unbind(0)
    return dr, dw, dk, dv, da, db


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "T": 32, "K": 16, "V": 32},
    {"B": 2, "H": 1, "T": 27, "K": 12, "V": 20},
    {"B": 1, "H": 2, "T": 19, "K": 8, "V": 8, "dtype": "bfloat16"},
)
BENCH = ({"B": 8, "H": 16, "T": 512, "K": 64, "V": 64, "dtype": "bfloat16"},)


def make_args(B, H, T, K, V, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    r, w, k, rate = (torch.randn(B, H, T, K, generator=g) for _ in range(4))
    v = torch.randn(B, H, T, V, generator=g)
    # As the layer makes them: log decays in (-0.6, 0), and a removal of what the state holds along a unit vector.
    w = -0.6065306597126334 * torch.sigmoid(w)
    a = -torch.nn.functional.normalize(k, dim=-1)
    b = -a * torch.sigmoid(rate)
    return tuple(x.to(device=device, dtype=getattr(torch, dtype)) for x in (r, w, k, v, a, b))


def reference(r, w, k, v, a, b):
    # Chunks of 64 tokens. With the decay since the chunk's begin put into r and a, and taken out of k and b, what is
    # removed from the state is a triangular system within a chunk, plus a product with the state before it.
    T, dtype = k.shape[2], v.dtype
    size = 64 if T > 256 else 16
    r, w, k, v, a, b = (
        torch.nn.functional.pad(x.float(), (0, 0, 0, -T % size)).unflatten(2, (-1, size)) for x in (r, w, k, v, a, b)
    )
    total = w.cumsum(3)
    r, a, k, b = r * total.exp(), a * (total - w).exp(), k * (-total).exp(), b * (-total).exp()
    left = (a @ k.transpose(-1, -2)).tril(-1) @ v
    system = -(a @ b.transpose(-1, -2)).tril(-1)
    solved = torch.linalg.solve_triangular(system, torch.cat((a, left), -1), upper=False, unitriangular=True)
    through, own = solved.split((k.shape[-1], v.shape[-1]), -1)
    passed = total[:, :, :, -1].exp()[..., None]
    added = k.transpose(-1, -2) @ v
    state = torch.zeros_like(added[:, :, 0])
    states, removed = [], []
    for chunk in range(k.shape[2]):
        states.append(state)
        removed.append(own[:, :, chunk] + through[:, :, chunk] @ state)
        state = passed[:, :, chunk] * (state + added[:, :, chunk] + b[:, :, chunk].transpose(-1, -2) @ removed[-1])
    removed = torch.stack(removed, 2)
    out = r @ torch.stack(states, 2) + (r @ k.transpose(-1, -2)).tril() @ v + (r @ b.transpose(-1, -2)).tril() @ removed
    return out.flatten(2, 3)[:, :, :T].to(dtype)
