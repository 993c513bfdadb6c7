"""Truths on disk by the hash of what they were computed from: raw tensors behind a JSON header, never pickle.

One file per entry: eight bytes of header length, the header (the record and the table of tensors), the tensors' bytes.
A file is written beside its place and moved there, so that a killed run leaves no half entry; a damaged one is a miss.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

FORMAT = 1
_LENGTH = 8


@dataclass(frozen=True)
class Entry:
    """One cached answer."""

    record: dict[str, Any]
    """JSON as the truth child sent it."""
    tensors: dict[str, Tensor]
    """Tensors by name, with dtype, shape and strides as stored."""


class Cache(Protocol):
    """Where truths are kept."""

    def get(self, key: str) -> Entry | None:
        """The entry of that key, or None."""

    def put(self, key: str, entry: Entry) -> None:
        """Keep an entry."""


class MemoryCache:
    """Truths for the life of one process: what is out of a candidate's reach on every machine."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def get(self, key: str) -> Entry | None:
        """The entry of that key, or None."""
        return self._entries.get(key)

    def put(self, key: str, entry: Entry) -> None:
        """Keep an entry."""
        self._entries[key] = entry


class DiskCache:
    """Truths that outlive the process, in one folder. The folder must not be readable by candidates."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, key: str) -> Entry | None:
        """The entry of that key; None when it is absent or its file is damaged."""
        path = self._path(key)
        if not path.is_file():
            return None
        data = bytearray(path.read_bytes())
        body = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
        try:
            header = json.loads(bytes(data[_LENGTH:body]))
            if header["format"] != FORMAT or header["bytes"] != len(data) - body:
                return None
            tensors = {row["name"]: _read(row, data, body) for row in header["tensors"]}
        except (ValueError, KeyError, TypeError):  # cut short or overwritten: computed again
            return None
        return Entry(header["record"], tensors)

    def put(self, key: str, entry: Entry) -> None:
        """Write an entry; the file appears whole or not at all."""
        rows, chunks, offset = [], [], 0
        for name, tensor in entry.tensors.items():
            core = _core(tensor)
            raw = core.view(torch.uint8).numpy().tobytes() if core.numel() else b""
            rows.append(
                {
                    "name": name,
                    "dtype": str(tensor.dtype).removeprefix("torch."),
                    "shape": list(tensor.shape),
                    "stride": list(tensor.stride()),
                    "offset": offset,
                    "bytes": len(raw),
                }
            )
            chunks.append(raw)
            offset += len(raw)
        header = {"format": FORMAT, "bytes": offset, "record": entry.record, "tensors": rows}
        text = json.dumps(header).encode()
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
            file.write(len(text).to_bytes(_LENGTH, "little") + text)
            for raw in chunks:
                file.write(raw)
        os.replace(file.name, self._path(key))

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.truth"


def make_cache(folder: Path | None) -> Cache:
    """A disk cache in `folder`, or a memory cache for None."""
    return MemoryCache() if folder is None else DiskCache(folder)


def _core(tensor: Tensor) -> Tensor:
    """The distinct elements of a tensor as a flat run: an expanded dimension is stored once."""
    for d, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[d] > 1:
            tensor = tensor.narrow(d, 0, 1)
    return tensor.detach().contiguous().flatten()


def _read(row: dict[str, Any], data: bytearray, body: int) -> Tensor:
    dtype, shape, stride = getattr(torch, row["dtype"]), row["shape"], row["stride"]
    if row["bytes"] == 0:
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(data, dtype=torch.uint8, count=row["bytes"], offset=body + row["offset"])
    core_shape = [1 if s == 0 else n for n, s in zip(shape, stride, strict=True)]
    values = flat.clone().view(dtype).view(core_shape)  # the clone aligns the bytes and owns them
    expanded = values.expand(shape)
    if tuple(expanded.stride()) == tuple(stride):
        return expanded
    span = 1 + sum((n - 1) * s for n, s in zip(core_shape, stride, strict=True))
    place = torch.zeros(span, dtype=dtype).as_strided(core_shape, stride)
    place.copy_(values)
    return place.as_strided(shape, stride)
