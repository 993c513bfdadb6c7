"""Floats that kernels are compiled with are numbers like others, but where kernels ask for one of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_agent.compiler.derive import derive
from kernel_agent.gate.options import GateOptions
from kernel_agent.oracle import describe
from kernel_agent.pairs.userfile import read_file
from kernel_agent.sandbox import Sandbox

NUMBERS = GateOptions(seeds=(0,), max_elements=1 << 12, odd_sizes=1, max_cases=24)
"""With other floats than make_args gives among the cases."""


FORWARD = """
import torch
import triton
import triton.language as tl

from kernel_agent import autodiff


@triton.jit
def mixed_kernel(X, Y, N, eps: tl.constexpr, beta: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + at, mask=at < N, other=0.0)
    if beta == 0.0:
        y = tl.exp(x + eps)
    else:
        y = beta * tl.exp(x + eps) + (1 - beta) * tl.exp(-x)
    tl.store(Y + at, y, mask=at < N)


@autodiff
def mixed(x, eps, beta):
    y = torch.empty_like(x)
    mixed_kernel[(triton.cdiv(x.numel(), 64),)](x, y, x.numel(), eps=eps, beta=beta, BLOCK=64)
    return y


SWEEP = {sweep}


def make_args(N, beta, device="cuda"):
    return torch.randn(N, device=device), 0.1, beta
"""


@pytest.mark.parametrize(
    ("sweep", "conditions"),
    [
        ("[dict(N=40, beta=0.5)]", ["if not (beta != 0.0):"]),
        ("[dict(N=40, beta=0.5), dict(N=40, beta=0.25), dict(N=40, beta=0.0)]", ["if beta != 0.0:"]),
    ],
)
def test_one_backward_is_proven_for_all_floats(
    sweep: str, conditions: list[str], tmp_path: Path, sandbox: Sandbox
) -> None:
    # Each was a configuration: the gate calls with floats that SWEEP does not show, and nothing was proven.
    path = tmp_path / "forward.py"
    path.write_text(FORWARD.replace("{sweep}", sweep))
    found = derive(describe(read_file(path), sandbox), sandbox, options=NUMBERS)
    assert found.verdict.green, found.verdict.message
    backward = found.draft.candidate.backward
    assert [line.strip() for line in backward.split("\n") if "beta" in line and " if " in line] == conditions
    assert "0.1" not in backward
