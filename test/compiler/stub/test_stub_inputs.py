"""Inputs that a test made from one tensor are inputs of their own, unless they have elements in common."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernel_agent.compiler.derive import drafts
from kernel_agent.compiler.stub.trace import trace
from kernel_agent.oracle import describe
from kernel_agent.pairs.userfile import read_file
from kernel_agent.sandbox import Sandbox

FORWARD = """
import torch
import triton
import triton.language as tl

from kernel_agent import autodiff


@triton.jit
def product_kernel(S, T, Y, N, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    s = tl.load(S + offs, mask=offs < N, other=0.0)
    t = tl.load(T + offs, mask=offs < N, other=0.0)
    tl.store(Y + offs, s * t, mask=offs < N)


@autodiff(inputs_require_grad=("s",))
def product(s, t):
    y = torch.empty_like(s)
    product_kernel[(triton.cdiv(s.numel(), 64),)](s, t, y, s.numel(), BLOCK=64)
    return y


SWEEP = [dict(N=100)]


def make_args(N, device="cuda"):
    return tuple(torch.randn(2, N, device=device))
"""


def test_an_input_beside_one_that_gradients_are_wanted_of_gets_none(tmp_path: Path, sandbox: Sandbox) -> None:
    # Both lie in the memory of what make_args unbound: the gradient of the teacher's logits was computed beside that of
    # the student's, and thrown away.
    path = tmp_path / "forward.py"
    path.write_text(FORWARD)
    found, _ = drafts(describe(read_file(path), sandbox), sandbox)
    assert found
    assert all("dS" in draft.candidate.backward for draft in found)
    assert not any("dT" in draft.candidate.backward for draft in found)


@pytest.mark.parametrize(("second", "shared"), [(slice(2, 4), False), (slice(1, 3), True), (slice(0, 2), True)])
def test_inputs_share_memory_where_they_have_elements_in_common(second: slice, shared: bool) -> None:
    # What a stub writes to one of two such inputs is read of the other.
    whole = torch.randn(4, 6)

    def stub(one: Tensor, other: Tensor) -> Tensor:
        return one + other

    seen = trace(stub, (whole[:2], whole[second]), {}, Path(__file__))
    one, other = seen.inputs.values()
    assert (one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()) == shared
    assert other.stride() == (6, 1)
    assert other.storage_offset() == whole[second].storage_offset()
