"""Mean cross-entropy whose forward overwrites the logits with softmax - onehot: no (M, V) tensor is kept beside them.

A scalar loss hands every row the same cotangent, so all but that factor is known before the backward begins. The
forward meets each row twice, first for its log-sum-exp, then (out of L2) to write the gradient over it. The backward
is one stream over memory that multiplies by cotangent / count. Kept without the factor, entries stay of order one,
where fp16 does not underflow. The caller gives up the logits: they must come from an operation that needs them no more.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "ce_inplace_grad_in_fwd",
    "family": "loss_ce",
    "op": "cross_entropy",
    "schema": 1,
    "techniques": ("grad-in-forward", "in-place", "elementwise"),
    "saves": ("count: fp32 ()",),
    "grads": ("logits",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _ce_overwrite(Logits, Target, RowLoss, V, row_stride, ignore, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    base = Logits + row * row_stride
    target = tl.load(Target + row)
    # Every lane keeps a maximum and a sum of its own, finite even where it sees no column: they are merged once.
    # The target's logit is picked out of its tile. A load of its own could come after another thread's overwrite.
    top = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    picked = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        c = start + tl.arange(0, BLOCK)
        x = tl.load(base + c, mask=c < V, other=0.0).to(tl.float32)
        x = tl.where(c < V, x, -1.0e30)
        higher = tl.maximum(top, x)
        total = total * tl.exp(top - higher) + tl.exp(x - higher)
        top = higher
        picked += tl.where(c == target, x, 0.0)
    row_top = tl.max(top, 0)
    lse = row_top + tl.log(tl.sum(total * tl.exp(top - row_top), 0))
    kept = target != ignore
    tl.store(RowLoss + row, tl.where(kept, lse - tl.sum(picked, 0), 0.0))
    for start in range(0, V, BLOCK):
        c = start + tl.arange(0, BLOCK)
        x = tl.load(base + c, mask=c < V, other=0.0).to(tl.float32)
        p = tl.exp(x - lse)
        tl.store(base + c, tl.where(kept, tl.where(c == target, p - 1.0, p), 0.0), mask=c < V)


@triton.jit
def _ce_mean(RowLoss, Target, Loss, Count, M, ignore, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    count = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, M, BLOCK):
        r = start + tl.arange(0, BLOCK)
        total += tl.load(RowLoss + r, mask=r < M, other=0.0)
        count += tl.where(tl.load(Target + r, mask=r < M, other=ignore) != ignore, 1.0, 0.0)
    # All ignored: the loss is 0 / 1, and so are the gradients.
    kept = tl.maximum(tl.sum(count, 0), 1.0)
    tl.store(Count, kept)
    tl.store(Loss, tl.sum(total, 0) / kept)


def forward(logits, target, ignore_index=-100):
    if logits.stride(1) != 1:
        raise ValueError("the logits are overwritten in place: their last axis must be contiguous")
    M, V = logits.shape
    row_loss = torch.empty(M, device=logits.device, dtype=torch.float32)
    loss = torch.empty((), device=logits.device, dtype=torch.float32)
    count = torch.empty_like(loss)
    BLOCK = max(64, min(4096, triton.next_power_of_2(V)))
    _ce_overwrite[(M,)](
        logits, target, row_loss, V, logits.stride(0), ignore_index,
        BLOCK=BLOCK, num_warps=max(1, min(8, BLOCK // 512)),
    )  # fmt: skip
    _ce_mean[(1,)](row_loss, target, loss, count, M, ignore_index, BLOCK=1024, num_warps=8)
    return loss, (logits, count)


# --- backward ---
@triton.jit
def _scale_by_cotangent(DLoss, Count, Grad, DLogits, V, row_stride, BLOCK: tl.constexpr):
    # Out of place: what is saved belongs to autograd, which may run this backward again.
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    factor = tl.load(DLoss) / tl.load(Count)
    grad = tl.load(Grad + row * row_stride + c, mask=c < V, other=0.0).to(tl.float32)
    tl.store(DLogits + row * V + c, factor * grad, mask=c < V)


def backward(saved, grad_loss, needs=None):
    grad, count = saved
    M, V = grad.shape
    dlogits = torch.empty(M, V, device=grad.device, dtype=grad.dtype)
    BLOCK = max(64, min(4096, triton.next_power_of_2(V)))
    _scale_by_cotangent[(M, triton.cdiv(V, BLOCK))](
        grad_loss, count, grad, dlogits, V, grad.stride(0), BLOCK=BLOCK, num_warps=max(1, min(8, BLOCK // 512))
    )
    return dlogits


# --- check ---
SWEEP = (
    {"M": 8, "V": 128},
    {"M": 13, "V": 201},
    {"M": 6, "V": 64, "dtype": "bfloat16"},
    {"M": 5, "V": 90, "dtype": "float16"},
)
BENCH = ({"M": 4096, "V": 32000, "dtype": "bfloat16"},)


def make_args(M, V, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    logits = (2 * torch.randn(M, V, generator=g)).to(device=device, dtype=getattr(torch, dtype))
    target = torch.randint(0, V, (M,), generator=g)
    target[3::4] = -100
    return logits, target.to(device)


def reference(logits, target, ignore_index=-100):
    loss = torch.nn.functional.cross_entropy(logits.float(), target, ignore_index=ignore_index, reduction="sum")
    return loss / (target != ignore_index).sum().clamp(min=1)
