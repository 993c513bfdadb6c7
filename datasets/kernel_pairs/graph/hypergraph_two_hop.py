"""Hypergraph smoothing: means over the nodes of each hyperedge, then over the hyperedges of each node, and back alike.

With both incidence lists at hand every step has owners. The adjoint runs the hops in reverse order on the same lists:
a hyperedge collects dy / degree of its nodes, a node collects what its hyperedges hold over their size. The divisors
belong to the rows that are read, not to the row that is written, so that they go into the sum.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "hypergraph_two_hop",
    "family": "graph",
    "op": "hypergraph_mean",
    "schema": 1,
    "techniques": ("inverse-map", "varlen", "gather-form", "strided-cotangent"),
    "saves": (),
    "grads": ("x",),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _mean_of_members(X, Ptr, Member, Y, F, BLOCK_E: tl.constexpr, BLOCK_F: tl.constexpr):
    owner = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    begin = tl.load(Ptr + owner)
    end = tl.load(Ptr + owner + 1)
    total = tl.zeros((BLOCK_E, BLOCK_F), tl.float32)
    for start in range(begin, end, BLOCK_E):
        place = start + tl.arange(0, BLOCK_E)
        member = tl.load(Member + place, mask=place < end, other=0).to(tl.int64)
        ok = (place[:, None] < end) & (f[None, :] < F)
        total += tl.load(X + member[:, None] * F + f[None, :], mask=ok, other=0.0).to(tl.float32)
    # Without members the mean is zero.
    mean = tl.sum(total, 0) / tl.maximum(end - begin, 1).to(tl.float32)
    tl.store(Y + owner * F + f, mean, mask=f < F)


def forward(x, edge_ptr, edge_nodes, node_ptr, node_edges):
    """x (nodes, F). Hyperedge e holds edge_nodes[edge_ptr[e] : edge_ptr[e + 1]], node i lies in
    node_edges[node_ptr[i] : node_ptr[i + 1]]: the same incidences in two orders.
    """
    x = x.contiguous()
    nodes, F = x.shape
    edges = edge_ptr.numel() - 1
    # The middle keeps fp32: it is small, and rounding it would round every sum twice.
    middle = torch.empty(edges, F, device=x.device, dtype=torch.float32)
    y = torch.empty_like(x)
    BLOCK_F = min(128, triton.next_power_of_2(F))
    columns = triton.cdiv(F, BLOCK_F)
    _mean_of_members[(edges, columns)](x, edge_ptr, edge_nodes, middle, F, BLOCK_E=8, BLOCK_F=BLOCK_F, num_warps=2)
    _mean_of_members[(nodes, columns)](middle, node_ptr, node_edges, y, F, BLOCK_E=8, BLOCK_F=BLOCK_F, num_warps=2)
    return y, (x, edge_ptr, edge_nodes, node_ptr, node_edges)


# --- backward ---
@triton.jit
def _collect_shares(
    D, Ptr, Member, MemberPtr, Out, F, d_r, d_f, BLOCK_E: tl.constexpr, BLOCK_F: tl.constexpr
):  # fmt: skip
    # out[owner] = sum over its members of d[member] / (number that the member lies among)
    owner = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    end = tl.load(Ptr + owner + 1)
    total = tl.zeros((BLOCK_E, BLOCK_F), tl.float32)
    for start in range(tl.load(Ptr + owner), end, BLOCK_E):
        place = start + tl.arange(0, BLOCK_E)
        inside = place < end
        member = tl.load(Member + place, mask=inside, other=0).to(tl.int64)
        size = tl.load(MemberPtr + member + 1, mask=inside, other=1) - tl.load(MemberPtr + member, mask=inside, other=0)
        at = member[:, None] * d_r + f[None, :].to(tl.int64) * d_f
        d = tl.load(D + at, mask=inside[:, None] & (f[None, :] < F), other=0.0).to(tl.float32)
        total += d / size.to(tl.float32)[:, None]
    tl.store(Out + owner * F + f, tl.sum(total, 0), mask=f < F)


def backward(saved, grad_y, needs=None):
    x, edge_ptr, edge_nodes, node_ptr, node_edges = saved
    nodes, F = x.shape
    edges = edge_ptr.numel() - 1
    dmiddle = torch.empty(edges, F, device=x.device, dtype=torch.float32)
    dx = torch.empty_like(x)
    BLOCK_F = min(128, triton.next_power_of_2(F))
    columns = triton.cdiv(F, BLOCK_F)
    _collect_shares[(edges, columns)](
        grad_y, edge_ptr, edge_nodes, node_ptr, dmiddle, F, *grad_y.stride(), BLOCK_E=4, BLOCK_F=BLOCK_F, num_warps=1
    )
    _collect_shares[(nodes, columns)](
        dmiddle, node_ptr, node_edges, edge_ptr, dx, F, *dmiddle.stride(), BLOCK_E=4, BLOCK_F=BLOCK_F, num_warps=1
    )
    return dx


# --- check ---
SWEEP = (
    {"nodes": 12, "edges": 9, "incidences": 64, "F": 32},
    {"nodes": 23, "edges": 17, "incidences": 151, "F": 151},
    {"nodes": 8, "edges": 5, "incidences": 30, "F": 20, "dtype": "bfloat16"},
)
BENCH = ({"nodes": 65536, "edges": 32768, "incidences": 524288, "F": 128, "dtype": "bfloat16"},)


def make_args(nodes, edges, incidences, F, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(nodes, F, generator=g).to(device=device, dtype=getattr(torch, dtype))
    # Incidences drawn at random: empty hyperedges and lonely nodes occur.
    edge = torch.randint(0, edges, (incidences,), generator=g).sort().values
    node = torch.randint(0, nodes, (incidences,), generator=g)
    order = node.argsort(stable=True)

    def pointers(ids, size):
        return torch.cat((torch.zeros(1, dtype=torch.int64), ids.bincount(minlength=size).cumsum(0)))

    lists = (pointers(edge, edges), node, pointers(node, nodes), edge[order])
    return x, *(t.to(device=device, dtype=torch.int32) for t in lists)


def reference(x, edge_ptr, edge_nodes, node_ptr, node_edges):
    def means(values, ptr, members):
        sizes = ptr.diff()
        number = torch.arange(sizes.numel(), device=x.device)
        owner = torch.repeat_interleave(number, sizes, output_size=members.numel())
        total = torch.zeros(sizes.numel(), x.shape[1], device=x.device).index_add(0, owner, values[members])
        return total / sizes.clamp(min=1)[:, None]

    return means(means(x.float(), edge_ptr, edge_nodes), node_ptr, node_edges).to(x.dtype)
