"""Several launches give one input its gradient: how much memory their sum takes, and whose memory it is."""

from __future__ import annotations

from pathlib import Path

from kernel_agent.compiler.derive import derive, drafts
from kernel_agent.gate.options import GateOptions
from kernel_agent.oracle import describe
from kernel_agent.pairs.userfile import read_file
from kernel_agent.sandbox import Sandbox

QUICK = GateOptions(seeds=(0,), max_elements=1 << 12, odd_sizes=1, max_cases=6)

KERNELS = """
import torch
import triton
import triton.language as tl

from kernel_agent import autodiff


@triton.jit
def taken_kernel(X, At, Y, N, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(At + n, mask=n < N, other=0)
    x = tl.load(X + at, mask=n < N, other=0.0).to(tl.float32)
    tl.store(Y + n, tl.sin(x), mask=n < N)


@triton.jit
def thinned_kernel(X, Y, N, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + 2 * n, mask=n < N // 2, other=0.0).to(tl.float32)
    tl.store(Y + n, x * x, mask=n < N // 2)


@triton.jit
def shifted_kernel(X, R, Y, N, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    r = tl.sin(tl.load(R + n, mask=n < N, other=0.0).to(tl.float32))
    tl.store(Y + n, tl.load(X + n, mask=n < N, other=0.0) + r, mask=n < N)


@triton.jit
def away_kernel(X, Y, N, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    away = tl.load(X + n, mask=n < N, other=0.0).to(tl.float32) - tl.load(X).to(tl.float32)
    tl.store(Y + n, away * away, mask=n < N)


SWEEP = [dict(N=64), dict(N=50, dtype="bfloat16")]


def make_args(N, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    x, r = (torch.randn(N, generator=g).to(device, getattr(torch, dtype)) for _ in range(2))
    return x, r, torch.randint(0, N, (N,), generator=g).to(device)
"""

STUB = """

@autodiff
def stub(x, r, at):
    rows, N = x.contiguous(), x.numel()
    y, z = torch.empty_like(x), torch.empty_like(x)
    grid = (triton.cdiv(N, 32),)
    {first}
    {second}
    return y, z
"""


def backward(first: str, second: str, folder: Path, sandbox: Sandbox) -> str:
    """Of a stub with two launches, green in the gate."""
    path = folder / "forward.py"
    path.write_text(KERNELS + STUB.format(first=first, second=second))
    found = derive(describe(read_file(path), sandbox), sandbox, options=QUICK)
    assert found.verdict.green, found.verdict.message
    return found.draft.candidate.backward


def test_a_launch_adds_to_what_an_earlier_one_has_added(tmp_path: Path, sandbox: Sandbox) -> None:
    # Each of the launches with zeros of its own would take a sum of both in torch.
    first = "taken_kernel[grid](rows, at, y, N, BLOCK=32)"
    text = backward(first, first.replace("y, N", "z, N"), tmp_path, sandbox)
    assert text.count("torch.zeros_like(rows") == 1
    assert "torch.stack(" not in text


def test_a_launch_that_stores_adds_to_what_another_has_left(tmp_path: Path, sandbox: Sandbox) -> None:
    # Stored over the sums of the first launch, these would be lost; where only every other element is stored to, the
    # rest has to stay as it is.
    text = backward(
        "thinned_kernel[grid](rows, z, N, BLOCK=32)", "taken_kernel[grid](rows, at, y, N, BLOCK=32)", tmp_path, sandbox
    )
    assert "torch.stack(" not in text
    assert text.count("torch.zeros_like(rows") == 1
    kernel = text.split("def thinned_kernel_backward")[1].split("@triton.jit")[0]
    assert "tl.load(dX +" in kernel
    assert "tl.store(dX +" in kernel


def test_sums_that_are_added_behind_are_added_to_what_another_has_left_too(tmp_path: Path, sandbox: Sandbox) -> None:
    # The launch that stores adds to what is there, in its element; the one behind does so already, and doubled it if
    # it were given the same sum once more. The gradient of the narrow input is held in float32.
    text = backward(
        "away_kernel[grid](rows, z, N, BLOCK=32)", "taken_kernel[grid](rows, at, y, N, BLOCK=32)", tmp_path, sandbox
    )
    assert "torch.stack(" not in text
    behind = text.split("def away_kernel_backward_sums")[1].split("@triton.jit")[0].split("def backward")[0]
    assert behind.count("tl.load(dX") == 2  # of the sums, and of what is there
    assert "away_kernel_backward_sums[" in text


def test_one_input_given_twice_is_added_to_once_in_what_is_there(tmp_path: Path, sandbox: Sandbox) -> None:
    # Both arguments have a gradient of their own in the plan, and there is one memory.
    first = "shifted_kernel[grid](rows, rows, z, N, BLOCK=32)"
    text = backward(first, "taken_kernel[grid](rows, at, y, N, BLOCK=32)", tmp_path, sandbox)
    assert text.count("torch.zeros_like(rows") == 1


def test_a_launch_does_not_add_to_a_cotangent_that_is_a_gradient_as_it_is(tmp_path: Path, sandbox: Sandbox) -> None:
    # What the residual gives x is the caller's own tensor: it must stay as it was.
    text = backward(
        "taken_kernel[grid](rows, at, y, N, BLOCK=32)",
        "shifted_kernel[grid](rows, r, z, N, BLOCK=32)",
        tmp_path,
        sandbox,
    ).split("def backward")[1]
    assert "torch.zeros_like(rows" in text


def test_what_is_laid_out_as_an_input_of_any_strides_is_added_to(tmp_path: Path, sandbox: Sandbox) -> None:
    # An input that nobody made contiguous has a gradient of its own strides, in which both kernels know the way.
    first = "taken_kernel[grid](x, at, y, N, BLOCK=32)"
    text = backward(first, first.replace("y, N", "z, N"), tmp_path, sandbox).split("def backward")[1]
    assert text.count("gradient_room(") == 1


def test_sums_that_others_may_cancel_are_added_in_float32(sandbox: Sandbox) -> None:
    # Moments about the first pixel: its gradient gets two sums over all pixels, from two launches, which cancel.
    # Rounded to float16 in between, what was left was too coarse on an H200. Without such sums 16 bits are kept.
    pairs = Path(__file__).resolve().parents[3] / "datasets/kernel_pairs/norm_channel"
    made = {}
    for name in ("batchnorm_add_relu", "batchnorm_train_nchw_split", "batchnorm_relu"):
        (draft, *_), _ = drafts(describe(read_file(pairs / f"{name}.py"), sandbox), sandbox, most=1)
        made[name] = draft.candidate.backward
    for name in ("batchnorm_add_relu", "batchnorm_train_nchw_split"):
        assert "torch.zeros_like)(x, dtype=torch.float32)" in made[name], name
        assert "dx.to(x.dtype)" in made[name], name
    assert "torch.zeros_like)(x)" in made["batchnorm_relu"]
    assert "dx.to(" not in made["batchnorm_relu"]
