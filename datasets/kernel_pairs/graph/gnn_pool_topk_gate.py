"""Top-k pooling of nodes: survivors are scaled by the tanh of their score, and that gate alone trains the score.

    s = x p / |p|,    y = x[i] tanh(s[i]) for the k nodes i of largest score, in the order of the nodes

The choice of nodes has no derivative. Survivors keep their order: that of their scores is one of rounding wherever two
are alike, and neighbours in memory stay neighbours. A survivor's row gets tanh(s) dy + ds p / |p| with
ds = (1 - tanh^2) <dy, x>, as a plain store since survivors differ; dp = sum of ds (x - s p / |p|) / |p| collects in
registers of a fixed grid.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "gnn_pool_topk_gate",
    "family": "graph",
    "op": "topk_pool",
    "schema": 1,
    "techniques": ("inverse-map", "persistent-grid", "two-stage-partials", "saved-statistics", "strided-cotangent"),
    "saves": ("score: fp32 (nodes)", "chosen: i64 (k)"),
    "grads": ("x", "direction"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _scores(X, Direction, Score, nodes, F, BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr):
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    f = tl.arange(0, BLOCK_F)[None, :]
    p = tl.load(Direction + f, mask=f < F, other=0.0).to(tl.float32)
    x = tl.load(X + r * F + f, mask=(r < nodes) & (f < F), other=0.0).to(tl.float32)
    score = tl.sum(x * p, 1)[:, None] * tl.rsqrt(tl.sum(p * p))
    tl.store(Score + r, score, mask=r < nodes)


@triton.jit
def _gated_rows(X, Score, Chosen, Y, k, F, BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr):
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    f = tl.arange(0, BLOCK_F)[None, :]
    node = tl.load(Chosen + r, mask=r < k, other=0)
    gate = _tanh(tl.load(Score + node, mask=r < k, other=0.0))
    ok = (r < k) & (f < F)
    x = tl.load(X + node * F + f, mask=ok, other=0.0).to(tl.float32)
    tl.store(Y + r * F + f, gate * x, mask=ok)


def _tile(F):
    BLOCK_F = triton.next_power_of_2(F)
    return max(1, 2048 // BLOCK_F), BLOCK_F


def forward(x, direction, k):
    """x (nodes, F) with F up to a few thousand, direction (F)."""
    x, direction = x.contiguous(), direction.contiguous()
    nodes, F = x.shape
    score = torch.empty(nodes, device=x.device, dtype=torch.float32)
    BLOCK_R, BLOCK_F = _tile(F)
    _scores[(triton.cdiv(nodes, BLOCK_R),)](
        x, direction, score, nodes, F, BLOCK_R=BLOCK_R, BLOCK_F=BLOCK_F, num_warps=4
    )
    chosen = score.detach().topk(k).indices.sort().values
    y = torch.empty(k, F, device=x.device, dtype=x.dtype)
    _gated_rows[(triton.cdiv(k, BLOCK_R),)](
        x, score, chosen, y, k, F, BLOCK_R=BLOCK_R, BLOCK_F=BLOCK_F, num_warps=4
    )  # fmt: skip
    return y, (x, direction, score, chosen)


# --- backward ---
@triton.jit
def _gate_bwd(
    DY, X, Direction, Score, Chosen, DX, Parts, k, F, dy_r, dy_f, BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr
):  # fmt: skip
    f = tl.arange(0, BLOCK_F)[None, :]
    p = tl.load(Direction + f, mask=f < F, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(p * p))
    unit = p * inverse
    dunit = tl.zeros((BLOCK_R, BLOCK_F), tl.float32)
    for start in range(tl.program_id(0) * BLOCK_R, k, tl.num_programs(0) * BLOCK_R):
        r = start + tl.arange(0, BLOCK_R).to(tl.int64)[:, None]
        ok = (r < k) & (f < F)
        node = tl.load(Chosen + r, mask=r < k, other=0)
        score = tl.load(Score + node, mask=r < k, other=0.0)
        gate = _tanh(score)
        x = tl.load(X + node * F + f, mask=ok, other=0.0).to(tl.float32)
        dy = tl.load(DY + r * dy_r + f.to(tl.int64) * dy_f, mask=ok, other=0.0).to(tl.float32)
        dscore = (1.0 - gate * gate) * tl.sum(dy * x, 1)[:, None]
        tl.store(DX + node * F + f, gate * dy + dscore * unit, mask=ok)
        # Across the direction only: its length cancels out of the score.
        dunit += dscore * (x - score * unit)
    tl.store(Parts + tl.program_id(0) * F + f, inverse * tl.sum(dunit, 0)[None, :], mask=f < F)


def backward(saved, grad_y, needs=None):
    x, direction, score, chosen = saved
    k, F = grad_y.shape
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 4
    BLOCK_R, BLOCK_F = _tile(F)
    programs = min(triton.cdiv(k, BLOCK_R), 4 * processors)
    dx = torch.zeros_like(x)
    parts = torch.empty(programs, F, device=x.device, dtype=torch.float32)
    _gate_bwd[(programs,)](
        grad_y, x, direction, score, chosen, dx, parts, k, F, *grad_y.stride(),
        BLOCK_R=BLOCK_R, BLOCK_F=BLOCK_F, num_warps=8,
    )  # fmt: skip
    return dx, parts.sum(0).to(direction.dtype)


# --- check ---
SWEEP = (
    {"nodes": 40, "k": 16, "F": 64},
    {"nodes": 53, "k": 37, "F": 21},
    {"nodes": 30, "k": 10, "F": 140, "dtype": "bfloat16"},
)
BENCH = ({"nodes": 262144, "k": 131072, "F": 256, "dtype": "bfloat16"},)


def make_args(nodes, k, F, dtype="float32", device="cpu", seed=0):
    if k > nodes:
        raise ValueError("no more survivors than nodes")
    g = torch.Generator().manual_seed(seed)
    x, direction = torch.randn(nodes, F, generator=g), torch.randn(F, generator=g)
    if k < nodes:
        # Scores within rounding of the last one that survives would leave the choice to rounding: they move away.
        unit = direction / direction.norm()
        score = x @ unit
        bound = score.topk(k + 1).values[k - 1 :].mean()
        beyond = score - bound
        x += torch.where(beyond.abs() < 0.05, 0.05 * beyond.sign(), 0.0)[:, None] * unit
    return *(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, direction)), k


def reference(x, direction, k):
    p = direction.float()
    score = x.float() @ p / p.norm()
    chosen = score.detach().topk(k).indices.sort().values
    return (x.float()[chosen] * score[chosen].tanh()[:, None]).to(x.dtype)
