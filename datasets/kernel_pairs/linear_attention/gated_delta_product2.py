"""Gated DeltaProduct with two Householder steps a token: states come back from a scratch, steps are undone by errors.

    S = a_t S_(t - 1);   for j in 1, 2:  e_j = beta_j (v_j - S^T k_j),  S <- S + k_j e_j^T;   o_t = scale S^T q_t

The forward saves the state at every chunk's begin and the errors e. With the errors at hand a token is two rank-1
additions and needs no product with the state, so the backward replays a chunk cheaply, leaves its decayed states in a
scratch of one chunk per program, which stays in the L2, and walks back: the state between the two steps is the scratch
plus k_1 e_1^T. A program owns some value channels; what belongs to keys, sums over them, is left as partials.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "gated_delta_product2",
    "family": "linear_attention",
    "op": "gated_delta_product",
    "schema": 1,
    "techniques": ("reverse-scan", "checkpointed-states", "chunked", "recompute", "two-stage-partials"),
    "saves": ("states: fp32 (B * H, chunks, K, V)", "errors: fp32 (B, H, T, 2, V)"),
    "grads": ("q", "k", "v", "beta", "g"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _vector(X, row, WIDTH, first, BLOCK: tl.constexpr):
    c = first + tl.arange(0, BLOCK)
    return tl.load(X + row * WIDTH + c, mask=c < WIDTH, other=0.0).to(tl.float32)


@triton.jit
def _write_step(state, K, V, Beta, Errors, step, DK, DV, first, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):
    """The state after Householder step `step` (two a token); stores its error."""
    k = _vector(K, step, DK, 0, BLOCK_K)
    v = _vector(V, step, DV, first, BLOCK_V)
    beta = tl.load(Beta + step).to(tl.float32)
    error = beta * (v - tl.sum(state * k[:, None], 0))
    c = first + tl.arange(0, BLOCK_V)
    tl.store(Errors + step * DV + c, error, mask=c < DV)
    return state + k[:, None] * error[None, :]


@triton.jit
def _product_fwd(
    Q, K, V, Beta, G, States, Errors, Out, T, DK, DV, scale, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(1) * BLOCK_V
    head = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK_K)
    c = first + tl.arange(0, BLOCK_V)
    in_state = (i[:, None] < DK) & (c[None, :] < DV)
    state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    chunks = tl.cdiv(T, CHUNK)
    for chunk in range(chunks):
        tl.store(States + ((head * chunks + chunk) * DK + i[:, None]) * DV + c[None, :], state, mask=in_state)
        for t in range(chunk * CHUNK, tl.minimum((chunk + 1) * CHUNK, T)):
            token = head * T + t
            state *= tl.exp(tl.load(G + token).to(tl.float32))
            state = _write_step(state, K, V, Beta, Errors, 2 * token, DK, DV, first, BLOCK_K, BLOCK_V)
            state = _write_step(state, K, V, Beta, Errors, 2 * token + 1, DK, DV, first, BLOCK_K, BLOCK_V)
            q = _vector(Q, token, DK, 0, BLOCK_K)
            tl.store(Out + token * DV + c, tl.sum(state * q[:, None], 0) * scale, mask=c < DV)


def _tiles(q, v):
    return {
        "CHUNK": 16, "BLOCK_K": triton.next_power_of_2(q.shape[3]),
        "BLOCK_V": min(32, triton.next_power_of_2(v.shape[3])), "num_warps": 4,
    }  # fmt: skip


def forward(q, k, v, beta, g):
    q, k, v, beta, g = (x.contiguous() for x in (q, k, v, beta, g))
    (B, H, T, DK), DV = q.shape, v.shape[4]
    tiles = _tiles(q, v[:, :, :, 0])
    states = torch.empty(B * H, triton.cdiv(T, tiles["CHUNK"]), DK, DV, device=q.device, dtype=torch.float32)
    errors = torch.empty(v.shape, device=q.device, dtype=torch.float32)
    out = torch.empty(B, H, T, DV, device=q.device, dtype=v.dtype)
    _product_fwd[(B * H, triton.cdiv(DV, tiles["BLOCK_V"]))](
        q, k, v, beta, g, states, errors, out, T, DK, DV, DK**-0.5, **tiles
    )
    return out, (q, k, v, beta, g, states, errors)


# --- backward ---
@triton.jit
def _undo_step(
    before, dstate, K, V, Beta, Errors, DKParts, DV_, DBetaParts, step, part, DK, DV, first,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The gradient of the state before the step, `before`; stores those of its key, value and beta."""
    k = _vector(K, step, DK, 0, BLOCK_K)
    error = _vector(Errors, step, DV, first, BLOCK_V)
    beta = tl.load(Beta + step).to(tl.float32)
    derror = tl.sum(dstate * k[:, None], 0)
    c = first + tl.arange(0, BLOCK_V)
    tl.store(DV_ + step * DV + c, beta * derror, mask=c < DV)
    # The error without its factor; beta may be 0.
    miss = _vector(V, step, DV, first, BLOCK_V) - tl.sum(before * k[:, None], 0)
    tl.store(DBetaParts + part + step, tl.sum(derror * miss, 0))
    dread = -beta * derror
    i = tl.arange(0, BLOCK_K)
    dk = tl.sum(dstate * error[None, :] + before * dread[None, :], 1)
    tl.store(DKParts + (part + step) * DK + i, dk, mask=i < DK)
    return dstate + k[:, None] * dread[None, :]


@triton.jit
def _product_bwd(
    Q, K, V, Beta, G, States, Errors, DO, Scratch, DQParts, DKParts, DVal, DBetaParts, DGParts, H, T, DK, DV,
    do_b, do_h, do_t, do_d, scale, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(1) * BLOCK_V
    head = tl.program_id(0).to(tl.int64)
    DO += head // H * do_b + head % H * do_h
    # Partials are (value tiles, B * H, T, ...).
    part = tl.program_id(1).to(tl.int64) * tl.num_programs(0) * T
    i = tl.arange(0, BLOCK_K)
    c = first + tl.arange(0, BLOCK_V)
    in_state = (i[:, None] < DK) & (c[None, :] < DV)
    tile = i[:, None] * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    own = Scratch + (head * tl.num_programs(1) + tl.program_id(1)) * CHUNK * BLOCK_K * BLOCK_V + tile
    dstate = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    chunks = tl.cdiv(T, CHUNK)
    for back in range(chunks):
        chunk = chunks - 1 - back
        length = tl.minimum(CHUNK, T - chunk * CHUNK)
        state = tl.load(
            States + ((head * chunks + chunk) * DK + i[:, None]) * DV + c[None, :], mask=in_state, other=0.0
        )
        for t in range(length):
            token = head * T + chunk * CHUNK + t
            state *= tl.exp(tl.load(G + token).to(tl.float32))
            tl.store(own + t * BLOCK_K * BLOCK_V, state)
            for step in range(2 * token, 2 * token + 2):
                k = _vector(K, step, DK, 0, BLOCK_K)
                state += k[:, None] * _vector(Errors, step, DV, first, BLOCK_V)[None, :]
        tl.debug_barrier()
        for t_back in range(length):
            t = length - 1 - t_back
            token = head * T + chunk * CHUNK + t
            decayed = tl.load(own + t * BLOCK_K * BLOCK_V)
            k = _vector(K, 2 * token, DK, 0, BLOCK_K)
            between = decayed + k[:, None] * _vector(Errors, 2 * token, DV, first, BLOCK_V)[None, :]
            k = _vector(K, 2 * token + 1, DK, 0, BLOCK_K)
            after = between + k[:, None] * _vector(Errors, 2 * token + 1, DV, first, BLOCK_V)[None, :]
            do_at = (chunk * CHUNK + t).to(tl.int64) * do_t + c * do_d
            do = tl.load(DO + do_at, mask=c < DV, other=0.0).to(tl.float32) * scale
            tl.store(DQParts + (part + token) * DK + i, tl.sum(after * do[None, :], 1), mask=i < DK)
            dstate += _vector(Q, token, DK, 0, BLOCK_K)[:, None] * do[None, :]
            dstate = _undo_step(
                between, dstate, K, V, Beta, Errors, DKParts, DVal, DBetaParts, 2 * token + 1, 2 * part, DK, DV, first,
                BLOCK_K, BLOCK_V,
            )  # fmt: skip
            dstate = _undo_step(
                decayed, dstate, K, V, Beta, Errors, DKParts, DVal, DBetaParts, 2 * token, 2 * part, DK, DV, first,
                BLOCK_K, BLOCK_V,
            )  # fmt: skip
            # d(a S) / dg is a S itself.
            tl.store(DGParts + part + token, tl.sum(tl.sum(dstate * decayed, 1), 0))
            dstate *= tl.exp(tl.load(G + token).to(tl.float32))
        # The next chunk overwrites the scratch.
        tl.debug_barrier()


def backward(saved, grad_out, needs=None):
    q, k, v, beta, g, states, errors = saved
    (B, H, T, DK), DV = q.shape, v.shape[4]
    tiles = _tiles(q, v[:, :, :, 0])
    across = triton.cdiv(DV, tiles["BLOCK_V"])
    like = {"device": q.device, "dtype": torch.float32}
    scratch = torch.empty(B * H, across, tiles["CHUNK"], tiles["BLOCK_K"], tiles["BLOCK_V"], **like)
    dq, dk, dbeta, dg = (torch.empty(across, *x.shape, **like) for x in (q, k, beta, g))
    dv = torch.empty_like(v)
    _product_bwd[(B * H, across)](
        q, k, v, beta, g, states, errors, grad_out, scratch, dq, dk, dv, dbeta, dg, H, T, DK, DV,
        *grad_out.stride(), DK**-0.5, **tiles,
    )  # fmt: skip
    dq, dk, dbeta, dg = (part.sum(0).to(x.dtype) for part, x in ((dq, q), (dk, k), (dbeta, beta), (dg, g)))
    return dq, dk, dv, dbeta, dg


# --- check ---
SWEEP = (
    {"B": 1, "H": 2, "T": 24, "K": 16, "V": 32},
    {"B": 2, "H": 1, "T": 21, "K": 12, "V": 40},
    {"B": 1, "H": 1, "T": 18, "K": 16, "V": 16, "dtype": "bfloat16"},
)
BENCH = ({"B": 8, "H": 16, "T": 1024, "K": 64, "V": 64, "dtype": "bfloat16"},)


def make_args(B, H, T, K, V, dtype="float32", device="cpu", seed=0):
    r = torch.Generator().manual_seed(seed)
    q = torch.randn(B, H, T, K, generator=r)
    k = torch.nn.functional.normalize(torch.randn(B, H, T, 2, K, generator=r), dim=-1)
    v = torch.randn(B, H, T, 2, V, generator=r)
    # Two reflections make a rotation: beta goes up to 2.
    beta = 2.0 * torch.sigmoid(torch.randn(B, H, T, 2, generator=r))
    g = torch.nn.functional.logsigmoid(torch.randn(B, H, T, generator=r) + 2.0)
    return tuple(x.to(device=device, dtype=getattr(torch, dtype)) for x in (q, k, v, beta, g))


def reference(q, k, v, beta, g):
    # Steps in one row, the decay with the first of each token; chunks of 32 tokens, one triangular solve each.
    B, H, T, DK = q.shape
    state = torch.zeros(B, H, DK, v.shape[-1], device=q.device)
    outs = []
    for begin in range(0, T, 32):
        cut = slice(begin, begin + 32)
        kc, vc = (x[:, :, cut].flatten(2, 3) for x in (k, v))
        bc = beta[:, :, cut].flatten(2).float()[..., None]
        tokens = g[:, :, cut].float().cumsum(-1)
        decay = tokens.repeat_interleave(2, -1)
        ratios = (decay[..., :, None] - decay[..., None, :]).tril().exp().tril()
        system = bc * (kc @ kc.transpose(-1, -2)).float() * ratios
        begun = (kc @ state.to(k.dtype)).float() * decay.exp()[..., None]
        errors = torch.linalg.solve_triangular(system.tril(-1), bc * (vc - begun), upper=False, unitriangular=True)
        scores = (q[:, :, cut] @ kc.transpose(-1, -2)).float() * ratios[..., 1::2, :]
        inter = (q[:, :, cut] @ state.to(q.dtype)).float() * tokens.exp()[..., None]
        outs.append((scores.to(v.dtype) @ errors.to(v.dtype)).float() + inter)
        ending = (decay[..., -1:] - decay).exp()[..., None]
        state = decay[..., -1, None, None].exp() * state + (kc * ending).transpose(-1, -2) @ errors
    return (torch.cat(outs, 2) * DK**-0.5).to(v.dtype)
