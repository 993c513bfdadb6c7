"""Transposed conv1d, channels last: its backward is a plain strided conv, and that is a product with overlapping rows.

y[s stride - pad + tap] += x[s] W[:, tap], weight (CI, TAPS, CO). The forward gathers: outputs of one residue modulo the
stride form a tile, which meets every stride-th tap only. In the backward input step s reads the TAPS steps of dy from
s stride - pad on. Channels last these are one contiguous run of TAPS CO numbers, and the runs of neighbouring steps
overlap: a matrix U with row pitch stride CO that nobody stores. So dx = U W^T and dweight = x^T U, without a loop over
taps and without transposing the weight; runs that leave the sequence are masked. dweight splits the rows over programs.
"""

import torch
import triton
import triton.language as tl

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
def _run_start(m, S, T, CO, STRIDE: tl.constexpr, PAD: tl.constexpr):
    """Where the run of row m = (sequence, step) starts, and where the sequence starts that it must not leave."""
    first = (m % S * STRIDE - PAD).to(tl.int64) * CO
    return first, (m // S).to(tl.int64) * T * CO


@triton.jit
def _transposed_dx(
    DY, Weight, DX, rows, S, T, CI, CO, run, STRIDE: tl.constexpr, PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    first, sequence = _run_start(m, S, T, CO, STRIDE, PAD)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, run, BLOCK_K):
        j = start + tl.arange(0, BLOCK_K)
        at = first[:, None] + j[None, :]
        inside = (at >= 0) & (at < T * CO) & (j[None, :] < run) & (m[:, None] < rows)
        dy = tl.load(DY + sequence[:, None] + at, mask=inside, other=0.0)
        w = tl.load(Weight + n[None, :] * run + j[:, None], mask=(j[:, None] < run) & (n[None, :] < CI), other=0.0)
        acc = tl.dot(dy, w, acc)
    tl.store(DX + m.to(tl.int64)[:, None] * CI + n[None, :], acc, mask=(m[:, None] < rows) & (n[None, :] < CI))


@triton.jit
def _transposed_dweight(
    X, DY, Parts, rows, S, T, CI, CO, run, rows_each, STRIDE: tl.constexpr, PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Tile (input channel, place in the run) over the rows of one split.
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    j = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    last = tl.minimum((split + 1) * rows_each, rows)
    acc = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    for start in range(split * rows_each, last, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        first, sequence = _run_start(m, S, T, CO, STRIDE, PAD)
        x_at = m.to(tl.int64)[None, :] * CI + k[:, None]
        x = tl.load(X + x_at, mask=(m[None, :] < last) & (k[:, None] < CI), other=0.0)
        at = first[:, None] + j[None, :]
        inside = (at >= 0) & (at < T * CO) & (j[None, :] < run) & (m[:, None] < last)
        dy = tl.load(DY + sequence[:, None] + at, mask=inside, other=0.0)
        acc = tl.dot(x, dy, acc)
    at = (split * CI + k[:, None]).to(tl.int64) * run + j[None, :]
    tl.store(Parts + at, acc, mask=(k[:, None] < CI) & (j[None, :] < run))


def backward(saved, grad_y, needs=None):
    x, weight, stride, pad = saved
    need_x, need_w = needs or (True, True)
    B, S, CI = x.shape
    TAPS, CO = weight.shape[1:]
    T, rows, run = grad_y.shape[1], B * S, TAPS * CO
    # A run is contiguous only if steps and channels of the cotangent are.
    grad_y = grad_y.contiguous()
    inner = 128 // x.element_size()
    dx = dweight = None
    if need_x:
        dx = torch.empty_like(x)
        BLOCK_M, BLOCK_N = _tile(rows, 128), _tile(CI, 128)
        _transposed_dx[(triton.cdiv(rows, BLOCK_M), triton.cdiv(CI, BLOCK_N))](
            grad_y, weight, dx, rows, S, T, CI, CO, run, STRIDE=stride, PAD=pad,
            BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=_tile(run, inner), num_warps=8, num_stages=3,
        )  # fmt: skip
    if need_w:
        BLOCK_K, BLOCK_N, BLOCK_M = _tile(CI, 128), _tile(run, 128), _tile(rows, inner)
        # Two programs for each of 132 processors, but splits of at least eight row tiles.
        tiles = triton.cdiv(CI, BLOCK_K) * triton.cdiv(run, BLOCK_N)
        splits = max(1, min(rows // (8 * BLOCK_M), 264 // tiles))
        rows_each = triton.cdiv(triton.cdiv(rows, splits), BLOCK_M) * BLOCK_M
        splits = triton.cdiv(rows, rows_each)
        parts = torch.empty(splits, CI, TAPS, CO, device=x.device, dtype=torch.float32)
        _transposed_dweight[(triton.cdiv(CI, BLOCK_K), triton.cdiv(run, BLOCK_N), splits)](
            x, grad_y, parts, rows, S, T, CI, CO, run, rows_each, STRIDE=stride, PAD=pad,
            BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, num_warps=4, num_stages=3,
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
BENCH = ({"B": 16, "S": 2048, "CI": 512, "CO": 256, "TAPS": 8, "stride": 4, "pad": 2, "dtype": "bfloat16"},)


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
