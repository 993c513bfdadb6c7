"""A derived backward suits the calls of its stub: those of SWEEP and of BENCH, in all dtypes."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_agent.compiler.derive import derive, drafts
from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.gate.options import GateOptions
from kernel_agent.oracle import describe
from kernel_agent.pairs.spec import ShapeEntry
from kernel_agent.pairs.userfile import read_file
from kernel_agent.sandbox import Sandbox

QUICK = GateOptions(seeds=(0,), max_elements=1 << 12, odd_sizes=1, max_cases=6)

WINDOWS = """
import torch
import triton
import triton.language as tl

from kernel_agent import autodiff


@triton.jit
def windows_kernel(X, Y, hop, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    x = tl.load(X + tl.program_id(0) * hop + lanes)
    tl.store(Y + tl.program_id(0) * BLOCK + lanes, x * x)


@autodiff
def stub(x, hop):
    count = (x.numel() - 32) // hop + 1
    y = torch.empty(count, 32, device=x.device)
    windows_kernel[(count,)](x, y, hop, BLOCK=32)
    return y


SWEEP = [dict(N=130, hop=40), dict(N=96, hop=32)]


def make_args(N, hop, device="cuda"):
    return torch.randn(N, device=device), hop
"""


@pytest.mark.parametrize("hop", [8, 64])
def test_windows_that_overlap_at_sizes_of_real_work_alone_are_added(hop: int, tmp_path: Path, sandbox: Sandbox) -> None:
    # The gate calls SWEEP alone, where windows lie apart: a store was printed, and a check that raised in every call
    # with the real hop. Where none overlap the store and its check are right.
    path = tmp_path / "windows.py"
    path.write_text(WINDOWS)
    facts = read_file(path).model_copy(update={"bench": (ShapeEntry(dims={"N": 4096, "hop": hop}),)})
    (found,), _ = drafts(describe(facts, sandbox), sandbox, most=1)
    assert ("stored once only if hop >= 32" in found.candidate.backward) == (hop == 64)
    assert ("tl.atomic_add" in found.candidate.backward) == (hop == 8)


HIDDEN = """
import torch
import triton
import triton.language as tl

from kernel_agent import autodiff


@triton.jit
def sum_kernel(tensors, Y, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    tl.store(Y + lanes, tl.load(tensors[0] + lanes) * tl.load(tensors[1] + lanes))


@autodiff
def stub(x, y):
    z = torch.empty_like(x)
    sum_kernel[(1,)]((x, y), z, BLOCK=32)
    return z


SWEEP = [dict(N=32)]


def make_args(N, device="cuda"):
    return torch.randn(N, device=device), torch.randn(N, device=device)
"""


def test_tensors_in_a_tuple_are_refused_with_the_line(tmp_path: Path, sandbox: Sandbox) -> None:
    # They were not seen: the launch had no tensors that gradients go to, and zeros were returned for all of them.
    path = tmp_path / "hidden.py"
    path.write_text(HIDDEN)
    with pytest.raises(CannotDerive, match=r"`sum_kernel` \(line 18\) is given a tuple of tensors for `tensors`"):
        drafts(describe(read_file(path), sandbox), sandbox, most=1)


ROUNDED = """
import torch
import triton
import triton.language as tl

from kernel_agent import autodiff


@triton.jit
def recurrence_kernel(X, Y, T, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    h = tl.load(X + lanes)
    for t in range(T):
        h = (tl.exp(-h.to(tl.float32)) + tl.load(X + t * BLOCK + lanes)).to(h.dtype)
    tl.store(Y + lanes, h)


@autodiff
def stub(x):
    y = torch.empty_like(x[0])
    recurrence_kernel[(1,)](x, y, x.shape[0], BLOCK=x.shape[1])
    return y


SWEEP = [dict(T=3, N=32, dtype="bfloat16"), dict(T=3, N=32, dtype="float16"), dict(T=3, N=32, dtype="float32")]


def make_args(T, N, dtype, device="cuda"):
    return (torch.randn(T, N, device=device, dtype=getattr(torch, dtype)),)
"""


def test_a_tape_of_rounded_values_has_the_dtype_of_the_call(tmp_path: Path, sandbox: Sandbox) -> None:
    # The kernel was read at bfloat16 and the tape was made of that in all calls: products with tensors of float16
    # did not compile.
    path = tmp_path / "rounded.py"
    path.write_text(ROUNDED)
    (found,), _ = drafts(describe(read_file(path), sandbox), sandbox, most=1)
    assert "dtype=x.dtype" in found.candidate.backward
    assert "bfloat16" not in found.candidate.backward


HEURISTICS = """
import torch
import triton
import triton.language as tl

from kernel_agent import autodiff


@triton.heuristics(
    {"BLOCK": lambda args: triton.next_power_of_2(args["N"]), "EVEN": lambda args: args["N"] == args["BLOCK"]}
)
@triton.jit
def squares_kernel(X, Y, N, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    mask = (cols < N) | EVEN
    x = tl.load(X + tl.program_id(0) * N + cols, mask=mask)
    tl.store(Y + tl.program_id(0) * N + cols, x * x, mask=mask)


@autodiff
def stub(x):
    rows, width = x.shape
    y = torch.empty_like(x)
    squares_kernel[(rows,)](x.contiguous(), y, width)
    return y


SWEEP = [dict(M=3, N=40)]


def make_args(M, N, device="cuda"):
    return torch.randn(M, N, device=device),
"""


def test_what_a_heuristic_decides_is_decided_anew_by_the_backward(tmp_path: Path, sandbox: Sandbox) -> None:
    # The 64 lanes that the one entry has were printed: of rows of 100 the last 36 had no gradient.
    path = tmp_path / "forward.py"
    path.write_text(HEURISTICS)
    (found, *_), _ = drafts(describe(read_file(path), sandbox), sandbox, most=1)
    assert "BLOCK=triton.next_power_of_2(width)" in found.candidate.backward
    assert "64" not in found.candidate.backward


BY_NAME = """
def block_for(args):
    block = 16
    while block < args["N"]:
        block *= 2
    return block


def is_even(args):
    return args["N"] == args["BLOCK"]


DECIDED = {"BLOCK": block_for, "EVEN": is_even}


@triton.heuristics(values=DECIDED)
"""


def _with_rules(rules: str) -> str:
    """The forward above, with its heuristics written in another way."""
    start, end = HEURISTICS.index("@triton.heuristics"), HEURISTICS.index("@triton.jit")
    return HEURISTICS[:start] + rules.lstrip("\n") + HEURISTICS[end:]


def test_heuristics_that_are_functions_of_the_file_are_asked_anew_too(tmp_path: Path, sandbox: Sandbox) -> None:
    # Only lambdas at the decorator were read: the 64 lanes of the one entry were printed for all others.
    path = tmp_path / "forward.py"
    path.write_text(_with_rules(BY_NAME))
    (found, *_), _ = drafts(describe(read_file(path), sandbox), sandbox, most=1)
    assert 'block_for({"N": width})' in found.candidate.backward
    assert "64" not in found.candidate.backward


def test_a_heuristic_that_cannot_be_read_is_refused(tmp_path: Path, sandbox: Sandbox) -> None:
    # What it gave at the one entry was printed, and wrong in calls with other rows.
    path = tmp_path / "forward.py"
    path.write_text(_with_rules(BY_NAME.replace('args["N"]:', 'max(args.get("N"), 1):')))
    with pytest.raises(CannotDerive, match="a heuristic of kernel `squares_kernel` decides `BLOCK`"):
        drafts(describe(read_file(path), sandbox), sandbox, most=1)


DESCRIBED = """
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernel_agent import autodiff


@triton.jit
def scaled_kernel(x_desc, W, y_desc, N, BM: tl.constexpr, BN: tl.constexpr):
    row, col = tl.program_id(0) * BM, tl.program_id(1) * BN
    cols = col + tl.arange(0, BN)
    w = tl.load(W + cols, mask=cols < N, other=0.0)
    y_desc.store([row, col], x_desc.load([row, col]) * w[None, :])


@autodiff
def stub(x, w):
    M, N = x.shape
    rows, columns = 16, 32 if N > 40 else 16
    y = torch.empty((M, N), dtype=x.dtype, device=x.device)
    TILE
    DESCRIPTORS
    scaled_kernel[(triton.cdiv(M, rows), triton.cdiv(N, columns))](x_desc, w, y_desc, N, BM=rows, BN=columns)
    return y


SWEEP = [dict(M=40, N=64), dict(M=17, N=36)]


def make_args(M, N, device="cuda"):
    return (torch.randn(M, N), torch.randn(N))
"""


def _described(descriptors: str, tile: str = "tile = [rows, columns]") -> str:
    return DESCRIBED.replace("TILE", tile).replace("DESCRIPTORS", descriptors)


@pytest.mark.parametrize(
    "descriptors",
    [
        "x_desc, y_desc = (TensorDescriptor.from_tensor(t, tile) for t in (x, y))",
        "both = [TensorDescriptor(t, [M, N], [N, 1], [rows, columns]) for t in (x, y)]; x_desc, y_desc = both",
    ],
)
def test_descriptors_of_the_stub_are_tensors_with_extents_and_strides(
    descriptors: str, tmp_path: Path, sandbox: Sandbox
) -> None:
    # Their tiles are as long as BM and BN in every call: taken for numbers, each size of BN had a kernel of its own.
    path = tmp_path / "described.py"
    path.write_text(_described(descriptors))
    found = derive(describe(read_file(path), sandbox), sandbox, options=QUICK)
    text = found.draft.candidate.backward
    assert "tl.atomic_add" not in text
    assert "[BM, BN])" in text, "the gradient is stored as the output is"
    assert text.count("@triton.jit") == 1
    assert "NotImplementedError" not in text


def test_tiles_of_descriptors_that_no_constexpr_names_are_what_the_backward_is_for(
    tmp_path: Path, sandbox: Sandbox
) -> None:
    # A call with other tiles runs another program: nothing but the descriptor tells of it.
    path = tmp_path / "described.py"
    text = _described(
        "x_desc, y_desc = (TensorDescriptor.from_tensor(t, tile) for t in (x, y))", "tile = [rows, N // 4]"
    )
    path.write_text(text.replace("dict(M=17, N=36)", "dict(M=8, N=64)").replace("BN=columns", "BN=16"))
    (draft, *_), _ = drafts(describe(read_file(path), sandbox), sandbox, most=1)
    assert "N // 4 == 16" in draft.candidate.backward


def test_a_descriptor_that_cannot_be_read_is_refused_with_what_to_write(tmp_path: Path, sandbox: Sandbox) -> None:
    path = tmp_path / "described.py"
    made = "x_desc, y_desc = map(lambda t: TensorDescriptor.from_tensor(t, tile), (x, y))"
    path.write_text(_described(made))
    with pytest.raises(CannotDerive, match="a tensor descriptor for `x_desc` that cannot be read") as refused:
        drafts(describe(read_file(path), sandbox), sandbox, most=1)
    assert "TensorDescriptor.from_tensor(name" in refused.value.remedy


BETWEEN = """
import torch
import triton
import triton.language as tl

from kernel_agent import autodiff


@triton.jit
def square_kernel(X, Y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + at, mask=at < n, other=0.0)
    tl.store(Y + at, x * x, mask=at < n)


@autodiff
def stub(x):
    y = torch.empty_like(x)
    square_kernel[(triton.cdiv(x.numel(), 64),)](x, y, x.numel(), BLOCK=64)
    return y.amax(1), y.gather(1, y.argsort(1)), torch.nn.functional.gelu(y)


SWEEP = [dict(M=10, N=12)]


def make_args(M, N, device="cuda"):
    return (torch.randn(M, N),)
"""


def test_torch_functions_that_only_choose_are_proven_with_what_their_adjoints_compute(
    tmp_path: Path, sandbox: Sandbox
) -> None:
    # The gate let a backward compute only as the stub does, and took a maximum for no computation: eq and where were
    # fallbacks.
    path = tmp_path / "between.py"
    path.write_text(BETWEEN)
    assert derive(describe(read_file(path), sandbox), sandbox, options=QUICK).verdict.green


def test_a_count_of_elements_that_the_launch_is_given_is_not_compared_with_itself(
    tmp_path: Path, sandbox: Sandbox
) -> None:
    # `zeros=not (x.numel() == x.numel())`, in the first backward that most users see.
    path = tmp_path / "between.py"
    path.write_text(BETWEEN)
    text = drafts(describe(read_file(path), sandbox), sandbox, most=1)[0][0].candidate.backward
    assert "dx = gradient_room(x, zeros=False, " in text
    assert "== x.numel()" not in text
