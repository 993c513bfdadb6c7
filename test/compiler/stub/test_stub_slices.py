"""Gradients of parts that a launch is given lie as the whole tensor does, whatever gaps it has."""

from __future__ import annotations

from pathlib import Path

from kernel_agent.compiler.derive import derive
from kernel_agent.gate.options import GateOptions
from kernel_agent.oracle import describe
from kernel_agent.pairs.userfile import read_file
from kernel_agent.sandbox import Sandbox

SPACED = GateOptions(seeds=(0,), max_elements=1 << 12, odd_sizes=1, max_cases=24)
"""With inputs whose rows lie apart among the cases."""

FORWARD = """
import torch
import triton
import triton.language as tl

from kernel_agent import autodiff


@triton.jit
def gated_kernel(X, Z, Y, N, x_row, z_row, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    x = tl.load(X + row * x_row + cols, mask=cols < N, other=0.0)
    z = tl.load(Z + row * z_row + cols, mask=cols < N, other=0.0)
    tl.store(Y + row * N + cols, x * tl.sigmoid(z), mask=cols < N)


@autodiff
def gated(xz):
    x, z = xz.chunk(2, dim=-1)
    M, N = x.shape
    y = torch.empty((M, N), device=x.device, dtype=x.dtype)
    gated_kernel[(M,)](x, z, y, N, x.stride(0), z.stride(0), BLOCK=triton.next_power_of_2(N))
    return y


SWEEP = [dict(M=5, N=12)]


def make_args(M, N, device="cuda"):
    return (torch.randn(M, 2 * N, device=device),)
"""


def test_halves_of_rows_that_lie_apart_have_gradients_that_do(tmp_path: Path, sandbox: Sandbox) -> None:
    # Zeros like the input have no gaps: a launch that steps by the input's rows stored the gradient of one half into
    # the other, and no schedule of a packed projection was proven.
    path = tmp_path / "forward.py"
    path.write_text(FORWARD)
    found = derive(describe(read_file(path), sandbox), sandbox, options=SPACED)
    assert found.verdict.green, found.verdict.message
    assert "dxz = gradient_room(xz, dtype=torch.float32)" in found.draft.candidate.backward
