"""Cross entropy of logits and integer labels, one loss per row; rows labelled `ignore_index` lose nothing."""

import torch
import triton
import triton.language as tl

from kernel_agent import autodiff


@triton.jit
def cross_entropy_fwd_kernel(
    LOGITS,
    LABELS,
    LOSS,
    LSE,
    stride_m,
    V,
    ignore_index,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    LOGITS += row * stride_m
    label = tl.load(LABELS + row)

    running_max = tl.full((), float("-inf"), tl.float32)
    running_sum = tl.zeros((), tl.float32)
    for start in range(0, V, BLOCK_V):
        cols = start + tl.arange(0, BLOCK_V)
        b_x = tl.load(LOGITS + cols, mask=cols < V, other=float("-inf")).to(tl.float32)
        new_max = tl.maximum(running_max, tl.max(b_x, axis=0))
        running_sum = running_sum * tl.exp(running_max - new_max) + tl.sum(tl.exp(b_x - new_max), axis=0)
        running_max = new_max
    lse = running_max + tl.log(running_sum)
    tl.store(LSE + row, lse)

    if label == ignore_index:
        tl.store(LOSS + row, 0.0)
    else:
        tl.store(LOSS + row, lse - tl.load(LOGITS + label).to(tl.float32))


@autodiff(inputs_require_grad=("logits",), nondiff_outputs=(1,))
def cross_entropy(logits, labels, ignore_index=-100):
    """Loss (M,) in float32 of logits (M, V) and labels (M,), and the rows' log-sum-exp for a backward to reuse."""
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    M, V = logits.shape
    loss = torch.empty(M, dtype=torch.float32, device=logits.device)
    lse = torch.empty(M, dtype=torch.float32, device=logits.device)
    BLOCK_V = min(triton.next_power_of_2(V), 4096)
    cross_entropy_fwd_kernel[(M,)](
        logits,
        labels,
        loss,
        lse,
        logits.stride(0),
        V,
        ignore_index,
        BLOCK_V=BLOCK_V,
        num_warps=8,
    )
    return loss, lse


SWEEP = [
    dict(M=4096, V=32000),
    dict(M=1024, V=128256, dtype="bfloat16"),
    dict(M=19, V=1000),
]


def make_args(M, V, dtype="float32", device="cuda"):
    logits = (torch.randn(M, V, device=device) * 2).to(getattr(torch, dtype))
    labels = torch.randint(0, V, (M,), device=device)
    labels[::7] = -100
    return logits, labels


def reference(logits, labels, ignore_index=-100):
    wide = logits if logits.dtype == torch.float64 else logits.float()
    loss = torch.nn.functional.cross_entropy(wide, labels, ignore_index=ignore_index, reduction="none")
    return loss, torch.logsumexp(wide, dim=-1)
