"""Sizes that kernels are compiled for are seen as they were asked for, also where an entry was made small."""

from __future__ import annotations

from pathlib import Path

from kernel_agent.compiler.derive import derive, drafts
from kernel_agent.gate.options import GateOptions
from kernel_agent.oracle import describe
from kernel_agent.pairs.userfile import read_file
from kernel_agent.sandbox import Sandbox

QUICK = GateOptions(seeds=(0,), max_elements=1 << 18, odd_sizes=1, max_cases=6)

FORWARD = """
import torch
import triton
import triton.language as tl

from kernel_agent import autodiff


@triton.jit
def row_kernel(X, LSE, M: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * M + tl.program_id(1)
    X += tl.program_id(0) * (M + 1) * N + tl.program_id(1) * N
    top, total = float("-inf"), 0.0
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(X + cols, mask=cols < N, other=float("-inf"))
        higher = tl.maximum(top, tl.max(x))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher))
        top = higher
    tl.store(LSE + row, top + tl.log(total))


@autodiff(inputs_require_grad=("x",))
def stub(x, keep=None):
    batch, rows, n = x.shape
    lse = torch.empty(batch, rows - 1, device=x.device)
    row_kernel[(batch, rows - 1)](x, lse, rows - 1, n, BLOCK=1024)
    return lse.sum() / keep.sum().clamp(min=1.0)


SWEEP = [dict(B=5, M=8, N=1500), dict(B=3, M=5, N=70)]


def make_args(B, M, N, device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(B, M + 1, N, generator=g).to(device), torch.ones(B, M, device=device)
"""


def test_a_loop_over_a_compiled_size_has_the_trips_that_were_asked_for(tmp_path: Path, sandbox: Sandbox) -> None:
    # 67,500 elements are more than what is looked at: with 750 columns the loop made one trip, and Triton wrote none,
    # so that the backward had the whole row in a tile. Rows were compiled in as the number that an entry
    # had, since `(M + 1) * N` had no name.
    path = tmp_path / "forward.py"
    path.write_text(FORWARD)
    found = derive(describe(read_file(path), sandbox), sandbox, options=QUICK)
    text = found.draft.candidate.backward
    assert found.verdict.green
    assert "for start in range(0, N, BLOCK):" in text
    assert "(M + 1) * N" in text
    assert "NotImplementedError" not in text


def test_what_the_stub_computes_without_gradient_is_declared_where_the_backward_repeats_it(
    tmp_path: Path, sandbox: Sandbox
) -> None:
    # The gate refused `clamp`, which the stub calls, since nothing has its adjoint: a loss over a mask was not derived.
    path = tmp_path / "forward.py"
    path.write_text(FORWARD)
    (draft,), _ = drafts(describe(read_file(path), sandbox), sandbox, most=1)
    assert "keep.sum().clamp(min=1.0)" in draft.candidate.backward
    assert "clamp" in draft.candidate.torch_ops


HEADS = """
import torch
import triton
import triton.language as tl

from kernel_agent import autodiff


@triton.jit
def gram_kernel(X, Y, rows, D: tl.constexpr):
    at, cols = tl.program_id(0) * 16 + tl.arange(0, 16), tl.arange(0, D)
    x = tl.load(X + at[:, None] * D + cols[None, :], mask=(at < rows)[:, None], other=0.0)
    tl.store(Y + at[:, None] * 16 + tl.arange(0, 16)[None, :], tl.dot(x, tl.trans(x)), mask=(at < rows)[:, None])


@autodiff
def stub(x):
    y = torch.empty(x.shape[0], 16, device=x.device)
    gram_kernel[(triton.cdiv(x.shape[0], 16),)](x, y, x.shape[0], D=x.shape[1])
    return y


SWEEP = [dict(lens=(5, 30), D=16), dict(lens=(2000, 4000), D=64, dtype="float16")]


def make_args(lens, D, dtype="float32", device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(sum(lens), D, generator=g).to(device, getattr(torch, dtype)),)
"""


def test_heads_are_not_made_too_narrow_for_a_product(tmp_path: Path, sandbox: Sandbox) -> None:
    # Lengths in a tuple are not made smaller, so that 64 columns became 8, of which Triton makes no product: a forward
    # of packed sequences was refused as one that Triton cannot compile.
    path = tmp_path / "forward.py"
    path.write_text(HEADS)
    written, _ = drafts(describe(read_file(path), sandbox), sandbox, most=1)
    assert written


LANES = """
import torch
import triton
import triton.language as tl

from kernel_agent import autodiff


@triton.jit
def quads_kernel(X, Y, N, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    at = tl.program_id(0) * N + cols
    x = tl.load(X + at, mask=cols < N, other=0.0)
    scale = tl.arange(0, BLOCK // 4).to(tl.float32)
    pair = tl.join(scale, scale + 1.0)
    tl.store(Y + at, x * tl.reshape(tl.join(pair, pair), [BLOCK]), mask=cols < N)


@autodiff(inputs_require_grad=("x",))
def stub(x):
    M, N = x.shape
    y = torch.empty_like(x)
    quads_kernel[(M,)](x, y, N, BLOCK=max(4, triton.next_power_of_2(N)))
    return y


SWEEP = [dict(M=8, N=64), dict(M=7, N=101), dict(M=16384, N=2048)]


def make_args(M, N, device="cpu", seed=0):
    return (torch.randn(M, N, generator=torch.Generator().manual_seed(seed)).to(device),)
"""


def test_a_call_whose_tile_is_folded_away_leaves_the_others_one_kernel(tmp_path: Path, sandbox: Sandbox) -> None:
    # As many rows as were asked for leave columns so few that `BLOCK // 4` is 1: the kernel of one lane is another one,
    # and a dropout had a backward for each of the sizes of SWEEP, and none for others.
    path = tmp_path / "forward.py"
    path.write_text(LANES)
    (draft,), _ = drafts(describe(read_file(path), sandbox), sandbox, most=1)
    assert "NotImplementedError" not in draft.candidate.backward
    assert "BLOCK // 4" in draft.candidate.backward


PAGES = """
import torch
import triton
import triton.language as tl

from kernel_agent import autodiff


@triton.jit
def pages_kernel(X, Y, PAGE: tl.constexpr):
    at = tl.program_id(0) * PAGE * PAGE + tl.arange(0, PAGE)[:, None] * PAGE + tl.arange(0, PAGE)[None, :]
    x = tl.load(X + at)
    tl.store(Y + at, tl.dot(x, x))


@autodiff
def stub(x):
    y = torch.empty_like(x)
    pages_kernel[(x.shape[0] * x.shape[1],)](x, y, PAGE=x.shape[2])
    return y


SWEEP = [dict(B=512, H=32, PAGE=16), dict(B=3, H=2, PAGE=16)]


def make_args(B, H, PAGE, device="cpu"):
    return (torch.randn(B, H, PAGE, PAGE, device=device),)
"""


def test_an_entry_of_which_only_pages_are_small_leaves_others_to_be_looked_at(tmp_path: Path, sandbox: Sandbox) -> None:
    # Counts are halved before long dims fit, and pages of 16 rows are taken for counts: a product over 8 rows refused
    # the file, though its second entry is small as it is.
    path = tmp_path / "forward.py"
    path.write_text(PAGES)
    found, _ = drafts(describe(read_file(path), sandbox), sandbox)
    assert found


def test_a_small_size_that_no_product_has_leaves_its_entry_among_those_looked_at(
    tmp_path: Path, sandbox: Sandbox
) -> None:
    # Halved from 32 to 8, a size is no reason to leave an entry out: with the other one alone, the backward was for
    # pages of one row, and raised for all others.
    path = tmp_path / "forward.py"
    text = PAGES.replace("tl.dot(x, x)", "x * x").replace("dict(B=512, H=32, PAGE=16)", "dict(B=512, H=32, PAGE=32)")
    path.write_text(text.replace("dict(B=3, H=2, PAGE=16)", "dict(B=3, H=2, PAGE=1)"))
    found, _ = drafts(describe(read_file(path), sandbox), sandbox)
    assert not any("NotImplementedError" in draft.candidate.backward for draft in found)
