"""Split-K with atomics into zeroed buffers: autotuned with pruning over heuristics, block pointers, grouped tiles."""

import torch
import triton
import triton.language as tl


def _configs():
    return [
        triton.Config({"BLOCK_A": a, "BLOCK_B": 16, "BLOCK_R": r, "SPLITS": s}, num_warps=4, num_stages=2)
        for a in (16, 32)
        for r in (16, 32)
        for s in (1, 3)
    ]


def _prune(configs, named_args, **kwargs):
    inner = named_args["inner"]
    kept = [config for config in configs if config.kwargs["BLOCK_R"] * config.kwargs["SPLITS"] <= max(32, 2 * inner)]
    return kept or configs[:1]


@triton.autotune(
    configs=_configs(),
    key=["rows", "columns", "inner"],
    reset_to_zero=["C"],
    prune_configs_by={"early_config_prune": _prune},
)
@triton.heuristics(
    {
        "EVEN": lambda args: args["inner"] % (args["BLOCK_R"] * args["SPLITS"]) == 0,
        "ATOMIC": lambda args: args["SPLITS"] > 1,
    }
)
@triton.jit
def _product(
    A, B, C, rows, columns, inner, a0, a1, b0, b1,
    BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_R: tl.constexpr, SPLITS: tl.constexpr,
    EVEN: tl.constexpr, ATOMIC: tl.constexpr, GROUP: tl.constexpr = 2,
):  # fmt: skip
    pid, split = tl.program_id(0), tl.program_id(1)
    across, down = tl.cdiv(columns, BLOCK_B), tl.cdiv(rows, BLOCK_A)
    i, j = tl.swizzle2d(pid // across, pid % across, down, across, GROUP)
    a = tl.make_block_ptr(A, (rows, inner), (a0, a1), (i * BLOCK_A, split * BLOCK_R), (BLOCK_A, BLOCK_R), (1, 0))
    b = tl.make_block_ptr(B, (inner, columns), (b0, b1), (split * BLOCK_R, j * BLOCK_B), (BLOCK_R, BLOCK_B), (1, 0))
    acc = tl.zeros((BLOCK_A, BLOCK_B), dtype=tl.float32)
    for _ in range(tl.cdiv(inner, BLOCK_R * SPLITS)):
        if EVEN:
            left = tl.load(a, boundary_check=(0,), padding_option="zero")
            right = tl.load(b, boundary_check=(1,), padding_option="zero")
        else:
            left = tl.load(a, boundary_check=(0, 1), padding_option="zero")
            right = tl.load(b, boundary_check=(0, 1), padding_option="zero")
        acc = tl.dot(left, right, acc)
        a = tl.advance(a, (0, BLOCK_R * SPLITS))
        b = tl.advance(b, (BLOCK_R * SPLITS, 0))
    r = i * BLOCK_A + tl.arange(0, BLOCK_A)
    c = j * BLOCK_B + tl.arange(0, BLOCK_B)
    at = C + r[:, None] * columns + c[None, :]
    inside = (r[:, None] < rows) & (c[None, :] < columns)
    if ATOMIC:
        tl.atomic_add(at, acc, mask=inside)
    else:
        tl.store(at, acc, mask=inside)


@triton.jit
def _column_sums(G, OUT, rows, columns, g0, g1, BLOCK: tl.constexpr):
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for row in range(rows):
        total += tl.load(G + row * g0 + c * g1, mask=c < columns, other=0.0)
    tl.store(OUT + c, total, mask=c < columns)


def _times(a, b):
    rows, inner = a.shape
    columns = b.shape[1]
    c = torch.zeros((rows, columns), device=a.device, dtype=torch.float32)

    def grid(meta):
        return triton.cdiv(rows, meta["BLOCK_A"]) * triton.cdiv(columns, meta["BLOCK_B"]), meta["SPLITS"]

    _product[grid](a, b, c, rows, columns, inner, *a.stride(), *b.stride())
    return c


def backward(saved, grad_out, needs=(True, True, True)):
    x, w, b = saved
    db = None
    if needs[2]:
        db = torch.empty_like(b)
        _column_sums[(triton.cdiv(b.numel(), 16),)](grad_out, db, *grad_out.shape, *grad_out.stride(), BLOCK=16)
    dx = _times(grad_out, w.mT).to(x.dtype) if needs[0] else None
    dw = _times(x.transpose(0, 1), grad_out).to(w.dtype) if needs[1] else None
    return dx, dw, db
