"""All processes below one, as `/proc` tells them: how the warden finds, counts, weighs and kills what a child started.

A descendant cannot leave the tree: sessions, process groups and double forks do not change it, because the warden
adopts orphans (PR_SET_CHILD_SUBREAPER).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

_KERNEL_LISTS_CHILDREN = os.path.exists(f"/proc/self/task/{os.getpid()}/children")


@dataclass(frozen=True)
class Usage:
    """What a group of processes uses right now."""

    memory_bytes: int
    """Anonymous and shared resident memory; pages shared by a fork count once per process."""
    processes: int
    threads: int


def _read(path: str) -> bytes:
    """Content of a `/proc` file; empty when the process has gone meanwhile.

    A warden reads some of them fifty times a second: a file object and a decoder took longer than the kernel does.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""
    try:
        parts = []
        while part := os.read(file, 1 << 16):
            parts.append(part)
        return b"".join(parts)
    except (ProcessLookupError, PermissionError):
        return b""
    finally:
        os.close(file)


def _numbers_in(folder: str) -> list[int]:
    try:
        return [int(name) for name in os.listdir(folder) if name.isdigit()]
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []


def children(pid: int) -> list[int]:
    """Process ids of the direct children of `pid`."""
    return _listed_children(pid) if _KERNEL_LISTS_CHILDREN else _all_children().get(pid, [])


def _listed_children(pid: int) -> list[int]:
    lists = (_read(f"/proc/{pid}/task/{thread}/children") for thread in _numbers_in(f"/proc/{pid}/task"))
    return [int(word) for text in lists for word in text.split()]


def _all_children() -> dict[int, list[int]]:
    """Children of every process, from one pass over `/proc`: for kernels without `children` files."""
    table: dict[int, list[int]] = {}
    for pid in _numbers_in("/proc"):
        fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
        if fields:
            table.setdefault(int(fields[1]), []).append(pid)
    return table


def walk(root: int) -> Iterator[int]:
    """Process ids below `root`, parents before children, each as soon as it is found."""
    table = None if _KERNEL_LISTS_CHILDREN else _all_children()
    seen, queue = {root}, deque([root])
    while queue:
        pid = queue.popleft()
        for child in _listed_children(pid) if table is None else table.get(pid, []):
            if child not in seen:
                seen.add(child)
                queue.append(child)
                yield child


def descendants(root: int) -> list[int]:
    """All of `walk`."""
    return list(walk(root))


def usage(pids: list[int]) -> Usage:
    """What these processes use together; those that have ended count nothing."""
    memory = processes = threads = 0
    for pid in pids:
        status = _read(f"/proc/{pid}/status")
        if not status or _field(status, b"State")[:1] in (b"Z", b"X"):
            continue
        processes += 1
        threads += int(_field(status, b"Threads") or 1)
        parts = (b"RssAnon", b"RssShmem") if b"\nRssAnon:" in status else (b"VmRSS",)
        memory += sum(int(_field(status, part).split()[0]) << 10 for part in parts if _field(status, part))
    return Usage(memory, processes, threads)


def _field(status: bytes, name: bytes) -> bytes:
    """What a line of a `status` file says, empty where there is none. The first line, a name, is anybody's to choose,
    and cannot hold a line of its own: the kernel writes a newline in it as two characters."""
    _, _, rest = status.partition(b"\n" + name + b":")
    return rest.partition(b"\n")[0].strip()


def kill_descendants(patience_s: float = 10.0) -> tuple[int, ...]:
    """Kill and reap everything below this process, until nothing is left. Returns what could not be killed in time."""
    me, give_up = os.getpid(), time.monotonic() + patience_s
    while True:
        left = []
        for pid in walk(me):  # killed on sight, so that a fork bomb does not grow while it is being counted
            left.append(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return ()
        if time.monotonic() > give_up:
            return tuple(left)
        time.sleep(0.001)
