"""A cotangent is read where it lies if a launch is told the strides of the output, and needs them for nothing else."""

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
def square_kernel(X, R, Y, P, M, N, y_p, y_m, y_n, BLOCK: tl.constexpr):
    {index}
    inside = (m < {rows})[:, None] & (n < N)[None, :]
    at = p * M * N + m[:, None] * N + n[None, :]
    place = p * y_p + m[:, None] * y_m + n[None, :] * y_n
    x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
    r = tl.load(R + {other}, mask=inside, other=0.0).to(tl.float32)
    tl.store(Y + place, x * x * r, mask=inside)


SWEEP = [dict(P=2, M=8, N=6), dict(P=3, M=5, N=7, dtype="bfloat16")]


def make_args(P, M, N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, r = (torch.randn(P, M, N, generator=g).to(device, getattr(torch, dtype)) for _ in range(2))
    return {arguments}


@autodiff
def square(x, r):
    P, M, N = x.shape
    y = torch.empty_like(x)
    square_kernel[{grid}](
        x.contiguous(), r{given}, y, P, M, N, y.stride(0), y.stride(1), y.stride(2), BLOCK=16
    )
    return y
"""

INDEX = """p = tl.program_id(0).to(tl.int64)
    m = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    n = tl.arange(0, BLOCK).to(tl.int64)"""
LAID_OUT = "torch.empty_like(y).copy_(grad_y)"


def backward(
    folder: Path,
    sandbox: Sandbox,
    *,
    index: str = INDEX,
    rows: str = "M",
    other: str = "at",
    arguments: str = "x.mT, r.mT",
    grid: str = "(P, triton.cdiv(M, 16))",
    given: str = ".contiguous()",
) -> str:
    """Of a launch that is told the strides of its output, green in the gate."""
    path = folder / "forward.py"
    path.write_text(FORWARD.format(index=index, rows=rows, other=other, arguments=arguments, grid=grid, given=given))
    found = derive(describe(read_file(path), sandbox), sandbox, options=QUICK)
    assert found.verdict.green, found.verdict.message
    return found.draft.candidate.backward


def test_a_cotangent_is_read_by_its_own_strides(tmp_path: Path, sandbox: Sandbox) -> None:
    text = backward(tmp_path, sandbox)
    assert LAID_OUT not in text
    assert "grad_y.stride(0), grad_y.stride(1), grad_y.stride(2)" in " ".join(text.split())


def test_one_is_laid_out_where_longer_strides_might_overflow(tmp_path: Path, sandbox: Sandbox) -> None:
    assert LAID_OUT in backward(tmp_path, sandbox, index=INDEX.replace(".to(tl.int64)", ""))


def test_one_is_laid_out_where_an_index_goes_through_two_axes(tmp_path: Path, sandbox: Sandbox) -> None:
    # Rows of all `p` lie one behind the other in the output: those of a cotangent need not.
    index = INDEX.replace("tl.program_id(0).to(tl.int64)", "0").replace("program_id(1)", "program_id(0)")
    grid, arguments = "(triton.cdiv(P * M, 16),)", "x, r"
    text = backward(tmp_path, sandbox, index=index, rows="P * M", grid=grid, arguments=arguments)
    assert LAID_OUT in text


def test_one_is_laid_out_where_its_strides_are_those_of_another_tensor(tmp_path: Path, sandbox: Sandbox) -> None:
    assert LAID_OUT in backward(tmp_path, sandbox, other="place", given=".gt(0)")
