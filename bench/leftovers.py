"""What is there before and after untrusted code ran: processes, files, open descriptors and memory of this process."""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

_PATIENCE_S = 5.0


@dataclass(frozen=True)
class Inventory:
    """What is there at one moment."""

    processes: frozenset[int]
    """Below this process, or with the command line of the sandbox's server, which all it forks have, and no others."""
    files: frozenset[str]
    """In the folder where temporary files go, and in shared memory."""
    descriptors: int
    """Open in this process."""
    memory_bytes: int
    """Resident in this process and in the sandbox's server, apart from files."""


@dataclass(frozen=True)
class Left:
    """What was not there before."""

    processes: tuple[int, ...]
    files: tuple[str, ...]
    descriptors: int
    memory_bytes: int

    @property
    def nothing(self) -> bool:
        """Whether no process, file or descriptor is left. Memory is a figure, as no allocator gives all of it back."""
        return not self.processes and not self.files and self.descriptors <= 0


@contextmanager
def own_temporary_folder() -> Iterator[Path]:
    """A folder for all temporary files of this process meanwhile: what lies in it is ours. Removed at the end."""
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="kernel-agent-fuzz-") as folder:
        tempfile.tempdir = folder
        try:
            yield Path(folder)
        finally:
            tempfile.tempdir = before


def take_inventory(server: int | None, *, kept: Path | None = None) -> Inventory:
    """Count now. `server` is the sandbox's; `kept` is a file or folder that may come and go."""
    gc.collect()
    folders = (Path(tempfile.gettempdir()), Path("/dev/shm"))
    files = {str(path) for folder in folders if folder.is_dir() for path in folder.iterdir() if path != kept}
    memory = sum(_private_bytes(pid) for pid in (os.getpid(), server) if pid is not None)
    return Inventory(_processes(server), frozenset(files), len(os.listdir("/proc/self/fd")), memory)


def left_since(before: Inventory, server: int | None, *, kept: Path | None = None) -> Left:
    """What has come since. Processes that were killed get some seconds to disappear from the table."""
    give_up = time.monotonic() + _PATIENCE_S
    after = take_inventory(server, kept=kept)
    while after.processes - before.processes and time.monotonic() < give_up:
        time.sleep(0.02)
        after = take_inventory(server, kept=kept)
    return Left(
        processes=tuple(sorted(after.processes - before.processes)),
        files=tuple(sorted(after.files - before.files)),
        descriptors=after.descriptors - before.descriptors,
        memory_bytes=after.memory_bytes - before.memory_bytes,
    )


def _processes(server: int | None) -> frozenset[int]:
    found = {child.pid for child in psutil.Process().children(recursive=True)}
    if server is not None and psutil.pid_exists(server):
        command = psutil.Process(server).cmdline()
        found |= {process.pid for process in psutil.process_iter() if _command(process) == command}
    return frozenset(found)


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _private_bytes(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem") if name in fields)
