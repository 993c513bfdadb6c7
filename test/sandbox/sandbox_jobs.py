"""Jobs for the entries of `sandbox_entries`, and questions about processes that should be gone."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import kernel_agent
from kernel_agent.sandbox import Job, Limits, Report, Sandbox
from kernel_agent.sandbox.process_tree import descendants

ENTRIES = Path(__file__).resolve().parent
PATHS = [str(ENTRIES), str(Path(kernel_agent.__file__).resolve().parent.parent)]
"""What a program of its own needs on `sys.path` to import the entries and the package."""
Run = Callable[..., Report]


def job(name: str, limits: Limits | None = None, tensors: object = None, **payload: object) -> Job:
    """A job for one entry of `sandbox_entries`."""
    return Job(
        entry=f"sandbox_entries:{name}",
        payload=payload,
        tensors=tensors or {},
        limits=limits or Limits(wall_s=30),
        label=name,
        readable=(ENTRIES,),
    )


@dataclass(frozen=True)
class Watched:
    """A job that was run and the processes that were below the server when it sent its messages."""

    report: Report
    pids: list[int]


def run_watched(sandbox: Sandbox, asked: Job, **options: Any) -> Watched:
    """Run a job and note its processes as they are numbered here: inside of it they have other numbers."""
    pids: set[int] = set()
    report = sandbox.run(asked, lambda message: pids.update(below(sandbox)), **options)
    assert len(pids) >= 2, "a warden and a child at least"
    return Watched(report, sorted(pids))


def below(sandbox: Sandbox) -> list[int]:
    """All processes below the sandbox's server."""
    return [] if sandbox.server_pid is None else descendants(sandbox.server_pid)


def alive(pids: list[int]) -> list[int]:
    """Those of `pids` that still run; a zombie that init has not yet reaped does not count."""
    return [pid for pid in pids if _runs(pid)]


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(pids: list[int], seconds: float = 10) -> list[int]:
    """Give processes some time to end; returns those that did not."""
    deadline = time.monotonic() + seconds
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    return alive(pids)
