"""GATv2 edge scores: one backward kernel serves both ends of the edges, launched over the graph and its transpose.

score[e, h] = <attention[h], leaky_relu(x_from[j, h] + x_to[i, h])> for an edge e from j to i. The owner of a node keeps
its row and its gradient in registers while its edges bring in the rows of their other ends. The first launch also
collects dattention: a fixed grid walks the nodes, so that there is one partial row per program, not per node.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "gnn_gatv2_scores",
    "family": "graph",
    "op": "gatv2_scores",
    "schema": 1,
    "techniques": (
        "owner-grid", "inverse-map", "persistent-grid", "two-stage-partials", "recompute", "varlen",
        "strided-cotangent",
    ),
    "saves": (),
    "grads": ("x_from", "x_to", "attention"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}  # fmt: skip


# --- forward ---
@triton.jit
def _gatv2_fwd(
    XFrom, XTo, Attention, RowPtr, Source, Score, H, F, slope, BLOCK_E: tl.constexpr, BLOCK_F: tl.constexpr
):  # fmt: skip
    node = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    f = tl.arange(0, BLOCK_F)
    x_to = tl.load(XTo + (node * H + head) * F + f, mask=f < F, other=0.0).to(tl.float32)
    attention = tl.load(Attention + head * F + f, mask=f < F, other=0.0).to(tl.float32)
    end = tl.load(RowPtr + node + 1).to(tl.int64)
    for start in range(tl.load(RowPtr + node).to(tl.int64), end, BLOCK_E):
        e = start + tl.arange(0, BLOCK_E)
        source = tl.load(Source + e, mask=e < end, other=0).to(tl.int64)
        ok = (e[:, None] < end) & (f[None, :] < F)
        z = tl.load(XFrom + (source[:, None] * H + head) * F + f[None, :], mask=ok, other=0.0).to(tl.float32)
        z += x_to[None, :]
        score = tl.sum(attention[None, :] * tl.where(z > 0.0, z, slope * z), 1)
        tl.store(Score + e * H + head, score, mask=e < end)


def forward(x_from, x_to, attention, row_ptr, source, source_ptr, target, edge, slope=0.2):
    """Edges into node i are row_ptr[i] to row_ptr[i + 1]. The transposed graph lists the edges out of node j as
    source_ptr[j] to source_ptr[j + 1]: the nodes they end in (`target`) and their places in the forward order (`edge`).
    """
    x_from, x_to, attention = x_from.contiguous(), x_to.contiguous(), attention.contiguous()
    nodes, H, F = x_from.shape
    score = torch.empty(source.numel(), H, device=x_from.device, dtype=x_from.dtype)
    _gatv2_fwd[(nodes, H)](
        x_from, x_to, attention, row_ptr, source, score, H, F, slope,
        BLOCK_E=8, BLOCK_F=triton.next_power_of_2(F), num_warps=1 if F <= 64 else 2,
    )  # fmt: skip
    return score, (x_from, x_to, attention, row_ptr, source, source_ptr, target, edge, slope)


# --- backward ---
@triton.jit
def _gatv2_owner_bwd(
    DScore, Own, Other, Attention, Ptr, Neighbour, Edge, DOwn, Parts, nodes, H, F, slope, ds_e, ds_h,
    TRANSPOSED: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0)
    head = tl.program_id(1)
    f = tl.arange(0, BLOCK_F)
    attention = tl.load(Attention + head * F + f, mask=f < F, other=0.0).to(tl.float32)
    dattention = tl.zeros((BLOCK_E, BLOCK_F), tl.float32)
    for node in range(first.to(tl.int64), nodes, tl.num_programs(0)):
        own = tl.load(Own + (node * H + head) * F + f, mask=f < F, other=0.0).to(tl.float32)
        down = tl.zeros((BLOCK_E, BLOCK_F), tl.float32)
        end = tl.load(Ptr + node + 1).to(tl.int64)
        for start in range(tl.load(Ptr + node).to(tl.int64), end, BLOCK_E):
            place = start + tl.arange(0, BLOCK_E)
            inside = place < end
            neighbour = tl.load(Neighbour + place, mask=inside, other=0).to(tl.int64)
            edge = place
            if TRANSPOSED:
                edge = tl.load(Edge + place, mask=inside, other=0).to(tl.int64)
            ds = tl.load(DScore + edge * ds_e + head * ds_h, mask=inside, other=0.0).to(tl.float32)[:, None]
            ok = inside[:, None] & (f[None, :] < F)
            z = tl.load(Other + (neighbour[:, None] * H + head) * F + f[None, :], mask=ok, other=0.0).to(tl.float32)
            z += own[None, :]
            down += ds * tl.where(z > 0.0, 1.0, slope)
            if not TRANSPOSED:
                dattention += ds * tl.where(z > 0.0, z, slope * z)
        tl.store(DOwn + (node * H + head) * F + f, tl.sum(down, 0) * attention, mask=f < F)
    if not TRANSPOSED:
        tl.store(Parts + (first * H + head) * F + f, tl.sum(dattention, 0), mask=f < F)


def backward(saved, grad_score, needs=None):
    x_from, x_to, attention, row_ptr, source, source_ptr, target, edge, slope = saved
    need_from, need_to, need_attention = needs or (True, True, True)
    nodes, H, F = x_from.shape
    processors = 4 * torch.cuda.get_device_properties(x_from.device).multi_processor_count if x_from.is_cuda else 4
    # Small programs, as many as a processor's registers take: each is a chain of dependent loads, and hides the others'
    # latency.
    programs = min(nodes, triton.cdiv(20 * processors, H))
    sizes = {"BLOCK_E": 8, "BLOCK_F": triton.next_power_of_2(F), "num_warps": 1 if F <= 64 else 2}
    dfrom = dto = dattention = None
    if need_to or need_attention:
        dto = torch.empty_like(x_to)
        parts = torch.empty(programs, H, F, device=x_from.device, dtype=torch.float32)
        _gatv2_owner_bwd[(programs, H)](
            grad_score, x_to, x_from, attention, row_ptr, source, edge, dto, parts, nodes, H, F, slope,
            *grad_score.stride(), TRANSPOSED=False, **sizes,
        )  # fmt: skip
        dattention = parts.sum(0).to(attention.dtype)
    if need_from:
        dfrom = torch.empty_like(x_from)
        _gatv2_owner_bwd[(programs, H)](
            grad_score, x_from, x_to, attention, source_ptr, target, edge, dfrom, dfrom, nodes, H, F, slope,
            *grad_score.stride(), TRANSPOSED=True, **sizes,
        )  # fmt: skip
    return dfrom, dto, dattention


# --- check ---
SWEEP = (
    {"nodes": 12, "edges": 64, "H": 2, "F": 32},
    {"nodes": 23, "edges": 151, "H": 3, "F": 21},
    {"nodes": 8, "edges": 30, "H": 2, "F": 64, "dtype": "bfloat16"},
)
BENCH = ({"nodes": 65536, "edges": 1048576, "H": 4, "F": 64, "dtype": "bfloat16"},)


def make_args(nodes, edges, H, F, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    floats = [torch.randn(*shape, generator=g) for shape in ((nodes, H, F), (nodes, H, F), (H, F))]
    # The last node neither sends nor receives.
    into = torch.randint(0, max(1, nodes - 1), (edges,), generator=g).sort().values
    source = torch.randint(0, max(1, nodes - 1), (edges,), generator=g)
    edge = source.argsort(stable=True)

    def pointers(ids):
        return torch.cat((torch.zeros(1, dtype=torch.int64), ids.bincount(minlength=nodes).cumsum(0)))

    graph = (pointers(into), source, pointers(source), into[edge], edge)
    floats = (t.to(device=device, dtype=getattr(torch, dtype)) for t in floats)
    return (*floats, *(t.to(device=device, dtype=torch.int32) for t in graph))


def reference(x_from, x_to, attention, row_ptr, source, source_ptr, target, edge, slope=0.2):
    nodes = x_to.shape[0]
    into = torch.repeat_interleave(torch.arange(nodes, device=x_to.device), row_ptr.diff(), output_size=source.numel())
    z = torch.nn.functional.leaky_relu(x_from.float()[source] + x_to.float()[into], slope)
    return (attention.float() * z).sum(-1).to(x_from.dtype)
