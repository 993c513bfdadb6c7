"""A launch that leaves parts of softmaxes is differentiated without their maxima, if all that reads them is seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_agent.compiler.derive import derive, drafts
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
def part_kernel(X, Tops, Norms, n, each, BLOCK: tl.constexpr):
    row, part = tl.program_id(0), tl.program_id(1)
    top, norm = float("-inf"), 0.0
    for start in range(part * each, tl.minimum(part * each + each, n), BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(X + row * n + at, mask=at < n, other=float("-inf"))
        higher = tl.maximum(top, tl.max(x, 0))
        norm = norm * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
        top = higher
    tl.store(Tops + row * tl.num_programs(1) + part, top)
    tl.store(Norms + row * tl.num_programs(1) + part, norm)


@triton.jit
def join_kernel(Tops, Norms, Y, parts, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    tops = tl.load(Tops + row * parts + lane, mask=lane < parts, other=float("-inf"))
    norms = tl.load(Norms + row * parts + lane, mask=lane < parts, other=0.0)
    top = tl.max(tops, 0)
    tl.store(Y + row, top + tl.log(tl.sum(norms * tl.exp(tops - top), 0)))


@autodiff
def stub(x):
    M, N = x.shape
    x = x.contiguous()
    parts = triton.cdiv(N, 32)
    tops, norms = (MADE(M, parts, device=x.device) for _ in range(2))
    y = torch.empty(M, device=x.device)
    part_kernel[(M, parts)](x, tops, norms, N, 32, BLOCK=16)
    BETWEEN
    join_kernel[(M,)](tops, norms, y, parts, BLOCK=4)
    return RESULT


SWEEP = [dict(M=3, N=77), dict(M=2, N=100)]


def make_args(M, N, device="cpu", seed=0):
    return (torch.randn(M, N, generator=torch.Generator().manual_seed(seed)).to(device),)
"""


def _file(folder: Path, made: str = "torch.empty", between: str = "", result: str = "y") -> Path:
    path = folder / "forward.py"
    path.write_text(FORWARD.replace("MADE", made).replace("BETWEEN", between).replace("RESULT", result))
    return path


def test_parts_of_a_softmax_that_one_launch_joins_have_no_tape(tmp_path: Path, sandbox: Sandbox) -> None:
    # Without the proof across launches, the maximum of each part is a cotangent's way, and its loop remembers it.
    found = derive(describe(read_file(_file(tmp_path)), sandbox), sandbox, options=QUICK)
    assert found.verdict.green
    assert "tape" not in found.draft.candidate.backward


@pytest.mark.parametrize(
    ("made", "between", "result"),
    [
        ("torch.empty", "", "y, tops"),
        ("torch.empty", "z = norms.sum()", "y, z"),
        ("torch.zeros", "", "y"),
    ],
    ids=["an output", "a torch function", "values before"],
)
def test_what_something_else_reads_or_fills_keeps_its_tape(
    tmp_path: Path, sandbox: Sandbox, made: str, between: str, result: str
) -> None:
    # A cotangent that reaches the maxima, or one of the sums, another way would be lost.
    spec = describe(read_file(_file(tmp_path, made, between, result)), sandbox)
    (draft, *_), _ = drafts(spec, sandbox, most=1)
    assert "tape" in draft.candidate.backward
