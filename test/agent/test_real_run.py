"""One run through the real truth, gate and delivery; only the replies are written beforehand."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from scripted import BACKWARD, CRASHING, SWAPPED, Script, config, reply_text

from kernel_agent.agent.events import Outcome
from kernel_agent.agent.orchestrator import FinishedRun
from kernel_agent.agent.runs import resume, run
from kernel_agent.certificate.judged_again import recheck
from kernel_agent.certificate.reading import read_certificate
from kernel_agent.gate.verdict import Status
from kernel_agent.models.replay import find_recording
from kernel_agent.sandbox import Sandbox


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    script = Script(reply_text(SWAPPED), reply_text(CRASHING), reply_text(BACKWARD))
    out = tmp_path_factory.mktemp("out")
    return run(config(out, rag=False, max_iters=3, mutant_seconds=15.0), model=script.model)


def test_wrong_and_crashing_drafts_are_seen_and_the_right_one_is_delivered(finished: FinishedRun) -> None:
    statuses = [r.verdict.status for r in finished.state.rounds if r.verdict is not None]
    assert statuses == [Status.WRONG_GRADIENT, Status.CRASHED, Status.GREEN]
    first = finished.state.rounds[0].verdict
    assert first is not None
    assert first.grad == "w", "dx is right, so the verdict names w"
    assert finished.outcome is Outcome.DELIVERED


def test_the_truth_was_cross_checked_before_the_first_ask(finished: FinishedRun) -> None:
    assert finished.state.truth is not None
    assert finished.state.truth.passed
    assert finished.state.truth.worst < 1e-5


def test_the_delivered_files_say_what_was_proven(finished: FinishedRun) -> None:
    assert finished.state.delivered is not None
    certificate = json.loads((finished.folder.product / "certificate.json").read_text())
    assert certificate["verdict"]["status"] == "GREEN"
    assert certificate["provenance"]["asks"] == 3
    assert certificate["provenance"]["run_id"] == finished.folder.run_id
    operator = finished.folder.product / "product_backward.py"
    assert importlib.util.spec_from_file_location("product_backward", operator) is not None


def test_the_delivered_certificate_holds_when_it_is_judged_again(finished: FinishedRun, sandbox: Sandbox) -> None:
    # The forward that the truth is of is not in the delivered file: the certificate has to carry it.
    certificate = read_certificate(finished.folder.product / "certificate.json")
    found = recheck(certificate, sandbox, folder=finished.folder.product)
    assert found.holds, found
    assert not found.machine


def test_the_gate_was_tried_on_what_is_wrong_before_and_after(finished: FinishedRun) -> None:
    first, last = finished.state.tried
    assert first.digest is None, "in phase 1 there is no backward yet"
    assert first.tally.killed >= 10
    assert finished.state.best is not None
    assert last.digest == finished.state.best.digest
    assert last.tally.killed
    kept = read_certificate(finished.folder.product / "certificate.json").mutants
    assert kept == first.tally + last.tally
    assert kept.survived == 0
    assert "The gate before wrong gradients" in (finished.folder.path / "trace.md").read_text()


def test_the_crash_is_shown_to_the_model_with_its_line(finished: FinishedRun) -> None:
    ask = (finished.folder.asks / "0003.md").read_text()
    assert ">" in ask
    assert "x, w = saved" in ask.split("# Verdict")[-1]


def test_the_run_can_be_replayed_through_the_gate_again(finished: FinishedRun, tmp_path: Path) -> None:
    runs = finished.folder.path.parent
    assert find_recording(finished.folder.source.read_text(), runs) is not None
    again = run(config(tmp_path, rag=False, backend="replay", replay=finished.folder.path))
    assert again.state.best is not None
    assert finished.state.best is not None
    assert again.state.best.digest == finished.state.best.digest
    assert not [notice for r in again.state.rounds if r.reply for notice in r.reply.notices], "the asks are the same"
    assert resume(again.folder.path).outcome is Outcome.DELIVERED
