"""A loop that makes one trip at every entry of SWEEP is a loop all the same."""

from __future__ import annotations

from pathlib import Path

from kernel_agent.compiler.derive import derive
from kernel_agent.gate.options import GateOptions
from kernel_agent.oracle import describe
from kernel_agent.pairs.userfile import read_file
from kernel_agent.sandbox import Sandbox

ODD = GateOptions(seeds=(0,), max_cases=40)
"""With sizes beyond those of SWEEP."""

FORWARD = """
import torch
import triton
import triton.language as tl

from kernel_agent import autodiff


@triton.jit
def length_kernel(X, Y, D: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, D, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(X + row * D + cols, mask=cols < D, other=0.0)
        squares += x * x
    tl.store(Y + row, tl.sqrt(tl.sum(squares, 0)))


@autodiff
def lengths(x):
    M, D = x.shape
    y = torch.empty(M, device=x.device)
    length_kernel[(M,)](x, y, D, BLOCK=64)
    return y


SWEEP = [dict(M=8, D=64), dict(M=3, D=32)]


def make_args(M, D, device="cuda"):
    return (torch.randn(M, D, device=device),)
"""


def test_a_row_of_one_tile_does_not_stand_for_longer_rows(tmp_path: Path, sandbox: Sandbox) -> None:
    # Triton writes a single trip out, and rows of 129 columns got the gradient of their first tile: red in the gate
    # under every schedule, although one look at that size shows the loop.
    path = tmp_path / "forward.py"
    path.write_text(FORWARD)
    found = derive(describe(read_file(path), sandbox), sandbox, options=ODD)
    assert found.verdict.green, found.verdict.message
    assert "for start in range(0, D, BLOCK):" in found.draft.candidate.backward
