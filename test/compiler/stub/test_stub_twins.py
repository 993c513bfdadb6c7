"""Inputs that share one gradient in memory each get it in their own shape."""

from __future__ import annotations

from pathlib import Path

from kernel_agent.compiler.derive import derive
from kernel_agent.gate.options import GateOptions
from kernel_agent.oracle import describe
from kernel_agent.pairs.userfile import read_file
from kernel_agent.sandbox import Sandbox

QUICK = GateOptions(seeds=(0,), max_elements=1 << 12, odd_sizes=1, max_cases=6)

FORWARD = """
import torch
import triton
import triton.language as tl

from kernel_agent import autodiff


@triton.jit
def sum_kernel(X, R, Z, Y, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + at, mask=at < N, other=0.0) + tl.load(R + at, mask=at < N, other=0.0)
    tl.store(Y + at, tl.sin(x) + tl.load(Z + at, mask=at < N, other=0.0), mask=at < N)


@autodiff
def stub(x, r, z):
    # All three lie in memory in the order of x.
    y = torch.empty_like(x)
    sum_kernel[(triton.cdiv(x.numel(), 64),)](x, r, z, y, x.numel(), BLOCK=64)
    return y


SWEEP = [dict(M=9, N=7), dict(M=5, N=20)]


def make_args(M, N, device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, r, z = (torch.randn(M, N, generator=g).to(device) for _ in range(3))
    return x.t(), r.view(-1), z.view(1, M, N)
"""


def test_a_shared_gradient_is_viewed_as_each_input_is(tmp_path: Path, sandbox: Sandbox) -> None:
    # The gradient of r is that of x in the order of memory: reshaping that of x, which is transposed, would mix it up.
    path = tmp_path / "forward.py"
    path.write_text(FORWARD)
    found = derive(describe(read_file(path), sandbox), sandbox, options=QUICK)
    text = found.draft.candidate.backward
    assert found.verdict.green
    assert "dx.as_strided(r.shape, r.stride())" in text
    assert "grad_y.as_strided(z.shape, z.stride())" in text
    assert text.count("tl.store(") == 1
