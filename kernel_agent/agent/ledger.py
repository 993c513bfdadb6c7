"""`trace.jsonl`: the append-only record of a run, one event per line, on disk before the next step is taken.

A kill can damage the last line only. It is dropped on opening and its text is told, so that resuming can say so.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from io import FileIO
from pathlib import Path
from types import TracebackType

from pydantic import ValidationError

from kernel_agent.agent.events import Entry, Event
from kernel_agent.errors import InputError, KernelAgentError


class LedgerBusy(KernelAgentError):
    """Another process is writing to the same ledger."""


@dataclass(frozen=True)
class LedgerText:
    """A ledger as read from disk."""

    entries: tuple[Entry, ...]
    """The events, in order."""
    dropped: str
    """Text of a damaged last line, or empty."""
    length: int
    """Bytes up to the end of the last sound line."""


def read_ledger(path: Path) -> LedgerText:
    """Read a ledger. Raises `InputError` when it is missing or damaged anywhere but in its last line."""
    if not path.is_file():
        raise InputError(
            "no ledger here", remedy="give the folder of a run, such as generated/<stem>-<hash>/runs/latest", path=path
        )
    entries: list[Entry] = []
    length = 0
    lines = path.read_bytes().splitlines(keepends=True)
    for index, line in enumerate(lines):
        entry = _parse(line)
        if entry is None or entry.number != len(entries) + 1:
            if index == len(lines) - 1:
                return LedgerText(tuple(entries), line.decode(errors="replace").rstrip("\n"), length)
            raise InputError(
                "this line of the ledger is damaged",
                remedy="only a damaged last line can be repaired; start a new run",
                path=path,
                line=index + 1,
            )
        entries.append(entry)
        length += len(line)
    return LedgerText(tuple(entries), "", length)


def _parse(line: bytes) -> Entry | None:
    if not line.endswith(b"\n"):
        return None
    try:
        return Entry.model_validate(json.loads(line))
    except (ValueError, ValidationError):
        return None


class Ledger:
    """An open ledger. One process at a time may hold it; the lock dies with the process."""

    def __init__(self, path: Path, file: FileIO, text: LedgerText) -> None:
        self.path = path
        self.dropped = text.dropped
        self._file = file
        self._length = text.length
        self._entries = list(text.entries)

    @classmethod
    def create(cls, path: Path) -> Ledger:
        """Begin a new ledger. Raises `FileExistsError` rather than overwrite one."""
        return cls(path, _locked(path, "x"), LedgerText((), "", 0))

    @classmethod
    def open(cls, path: Path) -> Ledger:
        """Continue a ledger. A damaged last line is cut off, see `dropped`. Raises `InputError`, `LedgerBusy`."""
        if not path.is_file():
            read_ledger(path)
        file = _locked(path, "r+")
        text = read_ledger(path)
        file.truncate(text.length)
        file.seek(text.length)
        return cls(path, file, text)

    def append(self, event: Event) -> Entry:
        """Write one event; it is on disk when this returns, or not at all when this raises."""
        at = datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        entry = Entry(number=len(self._entries) + 1, at=at, event=event)
        line = entry.model_dump_json().encode() + b"\n"
        try:
            self._write(line)
        except BaseException:
            # Also a Ctrl-C: half a line must not stand before the event that tells of it.
            self._file.truncate(self._length)
            self._file.seek(self._length)
            raise
        self._length += len(line)
        self._entries.append(entry)
        return entry

    def _write(self, line: bytes) -> None:
        rest = memoryview(line)
        while rest:
            rest = rest[self._file.write(rest) :]
        os.fsync(self._file.fileno())

    def __iter__(self) -> Iterator[Entry]:
        return iter(tuple(self._entries))

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Keep other processes from working on a run while the block runs. Raises `LedgerBusy` when one does."""
    with _locked(path, "r+"):
        yield


def _locked(path: Path, mode: str) -> FileIO:
    file = FileIO(path, mode)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise LedgerBusy(
            f"another process is working on {path.parent.name}", remedy="wait for it, or end it, then resume"
        ) from None
    return file
