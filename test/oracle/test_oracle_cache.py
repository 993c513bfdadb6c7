"""Truths on disk: every tensor comes back as it went, damage is a miss, nothing is unpickled."""

from __future__ import annotations

import math

import pytest
import torch

from kernel_agent.errors import InputError
from kernel_agent.oracle.cache import DiskCache, Entry
from kernel_agent.oracle.wire import pack, unpack

TENSORS = {
    "float64": torch.randn(3, 4, dtype=torch.float64),
    "bfloat16": torch.randn(5).to(torch.bfloat16),
    "bool": torch.tensor([True, False]),
    "integer": torch.arange(6).view(2, 3),
    "transposed": torch.randn(3, 4).t(),
    "strided": torch.randn(3, 8)[:, ::2],
    "expanded": torch.randn(3, 1).expand(3, 7),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_comes_back_with_values_dtype_shape_and_strides(tmp_path, name):
    cache, tensor = DiskCache(tmp_path), TENSORS[name]
    cache.put("k", Entry({"a": 1}, {"t": tensor}))
    entry = cache.get("k")
    assert entry is not None
    assert entry.record == {"a": 1}
    back = entry.tensors["t"]
    assert back.dtype == tensor.dtype
    assert torch.equal(back, tensor)
    if tensor.numel():
        assert back.stride() == tensor.stride()


def test_an_unknown_key_is_a_miss(tmp_path):
    assert DiskCache(tmp_path / "not_there").get("k") is None


@pytest.mark.parametrize("damage", [lambda d: d[:-1], lambda d: d[:20], lambda d: b"", lambda d: b"\xff" * len(d)])
def test_a_damaged_file_is_a_miss(tmp_path, damage):
    # A run killed while writing, or a full disk, must cost time and never a wrong truth.
    cache = DiskCache(tmp_path)
    cache.put("k", Entry({}, {"t": torch.ones(8)}))
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert cache.get("k") is None


def test_arguments_of_all_plain_kinds_travel():
    value = (
        torch.ones(2),
        None,
        True,
        3,
        0.5,
        math.inf,
        "mean",
        torch.float16,
        [torch.zeros(1), 2],
        {"eps": -math.inf},
    )
    tensors: dict[str, torch.Tensor] = {}
    back = unpack(pack(value, tensors, "args"), tensors)
    assert torch.equal(back[0], value[0])
    assert back[1:8] == value[1:8]
    assert torch.equal(back[8][0], value[8][0])
    assert back[9] == value[9]


def test_a_value_that_cannot_travel_is_named():
    with pytest.raises(InputError, match="a function cannot be passed"):
        pack(lambda: None, {}, "args")
