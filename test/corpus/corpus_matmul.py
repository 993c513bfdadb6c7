"""Matrix products: how tiles are ordered, split, fed and finished."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from corpus.case import BLOCK_POINTERS, Case, in_dtypes

BF16, HALF, DOUBLE = torch.bfloat16, torch.float16, torch.float64


@triton.jit
def _grouped(
    A, B, C, M, N, K, sam, sak, sbk, sbn, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr
):
    pid = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    width = GROUP * tiles_n
    first = (pid // width) * GROUP
    size = min(tiles_m - first, GROUP)
    pid_m = first + (pid % width) % size
    pid_n = (pid % width) // size
    # wrapped rows and columns need no mask on loads
    rm = (pid_m * BM + tl.arange(0, BM)) % M
    rn = (pid_n * BN + tl.arange(0, BN)) % N
    rk = tl.arange(0, BK)
    a_at = A + rm[:, None] * sam + rk[None, :] * sak
    b_at = B + rk[:, None] * sbk + rn[None, :] * sbn
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(tl.cdiv(K, BK)):
        a = tl.load(a_at, mask=rk[None, :] < K - k * BK, other=0.0)
        b = tl.load(b_at, mask=rk[:, None] < K - k * BK, other=0.0)
        acc = tl.dot(a, b, acc)
        a_at += BK * sak
        b_at += BK * sbk
    om = pid_m * BM + tl.arange(0, BM)
    on = pid_n * BN + tl.arange(0, BN)
    tl.store(C + om[:, None] * N + on[None, :], acc.to(C.type.element_ty), mask=(om[:, None] < M) & (on[None, :] < N))


def grouped(a: Tensor, b: Tensor) -> Tensor:
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    grid = (triton.cdiv(M, 16) * triton.cdiv(N, 16),)
    _grouped[grid](a, b, c, M, N, K, *a.stride(), *b.stride(), BM=16, BN=16, BK=16, GROUP=2)
    return c


@triton.jit
def _split_k(A, B, C, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr):
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(tl.program_id(2) * BK, K, SPLITS * BK):
        rk = start + tl.arange(0, BK)
        a = tl.load(A + rm[:, None] * K + rk[None, :], mask=(rm[:, None] < M) & (rk[None, :] < K), other=0.0)
        b = tl.load(B + rk[:, None] * N + rn[None, :], mask=(rk[:, None] < K) & (rn[None, :] < N), other=0.0)
        acc += tl.dot(a, b, input_precision="ieee")
    tl.atomic_add(C + rm[:, None] * N + rn[None, :], acc, mask=(rm[:, None] < M) & (rn[None, :] < N))


def split_k(a: Tensor, b: Tensor) -> Tensor:
    c = torch.zeros((a.shape[0], b.shape[1]), dtype=torch.float32, device=a.device)
    grid = (triton.cdiv(a.shape[0], 16), triton.cdiv(b.shape[1], 16), 3)
    _split_k[grid](a, b, c, a.shape[0], b.shape[1], a.shape[1], BM=16, BN=16, BK=32, SPLITS=3)
    return c


@triton.jit
def _gram(X, G, N, K, BN: tl.constexpr, BK: tl.constexpr):
    n, k = tl.arange(0, BN), tl.arange(0, BK)
    acc = tl.zeros((BN, BN), tl.float64)
    for start in range(0, K, BK):
        live = (n[:, None] < N) & (start + k[None, :] < K)
        x = tl.load(X + n[:, None] * K + start + k[None, :], mask=live, other=0.0)
        acc = tl.dot(x, tl.trans(x), acc, out_dtype=tl.float64)
    tl.store(G + n[:, None] * N + n[None, :], acc, mask=(n[:, None] < N) & (n[None, :] < N))


def gram(x: Tensor) -> Tensor:
    out = torch.empty((x.shape[0], x.shape[0]), dtype=x.dtype, device=x.device)
    _gram[(1,)](x, out, *x.shape, BN=16, BK=16)
    return out


@triton.jit
def _persistent(A, B, BIAS, C, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ACT: tl.constexpr):
    tiles_n = tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BM) * tiles_n, tl.num_programs(0), flatten=True):
        rm = tile // tiles_n * BM + tl.arange(0, BM)
        rn = tile % tiles_n * BN + tl.arange(0, BN)
        acc = tl.zeros((BM, BN), tl.float32)
        for start in tl.range(0, K, BK):
            rk = start + tl.arange(0, BK)
            a = tl.load(A + rm[:, None] * K + rk[None, :], mask=(rm[:, None] < M) & (rk[None, :] < K), other=0.0)
            b = tl.load(B + rn[:, None] * K + rk[None, :], mask=(rn[:, None] < N) & (rk[None, :] < K), other=0.0)
            acc = tl.dot(a, b.T, acc)
        acc += tl.load(BIAS + rn, mask=rn < N, other=0.0)[None, :]
        if ACT == "silu":
            acc = acc * tl.sigmoid(acc)
        elif ACT == "relu":
            acc = tl.maximum(acc, 0.0)
        tl.store(C + rm[:, None] * N + rn[None, :], acc, mask=(rm[:, None] < M) & (rn[None, :] < N))


def persistent(x: Tensor, weight: Tensor, bias: Tensor, activation: str) -> Tensor:
    (M, K), N = x.shape, weight.shape[0]
    c = torch.empty((M, N), dtype=x.dtype, device=x.device)
    count = torch.cuda.get_device_properties(0).multi_processor_count
    _persistent[(min(4, count),)](x, weight, bias, c, M, N, K, BM=16, BN=32, BK=16, ACT=activation)
    return c


def _persistent_reference(x: Tensor, weight: Tensor, bias: Tensor, activation: str) -> Tensor:
    y = torch.nn.functional.linear(x, weight, bias)
    return torch.nn.functional.silu(y) if activation == "silu" else y.relu()


@triton.jit
def _batched_blocks(A, B, C, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    batch = tl.program_id(2)
    a_at = tl.make_block_ptr(A + batch * M * K, (M, K), (K, 1), (tl.program_id(0) * BM, 0), (BM, BK), (1, 0))
    b_at = tl.make_block_ptr(B + batch * K * N, (K, N), (N, 1), (0, tl.program_id(1) * BN), (BK, BN), (1, 0))
    acc = tl.zeros((BM, BN), tl.float32)
    for _ in range(0, K, BK):
        a = tl.load(a_at, boundary_check=(0, 1), padding_option="zero")
        b = tl.load(b_at, boundary_check=(0, 1), padding_option="zero")
        acc = tl.dot(a, b, acc)
        a_at = tl.advance(a_at, (0, BK))
        b_at = tl.advance(b_at, (BK, 0))
    c_at = tl.make_block_ptr(
        C + batch * M * N, (M, N), (N, 1), (tl.program_id(0) * BM, tl.program_id(1) * BN), (BM, BN), (1, 0)
    )
    tl.store(c_at, acc.to(C.dtype.element_ty), boundary_check=(0, 1))


def batched_block_pointers(a: Tensor, b: Tensor) -> Tensor:
    (P, M, K), N = a.shape, b.shape[2]
    c = torch.empty((P, M, N), dtype=a.dtype, device=a.device)
    _batched_blocks[(triton.cdiv(M, 16), triton.cdiv(N, 16), P)](a, b, c, M, N, K, BM=16, BN=16, BK=32)
    return c


@triton.jit
def _host_descriptors(A, B, C, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m, n = tl.program_id(0) * BM, tl.program_id(1) * BN
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        acc = tl.dot(A.load([m, k]), B.load([n, k]).T, acc)
    C.store([m, n], acc.to(C.dtype))


def host_descriptors(a: Tensor, b: Tensor) -> Tensor:
    c = torch.empty((a.shape[0], b.shape[0]), dtype=a.dtype, device=a.device)
    blocks = [TensorDescriptor.from_tensor(t, block) for t, block in ((a, [16, 16]), (b, [32, 16]), (c, [16, 32]))]
    _host_descriptors[(triton.cdiv(a.shape[0], 16), triton.cdiv(b.shape[0], 32))](
        *blocks, a.shape[1], BM=16, BN=32, BK=16
    )
    return c


@triton.jit
def _device_descriptors(A, B, C, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    a_desc = tl.make_tensor_descriptor(A, shape=[M, K], strides=[K, 1], block_shape=[BM, BK])
    b_desc = tl.make_tensor_descriptor(B, shape=[K, N], strides=[N, 1], block_shape=[BK, BN])
    c_desc = tl.make_tensor_descriptor(C, shape=[M, N], strides=[N, 1], block_shape=[BM, BN // 2])
    m, n = tl.program_id(0) * BM, tl.program_id(1) * BN
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        acc += tl.dot(a_desc.load([m, k]), b_desc.load([k, n]))
    halves = tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1))
    left, right = tl.split(halves)
    c_desc.store([m, n], left.to(C.dtype.element_ty))
    c_desc.store([m, n + BN // 2], right.to(C.dtype.element_ty))


def device_descriptors(a: Tensor, b: Tensor) -> Tensor:
    (M, K), N = a.shape, b.shape[1]
    triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8, device=a.device))
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    _device_descriptors[(triton.cdiv(M, 16), triton.cdiv(N, 32))](a, b, c, M, N, K, BM=16, BN=32, BK=16)
    return c


@triton.jit
def _dequantized(X, W, SCALE, Y, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        rk = start + tl.arange(0, BK)
        x = tl.load(X + rm[:, None] * K + rk[None, :], mask=(rm[:, None] < M) & (rk[None, :] < K), other=0.0)
        w = tl.load(W + rk[:, None] * N + rn[None, :], mask=(rk[:, None] < K) & (rn[None, :] < N), other=0)
        acc += tl.dot(x, w.to(x.dtype))
    acc *= tl.load(SCALE + rn, mask=rn < N, other=0.0)[None, :]
    tl.store(Y + rm[:, None] * N + rn[None, :], acc, mask=(rm[:, None] < M) & (rn[None, :] < N))


def int8_weights(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    y = torch.empty((x.shape[0], w.shape[1]), dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(x.shape[0], 16), triton.cdiv(w.shape[1], 16))
    _dequantized[grid](x, w, scale, y, x.shape[0], w.shape[1], x.shape[1], BM=16, BN=16, BK=32)
    return y


@triton.jit
def _int8_product(A, B, SA, SB, C, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.int32)
    for start in range(0, K, BK):
        rk = start + tl.arange(0, BK)
        a = tl.load(A + rm[:, None] * K + rk[None, :], mask=(rm[:, None] < M) & (rk[None, :] < K), other=0)
        b = tl.load(B + rk[:, None] * N + rn[None, :], mask=(rk[:, None] < K) & (rn[None, :] < N), other=0)
        acc = tl.dot(a, b, acc, out_dtype=tl.int32)
    sa = tl.load(SA + rm, mask=rm < M, other=0.0)
    sb = tl.load(SB + rn, mask=rn < N, other=0.0)
    c = acc.to(tl.float32) * sa[:, None] * sb[None, :]
    tl.store(C + rm[:, None] * N + rn[None, :], c, mask=(rm[:, None] < M) & (rn[None, :] < N))


def int8_product(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor) -> Tensor:
    c = torch.empty((a.shape[0], b.shape[1]), dtype=sa.dtype, device=a.device)
    grid = (triton.cdiv(a.shape[0], 16), triton.cdiv(b.shape[1], 16))
    _int8_product[grid](a, b, sa, sb, c, a.shape[0], b.shape[1], a.shape[1], BM=16, BN=16, BK=32)
    return c


@triton.jit
def _batch_of_dots(A, B, C, P: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    p, m = tl.arange(0, P)[:, None, None], tl.arange(0, M)
    n, k = tl.arange(0, N), tl.arange(0, K)
    a = tl.load(A + p * M * K + m[None, :, None] * K + k[None, None, :])
    b = tl.load(B + p * K * N + k[None, :, None] * N + n[None, None, :])
    tl.store(C + p * M * N + m[None, :, None] * N + n[None, None, :], tl.dot(a, b, out_dtype=C.dtype.element_ty))


def dot_3d(a: Tensor, b: Tensor) -> Tensor:
    (P, M, K), N = a.shape, b.shape[2]
    c = torch.empty((P, M, N), dtype=torch.float32, device=a.device)
    _batch_of_dots[(1,)](a, b, c, P, M, N, K)
    return c


def _fp8_args() -> tuple[Tensor, Tensor]:
    return torch.randn(20, 40).to(torch.float8_e4m3fn), torch.randn(40, 24).to(torch.float8_e4m3fn)


def _int8_args() -> tuple[Tensor, ...]:
    a, b = (torch.randint(-128, 128, shape, dtype=torch.int8) for shape in ((20, 70), (70, 18)))
    return a, b, torch.rand(20), torch.rand(18)


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


CASES = [
    *in_dtypes(
        Case("matmul_grouped", grouped, lambda: (torch.randn(50, 37), torch.randn(37, 41)), _matmul), BF16, HALF
    ),
    Case("matmul_grouped_transposed", grouped, lambda: (torch.randn(37, 20).t(), torch.randn(41, 37).t()), _matmul),
    Case("matmul_fp64", gram, lambda: (torch.randn(13, 40, dtype=DOUBLE),), lambda x: x @ x.t()),
    Case("matmul_fp8", split_k, _fp8_args, _matmul),
    *in_dtypes(Case("matmul_split_k", split_k, lambda: (torch.randn(20, 77), torch.randn(77, 18)), _matmul), HALF),
    *in_dtypes(
        Case(
            "linear_persistent_silu",
            persistent,
            lambda: (torch.randn(40, 30), torch.randn(50, 30), torch.randn(50), "silu"),
            _persistent_reference,
        ),
        BF16,
    ),
    Case(
        "linear_persistent_relu",
        persistent,
        lambda: (torch.randn(17, 30), torch.randn(33, 30), torch.randn(33), "relu"),
        _persistent_reference,
    ),
    Case(
        "matmul_host_descriptors",
        host_descriptors,
        lambda: (torch.randn(40, 36), torch.randn(44, 36)),
        lambda a, b: a @ b.t(),
    ),
    *in_dtypes(
        Case(
            "matmul_device_descriptors", device_descriptors, lambda: (torch.randn(20, 36), torch.randn(36, 44)), _matmul
        ),
        HALF,
    ),
    *in_dtypes(
        Case(
            "matmul_int8_weights",
            int8_weights,
            lambda: (torch.randn(20, 40), torch.randint(-128, 128, (40, 24), dtype=torch.int8), torch.rand(24)),
            lambda x, w, scale: x @ (w.double() * scale),
        ),
        BF16,
    ),
    Case(
        "matmul_int8_int32", int8_product, _int8_args, lambda a, b, sa, sb: (a.double() @ b.double()) * sa[:, None] * sb
    ),
    Case("dot_3d", dot_3d, lambda: (torch.randn(4, 16, 32), torch.randn(4, 32, 16)), _matmul),
]

if BLOCK_POINTERS:
    CASES += in_dtypes(
        Case(
            "matmul_batched_block_pointers",
            batched_block_pointers,
            lambda: (torch.randn(3, 20, 40), torch.randn(3, 40, 18)),
            _matmul,
        ),
        HALF,
    )
