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


RESHAPED = """
import torch
import triton
import triton.language as tl

from kernel_agent import autodiff


@triton.jit
def add_kernel(X, R, S, Y, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    s = tl.load(X + at, mask=at < N, other=0.0) + tl.load(R + at, mask=at < N, other=0.0)
    tl.store(S + at, s, mask=at < N)
    tl.store(Y + at, tl.sin(s), mask=at < N)


@autodiff
def stub(x, r):
    shape = x.shape
    x = x.contiguous().view(-1, shape[-1])
    r = r.contiguous().view(-1, shape[-1])
    s, y = torch.empty_like(x), torch.empty_like(x)
    add_kernel[(triton.cdiv(x.numel(), 64),)](x, r, s, y, x.numel(), BLOCK=64)
    return s.view(shape), y.view(shape)


SWEEP = [dict(M=9, N=7), dict(M=5, N=20, flat=True)]


def make_args(M, N, flat=False, device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, r = (torch.randn(2, M, N, generator=g).to(device) for _ in range(2))
    return x, r.view(2 * M, N) if flat else r
"""


def test_inputs_that_the_stub_reshapes_share_one_tensor_where_their_shapes_are_one(
    tmp_path: Path, sandbox: Sandbox
) -> None:
    # Each had a view of one gradient: two tensors in one memory, which the gate refuses, so that residual and
    # normalisation were left with atomic additions. The second entry has inputs of two shapes, which need two tensors.
    path = tmp_path / "forward.py"
    path.write_text(RESHAPED)
    found = derive(describe(read_file(path), sandbox), sandbox, options=QUICK)
    text = found.draft.candidate.backward
    assert found.verdict.green
    assert not any("share memory" in why for why in found.refused)
    assert "dr = dx_2 if r_shape == x_shape else dx.reshape(r_shape).clone()" in text
    assert text.count("tl.store(") == 1
    assert "atomic" not in text
    assert "dX and dX" not in text
