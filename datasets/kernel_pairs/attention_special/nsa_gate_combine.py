"""Three attention branches mixed by sigmoid gates per row: gate gradients are row dots, branch gradients scaled rows.

    o = sum over b of sigmoid(z_b) o_b:    do_b = sigmoid(z_b) do,    dz_b = sigmoid'(z_b) (do . o_b)

The backward reads the cotangent once for all six gradients; a tile holds whole rows, so that a dot needs no second
pass.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "nsa_gate_combine",
    "family": "attention_special",
    "op": "gated_branch_mixture",
    "schema": 1,
    "techniques": ("row-local", "multi-row-tile", "recompute", "one-launch", "strided-cotangent"),
    "saves": (),
    "grads": ("compressed", "selected", "window", "logits"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _gate(Logits, row, inside, branch: tl.constexpr):
    return tl.sigmoid(tl.load(Logits + 3 * row + branch, mask=inside, other=0.0).to(tl.float32))


@triton.jit
def _combine_fwd(O0, O1, O2, Logits, Out, rows, D, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    at = row[:, None] * D + d[None, :]
    ok = (row[:, None] < rows) & (d[None, :] < D)
    out = _gate(Logits, row, row < rows, 0)[:, None] * tl.load(O0 + at, mask=ok, other=0.0).to(tl.float32)
    out += _gate(Logits, row, row < rows, 1)[:, None] * tl.load(O1 + at, mask=ok, other=0.0).to(tl.float32)
    out += _gate(Logits, row, row < rows, 2)[:, None] * tl.load(O2 + at, mask=ok, other=0.0).to(tl.float32)
    tl.store(Out + at, out, mask=ok)


def _tile(D):
    """(ROWS, BLOCK_D): about 2,048 elements."""
    BLOCK_D = triton.next_power_of_2(D)
    return max(1, 2048 // BLOCK_D), BLOCK_D


def forward(compressed, selected, window, logits):
    branches = tuple(x.contiguous() for x in (compressed, selected, window))
    logits = logits.contiguous()
    out = torch.empty_like(branches[0])
    rows, D = logits.numel() // 3, out.shape[-1]
    ROWS, BLOCK_D = _tile(D)
    _combine_fwd[(triton.cdiv(rows, ROWS),)](*branches, logits, out, rows, D, ROWS=ROWS, BLOCK_D=BLOCK_D)
    return out, (*branches, logits)


# --- backward ---
@triton.jit
def _branch_grads(Branch, DBranch, DLogits, Logits, do, row, at, rows, ok, branch: tl.constexpr):
    inside = row < rows
    gate = _gate(Logits, row, inside, branch)
    o = tl.load(Branch + at, mask=ok, other=0.0).to(tl.float32)
    tl.store(DBranch + at, gate[:, None] * do, mask=ok)
    tl.store(DLogits + 3 * row + branch, gate * (1.0 - gate) * tl.sum(do * o, 1), mask=inside)


@triton.jit
def _combine_bwd(
    DO, O0, O1, O2, Logits, D0, D1, D2, DLogits, rows, T, H, D, do_b, do_t, do_h, do_d,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    at = row[:, None] * D + d[None, :]
    ok = (row[:, None] < rows) & (d[None, :] < D)
    token = row // H
    do_row = token // T * do_b + token % T * do_t + row % H * do_h
    do = tl.load(DO + do_row[:, None] + d[None, :] * do_d, mask=ok, other=0.0).to(tl.float32)
    _branch_grads(O0, D0, DLogits, Logits, do, row, at, rows, ok, 0)
    _branch_grads(O1, D1, DLogits, Logits, do, row, at, rows, ok, 1)
    _branch_grads(O2, D2, DLogits, Logits, do, row, at, rows, ok, 2)


def backward(saved, grad_out, needs=None):
    compressed, selected, window, logits = saved
    _, T, H, D = compressed.shape
    branches = (compressed, selected, window)
    grads = tuple(torch.empty_like(x) for x in branches)
    dlogits = torch.empty_like(logits)
    rows = logits.numel() // 3
    ROWS, BLOCK_D = _tile(D)
    _combine_bwd[(triton.cdiv(rows, ROWS),)](
        grad_out, *branches, logits, *grads, dlogits, rows, T, H, D, *grad_out.stride(), ROWS=ROWS, BLOCK_D=BLOCK_D
    )
    return *grads, dlogits


# --- check ---
SWEEP = (
    {"B": 1, "T": 24, "H": 2, "D": 64},
    {"B": 2, "T": 19, "H": 3, "D": 50},
    {"B": 1, "T": 33, "H": 2, "D": 32, "dtype": "bfloat16"},
)
BENCH = ({"B": 1, "T": 8192, "H": 32, "D": 128, "dtype": "bfloat16"},)


def make_args(B, T, H, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = (*((B, T, H, D),) * 3, (B, T, H, 3))
    return tuple(torch.randn(shape, generator=g).to(device, getattr(torch, dtype)) for shape in shapes)


def reference(compressed, selected, window, logits):
    gates = torch.sigmoid(logits.float()).unsqueeze(-1)
    branches = torch.stack((compressed, selected, window), 3).float()
    return (gates * branches).sum(3).to(compressed.dtype)
