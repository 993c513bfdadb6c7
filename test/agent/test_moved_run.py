"""A run that goes on with other software or another GPU says so, and times what it timed elsewhere again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scripted import BACKWARD, Script, config, reply_text

from kernel_agent.agent import events as ev
from kernel_agent.agent.events import Outcome
from kernel_agent.agent.ledger import read_ledger
from kernel_agent.agent.runs import Changes, resume, run
from kernel_agent.errors import EnvironmentProblem, InputError
from kernel_agent.machine import Machine, Versions, installed_versions, this_machine

FASTER = BACKWARD.replace("BLOCK=32)", "BLOCK=64)").replace("x.numel(), 32)", "x.numel(), 64)")


def machine(gpu: str = "", **versions: str) -> Machine:
    return Machine(gpu=gpu, versions=installed_versions().model_copy(update=versions))


def moved_from(path: Path, **started: object) -> None:
    """Rewrite the first line of a ledger, as if the run had been started elsewhere."""
    ledger = path / "trace.jsonl"
    first, *rest = ledger.read_text().splitlines(keepends=True)
    line = json.loads(first)
    line["event"].update(started)
    ledger.write_text(json.dumps(line) + "\n" + "".join(rest))


@pytest.fixture
def script() -> Script:
    return Script(*[reply_text(BACKWARD)] * 2, reply_text(FASTER), times={"BLOCK=64": 50.0})


@pytest.fixture
def stopped(script: Script, tmp_path: Path) -> Path:
    """A run whose proven backward was timed, and whose budget ended there."""
    path = run(config(tmp_path, max_iters=1), tools=script.tools, model=script.model).folder.path
    ledger = path / "trace.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    end = next(place for place, line in enumerate(lines) if '"budget_exhausted"' in line)
    ledger.write_text("".join(lines[:end]))  # killed in the third phase, before it was delivered
    return path


def measured(path: Path) -> int:
    return sum(isinstance(entry.event, ev.Measured) for entry in read_ledger(path / "trace.jsonl").entries)


def test_on_the_same_machine_nothing_is_timed_twice(stopped: Path, script: Script) -> None:
    before = measured(stopped)
    resume(stopped, tools=script.tools, model=script.model)
    assert before == measured(stopped) == 1


def test_what_was_timed_on_another_gpu_is_timed_again(stopped: Path, script: Script) -> None:
    # Two devices' times must never stand against each other in a decision.
    moved_from(stopped, gpu="NVIDIA H200")
    resume(stopped, tools=script.tools, model=script.model)
    assert measured(stopped) == 2
    trace = (stopped / "trace.md").read_text()
    assert "From here on: no GPU instead of NVIDIA H200." in trace
    assert "is not compared" in trace


def test_what_was_timed_with_another_triton_is_timed_again(stopped: Path, script: Script) -> None:
    versions = installed_versions().model_copy(update={"triton": "3.6.0"})
    moved_from(stopped, versions=versions.model_dump())
    assert resume(stopped, tools=script.tools, model=script.model).outcome is Outcome.DELIVERED
    assert measured(stopped) == 2
    assert f"triton {installed_versions().triton} instead of 3.6.0" in (stopped / "trace.md").read_text()


def test_another_python_alone_is_told_and_changes_no_time(stopped: Path, script: Script) -> None:
    moved_from(stopped, versions=installed_versions().model_copy(update={"python": "3.10.1"}).model_dump())
    resume(stopped, tools=script.tools, model=script.model)
    assert measured(stopped) == 1
    trace = (stopped / "trace.md").read_text()
    assert "instead of 3.10.1" in trace
    assert "is not compared" not in trace


def test_versions_of_every_machine_are_in_the_ledger(stopped: Path, script: Script) -> None:
    resume(stopped, tools=script.tools, model=script.model)
    (resumed,) = [e.event for e in read_ledger(stopped / "trace.jsonl").entries if isinstance(e.event, ev.Resumed)]
    assert resumed.machine == this_machine("auto")


def test_a_ledger_of_an_earlier_version_goes_on(stopped: Path, script: Script) -> None:
    ledger = stopped / "trace.jsonl"
    ledger.write_text(ledger.read_text().replace('"gpu":"",', "", 1))
    assert resume(stopped, tools=script.tools, model=script.model).outcome is Outcome.DELIVERED


def test_the_users_file_may_be_gone(script: Script, tmp_path: Path) -> None:
    forward = tmp_path / "product.py"
    forward.write_text(config(tmp_path).file.read_text())
    first = config(tmp_path / "out", file=forward, max_iters=1)
    script = Script(reply_text("x = ("), reply_text(BACKWARD))
    path = run(first, tools=script.tools, model=script.model).folder.path
    forward.unlink()
    finished = resume(path, changes=Changes(max_iters=2), tools=script.tools, model=script.model)
    assert finished.outcome is Outcome.DELIVERED


def test_the_device_can_be_another_one(stopped: Path, script: Script) -> None:
    finished = resume(stopped, changes=Changes(device="cpu"), tools=script.tools, model=script.model)
    assert finished.state.config is not None
    assert finished.state.config.device == "cpu"


def test_a_device_that_is_not_here_stops_before_anything_is_written(stopped: Path, script: Script) -> None:
    before = (stopped / "trace.jsonl").read_bytes()
    with pytest.raises(EnvironmentProblem, match="--device cuda:63"):
        resume(stopped, changes=Changes(device="cuda:63"), tools=script.tools, model=script.model)
    assert (stopped / "trace.jsonl").read_bytes() == before


def test_there_must_be_a_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not the folder of a run"):
        resume(tmp_path)


def test_differences_are_said_in_words() -> None:
    here = machine("NVIDIA H200", torch="2.11.0")
    before = Machine(versions=Versions(**{**here.versions.model_dump(), "torch": "2.13.0"}))
    assert here.unlike(before) == ("NVIDIA H200 instead of no GPU", "torch 2.11.0 instead of 2.13.0")
    assert here.unlike(here) == ()
