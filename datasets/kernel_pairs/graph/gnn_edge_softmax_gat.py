"""GAT attention over a graph's edges: edge probabilities are rebuilt from a saved log-sum-exp by the source's owner.

    s[e, h] = leaky_relu(to[i, h] + from[j, h])  for an edge e from j to i
    p[e, h] = softmax of s over the edges into i,    y[i, h] = sum of p[e, h] x[j, h]

As in flash attention ds = p (<dy[i], x[j]> - delta[i]) with delta = <dy, y>. The owner of a source node walks the
transposed graph, so dx and dfrom need no atomics; it leaves the edge gradients in the order of the forward graph, where
the edges of a target lie side by side, and a last launch adds them up for dto.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "gnn_edge_softmax_gat",
    "family": "graph",
    "op": "gat_attention",
    "schema": 1,
    "techniques": ("saved-lse", "delta-preprocess", "inverse-map", "varlen", "recompute", "strided-cotangent"),
    "saves": ("y: fp32 or bf16 (nodes, H, F)", "lse: fp32 (nodes, H)"),
    "grads": ("x", "from_score", "to_score"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _gat_fwd(
    X, From, To, RowPtr, Source, Y, LSE, H, F, slope, BLOCK_E: tl.constexpr, BLOCK_F: tl.constexpr
):  # fmt: skip
    node = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    f = tl.arange(0, BLOCK_F)
    to = tl.load(To + node * H + head).to(tl.float32)
    end = tl.load(RowPtr + node + 1)
    # Online softmax over the incoming edges; the start keeps nodes without edges free of NaN.
    top = -1.0e30
    norm = 0.0
    acc = tl.zeros((BLOCK_F,), tl.float32)
    for start in range(tl.load(RowPtr + node), end, BLOCK_E):
        e = start + tl.arange(0, BLOCK_E)
        source = tl.load(Source + e, mask=e < end, other=0).to(tl.int64)
        s = tl.load(From + source * H + head, mask=e < end, other=0.0).to(tl.float32) + to
        s = tl.where(e < end, tl.where(s > 0.0, s, slope * s), float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 0))
        shrink = tl.exp(top - new_top)
        p = tl.exp(s - new_top)
        ok = (e[:, None] < end) & (f[None, :] < F)
        x = tl.load(X + (source[:, None] * H + head) * F + f[None, :], mask=ok, other=0.0).to(tl.float32)
        norm = norm * shrink + tl.sum(p, 0)
        acc = acc * shrink + tl.sum(p[:, None] * x, 0)
        top = new_top
    filled = tl.where(norm > 0.0, norm, 1.0)
    tl.store(Y + (node * H + head) * F + f, acc / filled, mask=f < F)
    tl.store(LSE + node * H + head, top + tl.log(filled))


def forward(x, from_score, to_score, row_ptr, source, source_ptr, target, edge, slope=0.2):
    """Edges into node i are row_ptr[i] to row_ptr[i + 1]. The transposed graph lists the edges out of node j as
    source_ptr[j] to source_ptr[j + 1]: the nodes they end in (`target`) and their places in the forward order (`edge`).
    """
    x, from_score, to_score = x.contiguous(), from_score.contiguous(), to_score.contiguous()
    nodes, H, F = x.shape
    y = torch.empty_like(x)
    lse = torch.empty(nodes, H, device=x.device, dtype=torch.float32)
    _gat_fwd[(nodes, H)](
        x, from_score, to_score, row_ptr, source, y, lse, H, F, slope,
        BLOCK_E=8, BLOCK_F=triton.next_power_of_2(F), num_warps=1 if F <= 64 else 2,
    )  # fmt: skip
    return y, (x, from_score, to_score, row_ptr, source_ptr, target, edge, slope, y, lse)


# --- backward ---
@triton.jit
def _gat_delta(DY, Y, Delta, rows, H, F, dy_n, dy_h, dy_f, BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr):
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    f = tl.arange(0, BLOCK_F).to(tl.int64)
    ok = (r[:, None] < rows) & (f[None, :] < F)
    dy_at = (r // H)[:, None] * dy_n + (r % H)[:, None] * dy_h + f[None, :] * dy_f
    dy = tl.load(DY + dy_at, mask=ok, other=0.0).to(tl.float32)
    y = tl.load(Y + r[:, None] * F + f[None, :], mask=ok, other=0.0).to(tl.float32)
    tl.store(Delta + r, tl.sum(dy * y, 1), mask=r < rows)


@triton.jit
def _gat_source_bwd(
    DY, X, From, To, LSE, Delta, SourcePtr, Target, Edge, DX, DFrom, DEdge, H, F, slope, dy_n, dy_h, dy_f,
    BLOCK_E: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    node = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    f = tl.arange(0, BLOCK_F).to(tl.int64)
    own = (node * H + head) * F + f
    x = tl.load(X + own, mask=f < F, other=0.0).to(tl.float32)
    from_node = tl.load(From + node * H + head).to(tl.float32)
    end = tl.load(SourcePtr + node + 1)
    dx = tl.zeros((BLOCK_F,), tl.float32)
    dfrom = tl.zeros((BLOCK_E,), tl.float32)
    for start in range(tl.load(SourcePtr + node), end, BLOCK_E):
        place = start + tl.arange(0, BLOCK_E)
        inside = place < end
        target = tl.load(Target + place, mask=inside, other=0).to(tl.int64)
        edge = tl.load(Edge + place, mask=inside, other=0).to(tl.int64)
        stat = target * H + head
        z = from_node + tl.load(To + stat, mask=inside, other=0.0).to(tl.float32)
        tilt = tl.where(z > 0.0, 1.0, slope)
        lse = tl.load(LSE + stat, mask=inside, other=float("inf"))
        p = tl.exp(tilt * z - lse)
        dy_at = target[:, None] * dy_n + head * dy_h + f[None, :] * dy_f
        dy = tl.load(DY + dy_at, mask=inside[:, None] & (f[None, :] < F), other=0.0).to(tl.float32)
        dx += tl.sum(p[:, None] * dy, 0)
        delta = tl.load(Delta + stat, mask=inside, other=0.0)
        dz = p * (tl.sum(dy * x[None, :], 1) - delta) * tilt
        dfrom += dz
        tl.store(DEdge + edge * H + head, dz, mask=inside)
    tl.store(DX + own, dx, mask=f < F)
    tl.store(DFrom + node * H + head, tl.sum(dfrom, 0))


@triton.jit
def _gat_target_bwd(DEdge, RowPtr, DTo, H, BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr):
    # All heads of a node's edges are one contiguous stretch of DEdge.
    node = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK_H)
    end = tl.load(RowPtr + node + 1).to(tl.int64)
    total = tl.zeros((BLOCK_E, BLOCK_H), tl.float32)
    for start in range(tl.load(RowPtr + node).to(tl.int64), end, BLOCK_E):
        e = start + tl.arange(0, BLOCK_E)
        total += tl.load(DEdge + e[:, None] * H + h[None, :], mask=(e[:, None] < end) & (h[None, :] < H), other=0.0)
    tl.store(DTo + node * H + h, tl.sum(total, 0), mask=h < H)


def backward(saved, grad_y, needs=None):
    x, from_score, to_score, row_ptr, source_ptr, target, edge, slope, y, lse = saved
    nodes, H, F = x.shape
    dx, dfrom, dto = torch.empty_like(x), torch.empty_like(from_score), torch.empty_like(to_score)
    delta = torch.empty_like(lse)
    dedge = torch.empty(edge.numel(), H, device=x.device, dtype=torch.float32)
    BLOCK_F = triton.next_power_of_2(F)
    BLOCK_R = max(1, 2048 // BLOCK_F)
    _gat_delta[(triton.cdiv(nodes * H, BLOCK_R),)](
        grad_y, y, delta, nodes * H, H, F, *grad_y.stride(), BLOCK_R=BLOCK_R, BLOCK_F=BLOCK_F, num_warps=4
    )
    _gat_source_bwd[(nodes, H)](
        grad_y, x, from_score, to_score, lse, delta, source_ptr, target, edge, dx, dfrom, dedge, H, F, slope,
        *grad_y.stride(), BLOCK_E=8, BLOCK_F=BLOCK_F, num_warps=1 if F <= 64 else 2,
    )  # fmt: skip
    # Tall tiles: a hub with thousands of edges is one program's work, and would be the tail of the launch.
    BLOCK_H = triton.next_power_of_2(H)
    _gat_target_bwd[(nodes,)](dedge, row_ptr, dto, H, BLOCK_E=max(16, 512 // BLOCK_H), BLOCK_H=BLOCK_H, num_warps=1)
    return dx, dfrom, dto


# --- check ---
SWEEP = (
    {"nodes": 12, "edges": 64, "H": 2, "F": 32},
    {"nodes": 23, "edges": 151, "H": 3, "F": 21},
    {"nodes": 8, "edges": 30, "H": 2, "F": 64, "dtype": "bfloat16"},
)
BENCH = ({"nodes": 65536, "edges": 1048576, "H": 4, "F": 64, "dtype": "bfloat16"},)


def make_args(nodes, edges, H, F, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, from_score, to_score = (torch.randn(nodes, H, size, generator=g) for size in (F, 1, 1))
    # A tenth of the edges meets in node 0; the last node neither sends nor receives.
    into = torch.randint(0, max(1, nodes - 1), (edges,), generator=g)
    into[: min(edges // 10, 4096)] = 0
    into = into.sort().values
    source = torch.randint(0, max(1, nodes - 1), (edges,), generator=g)
    edge = source.argsort(stable=True)

    def pointers(ids):
        return torch.cat((torch.zeros(1, dtype=torch.int64), ids.bincount(minlength=nodes).cumsum(0)))

    graph = (pointers(into), source, pointers(source), into[edge], edge)
    floats = (t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, from_score[..., 0], to_score[..., 0]))
    return (*floats, *(t.to(device=device, dtype=torch.int32) for t in graph))


def reference(x, from_score, to_score, row_ptr, source, source_ptr, target, edge, slope=0.2):
    nodes, H, F = x.shape
    into = torch.repeat_interleave(torch.arange(nodes, device=x.device), row_ptr.diff(), output_size=source.numel())
    s = torch.nn.functional.leaky_relu(from_score.float()[source] + to_score.float()[into], slope)
    index = into[:, None].expand(-1, H)
    top = torch.full((nodes, H), float("-inf"), device=x.device).scatter_reduce(0, index, s.detach(), "amax")
    p = (s - top[into]).exp()
    norm = torch.zeros(nodes, H, device=x.device).index_add(0, into, p)
    messages = (p / norm[into])[..., None] * x.float()[source]
    return torch.zeros(nodes, H, F, device=x.device).index_add(0, into, messages).to(x.dtype)
