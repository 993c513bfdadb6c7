"""Weighted message sum over CSR edges: the owner of a source node walks the transposed graph for dx and edge dots."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "gnn_message_sum",
    "family": "graph",
    "op": "spmm_csr",
    "schema": 1,
    "techniques": ("inverse-map", "one-launch", "varlen", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _message_sum_fwd(X, W, RowPtr, Source, Y, F, BLOCK_E: tl.constexpr, BLOCK_F: tl.constexpr):
    # y[i] = sum of w[e] x[source[e]] over the edges RowPtr[i] to RowPtr[i + 1] that end in node i.
    node = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    last = tl.load(RowPtr + node + 1).to(tl.int64)
    acc = tl.zeros((BLOCK_F,), tl.float32)
    for start in range(tl.load(RowPtr + node).to(tl.int64), last, BLOCK_E):
        e = start + tl.arange(0, BLOCK_E)
        source = tl.load(Source + e, mask=e < last, other=0).to(tl.int64)
        w = tl.load(W + e, mask=e < last, other=0.0).to(tl.float32)
        ok = (e[:, None] < last) & (f[None, :] < F)
        x = tl.load(X + source[:, None] * F + f[None, :], mask=ok, other=0.0).to(tl.float32)
        acc += tl.sum(w[:, None] * x, 0)
    tl.store(Y + node * F + f, acc, mask=f < F)


def forward(x, weight, row_ptr, source, source_ptr, target, edge):
    # The transposed graph is built once per graph: edge[source_ptr[j] : source_ptr[j + 1]] are the edges that leave
    # node j, and `target` holds the nodes they end in.
    x, weight = x.contiguous(), weight.contiguous()
    F = x.shape[1]
    nodes = row_ptr.numel() - 1
    y = torch.empty(nodes, F, device=x.device, dtype=x.dtype)
    BLOCK_F = min(256, triton.next_power_of_2(F))
    _message_sum_fwd[(nodes, triton.cdiv(F, BLOCK_F))](
        x, weight, row_ptr, source, y, F, BLOCK_E=8, BLOCK_F=BLOCK_F, num_warps=2
    )
    return y, (x, weight, source_ptr, target, edge)


# --- backward ---
@triton.jit
def _message_sum_bwd(
    DY, X, W, SourcePtr, Target, Edge, DX, DW, F, dy_n, dy_f, BLOCK_E: tl.constexpr, BLOCK_F: tl.constexpr
):
    # A whole feature row of node j stays in registers: each cotangent row that its edges bring in is weighted into
    # dx[j] and dotted with x[j] for dw. Every edge leaves one node, so dw needs no atomics either.
    node = tl.program_id(0).to(tl.int64)
    f = tl.arange(0, BLOCK_F)
    x = tl.load(X + node * F + f, mask=f < F, other=0.0).to(tl.float32)
    last = tl.load(SourcePtr + node + 1).to(tl.int64)
    dx = tl.zeros((BLOCK_F,), tl.float32)
    for start in range(tl.load(SourcePtr + node).to(tl.int64), last, BLOCK_E):
        place = start + tl.arange(0, BLOCK_E)
        inside = place < last
        target = tl.load(Target + place, mask=inside, other=0).to(tl.int64)
        edge = tl.load(Edge + place, mask=inside, other=0).to(tl.int64)
        w = tl.load(W + edge, mask=inside, other=0.0).to(tl.float32)
        ok = inside[:, None] & (f[None, :] < F)
        dy_at = target[:, None] * dy_n + f[None, :].to(tl.int64) * dy_f
        dy = tl.load(DY + dy_at, mask=ok, other=0.0).to(tl.float32)
        dx += tl.sum(w[:, None] * dy, 0)
        tl.store(DW + edge, tl.sum(x[None, :] * dy, 1), mask=inside)
    tl.store(DX + node * F + f, dx, mask=f < F)


def backward(saved, grad_y, needs=None):
    x, weight, source_ptr, target, edge = saved
    nodes, F = x.shape
    dx, dw = torch.empty_like(x), torch.empty_like(weight)
    BLOCK_F = triton.next_power_of_2(F)
    _message_sum_bwd[(nodes,)](
        grad_y, x, weight, source_ptr, target, edge, dx, dw, F, grad_y.stride(0), grad_y.stride(1),
        BLOCK_E=8, BLOCK_F=BLOCK_F, num_warps=max(1, min(8, BLOCK_F // 128)),
    )  # fmt: skip
    return dx, dw


# --- check ---
SWEEP = (
    {"nodes": 12, "edges": 64, "F": 32},
    {"nodes": 23, "edges": 151, "F": 21, "dtype": "float16"},
    {"nodes": 8, "edges": 30, "F": 64, "dtype": "bfloat16"},
)
BENCH = ({"nodes": 65536, "edges": 524288, "F": 128, "dtype": "bfloat16"},)


def make_args(nodes, edges, F, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(nodes, F, generator=g), torch.randn(edges, generator=g)
    # Half of the edges, but no more than 1024, meet in node 0; the last node neither sends nor receives.
    into = torch.randint(0, max(1, nodes - 1), (edges,), generator=g)
    into[: min(edges // 2, 1024)] = 0
    into = into.sort().values
    source = torch.randint(0, max(1, nodes - 1), (edges,), generator=g)
    edge = source.argsort(stable=True)

    def pointers(ids):
        return torch.cat((torch.zeros(1, dtype=torch.int64), ids.bincount(minlength=nodes).cumsum(0)))

    graph = (pointers(into), source, pointers(source), into[edge], edge)
    floats = (t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, weight))
    return (*floats, *(t.to(device=device, dtype=torch.int32) for t in graph))


def reference(x, weight, row_ptr, source, source_ptr, target, edge):
    nodes = row_ptr.numel() - 1
    into = torch.repeat_interleave(torch.arange(nodes, device=x.device), row_ptr.diff().long())
    messages = weight.float()[:, None] * x.float()[source.long()]
    out = torch.zeros(nodes, x.shape[1], device=x.device, dtype=messages.dtype)
    return out.index_add(0, into, messages).to(x.dtype)
