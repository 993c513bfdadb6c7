"""The server's memory lies on large pages, so that a fork copies few entries: found by what the kernel says of it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from sandbox_jobs import job

from kernel_agent.sandbox import Ending, Sandbox

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def _can() -> bool:
    release = tuple(int(part) for part in os.uname().release.split(".")[:2])
    return release >= (6, 1) and SETTING.exists() and "[never]" not in SETTING.read_text()


def _on_large_pages(pid: int) -> int:
    """Megabytes."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages:")) >> 10


@pytest.mark.skipif(not _can(), reason="this kernel makes no large pages on demand")
def test_the_server_puts_its_memory_onto_large_pages_while_nobody_asks() -> None:
    with Sandbox(preload=("torch",)) as sandbox:
        assert sandbox.run(job("say_nothing")).ending is Ending.FINISHED
        pid, end = sandbox.server_pid, time.monotonic() + 60
        assert pid is not None
        while _on_large_pages(pid) < 40 and time.monotonic() < end:
            time.sleep(0.1)
        assert _on_large_pages(pid) >= 40, "torch alone holds more than that"
        # What a child reads afterwards is what there was before.
        assert sandbox.run(job("say_nothing")).ending is Ending.FINISHED
