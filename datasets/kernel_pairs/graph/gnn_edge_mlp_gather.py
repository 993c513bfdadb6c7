"""Edge layer concat(x[target], x[source], edge) W + b without the concatenation: products gather, gradients scatter.

Columns of the never stored matrix are read from where they lie: masks pick the node rows at one end of an edge, at the
other, or the edge's own features. Backwards, tiles of dy W^T go out the same way, to the nodes as atomic adds; dW
gathers again, with the edges split over programs that leave partial sums.
"""

import torch
import triton
import triton.language as tl

META = {
    "slug": "gnn_edge_mlp_gather",
    "family": "graph",
    "op": "edge_linear",
    "schema": 1,
    "techniques": ("atomics", "split-k", "two-stage-partials", "prologue-fusion", "strided-cotangent"),
    "saves": (),
    "grads": ("x", "edge_features", "weight", "bias"),
    "dtypes": ("float32", "bfloat16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _gathered(X, Features, Target, Source, e, k, last, F, G):
    """Tile (edge, column) of concat(x[target], x[source], features). A tile within one part causes no other loads."""
    ok = e[:, None] < last
    target = tl.load(Target + e, mask=e < last, other=0).to(tl.int64)[:, None]
    source = tl.load(Source + e, mask=e < last, other=0).to(tl.int64)[:, None]
    column = k[None, :]
    tile = tl.load(X + target * F + column, mask=ok & (column < F), other=0.0)
    tile += tl.load(X + source * F + column - F, mask=ok & (column >= F) & (column < 2 * F), other=0.0)
    at = Features + e[:, None] * G + column - 2 * F
    return tile + tl.load(at, mask=ok & (column >= 2 * F) & (column < 2 * F + G), other=0.0)


@triton.jit
def _edge_fwd(
    X, Features, Target, Source, W, B, Y, E, F, G, N,
    BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(0).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    K = 2 * F + G
    acc = tl.zeros((BLOCK_E, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        rows = _gathered(X, Features, Target, Source, e, k, E, F, G)
        w = tl.load(W + k[:, None] * N + n[None, :], mask=(k[:, None] < K) & (n[None, :] < N), other=0.0)
        acc = tl.dot(rows, w, acc)
    acc += tl.load(B + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    tl.store(Y + e[:, None] * N + n[None, :], acc, mask=(e[:, None] < E) & (n[None, :] < N))


def forward(x, edge_features, weight, bias, target, source):
    """x (nodes, F), edge_features (E, G), weight (2 F + G, N), bias (N), target and source (E)."""
    x, edge_features, weight, bias = (t.contiguous() for t in (x, edge_features, weight, bias))
    (E, G), F, N = edge_features.shape, x.shape[1], weight.shape[1]
    y = torch.empty(E, N, device=x.device, dtype=x.dtype)
    _edge_fwd[(triton.cdiv(E, 128), triton.cdiv(N, 64))](
        x, edge_features, target, source, weight, bias, y, E, F, G, N,
        BLOCK_E=128, BLOCK_N=64, BLOCK_K=32, num_warps=4, num_stages=2,
    )  # fmt: skip
    return y, (x, edge_features, weight, bias, target, source)


# --- backward ---
@triton.jit
def _edge_inputs_bwd(
    DY, W, Target, Source, DX, DFeatures, E, F, G, N, dy_e, dy_n,
    BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(0).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    K = 2 * F + G
    acc = tl.zeros((BLOCK_E, BLOCK_K), tl.float32)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        dy_at = DY + e[:, None] * dy_e + n[None, :].to(tl.int64) * dy_n
        dy = tl.load(dy_at, mask=(e[:, None] < E) & (n[None, :] < N), other=0.0)
        wt = tl.load(W + k[None, :] * N + n[:, None], mask=(k[None, :] < K) & (n[:, None] < N), other=0.0)
        acc = tl.dot(dy, wt, acc)
    ok = e[:, None] < E
    column = k[None, :]
    target = tl.load(Target + e, mask=e < E, other=0).to(tl.int64)[:, None]
    source = tl.load(Source + e, mask=e < E, other=0).to(tl.int64)[:, None]
    tl.atomic_add(DX + target * F + column, acc, mask=ok & (column < F), sem="relaxed")
    middle = ok & (column >= F) & (column < 2 * F)
    tl.atomic_add(DX + source * F + column - F, acc, mask=middle, sem="relaxed")
    tl.store(DFeatures + e[:, None] * G + column - 2 * F, acc, mask=ok & (column >= 2 * F) & (column < K))


@triton.jit
def _edge_weight_bwd(
    DY, X, Features, Target, Source, Parts, E, F, G, N, edges_each, dy_e, dy_n,
    BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2).to(tl.int64)
    last = tl.minimum((split + 1) * edges_each, E)
    K = 2 * F + G
    acc = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    dbias = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(split * edges_each, last, BLOCK_E):
        e = start + tl.arange(0, BLOCK_E)
        dy_at = DY + e[:, None] * dy_e + n[None, :].to(tl.int64) * dy_n
        dy = tl.load(dy_at, mask=(e[:, None] < last) & (n[None, :] < N), other=0.0)
        rows = _gathered(X, Features, Target, Source, e, k, last, F, G)
        acc = tl.dot(tl.trans(rows), dy, acc)
        dbias += tl.sum(dy.to(tl.float32), 0)
    # Row K of a partial matrix holds the bias' share; the first tile of k writes it for all.
    base = Parts + split * (K + 1) * N
    tl.store(base + k[:, None] * N + n[None, :], acc, mask=(k[:, None] < K) & (n[None, :] < N))
    tl.store(base + K * N + n, dbias, mask=(n < N) & (tl.program_id(0) == 0))


def backward(saved, grad_y, needs=None):
    x, edge_features, weight, bias, target, source = saved
    (E, G), F = edge_features.shape, x.shape[1]
    K, N = weight.shape
    dx = torch.zeros(x.shape, device=x.device, dtype=torch.float32)
    dfeatures = torch.empty_like(edge_features)
    _edge_inputs_bwd[(triton.cdiv(E, 128), triton.cdiv(K, 64))](
        grad_y, weight, target, source, dx, dfeatures, E, F, G, N, *grad_y.stride(),
        BLOCK_E=128, BLOCK_N=32, BLOCK_K=64, num_warps=4, num_stages=3,
    )  # fmt: skip
    tiles = triton.cdiv(K, 64) * triton.cdiv(N, 64)
    # Two programs for each of 132 processors, each with at least eight tiles of edges.
    edges_each = max(256, triton.cdiv(triton.cdiv(E * tiles, 264), 32) * 32)
    splits = triton.cdiv(E, edges_each)
    parts = torch.empty(splits, K + 1, N, device=x.device, dtype=torch.float32)
    _edge_weight_bwd[(triton.cdiv(K, 64), triton.cdiv(N, 64), splits)](
        grad_y, x, edge_features, target, source, parts, E, F, G, N, edges_each, *grad_y.stride(),
        BLOCK_E=32, BLOCK_N=64, BLOCK_K=64, num_warps=4, num_stages=2,
    )  # fmt: skip
    total = parts.sum(0)
    return dx.to(x.dtype), dfeatures, total[:K].to(weight.dtype), total[K].to(bias.dtype)


# --- check ---
SWEEP = (
    {"nodes": 12, "E": 256, "F": 32, "G": 16, "N": 64},
    {"nodes": 9, "E": 301, "F": 21, "G": 5, "N": 37},
    {"nodes": 7, "E": 40, "F": 16, "G": 3, "N": 24, "dtype": "bfloat16"},
)
BENCH = ({"nodes": 16384, "E": 262144, "F": 128, "G": 32, "N": 128, "dtype": "bfloat16"},)


def make_args(nodes, E, F, G, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    K = 2 * F + G
    shapes = ((nodes, F), (E, G), (K, N), (N,))
    x, edge_features, weight, bias = (torch.randn(*shape, generator=g) for shape in shapes)
    floats = (x, edge_features, weight * K**-0.5, bias)
    ends = (torch.randint(0, nodes, (E,), generator=g).to(device=device, dtype=torch.int32) for _ in range(2))
    return *(t.to(device=device, dtype=getattr(torch, dtype)) for t in floats), *ends


def reference(x, edge_features, weight, bias, target, source):
    return torch.cat((x[target], x[source], edge_features), 1) @ weight + bias
