"""What a torch call would return on the GPU: functions that are told by their argument are told as torch would."""

from __future__ import annotations

import pytest
import torch

from kernel_agent.ir.capture import expected
from kernel_agent.ir.capture.images import as_image


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.bool])
@pytest.mark.parametrize("name", sorted(expected._ALIKE))
@pytest.mark.parametrize("shape", [(3, 4), (), (0, 5)])
def test_a_tensor_like_another_is_told_as_on_meta_tensors(monkeypatch, name, dtype, shape):
    # An image holds float64: what is made like one of bfloat16 declares bfloat16, and kernels store that.
    image = as_image(torch.ones(shape, dtype=dtype))
    told = expected.expected_of(name, getattr(torch, name), (image,), {}, True)
    monkeypatch.setattr(expected, "_ALIKE", frozenset())
    on_meta = expected.expected_of(name, getattr(torch, name), (image,), {}, True)
    assert (type(told), told.dtype, told.shape) == (type(on_meta), on_meta.dtype, on_meta.shape)
    assert (type(told), told.dtype) == (expected.Fresh, dtype)


def test_a_tensor_like_another_of_another_dtype_has_that_one():
    image = as_image(torch.ones(3, dtype=torch.bfloat16))
    told = expected.expected_of("zeros_like", torch.zeros_like, (image,), {"dtype": torch.float32}, True)
    assert told.dtype is torch.float32
