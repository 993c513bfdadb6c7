"""A ledger to render: a scripted run with times, versions and names that are the same on every machine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kernel_agent.agent.events import Entry, RunStarted
from kernel_agent.agent.ledger import read_ledger
from kernel_agent.agent.orchestrator import FinishedRun
from kernel_agent.agent.runs import run
from kernel_agent.machine import Versions

sys.path.insert(0, str(Path(__file__).parents[1] / "agent"))

from scripted import BACKWARD, CRASHING, NO_CODE, SWAPPED, Script, config, reply_text


@pytest.fixture
def finished(tmp_path: Path) -> FinishedRun:
    """Wrong, crash, no code (rolls back), right."""
    script = Script(reply_text(SWAPPED), reply_text(CRASHING), NO_CODE, reply_text(BACKWARD))
    return run(config(tmp_path, patience=2), tools=script.tools, model=script.model)


@pytest.fixture
def entries(finished: FinishedRun) -> tuple[Entry, ...]:
    """The ledger of that run, one second per event."""
    return tuple(_fixed(entry) for entry in read_ledger(finished.folder.ledger).entries)


def _fixed(entry: Entry) -> Entry:
    event = entry.event
    if isinstance(event, RunStarted):
        versions = Versions(kernel_agent="0.1.0", python="3.11.0", torch="2.13.0", triton="3.7.1")
        event = event.model_copy(update={"versions": versions, "run_id": "20260102T030405Z-abcd"})
    return entry.model_copy(update={"at": f"2026-01-02T03:04:{entry.number:02d}.000Z", "event": event})
