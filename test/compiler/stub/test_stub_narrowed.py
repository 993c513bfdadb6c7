"""Ways through a stub that SWEEP shows in float32 alone are derived as in the narrow dtype that other entries name."""

from __future__ import annotations

from pathlib import Path

from kernel_agent.compiler.derive import drafts
from kernel_agent.oracle import describe
from kernel_agent.pairs.userfile import read_file
from kernel_agent.sandbox import Sandbox

FORWARD = """
import torch
import triton
import triton.language as tl

from kernel_agent import autodiff


@triton.jit
def activation_kernel(X, Y, N, HOW: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + offs, mask=offs < N, other=0.0)
    if HOW == "exp":
        y = {exp}
    else:
        y = tl.sigmoid(x.to(tl.float32))
    tl.store(Y + offs, y, mask=offs < N)


@autodiff
def activation(x, how):
    y = torch.empty_like(x)
    activation_kernel[(triton.cdiv(x.numel(), 64),)](x, y, x.numel(), HOW=how, BLOCK=64)
    return y


SWEEP = [dict(N=100, how="exp"), dict(N=100, how="sigmoid", dtype="bfloat16")]


def make_args(N, how, dtype="float32", device="cuda"):
    return torch.randn(N, device=device).to(getattr(torch, dtype)), how
"""


def exponentials(text: str, folder: Path, sandbox: Sandbox) -> list[str]:
    """Lines of the plain backward that compute or load for `exp`, whose kernel is the one without a sigmoid."""
    path = folder / "forward.py"
    path.write_text(FORWARD.replace("{exp}", text))
    found, _ = drafts(describe(read_file(path), sandbox), sandbox)
    kernels = found[-1].candidate.backward.split("@triton.jit")
    (kernel,) = [one for one in kernels if "tl.exp(" in one]
    return [line.strip() for line in kernel.split("\n")]


def test_conversions_of_a_way_that_was_seen_in_float32_are_kept(tmp_path: Path, sandbox: Sandbox) -> None:
    # In float32 the conversion is none, and its exponential was printed without it: of bfloat16 Triton computes none,
    # and products of two loads were rounded.
    lines = exponentials("tl.exp(x.to(tl.float32))", tmp_path, sandbox)
    assert "x = tl.load(X + offs, mask=mask, other=0.0).to(tl.float32)" in lines


def test_a_way_that_takes_no_narrow_tensors_is_derived_as_it_was_seen(tmp_path: Path, sandbox: Sandbox) -> None:
    # Triton refuses this kernel in bfloat16, where the stub need not be right: no reason to refuse it in float32.
    lines = exponentials("tl.exp(x)", tmp_path, sandbox)
    assert "x = tl.load(X + offs, mask=mask, other=0.0)" in lines
