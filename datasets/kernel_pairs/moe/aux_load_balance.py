"""Load-balancing loss of a router: expert counts are constants, so each probability column gets one coefficient.

L = E sum over e of f[e] P[e],  f[e] = share of the T K assignments,  P[e] = mean over tokens of softmax(logits)[e].
With c[e] = E f[e] / T, saved as E numbers:    dlogits[t] = g p (c - <c, p>).
Forward: a persistent grid keeps column sums and counts in registers, one partial row per program, and one program joins
them. The backward is row-local: the coefficients are the same for every token and stay in registers.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "aux_load_balance",
    "family": "moe",
    "op": "load_balancing_loss",
    "schema": 1,
    "techniques": ("row-local", "multi-row-tile", "saved-lse", "broadcast-adjoint", "persistent-grid"),
    "saves": ("coefficient: fp32 (E,)", "lse: fp32 (T,)"),
    "grads": ("logits",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _balance_partials(
    Logits, Index, Lse, Mass, Count, T, E, K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr
):
    e = tl.arange(0, BLOCK_E)
    mass = tl.zeros((BLOCK_E,), tl.float32)
    count = tl.zeros((BLOCK_E,), tl.int32)
    for start in range(tl.program_id(0) * BLOCK_T, T, tl.num_programs(0) * BLOCK_T):
        t = start.to(tl.int64) + tl.arange(0, BLOCK_T)
        inside = (t[:, None] < T) & (e[None, :] < E)
        x = tl.load(Logits + t[:, None] * E + e[None, :], mask=inside, other=0.0).to(tl.float32)
        x = tl.where(e[None, :] < E, x, -float("inf"))
        top = tl.max(x, 1)
        lse = top + tl.log(tl.sum(tl.exp(x - top[:, None]), 1))
        tl.store(Lse + t, lse, mask=t < T)
        p = tl.exp(x - lse[:, None])
        mass += tl.sum(tl.where(t[:, None] < T, p, 0.0), 0)
        for j in tl.static_range(K):
            chosen = tl.load(Index + t * K + j, mask=t < T, other=-1)
            count += tl.sum((e[None, :] == chosen[:, None]).to(tl.int32), 0)
    out = tl.program_id(0) * E + e
    tl.store(Mass + out, mass, mask=e < E)
    tl.store(Count + out, count, mask=e < E)


@triton.jit
def _balance_join(
    Mass, Count, Loss, Coefficient, T, E, programs, K: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr
):
    e = tl.arange(0, BLOCK_E)
    mass = tl.zeros((BLOCK_E,), tl.float32)
    count = tl.zeros((BLOCK_E,), tl.int32)
    for start in range(0, programs, BLOCK_P):
        part = start + tl.arange(0, BLOCK_P)
        inside = (part[:, None] < programs) & (e[None, :] < E)
        mass += tl.sum(tl.load(Mass + part[:, None] * E + e[None, :], mask=inside, other=0.0), 0)
        count += tl.sum(tl.load(Count + part[:, None] * E + e[None, :], mask=inside, other=0), 0)
    share = count.to(tl.float32) / (tl.cast(T, tl.float32) * K)
    coefficient = share * E / T
    tl.store(Coefficient + e, coefficient, mask=e < E)
    tl.store(Loss, tl.sum(coefficient * mass, 0))


def _tile(E):
    BLOCK_E = max(16, triton.next_power_of_2(E))
    return max(1, 2048 // BLOCK_E), BLOCK_E


def forward(logits, index):
    logits, index = logits.contiguous(), index.contiguous()
    (T, E), K = logits.shape, index.shape[1]
    BLOCK_T, BLOCK_E = _tile(E)
    processors = torch.cuda.get_device_properties(logits.device).multi_processor_count if logits.is_cuda else 4
    programs = min(triton.cdiv(T, BLOCK_T), 2 * processors)
    lse = torch.empty(T, device=logits.device, dtype=torch.float32)
    mass = torch.empty(programs, E, device=logits.device, dtype=torch.float32)
    count = torch.empty(programs, E, device=logits.device, dtype=torch.int32)
    coefficient = torch.empty(E, device=logits.device, dtype=torch.float32)
    loss = torch.empty((), device=logits.device, dtype=torch.float32)
    _balance_partials[(programs,)](
        logits, index, lse, mass, count, T, E, K=K, BLOCK_T=BLOCK_T, BLOCK_E=BLOCK_E, num_warps=4
    )
    _balance_join[(1,)](
        mass, count, loss, coefficient, T, E, programs, K=K, BLOCK_P=BLOCK_T, BLOCK_E=BLOCK_E, num_warps=8
    )
    return loss, (logits, coefficient, lse)


# --- backward ---
@triton.jit
def _balance_bwd(DLoss, Logits, Coefficient, Lse, DLogits, T, E, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr):
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_E)
    inside = (t[:, None] < T) & (e[None, :] < E)
    c = tl.load(DLoss) * tl.load(Coefficient + e, mask=e < E, other=0.0)
    x = tl.load(Logits + t[:, None] * E + e[None, :], mask=inside, other=-float("inf")).to(tl.float32)
    p = tl.exp(x - tl.load(Lse + t, mask=t < T, other=0.0)[:, None])
    expected = tl.sum(p * c[None, :], 1)
    tl.store(DLogits + t[:, None] * E + e[None, :], p * (c[None, :] - expected[:, None]), mask=inside)


def backward(saved, grad_loss, needs=None):
    logits, coefficient, lse = saved
    T, E = logits.shape
    dlogits = torch.empty_like(logits)
    BLOCK_T, BLOCK_E = _tile(E)
    _balance_bwd[(triton.cdiv(T, BLOCK_T),)](
        grad_loss, logits, coefficient, lse, dlogits, T, E, BLOCK_T=BLOCK_T, BLOCK_E=BLOCK_E, num_warps=4
    )
    return dlogits


# --- check ---
SWEEP = (
    {"T": 128, "E": 64, "K": 2},
    {"T": 203, "E": 37, "K": 4},
    {"T": 70, "E": 128, "K": 8, "dtype": "bfloat16"},
    {"T": 90, "E": 8, "K": 1, "dtype": "float16"},
)
BENCH = ({"T": 131072, "E": 128, "K": 8, "dtype": "float32"},)


def make_args(T, E, K, dtype="float32", device="cpu", seed=0):
    if K > E:
        raise ValueError("a token cannot choose more experts than there are")
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(T, E, generator=g).to(dtype=getattr(torch, dtype))
    # Low experts are liked more, so that counts differ.
    logits += torch.linspace(1.0, 0.0, E).to(logits.dtype)
    return logits.to(device), logits.topk(K).indices.to(device)


def reference(logits, index):
    _, E = logits.shape
    share = torch.nn.functional.one_hot(index, E).sum((0, 1)).float() / index.numel()
    return E * (share * torch.softmax(logits.float(), -1).mean(0)).sum()
