"""A run that stops between phase 2 and phase 3, to go on elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripted import BACKWARD, SWAPPED, Script, config, reply_text

from kernel_agent.agent import events as ev
from kernel_agent.agent.events import Outcome
from kernel_agent.agent.ledger import read_ledger
from kernel_agent.agent.runs import resume, run
from kernel_agent.errors import ExitCode, PausedRun

GOOD = reply_text(BACKWARD)


def test_a_paused_run_stops_when_the_backward_is_proven_and_delivers_when_resumed(tmp_path: Path) -> None:
    script = Script(GOOD)
    with pytest.raises(PausedRun) as stop:
        run(config(tmp_path, pause=True), tools=script.tools, model=script.model)
    assert stop.value.exit_code is ExitCode.WAITING
    assert stop.value.run is not None
    events = [entry.event for entry in read_ledger(stop.value.run / "trace.jsonl").entries]
    # Without the pause the run would go on to phase 3 here, on the machine that may have no GPU.
    assert not any(isinstance(event, ev.Delivered) for event in events)
    finished = resume(stop.value.run, tools=script.tools, model=script.model)
    assert finished.outcome is Outcome.DELIVERED
    assert len(finished.state.rounds) == 1


def test_a_run_without_a_proven_backward_ends_instead_of_pausing(tmp_path: Path) -> None:
    script = Script(reply_text(SWAPPED))
    finished = run(config(tmp_path, pause=True, max_iters=1), tools=script.tools, model=script.model)
    # A pause here would promise a phase 3 that there is nothing for.
    assert finished.outcome is Outcome.NO_GREEN_VERDICT
