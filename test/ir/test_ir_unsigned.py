"""Torch code on unsigned integers of 16, 32 and 64 bits: images hold their bits signed, numbers come out unsigned."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_agent.ir import CaptureError, execute

LARGE = {torch.uint16: 65_535, torch.uint32: 4_000_000_000, torch.uint64: 2**63 + 2**40}


@triton.jit
def _large(OUT, value):
    tl.store(OUT, value)


def made(dtype: torch.dtype) -> Tensor:
    """What a kernel stores, as an image."""
    out = torch.empty(1, dtype=dtype, device="cuda")
    _large[(1,)](out, LARGE[dtype])
    return out


@pytest.mark.parametrize("dtype", list(LARGE))
def test_conversions_extend_with_zeros_and_not_with_the_sign(dtype):
    def stub() -> tuple[Tensor, Tensor, Tensor]:
        out = made(dtype)
        return out.to(torch.float64), out.double() * 2, out.view(1, 1).contiguous().float()

    exact, doubled, single = execute(stub, ()).result
    assert exact.item() == LARGE[dtype]
    assert doubled.item() == 2 * LARGE[dtype]
    assert single.item() == LARGE[dtype]


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32])
def test_numbers_read_on_the_host_are_unsigned(dtype):
    def stub() -> list[int]:
        out = made(dtype)
        return [out.item(), *out.tolist(), int(out), int(out.long())]

    assert execute(stub, ()).result == [LARGE[dtype]] * 4


def test_bits_of_two_tensors_may_be_compared():
    def stub() -> bool:
        return bool((made(torch.uint16) == made(torch.uint16).clone()).all())

    assert execute(stub, ()).result is True


@pytest.mark.parametrize(
    "compute", [lambda x: x + 1, lambda x: x.sum(), lambda x: x > 3, lambda x: x == 65_535, lambda x: x.float() * x]
)
def test_what_would_read_the_bits_as_signed_is_refused(compute):
    # -1 + 1 is 0 and not 65536
    def stub() -> Tensor:
        return compute(made(torch.uint16))

    with pytest.raises(CaptureError, match="on uint16 is not followed") as caught:
        execute(stub, ())
    assert "torch.int64" in (caught.value.remedy or "")
