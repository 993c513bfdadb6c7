"""Walsh-Hadamard rotation, then a learned diagonal: the transform is its own adjoint, replayed for the diagonal."""

import torch
import triton
import triton.language as tl

META = {
    "slug": "hadamard_rotate_scale",
    "family": "low_rank",
    "op": "hadamard_transform",
    "schema": 1,
    "techniques": ("orthogonal-adjoint", "recompute", "persistent-grid", "two-stage-partials"),
    "saves": (),
    "grads": ("x", "diagonal"),
    "dtypes": ("float32", "bfloat16", "float16"),
    "license": "Apache-2.0",
    "origin": "original",
    "interpreter_ok": True,
}


# --- forward ---
@triton.jit
def _walsh_hadamard(x, ROWS: tl.constexpr, LOG_N: tl.constexpr):
    """Orthonormal transform of each row. Every stage combines neighbours and moves their bit to the front: after LOG_N
    stages each bit was combined once and stands where it began, so no reordering is left over."""
    HALF: tl.constexpr = 2 ** (LOG_N - 1)
    for _ in tl.static_range(LOG_N):
        a, b = tl.split(tl.reshape(x, (ROWS, HALF, 2)))
        stacked = tl.permute(tl.join(a + b, a - b), (0, 2, 1))
        x = tl.reshape(stacked, (ROWS, 2 * HALF))
    return x * (2.0 ** (-0.5 * LOG_N))


@triton.jit
def _hadamard_fwd(X, Diag, Y, M, ROWS: tl.constexpr, LOG_N: tl.constexpr):
    N: tl.constexpr = 2**LOG_N
    m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, N)
    at = m[:, None] * N + n[None, :]
    x = tl.load(X + at, mask=m[:, None] < M, other=0.0).to(tl.float32)
    diag = tl.load(Diag + n).to(tl.float32)
    tl.store(Y + at, _walsh_hadamard(x, ROWS, LOG_N) * diag[None, :], mask=m[:, None] < M)


def forward(x, diagonal):
    x = x.contiguous()
    M, N = x.shape
    y = torch.empty_like(x)
    ROWS = max(1, 1024 // N)
    _hadamard_fwd[(triton.cdiv(M, ROWS),)](x, diagonal, y, M, ROWS=ROWS, LOG_N=N.bit_length() - 1)
    return y, (x, diagonal)


# --- backward ---
@triton.jit
def _hadamard_bwd(DY, X, Diag, DX, Parts, M, stride_m, stride_n, ROWS: tl.constexpr, LOG_N: tl.constexpr):
    N: tl.constexpr = 2**LOG_N
    pid = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, N)
    diag = tl.load(Diag + n).to(tl.float32)
    acc = tl.zeros((ROWS, N), tl.float32)
    for start in tl.range(pid * ROWS, M, tl.num_programs(0) * ROWS, num_stages=3):
        m = start + tl.arange(0, ROWS)
        live = m[:, None] < M
        x = tl.load(X + m[:, None] * N + n[None, :], mask=live, other=0.0).to(tl.float32)
        dy = tl.load(DY + m[:, None] * stride_m + n[None, :] * stride_n, mask=live, other=0.0).to(tl.float32)
        acc += dy * _walsh_hadamard(x, ROWS, LOG_N)
        tl.store(DX + m[:, None] * N + n[None, :], _walsh_hadamard(dy * diag[None, :], ROWS, LOG_N), mask=live)
    tl.store(Parts + pid * N + n, tl.sum(acc, 0))


def backward(saved, grad_y, needs=None):
    x, diagonal = saved
    M, N = x.shape
    ROWS = max(1, 1024 // N)
    count = 2 * torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 4
    programs = max(1, min(4 * count, triton.cdiv(M, 2 * ROWS)))
    dx = torch.empty_like(x)
    parts = torch.empty(programs, N, device=x.device, dtype=torch.float32)
    _hadamard_bwd[(programs,)](
        grad_y, x, diagonal, dx, parts, M, grad_y.stride(0), grad_y.stride(1), ROWS=ROWS, LOG_N=N.bit_length() - 1
    )
    return dx, parts.sum(0).to(diagonal.dtype)


# --- check ---
SWEEP = ({"M": 70, "LOG_N": 5}, {"M": 37, "LOG_N": 7, "dtype": "float16"}, {"M": 9, "LOG_N": 6, "dtype": "bfloat16"})
BENCH = ({"M": 65536, "LOG_N": 11, "dtype": "bfloat16"},)


def make_args(M, LOG_N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, diagonal = torch.randn(M, 2**LOG_N, generator=g), torch.rand(2**LOG_N, generator=g) + 0.5
    return tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (x, diagonal))


def _walsh(bits, like):
    matrix = like.new_ones(1, 1)
    for _ in range(bits):
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


def reference(x, diagonal):
    # The transform of 2^(a + b) is a Kronecker product: two thin products of signs stand for the dense matrix.
    n = x.shape[1]
    bits = n.bit_length() - 1
    left, right = _walsh(bits // 2, x), _walsh(bits - bits // 2, x)
    grid = left @ (x.view(-1, len(left), len(right)) @ right)
    return (grid.flatten(1).float() * (diagonal.float() * n**-0.5)).to(x.dtype)
