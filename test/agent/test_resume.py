"""A run that is killed at any point comes to the same end, and no reply is asked for twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from scripted import BACKWARD, SWAPPED, Script, config, reply_text

from kernel_agent.agent import events as ev
from kernel_agent.agent.events import Entry, Outcome
from kernel_agent.agent.ledger import read_ledger
from kernel_agent.agent.runs import Changes, resume, run
from kernel_agent.config import Backend
from kernel_agent.errors import ExitCode, InternalError, InterruptedRun, WaitingForReply
from kernel_agent.models.protocol import Notice

ROOT = Path(__file__).parents[2]
SIGKILL = 9


@pytest.mark.timeout(600)
def test_a_run_killed_at_any_event_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).with_name("killed_runs.py")), str(tmp_path)]
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    environment = {"PYTHONPATH": path, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    whole, *killed = [json.loads(line) for line in done.stdout.splitlines()]
    assert whole["asks"] == ["1", "2", "3", "4", "5", "6", "7"]
    kinds = {event["event"] for event in whole["events"]}
    assert kinds >= {"planned", "techniques_retrieved", "drafts_planned", "edit_failed", "locked", "spliced"}
    assert kinds >= {"rolled_back", "set_aside", "snapshot_kept", "delivered"}
    # Twice per event, before and after it is written, except before the first one.
    assert len(killed) == 2 * (len(whole["events"]) + 1) - 1
    for place, outcome in enumerate(killed):
        where = f"kill {place} of {len(killed)}\n{done.stderr}"
        assert outcome["died"] == SIGKILL, where
        assert outcome["resumed"] == 0, where
        assert outcome["asks"] == whole["asks"], f"a reply was asked for again: {where}"
        assert outcome["events"] == whole["events"], where
        assert outcome["delivered"] == whole["delivered"], where
        assert outcome["files"] == whole["files"], where


def started(script: Script, out: Path) -> Path:
    """A run that ended red after its one ask."""
    return run(config(out, max_iters=1), tools=script.tools, model=script.model).folder.path


def test_a_damaged_last_line_is_dropped_and_told(tmp_path: Path) -> None:
    script = Script(reply_text(SWAPPED), reply_text(BACKWARD))
    path = started(script, tmp_path)
    ledger = path / "trace.jsonl"
    lines = ledger.read_bytes().splitlines(keepends=True)
    # The machine went down in the middle of the verdict.
    judged = next(index for index, line in enumerate(lines) if b'"judged"' in line)
    ledger.write_bytes(b"".join(lines[:judged]) + lines[judged][:40])
    finished = resume(path, changes=Changes(max_iters=2), tools=script.tools, model=script.model)
    assert finished.outcome is Outcome.DELIVERED
    (resumed,) = [e.event for e in read_ledger(ledger).entries if isinstance(e.event, ev.Resumed)]
    assert resumed.dropped == lines[judged][:40].decode()
    assert len(script.asked) == 2, "the first reply was in the ledger and is not asked for again"


def test_a_larger_budget_opens_a_run_that_ended_red(tmp_path: Path) -> None:
    script = Script(reply_text(SWAPPED), reply_text(BACKWARD))
    path = started(script, tmp_path)
    assert resume(path, tools=script.tools, model=script.model).outcome is Outcome.NO_GREEN_VERDICT
    finished = resume(path, changes=Changes(max_iters=2), tools=script.tools, model=script.model)
    assert finished.outcome is Outcome.DELIVERED


class Interrupter:
    """An observer at whose keyboard somebody presses Ctrl-C, or that breaks, when a certain event happens."""

    def __init__(self, event: str, raised: BaseException | None = None) -> None:
        self.event = event
        self.raised = raised or KeyboardInterrupt()

    def on_event(self, entry: Entry) -> None:
        if entry.event.event == self.event:
            raise self.raised

    def on_text(self, piece: str) -> None: ...

    def on_case(self, case: object, done: int, planned: int) -> None: ...

    def on_notice(self, notice: Notice) -> None: ...


@pytest.mark.parametrize(
    "event", ["run_started", "spec_described", "asked", "replied", "candidate_extracted", "judged"]
)
def test_ctrl_c_names_the_command_that_goes_on(tmp_path: Path, event: str) -> None:
    script = Script(reply_text(SWAPPED), reply_text(BACKWARD))
    with pytest.raises(InterruptedRun) as caught:
        run(config(tmp_path), Interrupter(event), tools=script.tools, model=script.model)
    assert caught.value.exit_code is ExitCode.INTERRUPTED
    (path,) = tmp_path.glob("product-*/runs/2*")
    assert f"kernel-agent resume {path}" in caught.value.remedy
    assert isinstance(read_ledger(path / "trace.jsonl").entries[-1].event, ev.Interrupted)
    finished = resume(path, tools=script.tools, model=script.model)
    assert finished.outcome is Outcome.DELIVERED
    assert len(script.asked) == 2


def test_a_reply_that_was_paid_for_is_taken_even_without_its_record(tmp_path: Path) -> None:
    # The process died after the text of the reply was on disk and before the record of its usage was.
    script = Script(reply_text(SWAPPED), reply_text(BACKWARD))
    hosted = config(tmp_path, backend=Backend.OPENAI)
    with pytest.raises(InterruptedRun):
        run(hosted, Interrupter("asked"), tools=script.tools, model=script.model)
    (path,) = tmp_path.glob("product-*/runs/2*")
    (path / "replies" / "0001.md").write_text(reply_text(SWAPPED))
    assert resume(path, tools=script.tools, model=script.model).outcome is Outcome.DELIVERED
    assert len(script.asked) == 1, "only the second reply was asked for"
    assert (path / "replies" / "0001.json").is_file()


def test_a_manual_reply_that_is_not_there_yet_ends_the_run_and_resuming_takes_it(tmp_path: Path) -> None:
    script = Script()
    with pytest.raises(WaitingForReply):
        run(config(tmp_path, wait=False), tools=script.tools)
    (path,) = tmp_path.glob("product-*/runs/2*")
    assert (path / "asks" / "0001.md").is_file()
    (path / "replies" / "0001.md").write_text(reply_text(BACKWARD))
    assert resume(path, tools=script.tools).outcome is Outcome.DELIVERED


def test_a_defect_of_ours_names_the_run_and_leaves_it_resumable(tmp_path: Path) -> None:
    script = Script(reply_text(BACKWARD))
    with pytest.raises(InternalError, match="internal error: ") as caught:
        run(
            config(tmp_path),
            Interrupter("asked", ZeroDivisionError("of no meaning")),
            tools=script.tools,
            model=script.model,
        )
    (path,) = tmp_path.glob("product-*/runs/2*")
    assert caught.value.run == path
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "internal error: ZeroDivisionError" in (path / "trace.md").read_text()
    assert resume(path, tools=script.tools, model=script.model).outcome is Outcome.DELIVERED


def test_a_proven_run_goes_on_in_the_optimize_phase_with_another_budget(tmp_path: Path) -> None:
    # The proof is not to be repeated: the open ask belongs to the phase that made it.
    script = Script(reply_text(BACKWARD), times={"": 100.0})
    with pytest.raises(InternalError):  # the script holds no second reply
        run(config(tmp_path, max_iters=5), tools=script.tools, model=script.model)
    (path,) = tmp_path.glob("product-*/runs/2*")
    faster = Script(reply_text(BACKWARD), reply_text(BACKWARD + "# faster\n"), times={"# faster": 50.0, "": 100.0})
    finished = resume(path, changes=Changes(max_iters=2), tools=faster.tools, model=faster.model)
    assert finished.state.best is not None
    assert finished.state.best.number == 2
    ended = [e.event.phase for e in read_ledger(path / "trace.jsonl").entries if isinstance(e.event, ev.PhaseEnded)]
    assert ended == [ev.PhaseName.REFERENCE, ev.PhaseName.BACKWARD, ev.PhaseName.OPTIMIZE]
