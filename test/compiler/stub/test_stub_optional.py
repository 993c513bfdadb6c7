"""A tensor that some calls go without is asked for its form in the others alone."""

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
def gate_kernel(X, G, Y, N, BLOCK: tl.constexpr, GATED: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = tl.exp(tl.load(X + at, mask=at < N, other=0.0))
    if GATED:
        y *= tl.load(G + at, mask=at < N, other=0.0)
    tl.store(Y + at, y, mask=at < N)


@autodiff
def gated(x, g):
    if g is not None:
        g = g.reshape(-1)
    y = torch.empty_like(x)
    gate_kernel[(triton.cdiv(x.numel(), 64),)](x, g, y, x.numel(), BLOCK=64, GATED=g is not None)
    return y


SWEEP = [dict(N=40), dict(N=33, gate=False)]


def make_args(N, gate=True, device="cuda"):
    return torch.randn(3, N, device=device), torch.randn(3, N, device=device) if gate else None
"""


def test_the_gradient_of_a_tensor_that_is_bound_again_where_it_is_given_has_its_shape(
    tmp_path: Path, sandbox: Sandbox
) -> None:
    # The forward noted `g.shape` at its start: without a gate every call raised AttributeError, and nothing was proven.
    path = tmp_path / "forward.py"
    path.write_text(FORWARD)
    found = derive(describe(read_file(path), sandbox), sandbox, options=QUICK)
    assert found.verdict.green, found.verdict.message
    assert "g.shape if g is not None else None" in (found.draft.candidate.forward or "")
