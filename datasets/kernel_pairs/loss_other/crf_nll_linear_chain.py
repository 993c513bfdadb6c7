"""Linear-chain CRF: alphas are saved on the way forward, marginals handed back by the softmaxes that made the alphas.

With emissions e and transitions A:    alpha[t, j] = e[t, j] + lse over i of (alpha[t - 1, i] + A[i, j]),
    L = log Z - score of the given tags,  m[last] = softmax of alpha[last],  m[t, i] = sum over j of pair[t + 1, i, j],
    pair[t, i, j] = m[t, j] softmax over i of (alpha[t - 1, i] + A[i, j]),
    de[t, j] = m[t, j] - [tag],    dA[i, j] = sum over t of pair[t, i, j] - count of (i, j) in tags.
The textbook's exp(alpha + beta - log Z) takes what is left of three numbers that grow with the sentence, and with them
what rounding them costs; a softmax needs differences of two alphas of neighbouring words alone.
A program owns a sentence. Its (tags, tags) tile of A stays in registers in both directions, and backward so does dA, to
which every step adds its pair marginals. One partial dA per sentence leaves.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "crf_nll_linear_chain",
    "family": "loss_other",
    "op": "crf_nll",
    "schema": 1,
    "techniques": ("reverse-scan", "checkpointed-states", "varlen", "two-stage-partials", "one-launch"),
    "saves": ("alpha: fp32 (B, T, K)",),
    "grads": ("emission", "transition"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _crf_fwd(Emission, Transition, Tag, Length, Alpha, Loss, T, K, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK_K)
    j = tl.arange(0, BLOCK_K)
    length = tl.load(Length + b)
    # Tags that do not exist are unreachable by a finite amount: minus infinity would meet itself in differences.
    pair = (i[:, None] < K) & (j[None, :] < K)
    a = tl.load(Transition + i[:, None] * K + j[None, :], mask=pair, other=-1.0e30).to(tl.float32)
    rows = (b * T) * K + j
    alpha = tl.load(Emission + rows, mask=j < K, other=-1.0e30).to(tl.float32)
    tl.store(Alpha + rows, alpha, mask=j < K)
    for step in range(1, length):
        e = tl.load(Emission + rows + step * K, mask=j < K, other=0.0).to(tl.float32)
        s = alpha[:, None] + a
        top = tl.max(s, 0)
        alpha = e + top + tl.log(tl.sum(tl.exp(s - top[None, :]), 0))
        tl.store(Alpha + rows + step * K, alpha, mask=j < K)
    best = tl.max(alpha, 0)
    log_z = best + tl.log(tl.sum(tl.exp(alpha - best), 0))
    # The given tags' score has no recursion: it is gathered in tiles of time.
    score = tl.zeros((BLOCK_T,), tl.float32)
    for start in range(0, length, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        tag = tl.load(Tag + b * T + t, mask=t < length, other=0)
        before = tl.load(Tag + b * T + t - 1, mask=(t > 0) & (t < length), other=0)
        score += tl.load(Emission + (b * T + t) * K + tag, mask=t < length, other=0.0).to(tl.float32)
        score += tl.load(Transition + before * K + tag, mask=(t > 0) & (t < length), other=0.0).to(tl.float32)
    tl.store(Loss + b, log_z - tl.sum(score, 0))


def _tile(K):
    if K > 64:
        raise ValueError("the transitions must fit one tile: at most 64 tags")
    BLOCK_K = max(16, triton.next_power_of_2(K))
    return BLOCK_K, 4 if BLOCK_K == 64 else 1


def forward(emission, transition, tag, length):
    emission, transition, tag = emission.contiguous(), transition.contiguous(), tag.contiguous()
    B, T, K = emission.shape
    # Steps past a sentence's end stay zero: what is saved is defined throughout.
    alpha = torch.zeros(B, T, K, device=emission.device, dtype=torch.float32)
    loss = torch.empty(B, device=emission.device, dtype=torch.float32)
    BLOCK_K, warps = _tile(K)
    _crf_fwd[(B,)](emission, transition, tag, length, alpha, loss, T, K, BLOCK_K=BLOCK_K, BLOCK_T=64, num_warps=warps)
    return loss, (emission, transition, tag, length, alpha)


# --- backward ---
@triton.jit
def _crf_bwd(
    DLoss, Emission, Transition, Tag, Length, Alpha, DEmission, DTransition, T, K, stride_g, BLOCK_K: tl.constexpr
):
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK_K)
    j = tl.arange(0, BLOCK_K)
    g = tl.load(DLoss + b * stride_g)
    last = tl.load(Length + b) - 1
    pair = (i[:, None] < K) & (j[None, :] < K)
    a = tl.load(Transition + i[:, None] * K + j[None, :], mask=pair, other=-1.0e30).to(tl.float32)
    da = tl.zeros((BLOCK_K, BLOCK_K), tl.float32)
    alpha = tl.load(Alpha + (b * T + last) * K + j, mask=j < K, other=-1.0e30)
    marginal = tl.exp(alpha - tl.max(alpha, 0))
    marginal /= tl.sum(marginal, 0)
    tag = tl.load(Tag + b * T + last)
    for back in range(last):
        t = last - back
        rows = (b * T + t) * K
        tl.store(DEmission + rows + j, g * (marginal - tl.where(j == tag, 1.0, 0.0)), mask=j < K)
        before = tl.load(Tag + b * T + t - 1)
        # e - alpha is minus the log-sum-exp: close enough to the largest term for the exponentials' range.
        here = tl.load(Alpha + rows + j, mask=j < K, other=0.0)
        e = tl.load(Emission + rows + j, mask=j < K, other=0.0).to(tl.float32)
        alpha = tl.load(Alpha + rows - K + i, mask=i < K, other=-1.0e30)
        weight = tl.exp((alpha[:, None] - here[None, :]) + (a + e[None, :]))
        weight *= (marginal / tl.where(j < K, tl.sum(weight, 0), 1.0))[None, :]
        da += weight
        da -= tl.where((i[:, None] == before) & (j[None, :] == tag), 1.0, 0.0)
        marginal = tl.sum(weight, 1)
        tag = before
    tl.store(DEmission + b * T * K + j, g * (marginal - tl.where(j == tag, 1.0, 0.0)), mask=j < K)
    tl.store(DTransition + b * K * K + i[:, None] * K + j[None, :], g * da, mask=pair)


def backward(saved, grad_loss, needs=None):
    emission, transition, tag, length, alpha = saved
    B, T, K = emission.shape
    # Words past a sentence's end are not visited.
    demission = torch.zeros_like(emission)
    parts = torch.empty(B, K, K, device=emission.device, dtype=torch.float32)
    BLOCK_K, warps = _tile(K)
    _crf_bwd[(B,)](
        grad_loss, emission, transition, tag, length, alpha, demission, parts, T, K, grad_loss.stride(0),
        BLOCK_K=BLOCK_K, num_warps=warps,
    )  # fmt: skip
    return demission, parts.sum(0).to(transition.dtype)


# --- check ---
SWEEP = (
    {"B": 3, "T": 8, "K": 16},
    {"B": 2, "T": 13, "K": 21},
    {"B": 2, "T": 7, "K": 9, "dtype": "bfloat16"},
)
BENCH = ({"B": 8192, "T": 64, "K": 32, "dtype": "float32"},)


def make_args(B, T, K, dtype="float32", device="cpu", seed=0):
    if K < 2:
        raise ValueError("with one tag there is one path")
    g = torch.Generator().manual_seed(seed)
    emission, transition = torch.randn(B, T, K, generator=g), 0.5 * torch.randn(K, K, generator=g)
    tag = torch.randint(0, K, (B, T), generator=g)
    length = torch.randint((T + 1) // 2, T + 1, (B,), generator=g).to(torch.int32)
    dt = getattr(torch, dtype)
    return emission.to(device, dt), transition.to(device, dt), tag.to(device), length.to(device)


def reference(emission, transition, tag, length):
    e, a = emission.float(), transition.float()
    live = torch.arange(e.shape[1], device=e.device) < length[:, None]
    pairs = torch.nn.functional.pad(a[tag[:, :-1], tag[:, 1:]], (1, 0))
    score = torch.where(live, e.gather(2, tag[..., None])[..., 0] + pairs, 0.0).sum(1)
    # A log-sum-exp over all pairs is a product of exponentials, with each row's largest taken off.
    alpha, factors = e[:, 0], a.exp()
    for t in range(1, e.shape[1]):
        top = alpha.detach().amax(1, keepdim=True)
        step = e[:, t] + top + ((alpha - top).exp() @ factors).log()
        alpha = torch.where(live[:, t, None], step, alpha)
    return torch.logsumexp(alpha, 1) - score
