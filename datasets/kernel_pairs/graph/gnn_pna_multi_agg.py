"""Mean, maximum, minimum and deviation of a node's incoming messages: four adjoints in one pass over the edges.

Mean and deviation act on a message x alike at all edges of a node, as A + B x with A = dmean/n - dstd mean/(n std) and
B = dstd/(n std), which a first launch prepares per node. The owner of a source node then walks its outgoing edges, adds
A + B x, and takes the maximum's and minimum's cotangents where the saved winner is this very edge. Messages that are
nearly alike have a B of up to 1 / sqrt(eps), which brings out that the mean is rounded: what it is off by is saved too.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "gnn_pna_multi_agg",
    "family": "graph",
    "op": "pna_aggregate",
    "schema": 1,
    "techniques": ("inverse-map", "argmax-routing", "saved-statistics", "varlen", "strided-cotangent"),
    "saves": ("stats: fp32 (nodes, 3, F)", "winners: i32 (nodes, 2, F)"),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _aggregate_fwd(
    X, RowPtr, Source, Y, Stats, Winners, F, eps, BLOCK_E: tl.constexpr, BLOCK_F: tl.constexpr
):  # fmt: skip
    node = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    begin = tl.load(RowPtr + node)
    end = tl.load(RowPtr + node + 1)
    count = tl.maximum(end - begin, 1).to(tl.float32)
    total = tl.zeros((BLOCK_F,), tl.float32)
    high = tl.full((BLOCK_F,), float("-inf"), tl.float32)
    low = tl.full((BLOCK_F,), float("inf"), tl.float32)
    high_edge = tl.full((BLOCK_F,), -1, tl.int32)
    low_edge = tl.full((BLOCK_F,), -1, tl.int32)
    for start in range(begin, end, BLOCK_E):
        e = start + tl.arange(0, BLOCK_E)
        source = tl.load(Source + e, mask=e < end, other=0).to(tl.int64)
        ok = (e[:, None] < end) & (f[None, :] < F)
        x = tl.load(X + source[:, None] * F + f[None, :], mask=ok, other=0.0).to(tl.float32)
        total += tl.sum(x, 0)
        value, slot = tl.max(tl.where(ok, x, float("-inf")), 0, return_indices=True)
        high_edge = tl.where(value > high, start + slot, high_edge)
        high = tl.where(value > high, value, high)
        value, slot = tl.min(tl.where(ok, x, float("inf")), 0, return_indices=True)
        low_edge = tl.where(value < low, start + slot, low_edge)
        low = tl.where(value < low, value, low)
    mean = total / count
    # The deviations in a second pass: the difference of mean squares would cancel.
    square = tl.zeros((BLOCK_F,), tl.float32)
    rest = tl.zeros((BLOCK_F,), tl.float32)
    for start in range(begin, end, BLOCK_E):
        e = start + tl.arange(0, BLOCK_E)
        source = tl.load(Source + e, mask=e < end, other=0).to(tl.int64)
        ok = (e[:, None] < end) & (f[None, :] < F)
        x = tl.load(X + source[:, None] * F + f[None, :], mask=ok, other=0.0).to(tl.float32)
        off = tl.where(ok, x - mean[None, :], 0.0)
        square += tl.sum(off * off, 0)
        rest += tl.sum(off, 0)
    std = tl.sqrt(square / count + eps)
    # A node that receives nothing has mean, maximum and minimum zero.
    at = Y + node * 4 * F + f
    tl.store(at, mean, mask=f < F)
    tl.store(at + F, tl.where(high_edge >= 0, high, 0.0), mask=f < F)
    tl.store(at + 2 * F, tl.where(low_edge >= 0, low, 0.0), mask=f < F)
    tl.store(at + 3 * F, std, mask=f < F)
    tl.store(Stats + node * 3 * F + f, mean, mask=f < F)
    tl.store(Stats + (node * 3 + 1) * F + f, std, mask=f < F)
    tl.store(Stats + (node * 3 + 2) * F + f, rest / count, mask=f < F)
    tl.store(Winners + node * 2 * F + f, high_edge, mask=f < F)
    tl.store(Winners + (node * 2 + 1) * F + f, low_edge, mask=f < F)


def forward(x, row_ptr, source, source_ptr, target, edge, eps=1e-5):
    """Edges into node i are row_ptr[i] to row_ptr[i + 1]. The transposed graph lists the edges out of node j as
    source_ptr[j] to source_ptr[j + 1]: the nodes they end in (`target`) and their places in the forward order (`edge`).
    The result is (nodes, 4, F): mean, maximum, minimum, deviation.
    """
    x = x.contiguous()
    nodes, F = x.shape
    y = torch.empty(nodes, 4, F, device=x.device, dtype=x.dtype)
    stats = torch.empty(nodes, 3, F, device=x.device, dtype=torch.float32)
    winners = torch.empty(nodes, 2, F, device=x.device, dtype=torch.int32)
    BLOCK_F = min(128, triton.next_power_of_2(F))
    _aggregate_fwd[(nodes, triton.cdiv(F, BLOCK_F))](
        x, row_ptr, source, y, stats, winners, F, eps, BLOCK_E=8, BLOCK_F=BLOCK_F, num_warps=1 if BLOCK_F <= 64 else 2
    )
    return y, (x, row_ptr, source_ptr, target, edge, stats, winners)


# --- backward ---
@triton.jit
def _slopes_bwd(
    DY, RowPtr, Stats, Slopes, nodes, F, dy_n, dy_a, dy_f, BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr
):  # fmt: skip
    node = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)[None, :]
    there = node < nodes
    received = tl.load(RowPtr + node + 1, mask=there, other=0) - tl.load(RowPtr + node, mask=there, other=0)
    count = tl.maximum(received, 1).to(tl.float32)[:, None]
    ok = there[:, None] & (f < F)
    dy_at = DY + node[:, None] * dy_n + f.to(tl.int64) * dy_f
    dmean = tl.load(dy_at, mask=ok, other=0.0).to(tl.float32)
    dstd = tl.load(dy_at + 3 * dy_a, mask=ok, other=0.0).to(tl.float32)
    stat = Stats + node[:, None] * 3 * F + f
    slope = dstd / (count * tl.load(stat + F, mask=ok, other=1.0))
    rest = tl.load(stat + 2 * F, mask=ok, other=0.0)
    at = node[:, None] * 2 * F + f
    tl.store(Slopes + at, dmean / count - slope * rest, mask=ok)
    tl.store(Slopes + at + F, slope, mask=ok)


@triton.jit
def _aggregate_bwd(
    DY, X, Stats, Slopes, Winners, SourcePtr, Target, Edge, DX, F, dy_n, dy_a, dy_f,
    BLOCK_E: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    node = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    x = tl.load(X + node * F + f, mask=f < F, other=0.0).to(tl.float32)
    end = tl.load(SourcePtr + node + 1)
    dx = tl.zeros((BLOCK_E, BLOCK_F), tl.float32)
    for start in range(tl.load(SourcePtr + node), end, BLOCK_E):
        place = start + tl.arange(0, BLOCK_E)
        target = tl.load(Target + place, mask=place < end, other=0).to(tl.int64)[:, None]
        edge = tl.load(Edge + place, mask=place < end, other=0)[:, None]
        ok = (place[:, None] < end) & (f[None, :] < F)
        at = target * 2 * F + f[None, :]
        dx += tl.load(Slopes + at, mask=ok, other=0.0)
        # The deviation first: one edge alone deviates by nothing, and its slope is 1 / sqrt(eps).
        off = x[None, :] - tl.load(Stats + target * 3 * F + f[None, :], mask=ok, other=0.0)
        dx += tl.load(Slopes + at + F, mask=ok, other=0.0) * off
        # Few edges win: the masked loads of their cotangents are mostly no traffic.
        dy_at = DY + target * dy_n + f[None, :].to(tl.int64) * dy_f
        highest = tl.load(Winners + at, mask=ok, other=-1) == edge
        dx += tl.load(dy_at + dy_a, mask=ok & highest, other=0.0).to(tl.float32)
        lowest = tl.load(Winners + at + F, mask=ok, other=-1) == edge
        dx += tl.load(dy_at + 2 * dy_a, mask=ok & lowest, other=0.0).to(tl.float32)
    tl.store(DX + node * F + f, tl.sum(dx, 0), mask=f < F)


def backward(saved, grad_y, needs=None):
    x, row_ptr, source_ptr, target, edge, stats, winners = saved
    nodes, F = x.shape
    dx = torch.empty_like(x)
    slopes = torch.empty(nodes, 2, F, device=x.device, dtype=torch.float32)
    BLOCK_F = min(32, triton.next_power_of_2(F))
    columns = triton.cdiv(F, BLOCK_F)
    BLOCK_R = 2048 // BLOCK_F
    _slopes_bwd[(triton.cdiv(nodes, BLOCK_R), columns)](
        grad_y, row_ptr, stats, slopes, nodes, F, *grad_y.stride(), BLOCK_R=BLOCK_R, BLOCK_F=BLOCK_F, num_warps=4
    )
    _aggregate_bwd[(nodes, columns)](
        grad_y, x, stats, slopes, winners, source_ptr, target, edge, dx, F, *grad_y.stride(),
        BLOCK_E=8, BLOCK_F=BLOCK_F, num_warps=1 if BLOCK_F <= 64 else 2,
    )  # fmt: skip
    return dx


# --- check ---
SWEEP = (
    {"nodes": 12, "edges": 64, "F": 32},
    {"nodes": 23, "edges": 151, "F": 21},
    {"nodes": 8, "edges": 30, "F": 64, "dtype": "bfloat16"},
)
BENCH = ({"nodes": 65536, "edges": 524288, "F": 128, "dtype": "float32"},)


def make_args(nodes, edges, F, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(nodes, F, generator=g).to(device=device, dtype=getattr(torch, dtype))
    # The last node neither sends nor receives. Edges between the same two nodes are ties: the first one wins.
    into = torch.randint(0, max(1, nodes - 1), (edges,), generator=g).sort().values
    source = torch.randint(0, max(1, nodes - 1), (edges,), generator=g)
    edge = source.argsort(stable=True)

    def pointers(ids):
        return torch.cat((torch.zeros(1, dtype=torch.int64), ids.bincount(minlength=nodes).cumsum(0)))

    graph = (pointers(into), source, pointers(source), into[edge], edge)
    return (x, *(t.to(device=device, dtype=torch.int32) for t in graph))


def reference(x, row_ptr, source, source_ptr, target, edge, eps=1e-5):
    nodes, F = x.shape
    counts = row_ptr.diff().long()
    into = torch.repeat_interleave(torch.arange(nodes, device=x.device), counts, output_size=source.numel())
    messages = x.float()[source]
    index, zeros = into[:, None].expand(-1, F), torch.zeros(nodes, F, device=x.device)
    count = counts.clamp(min=1)[:, None]
    mean = zeros.index_add(0, into, messages) / count
    std = (zeros.index_add(0, into, (messages - mean[into]).square()) / count + eps).sqrt()
    high, low = (zeros.scatter_reduce(0, index, messages, how, include_self=False) for how in ("amax", "amin"))
    return torch.stack((mean, high, low, std), 1).to(x.dtype)
