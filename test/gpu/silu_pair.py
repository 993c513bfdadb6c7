"""A pair that moves enough memory to be timed, and what dishonest backwards make of it."""

from __future__ import annotations

from pathlib import Path

from kernel_agent.oracle import describe
from kernel_agent.pairs.spec import KernelSpec
from kernel_agent.pairs.userfile import read_file
from kernel_agent.sandbox import Sandbox

HEAD = '''"""SiLU over all elements."""

import torch
import triton
import triton.language as tl

META = dict(
    slug="silu_timed",
    family="activation",
    op="silu",
    schema=1,
    techniques=("elementwise",),
    saves=(),
    grads=("x",),
    dtypes=("float32",),
    license="Apache-2.0",
    origin="original",
)


# --- forward ---
@triton.jit
def _silu_fwd(X, Y, n, BLOCK: tl.constexpr):
    c = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + c, mask=c < n, other=0.0)
    tl.store(Y + c, x * tl.sigmoid(x), mask=c < n)


def forward(x):
    y = torch.empty_like(x)
    n = x.numel()
    _silu_fwd[(triton.cdiv(n, 1024),)](x, y, n, BLOCK=1024)
    return y, (x,)


# --- backward ---
@triton.jit
def _silu_bwd(DY, X, DX, n, BLOCK: tl.constexpr):
    c = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + c, mask=c < n, other=0.0)
    g = tl.load(DY + c, mask=c < n, other=0.0)
    s = tl.sigmoid(x)
    tl.store(DX + c, g * s * (1 + x * (1 - s)), mask=c < n)


'''

HONEST = """def backward(saved, grad_y):
    (x,) = saved
    g = grad_y.contiguous()
    dx = torch.empty_like(x)
    n = x.numel()
    _silu_bwd[(triton.cdiv(n, 1024),)](g, x, dx, n, BLOCK=1024)
    return dx
"""

CHECK = """

# --- check ---
SWEEP = (dict(n=1 << 22), dict(n=1 << 24))


def make_args(n, device="cpu", seed=0):
    return (torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(device),)


def reference(x):
    return torch.nn.functional.silu(x)
"""


def pair(backward: str = HONEST) -> str:
    """The text of the pair with another function `backward`."""
    return HEAD + backward + CHECK


def spec_of(folder: Path, sandbox: Sandbox) -> KernelSpec:
    """The spec of the honest pair."""
    path = folder / "silu_timed.py"
    path.write_text(pair(), encoding="utf-8")
    return describe(read_file(path), sandbox)


SIDE_STREAM = """_SIDE = []


def backward(saved, grad_y):
    (x,) = saved
    if not _SIDE:
        _SIDE.append(torch.cuda.Stream())
    g = grad_y.contiguous()
    dx = torch.empty_like(x)
    n = x.numel()
    with torch.cuda.stream(_SIDE[0]):
        _silu_bwd[(triton.cdiv(n, 1024),)](g, x, dx, n, BLOCK=1024)
    return dx
"""

LEFT_BEHIND = SIDE_STREAM.replace(
    "    with torch", "    _SIDE[0].wait_stream(torch.cuda.current_stream())\n    with torch"
)

PATCHED_CLOCKS = (
    """import time

torch.cuda.Event.elapsed_time = lambda self, other: 0.001
torch.cuda.Event.record = lambda self, stream=None: None
torch.cuda.synchronize = lambda device=None: None
torch.cuda.current_stream = lambda device=None: torch.cuda.Stream()
time.perf_counter = lambda: 0.0


"""
    + HONEST
)

REMEMBERED = """_KNOWN = []


def backward(saved, grad_y):
    (x,) = saved
    if not _KNOWN:
        dx = torch.empty_like(x)
        n = x.numel()
        _silu_bwd[(triton.cdiv(n, 1024),)](grad_y.contiguous(), x, dx, n, BLOCK=1024)
        _KNOWN.append(dx)
    return _KNOWN[0]
"""

TIRED = """_CALLS = []


def backward(saved, grad_y):
    (x,) = saved
    g = grad_y.contiguous()
    dx = torch.empty_like(x)
    n = x.numel()
    _CALLS.append(1)
    if len(_CALLS) < 8:
        _silu_bwd[(triton.cdiv(n, 1024),)](g, x, dx, n, BLOCK=1024)
    else:
        _silu_bwd[(1,)](g, x, dx, n, BLOCK=1024)
    return dx
"""

WILD = """def backward(saved, grad_y):
    (x,) = saved
    g = grad_y.contiguous()
    dx = torch.empty_like(x)
    n = x.numel()
    _silu_bwd[(1 << 20,)](g, x, dx, 1 << 40, BLOCK=1024)
    return dx
"""

COARSE = HONEST.replace("_silu_bwd[", "_silu_coarse[")

COARSE_KERNEL = """@triton.jit
def _silu_coarse(DY, X, DX, n, BLOCK: tl.constexpr):
    c = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + c, mask=c < n, other=0.0).to(tl.bfloat16).to(tl.float32)
    g = tl.load(DY + c, mask=c < n, other=0.0)
    s = tl.sigmoid(x)
    tl.store(DX + c, g * s * (1 + x * (1 - s)), mask=c < n)


"""

UNWRITTEN = HONEST.replace("(triton.cdiv(n, 1024),)", "(n // 1024 - 1,)")

GREEDY = HONEST.replace(
    "    dx = torch",
    "    total = torch.cuda.mem_get_info()[1]\n    held = x.new_empty(int(total * 0.95) // 4)\n    dx = torch",
)
