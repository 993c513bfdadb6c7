"""Cross-entropy over a huge vocabulary: programs own chunks of a row, a merge kernel joins their log-sum-exps.

Few rows of 256k logits leave a device idle if one program owns a row, so both directions cut the vocabulary.
Forward: every (row, chunk) stores the log-sum-exp of its chunk, and the chunk that holds the target stores its logit;
the merge reads a small (rows, chunks) table. Backward: every (row, chunk) needs only the joined value and streams.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "ce_online_chunks",
    "family": "loss_ce",
    "op": "cross_entropy",
    "schema": 1,
    "techniques": ("saved-lse", "chunked", "two-stage-partials", "online-softmax", "recompute"),
    "saves": ("lse: fp32 (M,)",),
    "grads": ("logits",),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _ce_chunk(Logits, Target, ChunkLse, Picked, V, row_stride, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    # Every lane runs its own maximum and sum; they are merged once, after the loop.
    top = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    end = tl.minimum((chunk + 1) * CHUNK, V)
    for start in range(chunk * CHUNK, end, BLOCK):
        v = start + lane
        x = tl.load(Logits + row * row_stride + v, mask=v < end, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, x)
        # A lane that has seen nothing yet has no finite maximum to subtract.
        seen = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp(top - seen) + tl.exp(x - seen)
        top = higher
    best = tl.max(top, 0)
    tl.store(ChunkLse + row * tl.num_programs(1) + chunk, best + tl.log(tl.sum(total * tl.exp(top - best), 0)))
    target = tl.load(Target + row)
    if (target >= chunk * CHUNK) & (target < end):
        tl.store(Picked + row, tl.load(Logits + row * row_stride + target).to(tl.float32))


@triton.jit
def _ce_merge(ChunkLse, Target, Picked, Loss, Lse, M, chunks, ignore, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.arange(0, BLOCK_C)
    inside = (m[:, None] < M) & (c[None, :] < chunks)
    part = tl.load(ChunkLse + m[:, None] * chunks + c[None, :], mask=inside, other=-float("inf"))
    top = tl.where(m < M, tl.max(part, 1), 0.0)
    lse = top + tl.log(tl.sum(tl.exp(part - top[:, None]), 1))
    kept = (m < M) & (tl.load(Target + m, mask=m < M, other=ignore) != ignore)
    picked = tl.load(Picked + m, mask=kept, other=0.0)
    tl.store(Lse + m, lse, mask=m < M)
    tl.store(Loss + m, tl.where(kept, lse - picked, 0.0), mask=m < M)


def _chunk(V):
    return max(64, min(16384, triton.next_power_of_2(V) // 4))


def forward(logits, target, ignore_index=-100):
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    M, V = logits.shape
    CHUNK = _chunk(V)
    chunks = triton.cdiv(V, CHUNK)
    chunk_lse = torch.empty(M, chunks, device=logits.device, dtype=torch.float32)
    picked = torch.empty(M, device=logits.device, dtype=torch.float32)
    loss, lse = torch.empty_like(picked), torch.empty_like(picked)
    _ce_chunk[(M, chunks)](
        logits, target, chunk_lse, picked, V, logits.stride(0), CHUNK=CHUNK, BLOCK=min(CHUNK, 2048), num_warps=4
    )
    BLOCK_C = triton.next_power_of_2(chunks)
    BLOCK_M = max(1, 1024 // BLOCK_C)
    _ce_merge[(triton.cdiv(M, BLOCK_M),)](
        chunk_lse, target, picked, loss, lse, M, chunks, ignore_index, BLOCK_M=BLOCK_M, BLOCK_C=BLOCK_C, num_warps=4
    )
    return loss, (logits, target, lse, ignore_index)


# --- backward ---
@triton.jit
def _ce_chunk_bwd(
    DLoss, Logits, Target, Lse, DLogits, V, row_stride, stride_g, ignore, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * CHUNK
    end = tl.minimum(first + CHUNK, V)
    target = tl.load(Target + row)
    # Scalars of the row are read once for a chunk of many tiles. An ignored row has g = 0 and still writes its zeros.
    g = tl.load(DLoss + row * stride_g, mask=target != ignore, other=0.0)
    lse = tl.load(Lse + row)
    for start in range(first, end, BLOCK):
        v = start + tl.arange(0, BLOCK)
        x = tl.load(Logits + row * row_stride + v, mask=v < end, other=0.0).to(tl.float32)
        onehot = tl.where(v == target, 1.0, 0.0)
        tl.store(DLogits + row * V + v, g * (tl.exp(x - lse) - onehot), mask=v < end)


def backward(saved, grad_loss, needs=None):
    logits, target, lse, ignore_index = saved
    M, V = logits.shape
    dlogits = torch.empty(M, V, device=logits.device, dtype=logits.dtype)
    CHUNK = _chunk(V)
    _ce_chunk_bwd[(M, triton.cdiv(V, CHUNK))](
        grad_loss, logits, target, lse, dlogits, V, logits.stride(0), grad_loss.stride(0), ignore_index,
        CHUNK=CHUNK, BLOCK=min(CHUNK, 2048), num_warps=4,
    )  # fmt: skip
    return dlogits


# --- check ---
SWEEP = (
    {"M": 5, "V": 256},
    {"M": 7, "V": 333},
    {"M": 3, "V": 512, "dtype": "bfloat16"},
    {"M": 4, "V": 200, "dtype": "float16"},
)
BENCH = ({"M": 512, "V": 256000, "dtype": "bfloat16"},)


def make_args(M, V, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(M, V, generator=g)).to(device=device, dtype=getattr(torch, dtype))
    target = torch.randint(0, V, (M,), generator=g)
    target[1::4] = -100
    return logits, target.to(device)


def reference(logits, target, ignore_index=-100):
    return torch.nn.functional.cross_entropy(logits.float(), target, ignore_index=ignore_index, reduction="none")
