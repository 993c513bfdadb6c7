"""Truths by the hash of what they were computed from: in memory, and on disk where no candidate can read it.

A truth on disk is one file: eight bytes of header length, the header (record, table of tensors, hash of what follows),
the tensors' bytes; raw tensors behind JSON, never pickle. A file is written beside its place and moved there, so that a
killed run leaves no half entry; a damaged one is a miss and is computed again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from kernel_agent.errors import EnvironmentProblem
from kernel_agent.usercache import user_cache

FORMAT = 2
_LENGTH = 8
_SUFFIX = ".truth"
MAX_BYTES = 2 << 30
"""Size at which the least recently used entries of a folder are deleted."""
_STALE_S = 3600.0
"""Age of a half-written file at which nobody is writing it any more."""


@dataclass(frozen=True)
class Entry:
    """One cached answer."""

    record: dict[str, Any]
    """JSON as the truth child sent it, with the provenance."""
    tensors: dict[str, Tensor]
    """Tensors by name, with dtype, shape and strides as stored."""


class Cache(Protocol):
    """Where truths are kept."""

    def get(self, key: str) -> Entry | None:
        """The entry of that key, or None."""

    def put(self, key: str, entry: Entry, *, lasting: bool = True) -> None:
        """Keep an entry; for the life of this process only when it says something of this machine (`lasting` False)."""


class MemoryCache:
    """Truths for the life of one process: what is out of a candidate's reach on every machine."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def get(self, key: str) -> Entry | None:
        """The entry of that key, or None."""
        return self._entries.get(key)

    def put(self, key: str, entry: Entry, *, lasting: bool = True) -> None:  # noqa: ARG002
        """Keep an entry."""
        self._entries[key] = entry


class DiskCache:
    """Truths that outlive the process, in one folder of bounded size. It must not be readable by candidates."""

    def __init__(self, folder: Path, max_bytes: int = MAX_BYTES) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._bytes: int | None = None
        """Size of the folder as far as this process knows."""

    def get(self, key: str) -> Entry | None:
        """The entry of that key; None when it is absent or its file is damaged. Raises `EnvironmentProblem`."""
        path = self._path(key)
        try:
            data = bytearray(path.read_bytes())
            os.utime(path)  # the entries longest out of use go first
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._problem("read", error) from error
        body = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
        try:
            header = json.loads(bytes(data[_LENGTH:body]))
            if header["format"] != FORMAT or header["sha256"] != hashlib.sha256(memoryview(data)[body:]).hexdigest():
                return None
            tensors = {row["name"]: _read(row, data, body) for row in header["tensors"]}
        except (ValueError, KeyError, TypeError):  # cut short or overwritten: computed again
            return None
        return Entry(header["record"], tensors)

    def put(self, key: str, entry: Entry, *, lasting: bool = True) -> None:
        """Write an entry; the file appears whole or not at all. Raises `EnvironmentProblem`."""
        if not lasting:
            return
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
        total = hashlib.sha256()
        for raw in chunks:
            total.update(raw)
        header = {"format": FORMAT, "sha256": total.hexdigest(), "record": entry.record, "tensors": rows}
        text = json.dumps(header).encode()
        try:
            self._write(key, [len(text).to_bytes(_LENGTH, "little"), text, *chunks])
        except OSError as error:
            raise self._problem("write", error) from error
        self._bound(_LENGTH + len(text) + offset)

    def _write(self, key: str, chunks: list[bytes]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = tempfile.NamedTemporaryFile(dir=self._folder, prefix="writing-", delete=False)  # noqa: SIM115
        try:
            with file:
                for chunk in chunks:
                    file.write(chunk)
            os.replace(file.name, self._path(key))
        except OSError:
            Path(file.name).unlink(missing_ok=True)
            raise

    def _bound(self, added: int) -> None:
        """Delete what was not used longest, down to nine tenths of the bound."""
        if self._bytes is not None:
            self._bytes += added
        if self._bytes is not None and self._bytes <= self._max_bytes:
            return
        files = []
        for path in self._folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another process deletes too
                found = path.stat()
                if path.suffix == _SUFFIX:
                    files.append((found.st_mtime, found.st_size, path))
                elif path.name.startswith("writing-") and time.time() - found.st_mtime > _STALE_S:
                    path.unlink(missing_ok=True)
        size = sum(bytes_ for _, bytes_, _ in files)
        if size > self._max_bytes:
            for _, bytes_, path in sorted(files):
                if size <= 0.9 * self._max_bytes:
                    break
                path.unlink(missing_ok=True)
                size -= bytes_
        self._bytes = size

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}{_SUFFIX}"

    def _problem(self, verb: str, error: OSError) -> EnvironmentProblem:
        return EnvironmentProblem(
            f"cannot {verb} the truths kept in {self._folder}: {error.strerror or error}",
            remedy="Make room there or delete the folder: everything in it can be computed again.",
        )


class LayeredCache:
    """A memory in front of a disk: what this process met stays, whatever is deleted on disk meanwhile."""

    def __init__(self, disk: DiskCache) -> None:
        self._memory = MemoryCache()
        self._disk = disk

    def get(self, key: str) -> Entry | None:
        """The entry of that key, or None."""
        found = self._memory.get(key)
        if found is None:
            found = self._disk.get(key)
            if found is not None:
                self._memory.put(key, found)
        return found

    def put(self, key: str, entry: Entry, *, lasting: bool = True) -> None:
        """Keep an entry in both."""
        self._memory.put(key, entry)
        self._disk.put(key, entry, lasting=lasting)


def make_cache(folder: Path | None) -> Cache:
    """A disk cache in `folder` behind a memory, or a memory alone for None."""
    return MemoryCache() if folder is None else LayeredCache(DiskCache(folder))


def user_cache_folder() -> Path:
    """Where a user's truths are kept."""
    return user_cache("truth")


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
