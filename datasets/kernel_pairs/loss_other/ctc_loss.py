"""CTC from logits: alphas are saved, betas run back, and a row's gradient is its softmax minus the posterior by class.

A target of S labels has S + 1 blanks around them. Two vectors of lanes hold them: blank j, then label j. With e the
log-softmax of the logits and [skip j] where label j differs from label j - 1,
    blank'[j] = e[0] + lse(blank[j], label[j - 1]),
    label'[j] = e[label j] + lse(label[j], blank[j], [skip j] label[j - 1]),    L = -lse of the last blank and label,
    dL/dlogits[t, k] = softmax[t, k] - sum over states s of class k of exp(alpha + beta - log Z)[t, s].
A program owns a sequence in both recursions, with one shift of lanes for each step, and loads the next step's emissions
ahead. The backward's leaves state posteriors. A second launch owns rows (t, b): states come in the order of their
labels, so that a class is a segment of a running sum and repeated labels need no atomics.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "ctc_loss",
    "family": "loss_other",
    "op": "ctc_loss",
    "schema": 1,
    "techniques": ("reverse-scan", "checkpointed-states", "sorted-segments", "varlen", "saved-lse"),
    "saves": (
        "lse: fp32 (T, B)",
        "alpha: fp32 (B, T, 2, S + 1)",
        "log_z: fp32 (B,)",
        "order: int32 (B, S)",
        "bounds: int32 (B, K + 1)",
    ),
    "grads": ("logits",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _lse2(a, b):
    top = tl.maximum(a, b)
    return top + tl.log(tl.exp(a - top) + tl.exp(b - top))


@triton.jit
def _frame_lse(Logits, Lse, K, BLOCK_K: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    top = tl.full((BLOCK_K,), -1.0e30, tl.float32)
    norm = tl.zeros((BLOCK_K,), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        z = tl.load(Logits + row * K + k, mask=k < K, other=-1.0e30).to(tl.float32)
        higher = tl.maximum(top, z)
        norm = norm * tl.exp(top - higher) + tl.where(k < K, tl.exp(z - higher), 0.0)
        top = higher
    best = tl.max(top, 0)
    tl.store(Lse + row, best + tl.log(tl.sum(norm * tl.exp(top - best), 0)))


@triton.jit
def _emissions(Logits, Lse, row, label, j, length, K):
    """Log-probabilities of the blank and of the labels at frame `row`."""
    lse = tl.load(Lse + row)
    blank = tl.load(Logits + row * K).to(tl.float32) - lse
    labels = tl.load(Logits + row * K + label, mask=j < length, other=0.0).to(tl.float32) - lse
    return blank, labels


@triton.jit
def _labels(Target, b, j, length, S):
    """Labels by lane, and whether a path may skip the blank before them."""
    label = tl.load(Target + b * S + j, mask=j < length, other=0)
    before = tl.load(Target + b * S + j - 1, mask=(j > 0) & (j < length), other=0)
    return label, (j > 0) & (label != before)


@triton.jit
def _ctc_alpha(
    Logits, Lse, Target, Frames, Lengths, Alpha, LogZ, Loss, T, B, K, S, J, FAR: tl.constexpr, BLOCK_J: tl.constexpr
):
    b = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK_J)
    frames = tl.load(Frames + b)
    length = tl.load(Lengths + b)
    label, skip = _labels(Target, b, j, length, S)
    lane_before = tl.maximum(j - 1, 0)
    e_blank, e_label = _emissions(Logits, Lse, b, label, j, length, K)
    blank = tl.where(j == 0, e_blank, FAR)
    labels = tl.where(j == 0, e_label, FAR)
    at = Alpha + b * T * 2 * J + j
    tl.store(at, blank, mask=j < J)
    tl.store(at + J, labels, mask=j < J)
    e_blank, e_label = _emissions(Logits, Lse, tl.minimum(1, frames - 1) * B + b, label, j, length, K)
    for t in range(1, frames):
        next_blank, next_label = _emissions(Logits, Lse, tl.minimum(t + 1, frames - 1) * B + b, label, j, length, K)
        left = tl.where(j > 0, tl.gather(labels, lane_before, 0), FAR)
        stay = _lse2(labels, tl.where(skip, left, FAR))
        labels = tl.where(j < length, e_label + _lse2(stay, blank), FAR)
        blank = tl.where(j <= length, e_blank + _lse2(blank, left), FAR)
        at += 2 * J
        tl.store(at, blank, mask=j < J)
        tl.store(at + J, labels, mask=j < J)
        e_blank = next_blank
        e_label = next_label
    final_blank = tl.sum(tl.where(j == length, blank, 0.0), 0)
    final_label = tl.sum(tl.where(j == length - 1, labels, 0.0), 0)
    log_z = _lse2(final_blank, final_label)
    tl.store(LogZ + b, log_z)
    tl.store(Loss + b, -log_z)


def _lanes(S):
    BLOCK_J = max(16, triton.next_power_of_2(S + 1))
    return {"FAR": -1.0e30, "BLOCK_J": BLOCK_J, "num_warps": max(1, min(8, BLOCK_J // 128))}


def forward(logits, target, frames, lengths):
    # logits (T, B, K), class 0 is the blank; target (B, S), frames and lengths (B) as many as are used, at least one.
    logits, target = logits.contiguous(), target.contiguous()
    (T, B, K), S = logits.shape, target.shape[1]
    fp32 = {"device": logits.device, "dtype": torch.float32}
    lse, log_z, loss = torch.empty(T, B, **fp32), torch.empty(B, **fp32), torch.empty(B, **fp32)
    # Frames behind a sequence's end stay zero: what is saved is defined throughout.
    alpha = torch.zeros(B, T, 2, S + 1, **fp32)
    BLOCK_K = max(16, min(1024, triton.next_power_of_2(K)))
    _frame_lse[(T * B,)](logits, lse, K, BLOCK_K=BLOCK_K, num_warps=max(1, BLOCK_K // 256))
    _ctc_alpha[(B,)](logits, lse, target, frames, lengths, alpha, log_z, loss, T, B, K, S, S + 1, **_lanes(S))
    # Where the labels of each class begin among the target's labels in sorted order.
    labels, order = target.sort(1)
    classes = torch.arange(K + 1, device=target.device).expand(B, K + 1).contiguous()
    bounds = torch.searchsorted(labels, classes).to(torch.int32)
    return loss, (logits, target, frames, lengths, lse, alpha, log_z, order.to(torch.int32), bounds)


# --- backward ---
@triton.jit
def _ctc_beta(
    Logits, Lse, Target, Frames, Lengths, Alpha, LogZ, Posterior, T, B, K, S, J,
    FAR: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK_J)
    frames = tl.load(Frames + b)
    length = tl.load(Lengths + b)
    log_z = tl.load(LogZ + b)
    label, skip = _labels(Target, b, j, length, S)
    lane_after = tl.minimum(j + 1, BLOCK_J - 1)
    # Betas leave out their own frame's emission, alphas have it.
    blank = tl.where(j == length, 0.0, FAR)
    labels = tl.where(j == length - 1, 0.0, FAR)
    e_blank, e_label = _emissions(Logits, Lse, (frames - 1) * B + b, label, j, length, K)
    for back in tl.range(frames, num_stages=4):
        t = frames - 1 - back
        next_blank, next_label = _emissions(Logits, Lse, tl.maximum(t - 1, 0) * B + b, label, j, length, K)
        at = Alpha + (b * T + t) * 2 * J + j
        on_blank = tl.exp(tl.load(at, mask=j <= length, other=FAR) + blank - log_z)
        on_label = tl.exp(tl.load(at + J, mask=j < length, other=FAR) + labels - log_z)
        # Lane S has no label: it takes what all blanks have together.
        tl.store(Posterior + (b * T + t) * J + j, tl.where(j == S, tl.sum(on_blank, 0), on_label), mask=j < J)
        via_blank = tl.where(j <= length, e_blank + blank, FAR)
        via_label = tl.where(j < length, e_label + labels, FAR)
        onward = _lse2(via_blank, tl.where(skip, via_label, FAR))
        onward = tl.where(j + 1 < BLOCK_J, tl.gather(onward, lane_after, 0), FAR)
        blank = _lse2(via_blank, via_label)
        labels = _lse2(via_label, onward)
        e_blank = next_blank
        e_label = next_label


@triton.jit
def _class_gradient(
    DLoss, Logits, Lse, Frames, Posterior, Order, Bounds, DLogits, T, B, K, S, J, stride_g,
    BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    t = row // B
    b = row % B
    k = tl.arange(0, BLOCK_K)
    if t >= tl.load(Frames + b):
        for start in range(0, K, BLOCK_K):
            tl.store(DLogits + row * K + start + k, tl.zeros((BLOCK_K,), tl.float32), mask=start + k < K)
        return
    j = tl.arange(0, BLOCK_J)
    states = Posterior + (b * T + t) * J
    source = tl.load(Order + b * S + j, mask=j < S, other=0)
    running = tl.cumsum(tl.load(states + source, mask=j < S, other=0.0), 0)
    blanks = tl.load(states + S)
    lse = tl.load(Lse + row)
    g = tl.load(DLoss + b * stride_g)
    for start in range(0, K, BLOCK_K):
        c = start + k
        z = tl.load(Logits + row * K + c, mask=c < K, other=0.0).to(tl.float32)
        begin = tl.load(Bounds + b * (K + 1) + c, mask=c < K, other=0)
        end = tl.load(Bounds + b * (K + 1) + c + 1, mask=c < K, other=0)
        upto = tl.gather(running, tl.maximum(end - 1, 0), 0)
        below = tl.where(begin > 0, tl.gather(running, tl.maximum(begin - 1, 0), 0), 0.0)
        posterior = tl.where(end > begin, upto - below, 0.0)
        posterior = tl.where(c == 0, blanks, posterior)
        tl.store(DLogits + row * K + c, g * (tl.exp(z - lse) - posterior), mask=c < K)


def backward(saved, grad_loss, needs=None):
    logits, target, frames, lengths, lse, alpha, log_z, order, bounds = saved
    (T, B, K), S = logits.shape, target.shape[1]
    posterior = torch.empty(B, T, S + 1, device=logits.device, dtype=torch.float32)
    lanes = _lanes(S)
    _ctc_beta[(B,)](logits, lse, target, frames, lengths, alpha, log_z, posterior, T, B, K, S, S + 1, **lanes)
    dlogits = torch.empty_like(logits)
    BLOCK_K = max(16, min(512, triton.next_power_of_2(K)))
    _class_gradient[(T * B,)](
        grad_loss, logits, lse, frames, posterior, order, bounds, dlogits, T, B, K, S, S + 1, grad_loss.stride(0),
        BLOCK_J=lanes["BLOCK_J"], BLOCK_K=BLOCK_K, num_warps=max(1, BLOCK_K // 128),
    )  # fmt: skip
    return dlogits


# --- check ---
SWEEP = (
    {"B": 3, "S": 4, "SPARE": 8, "LABELS": 15},
    {"B": 2, "S": 7, "SPARE": 3, "LABELS": 20},
    {"B": 2, "S": 3, "SPARE": 5, "LABELS": 4, "dtype": "float16"},
    {"B": 2, "S": 5, "SPARE": 2, "LABELS": 36, "dtype": "bfloat16"},
)
BENCH = ({"B": 128, "S": 60, "SPARE": 392, "LABELS": 1023, "dtype": "bfloat16"},)


def make_args(B, S, SPARE, LABELS, dtype="float32", device="cpu", seed=0):
    # 2 S frames are enough for any labels; SPARE more.
    g = torch.Generator().manual_seed(seed)
    T = 2 * S + SPARE
    logits = torch.randn(T, B, LABELS + 1, generator=g).to(device=device, dtype=getattr(torch, dtype))
    target = torch.randint(1, LABELS + 1, (B, S), generator=g)
    lengths = torch.randint((S + 1) // 2, S + 1, (B,), generator=g)
    frames = torch.randint(2 * S, T + 1, (B,), generator=g)
    return logits, target.to(device), frames.to(device), lengths.to(device)


def reference(logits, target, frames, lengths):
    log_p = torch.log_softmax(logits.float(), -1)
    return torch.nn.functional.ctc_loss(log_p, target, frames, lengths, reduction="none")
