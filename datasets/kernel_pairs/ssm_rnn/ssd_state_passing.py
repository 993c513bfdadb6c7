"""Mamba-2 state passing between chunks: one decay for a whole state, so its gradient is a dot product per chunk.

h[c + 1] = exp(A[c]) h[c] + S[c] from h[0] = initial; outputs are the states that enter the chunks, and the last one.
Few chunks but states of thousands of elements: a program owns a piece of one head's state and keeps it in registers
while it walks the chunks. Backwards dS[c] = dh[c + 1] and dh[c] = dout[c] + exp(A[c]) dh[c + 1]; dA[c] = exp(A[c])
<dh[c + 1], h[c]> runs over the whole state, hence over all programs of a head, which leave one partial for each chunk.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "ssd_state_passing",
    "family": "ssm_rnn",
    "op": "ssd_state_passing",
    "schema": 1,
    "techniques": ("reverse-scan", "saved-output", "two-stage-partials", "optional-cotangent", "strided-cotangent"),
    "saves": ("entering: fp32 (B, chunks, H, D)",),
    "grads": ("states", "log_decay", "initial"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _pass_states(States, LogDecay, Initial, Entering, Final, H, chunks, D, BLOCK: tl.constexpr):
    piece = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1).to(tl.int64)
    inside = piece < D
    state = tl.load(Initial + row * D + piece, mask=inside, other=0.0).to(tl.float32)
    for chunk in range(chunks):
        at = ((row // H * chunks + chunk) * H + row % H) * D + piece
        tl.store(Entering + at, state, mask=inside)
        decay = tl.exp(tl.load(LogDecay + row * chunks + chunk))
        state = decay * state + tl.load(States + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(Final + row * D + piece, state, mask=inside)


def _block(D):
    # One wave or more of programs already for a few heads; two to eight elements for each thread.
    return min(512, max(16, triton.next_power_of_2(D)))


def forward(states, log_decay, initial):
    states, log_decay, initial = states.contiguous(), log_decay.contiguous(), initial.contiguous()
    B, chunks, H, D = states.shape
    entering = torch.empty(states.shape, device=states.device, dtype=torch.float32)
    final = torch.empty(B, H, D, device=states.device, dtype=torch.float32)
    BLOCK = _block(D)
    _pass_states[(triton.cdiv(D, BLOCK), B * H)](
        states, log_decay, initial, entering, final, H, chunks, D, BLOCK=BLOCK, num_warps=2
    )
    return (entering, final), (states, initial, log_decay, entering)


# --- backward ---
@triton.jit
def _pass_states_bwd(
    DEntering, DFinal, LogDecay, Entering, DStates, Parts, DInitial, H, chunks, D,
    de_b, de_c, de_h, de_d, df_b, df_h, df_d,
    HAS_ENTERING: tl.constexpr, HAS_FINAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    piece = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1).to(tl.int64)
    b = row // H
    h = row % H
    inside = piece < D
    dstate = tl.zeros((BLOCK,), tl.float32)
    if HAS_FINAL:
        source = DFinal + b * df_b + h * df_h + piece.to(tl.int64) * df_d
        dstate += tl.load(source, mask=inside, other=0.0).to(tl.float32)
    for back in range(chunks):
        chunk = chunks - 1 - back
        at = ((b * chunks + chunk) * H + h) * D + piece
        tl.store(DStates + at, dstate, mask=inside)
        decay = tl.exp(tl.load(LogDecay + row * chunks + chunk))
        entering = tl.load(Entering + at, mask=inside, other=0.0)
        dstate = decay * dstate
        tl.store(Parts + (tl.program_id(0) * tl.num_programs(1) + row) * chunks + chunk, tl.sum(dstate * entering, 0))
        if HAS_ENTERING:
            source = DEntering + b * de_b + chunk.to(tl.int64) * de_c + h * de_h + piece.to(tl.int64) * de_d
            dstate += tl.load(source, mask=inside, other=0.0).to(tl.float32)
    tl.store(DInitial + row * D + piece, dstate, mask=inside)


def backward(saved, grad_entering, grad_final, needs=None):
    states, initial, log_decay, entering = saved
    B, chunks, H, D = states.shape
    dstates, dinitial = torch.empty_like(states), torch.empty_like(initial)
    BLOCK = _block(D)
    pieces = triton.cdiv(D, BLOCK)
    parts = torch.empty(pieces, B, H, chunks, device=states.device, dtype=torch.float32)
    _pass_states_bwd[(pieces, B * H)](
        grad_entering, grad_final, log_decay, entering, dstates, parts, dinitial, H, chunks, D,
        *(grad_entering.stride() if grad_entering is not None else (0, 0, 0, 0)),
        *(grad_final.stride() if grad_final is not None else (0, 0, 0)),
        HAS_ENTERING=grad_entering is not None, HAS_FINAL=grad_final is not None, BLOCK=BLOCK, num_warps=2,
    )  # fmt: skip
    return dstates, parts.sum(0), dinitial


# --- check ---
SWEEP = (
    {"B": 2, "chunks": 6, "H": 3, "D": 64},
    {"B": 1, "chunks": 5, "H": 2, "D": 1037},
    {"B": 1, "chunks": 3, "H": 2, "D": 48, "dtype": "bfloat16"},
    {"B": 1, "chunks": 2, "H": 1, "D": 19, "dtype": "float16"},
)
BENCH = ({"B": 4, "chunks": 32, "H": 64, "D": 8192, "dtype": "float32"},)


def make_args(B, chunks, H, D, dtype="float32", device="cpu", seed=0):
    # D is head dimension times state size, flattened. Decays are in fp32 in any case.
    g = torch.Generator().manual_seed(seed)
    states, initial = torch.randn(B, chunks, H, D, generator=g), torch.randn(B, H, D, generator=g)
    log_decay = -torch.rand(B, H, chunks, generator=g)
    states, initial = (tensor.to(device=device, dtype=getattr(torch, dtype)) for tensor in (states, initial))
    return states, log_decay.to(device), initial


def reference(states, log_decay, initial):
    state, entering = initial.float(), []
    for chunk in range(states.shape[1]):
        entering.append(state)
        state = log_decay[:, :, chunk, None].exp() * state + states[:, chunk].float()
    return torch.stack(entering, 1), state
