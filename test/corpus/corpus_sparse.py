"""Products whose shape is data: groups, blocks, segments and tables of pointers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from corpus.case import Case, in_dtypes

BF16, HALF = torch.bfloat16, torch.float16


@triton.jit
def _grouped_gemm(TABLE_A, TABLE_B, TABLE_C, SIZES, groups, K, N, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    # a device-side loop over problems: each program walks the tiles of all of them
    tile = tl.program_id(0)
    passed = 0
    for g in range(groups):
        m_size = tl.load(SIZES + g)
        tiles_n = tl.cdiv(N, BN)
        count = tl.cdiv(m_size, BM) * tiles_n
        while tile >= passed and tile < passed + count:
            a = tl.load(TABLE_A + g).to(tl.pointer_type(tl.float32))
            b = tl.load(TABLE_B + g).to(tl.pointer_type(tl.float32))
            c = tl.load(TABLE_C + g).to(tl.pointer_type(tl.float32))
            m = (tile - passed) // tiles_n * BM + tl.arange(0, BM)
            n = (tile - passed) % tiles_n * BN + tl.arange(0, BN)
            acc = tl.zeros((BM, BN), tl.float32)
            for start in range(0, K, BK):
                k = start + tl.arange(0, BK)
                x = tl.load(a + m[:, None] * K + k[None, :], mask=(m < m_size)[:, None] & (k < K)[None, :], other=0.0)
                y = tl.load(b + k[:, None] * N + n[None, :], mask=(k < K)[:, None] & (n < N)[None, :], other=0.0)
                acc = tl.dot(x, y, acc)
            tl.store(c + m[:, None] * N + n[None, :], acc, mask=(m < m_size)[:, None] & (n < N)[None, :])
            tile += tl.num_programs(0)
        passed += count


def grouped_gemm(a0: Tensor, a1: Tensor, a2: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    rows = [a0, a1, a2]
    K, N = b.shape[1:]
    outputs = tuple(torch.empty((a.shape[0], N), dtype=a.dtype, device=a.device) for a in rows)
    tables = [
        torch.tensor([t.data_ptr() for t in group], dtype=torch.int64, device=b.device)
        for group in (rows, b.unbind(0), outputs)
    ]
    sizes = torch.tensor([a.shape[0] for a in rows], dtype=torch.int32, device=b.device)
    _grouped_gemm[(3,)](*tables, sizes, 3, K, N, BM=16, BN=16, BK=16)
    return outputs


@triton.jit
def _block_sparse(X, VALUES, COLUMNS, STARTS, Y, N, B: tl.constexpr, BN: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, B)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((B, BN), tl.float32)
    for k in range(tl.load(STARTS + row), tl.load(STARTS + row + 1)):
        column = tl.load(COLUMNS + k)
        block = tl.load(VALUES + k * B * B + i[:, None] * B + i[None, :])
        x = tl.load(X + (column * B + i)[:, None] * N + n[None, :], mask=(n < N)[None, :], other=0.0)
        acc = tl.dot(block, x, acc)
    tl.store(Y + (row * B + i)[:, None] * N + n[None, :], acc, mask=(n < N)[None, :])


def block_sparse(values: Tensor, columns: Tensor, starts: Tensor, x: Tensor) -> Tensor:
    size, rows = values.shape[1], starts.numel() - 1
    y = torch.empty((rows * size, x.shape[1]), dtype=x.dtype, device=x.device)
    _block_sparse[(rows, triton.cdiv(x.shape[1], 16))](x, values, columns, starts, y, x.shape[1], B=size, BN=16)
    return y


def _block_sparse_reference(values: Tensor, columns: Tensor, starts: Tensor, x: Tensor) -> Tensor:
    parts = x.view(-1, values.shape[1], x.shape[1])
    rows = []
    for low, high in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        row = x.new_zeros(parts.shape[1:])
        for k in range(low, high):
            row = row + values[k] @ parts[columns[k]]
        rows.append(row)
    return torch.cat(rows)


@triton.jit
def _csr(VALUES, COLUMNS, STARTS, X, Y, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    low, high = tl.load(STARTS + row), tl.load(STARTS + row + 1)
    acc = tl.zeros((BLOCK,), tl.float32)
    for start in range(low, high, BLOCK):
        k = start + tl.arange(0, BLOCK)
        column = tl.load(COLUMNS + k, mask=k < high, other=0)
        acc += tl.load(VALUES + k, mask=k < high, other=0.0) * tl.load(X + column, mask=k < high, other=0.0)
    tl.store(Y + row, tl.sum(acc, 0))


def sparse_matrix_vector(values: Tensor, columns: Tensor, starts: Tensor, x: Tensor) -> Tensor:
    y = torch.empty(starts.numel() - 1, dtype=x.dtype, device=x.device)
    _csr[(y.numel(),)](values, columns, starts, x, y, BLOCK=4)
    return y


def _csr_reference(values: Tensor, columns: Tensor, starts: Tensor, x: Tensor) -> Tensor:
    products = values * x[columns.long()]
    parts = zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
    return torch.stack([products[low:high].sum() for low, high in parts])


@triton.jit
def _edge_softmax(SCORES, TARGETS, STARTS, OUT, BLOCK: tl.constexpr):
    # the edges of a node stand together; nodes without edges store nothing
    node = tl.program_id(0)
    low, high = tl.load(STARTS + node), tl.load(STARTS + node + 1)
    if low == high:
        return
    e = low + tl.arange(0, BLOCK)
    x = tl.load(SCORES + e, mask=e < high, other=float("-inf"))
    p = tl.exp(x - tl.max(x, 0))
    tl.store(OUT + e, p / tl.sum(p, 0), mask=e < high)


@triton.jit
def _gather_edges(WEIGHT, SOURCE, NODE, X, OUT, D, BLOCK: tl.constexpr):
    edge = tl.program_id(0)
    d = tl.arange(0, BLOCK)
    x = tl.load(X + tl.load(SOURCE + edge) * D + d, mask=d < D, other=0.0)
    tl.atomic_add(OUT + tl.load(NODE + edge) * D + d, x * tl.load(WEIGHT + edge), mask=d < D)


def graph_attention(scores: Tensor, source: Tensor, starts: Tensor, x: Tensor) -> Tensor:
    nodes = starts.numel() - 1
    weight = torch.empty_like(scores)
    _edge_softmax[(nodes,)](scores, source, starts, weight, BLOCK=8)
    node = torch.repeat_interleave(torch.arange(nodes, device=x.device), starts.diff())
    out = torch.zeros((nodes, x.shape[1]), dtype=torch.float32, device=x.device)
    _gather_edges[(scores.numel(),)](weight, source, node, x, out, x.shape[1], BLOCK=8)
    return out


def _graph_reference(scores: Tensor, source: Tensor, starts: Tensor, x: Tensor) -> Tensor:
    rows = []
    for low, high in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        rows.append(scores[low:high].softmax(0) @ x[source[low:high]])
    return torch.stack(rows)


@triton.jit
def _jagged_to_dense(X, STARTS, OUT, D, LONGEST, fill, BLOCK: tl.constexpr):
    row, place = tl.program_id(0), tl.program_id(1)
    low, high = tl.load(STARTS + row), tl.load(STARTS + row + 1)
    d = tl.arange(0, BLOCK)
    inside = (low + place < high) & (d < D)
    x = tl.load(X + (low + place) * D + d, mask=inside, other=fill)
    tl.store(OUT + (row * LONGEST + place) * D + d, x, mask=d < D)


def jagged_to_dense(x: Tensor, starts: Tensor) -> Tensor:
    """The longest row is read back on the host to shape the output."""
    longest = int(starts.diff().max())
    out = torch.empty((starts.numel() - 1, longest, x.shape[1]), dtype=x.dtype, device=x.device)
    _jagged_to_dense[out.shape[:2]](x, starts, out, x.shape[1], longest, -1.0, BLOCK=8)
    return out


def _jagged_reference(x: Tensor, starts: Tensor) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(x.split(starts.diff().tolist()), batch_first=True, padding_value=-1.0)


@triton.jit
def _low_rank(X, W, A, B, Y, M, N, K, scale, R: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    r = tl.arange(0, R)
    acc = tl.zeros((BM, BN), tl.float32)
    low = tl.zeros((BM, R), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        x = tl.load(X + m[:, None] * K + k[None, :], mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
        w = tl.load(W + n[None, :] * K + k[:, None], mask=(n < N)[None, :] & (k < K)[:, None], other=0.0)
        a = tl.load(A + r[None, :] * K + k[:, None], mask=(k < K)[:, None], other=0.0)
        acc = tl.dot(x, w, acc)
        low = tl.dot(x, a, low)
    b = tl.load(B + n[None, :] * R + r[:, None], mask=(n < N)[None, :], other=0.0)
    acc += scale * tl.dot(low.to(b.dtype), b)
    tl.store(Y + m[:, None] * N + n[None, :], acc, mask=(m < M)[:, None] & (n < N)[None, :])


def low_rank_linear(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    (M, K), N = x.shape, w.shape[0]
    y = torch.empty((M, N), dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(M, 16), triton.cdiv(N, 16))
    _low_rank[grid](x, w, a, b, y, M, N, K, 2.0, R=16, BM=16, BN=16, BK=16)
    return y


def _blocks() -> tuple[Tensor, ...]:
    columns = torch.tensor([0, 2, 1, 0, 1, 2], dtype=torch.int32)
    return torch.randn(6, 16, 16), columns, torch.tensor([0, 2, 2, 6], dtype=torch.int32), torch.randn(48, 20)


def _rows() -> tuple[Tensor, ...]:
    starts = torch.tensor([0, 3, 3, 10, 14], dtype=torch.int32)
    return torch.randn(14), torch.randint(0, 6, (14,), dtype=torch.int32), starts, torch.randn(6)


def _graph() -> tuple[Tensor, ...]:
    return torch.randn(14), torch.randint(0, 4, (14,)), torch.tensor([0, 3, 3, 10, 14]), torch.randn(4, 5)


CASES = [
    Case(
        "grouped_gemm_tables",
        grouped_gemm,
        lambda: (torch.randn(20, 24), torch.randn(3, 24), torch.randn(33, 24), torch.randn(3, 24, 20)),
        lambda a0, a1, a2, b: (a0 @ b[0], a1 @ b[1], a2 @ b[2]),
    ),
    *in_dtypes(Case("block_sparse_matmul", block_sparse, _blocks, _block_sparse_reference), HALF),
    Case("sparse_matrix_vector", sparse_matrix_vector, _rows, _csr_reference),
    Case("graph_attention", graph_attention, _graph, _graph_reference),
    *in_dtypes(
        Case(
            "jagged_to_dense",
            jagged_to_dense,
            lambda: (torch.randn(14, 5), torch.tensor([0, 3, 3, 10, 14])),
            _jagged_reference,
        ),
        BF16,
    ),
    *in_dtypes(
        Case(
            "low_rank_linear",
            low_rank_linear,
            lambda: (torch.randn(20, 40), torch.randn(18, 40), torch.randn(16, 40), torch.randn(18, 16)),
            lambda x, w, a, b: x @ w.t() + 2 * (x @ a.t() @ b.t()),
        ),
        BF16,
    ),
]
