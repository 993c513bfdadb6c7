"""A backward derived of float32 alone refuses narrower floats where the forward's kernels convert what they load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernel_agent.compiler.derive import drafts
from kernel_agent.ir import import_module
from kernel_agent.oracle import describe
from kernel_agent.pairs.userfile import read_file
from kernel_agent.sandbox import Sandbox

FORWARD = """
import torch
import triton
import triton.language as tl

from kernel_agent import autodiff


@triton.jit
def square_kernel(X, W, Y, N, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + offs, mask=offs < N, other=0.0){to}
    w = tl.load(W + offs, mask=offs < N, other=0.0){to}
    tl.store(Y + offs, x * x * w, mask=offs < N)


@autodiff
def square(x, w):
    y = torch.empty_like(x)
    square_kernel[(triton.cdiv(x.numel(), 64),)](x, w, y, x.numel(), BLOCK=64)
    return y


SWEEP = [dict(N=100), dict(N=64{dtype})]


def make_args(N, dtype="float32", device="cuda"):
    return tuple(torch.randn(2, N, device=device).to(getattr(torch, dtype)))
"""
CONVERTED = ".to(tl.float32)"


def derived(folder: Path, sandbox: Sandbox, to: str = CONVERTED, dtype: str = ""):
    """The pair as a module, and its backward's text."""
    path = folder / "forward.py"
    path.write_text(FORWARD.replace("{to}", to).replace("{dtype}", dtype))
    (draft,), _ = drafts(describe(read_file(path), sandbox), sandbox, most=1)
    pair = folder / "pair.py"
    pair.write_text(draft.pair)
    return import_module(pair, "derived_square"), draft.candidate.backward


@pytest.mark.parametrize("narrow", ["x", "w"])
def test_a_narrow_input_is_refused_where_all_that_was_seen_was_wide(
    tmp_path: Path, sandbox: Sandbox, narrow: str
) -> None:
    # `.to(tl.float32)` is nothing in float32, and the backward has none: of bfloat16 its products were rounded where
    # the forward's are not, and nothing said so.
    module, text = derived(tmp_path, sandbox)
    assert "y, w, x = saved" in text
    saved = [torch.ones(64, dtype=torch.bfloat16 if name == narrow else torch.float32) for name in "ywx"]
    with pytest.raises(NotImplementedError, match="derived for wider floats: add an entry with this dtype"):
        module.backward(tuple(saved), torch.ones(64))


@pytest.mark.parametrize(
    ("to", "dtype"),
    [("", ""), (CONVERTED, ', dtype="bfloat16"'), (" * tl.arange(0, BLOCK).to(tl.float32)", "")],
    ids=["no conversion", "seen in bfloat16", "an index alone"],
)
def test_no_dtype_is_refused_where_all_conversions_show(tmp_path: Path, sandbox: Sandbox, to: str, dtype: str) -> None:
    # A kernel without conversions computes in the dtype of its tensors, and so does its backward; what was read in
    # bfloat16 has the conversions; and those of indices show in every dtype.
    _, text = derived(tmp_path, sandbox, to, dtype)
    assert "element_size() < 4" not in text
