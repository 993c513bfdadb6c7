"""Truths on disk: every tensor comes back as it went, damage is a miss, nothing is unpickled."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

import pytest
import torch

from kernel_agent.errors import EnvironmentProblem, InputError
from kernel_agent.oracle.cache import DiskCache, Entry, LayeredCache, user_cache_folder
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


def test_a_flipped_bit_among_the_values_is_a_miss(tmp_path):
    # The header is whole and the length is right: only a hash of the values tells.
    cache = DiskCache(tmp_path)
    cache.put("k", Entry({}, {"t": torch.ones(8)}))
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    assert cache.get("k") is None


def big(value):
    return Entry({}, {"t": torch.full((1 << 17,), value)})


def test_the_folder_is_bounded_and_what_was_used_last_stays(tmp_path):
    cache = DiskCache(tmp_path, max_bytes=2_500_000)
    for k in range(4):
        cache.put(f"k{k}", big(float(k)))
        os.utime(tmp_path / f"k{k}.truth", (1000 + k, 1000 + k))
    assert cache.get("k0") is not None, "four times half a MiB fit; reading it makes it the newest"
    cache.put("k4", big(4.0))
    assert cache.get("k1") is None, "the one longest out of use"
    assert cache.get("k0") is not None
    assert cache.get("k4") is not None
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2_500_000


def test_an_entry_that_was_deleted_meanwhile_stays_known_to_the_process(tmp_path):
    cache = LayeredCache(DiskCache(tmp_path, max_bytes=100))
    cache.put("k", big(1.0))
    assert list(tmp_path.iterdir()) == [], "too large for the folder"
    assert cache.get("k") is not None


def test_what_says_something_of_this_machine_is_not_kept_on_disk(tmp_path):
    cache = LayeredCache(DiskCache(tmp_path))
    cache.put("k", Entry({"refusal": "out of time"}, {}), lasting=False)
    assert cache.get("k") is not None
    assert DiskCache(tmp_path).get("k") is None


def test_half_written_files_of_killed_runs_are_cleared_away(tmp_path):
    left = tmp_path / "writing-abc"
    left.write_bytes(b"half")
    os.utime(left, (1000, 1000))
    fresh = tmp_path / "writing-def"
    fresh.write_bytes(b"being written")
    DiskCache(tmp_path).put("k", Entry({}, {}))
    assert not left.exists()
    assert fresh.exists(), "another process is at it"


def test_nobody_else_can_look_into_the_folder(tmp_path):
    DiskCache(tmp_path / "new").put("k", Entry({}, {"t": torch.ones(1)}))
    assert (tmp_path / "new").stat().st_mode & 0o077 == 0
    assert (tmp_path / "new" / "k.truth").stat().st_mode & 0o077 == 0


def test_a_folder_that_cannot_be_written_is_said_with_a_remedy(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(EnvironmentProblem, match="cannot write the truths"):
        DiskCache(tmp_path / "file").put("k", Entry({}, {}))


def test_the_users_folder_follows_the_platforms_convention(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache_folder() == tmp_path / "kernel-agent" / "truth"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert user_cache_folder().is_relative_to(Path.home()), "a relative one is to be ignored"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert user_cache_folder() == Path.home() / "Library/Caches/kernel-agent/truth"


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
