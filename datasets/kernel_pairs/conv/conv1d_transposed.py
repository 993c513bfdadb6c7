"""Transposed conv1d, channels last: its backward is a plain strided conv, whose rows are read by phases of the stride.

y[s stride - pad + tap] += x[s] W[:, tap], weight (CI, TAPS, CO). The forward gathers: outputs of one residue modulo the
stride form a tile, which meets every stride-th tap only. In the backward input step s reads the TAPS steps of dy from
s stride - pad on. Time of dy is seen as (row, phase) with `stride` phases: what a tap wants of neighbouring steps are
neighbouring rows of one phase, a tile of a descriptor, zero outside the sequence. dx sums over taps and channels in one
accumulator. dweight owns a tile of one tap and splits the rows over programs.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

META = {
    "slug": "conv1d_transposed",
    "family": "conv",
    "op": "conv_transpose1d",
    "schema": 1,
    "techniques": ("gather-form", "split-k", "two-stage-partials", "owner-grid"),
    "saves": (),
    "grads": ("x", "weight"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _transposed_fwd(
    X, Weight, Y, S, T, CI, CO, TAPS: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(tl.cdiv(T + PAD, STRIDE), BLOCK_M)
    batch = (tl.program_id(0) // (tiles * STRIDE)).to(tl.int64)
    tile = tl.program_id(0) % (tiles * STRIDE)
    residue = tile % STRIDE
    q = tile // STRIDE * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # Output q stride + residue - pad meets taps residue, residue + stride, ... at inputs q, q - 1, ...
    for back in range((TAPS - residue + STRIDE - 1) // STRIDE):
        tap = residue + back * STRIDE
        s = q - back
        there = (s >= 0) & (s < S)
        for start in range(0, CI, BLOCK_K):
            c = start + k
            x_at = (batch * S + s[:, None]) * CI + c[None, :]
            x = tl.load(X + x_at, mask=there[:, None] & (c[None, :] < CI), other=0.0)
            w_at = (c[:, None] * TAPS + tap) * CO + n[None, :]
            w = tl.load(Weight + w_at, mask=(c[:, None] < CI) & (n[None, :] < CO), other=0.0)
            acc = tl.dot(x, w, acc)
    t = q * STRIDE + residue - PAD
    inside = (t >= 0) & (t < T)
    tl.store(Y + (batch * T + t[:, None]) * CO + n[None, :], acc, mask=inside[:, None] & (n[None, :] < CO))


def _tile(size, most):
    return min(most, max(16, triton.next_power_of_2(size)))


def forward(x, weight, stride, pad):
    x, weight = x.contiguous(), weight.contiguous()
    B, S, CI = x.shape
    TAPS, CO = weight.shape[1:]
    T = (S - 1) * stride - 2 * pad + TAPS
    y = torch.empty(B, T, CO, device=x.device, dtype=x.dtype)
    steps = triton.cdiv(T + pad, stride)
    BLOCK_M, BLOCK_N = _tile(steps, 128), _tile(CO, 128)
    _transposed_fwd[(B * stride * triton.cdiv(steps, BLOCK_M), triton.cdiv(CO, BLOCK_N))](
        x, weight, y, S, T, CI, CO, TAPS=TAPS, STRIDE=stride, PAD=pad,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=_tile(CI, 128 // x.element_size()), num_warps=8, num_stages=3,
    )  # fmt: skip
    return y, (x, weight, stride, pad)


# --- backward ---
@triton.jit
def _dy_tile(DY, batch, s, tap, c, STRIDE: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """dy at the steps s stride + tap - pad of ROWS rows: a step is a row of `stride` phases; zero outside."""
    place = tap - PAD + PAD * STRIDE
    return tl.reshape(DY.load([batch, s + place // STRIDE - PAD, place % STRIDE, c]), (ROWS, COLS))


@triton.jit
def _transposed_dx(
    DY, Weight, DX, S, CI, CO, TAPS: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    s, n = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    batch = tl.program_id(2)
    pieces = tl.cdiv(CO, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(TAPS * pieces):
        tap, c = step // pieces, step % pieces * BLOCK_K
        dy = _dy_tile(DY, batch, s, tap, c, STRIDE, PAD, BLOCK_M, BLOCK_K)
        acc = tl.dot(dy, tl.reshape(Weight.load([n, tap, c]), (BLOCK_N, BLOCK_K)).T, acc)
    rows, cols = s + tl.arange(0, BLOCK_M), n + tl.arange(0, BLOCK_N)
    at = (batch.to(tl.int64) * S + rows[:, None]) * CI + cols[None, :]
    tl.store(DX + at, acc, mask=(rows[:, None] < S) & (cols[None, :] < CI))


@triton.jit
def _transposed_dweight(
    X, DY, Parts, S, CI, CO, steps, each, TAPS: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Tile (input channel, output channel) of one tap over one run of row steps; those of all sequences are one line.
    k = tl.program_id(0) * BLOCK_K
    tap, c = tl.program_id(1) % TAPS, tl.program_id(1) // TAPS * BLOCK_N
    split = tl.program_id(2)
    pieces = tl.cdiv(S, BLOCK_M)
    acc = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    for step in range(split * each, tl.minimum((split + 1) * each, steps)):
        batch, s = step // pieces, step % pieces * BLOCK_M
        xt = tl.reshape(X.load([batch, s, k]), (BLOCK_M, BLOCK_K)).T
        acc = tl.dot(xt, _dy_tile(DY, batch, s, tap, c, STRIDE, PAD, BLOCK_M, BLOCK_N), acc)
    rows, cols = k + tl.arange(0, BLOCK_K), c + tl.arange(0, BLOCK_N)
    at = ((split * CI + rows[:, None]).to(tl.int64) * TAPS + tap) * CO + cols[None, :]
    tl.store(Parts + at, acc, mask=(rows[:, None] < CI) & (cols[None, :] < CO))


def _tiles(tensor, *block):
    """A descriptor of tiles of a matrix, or of the matrices of a batch; of a copy where rows are not aligned."""
    step = 16 // tensor.element_size()
    width = tensor.shape[-1]
    outer = tensor.stride()[:-1]
    if tensor.stride(-1) != 1 or any(s % step or s < width for s in outer) or tensor.storage_offset() % step:
        dense = tensor.new_empty(*tensor.shape[:-1], triton.cdiv(width, step) * step)[..., :width]
        dense.copy_(tensor)
        tensor = dense
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(block))


def _up(size):
    return max(16, triton.next_power_of_2(size))


def backward(saved, grad_y, needs=None):
    x, weight, stride, pad = saved
    need_x, need_w = needs or (True, True)
    B, S, CI = x.shape
    TAPS, CO = weight.shape[1:]
    T, depth = grad_y.shape[1], 128 // x.element_size()
    if T % stride:
        # Steps come in rows of `stride` phases: the last row is filled up with zeros.
        filled = grad_y.new_zeros(B, triton.cdiv(T, stride) * stride, CO)
        filled[:, :T].copy_(grad_y)
        grad_y = filled
    phases = grad_y.unflatten(1, (-1, stride))
    constants = {"TAPS": TAPS, "STRIDE": stride, "PAD": pad}
    dx = dweight = None
    if need_x:
        dx = torch.empty_like(x)
        BM, BN, BK = min(256, _up(S)), min(128, _up(CI)), min(depth, _up(CO))
        _transposed_dx[(triton.cdiv(S, BM), triton.cdiv(CI, BN), B)](
            _tiles(phases, 1, BM, 1, BK), _tiles(weight, BN, 1, BK), dx, S, CI, CO, **constants,
            BLOCK_M=BM, BLOCK_N=BN, BLOCK_K=BK, num_warps=8, num_stages=4,
        )  # fmt: skip
    if need_w:
        BK, BN, BM = min(128, _up(CI)), min(256, _up(CO)), min(depth, _up(S))
        tiles_k, tiles_n = triton.cdiv(CI, BK), triton.cdiv(CO, BN)
        # One wave on 132 processors, but no split shorter than eight steps.
        steps = B * triton.cdiv(S, BM)
        splits = max(1, min(steps // 8, 132 // (TAPS * tiles_k * tiles_n)))
        each = triton.cdiv(steps, splits)
        splits = triton.cdiv(steps, each)
        parts = torch.empty(splits, CI, TAPS, CO, device=x.device, dtype=torch.float32)
        _transposed_dweight[(tiles_k, TAPS * tiles_n, splits)](
            _tiles(x, 1, BM, BK), _tiles(phases, 1, BM, 1, BN), parts, S, CI, CO, steps, each, **constants,
            BLOCK_M=BM, BLOCK_N=BN, BLOCK_K=BK, num_warps=8, num_stages=4,
        )  # fmt: skip
        dweight = parts.sum(0).to(weight.dtype)
    return dx, dweight


# --- check ---
SWEEP = (
    {"B": 2, "S": 32, "CI": 16, "CO": 16, "TAPS": 4, "stride": 2, "pad": 1},
    {"B": 3, "S": 45, "CI": 18, "CO": 13, "TAPS": 5, "stride": 3, "pad": 0},
    {"B": 1, "S": 19, "CI": 32, "CO": 16, "TAPS": 3, "stride": 1, "pad": 1, "dtype": "bfloat16"},
    {"B": 1, "S": 300, "CI": 16, "CO": 8, "TAPS": 2, "stride": 3, "pad": 0, "dtype": "float16"},
)
BENCH = ({"B": 32, "S": 2048, "CI": 512, "CO": 256, "TAPS": 8, "stride": 4, "pad": 2, "dtype": "bfloat16"},)


def make_args(B, S, CI, CO, TAPS, stride, pad, dtype="float32", device="cpu", seed=0):
    if (S - 1) * stride - 2 * pad + TAPS < 1:
        raise ValueError("the padding leaves no output")
    g = torch.Generator().manual_seed(seed)
    tensors = (torch.randn(B, S, CI, generator=g), torch.randn(CI, TAPS, CO, generator=g) * CI**-0.5)
    x, weight = (t.to(device=device, dtype=getattr(torch, dtype)) for t in tensors)
    return x, weight, stride, pad


def reference(x, weight, stride, pad):
    y = torch.nn.functional.conv_transpose1d(x.transpose(1, 2), weight.transpose(1, 2), stride=stride, padding=pad)
    return y.transpose(1, 2)
