"""The recorded runs of LOGS/: what is told of them is what their ledgers hold."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from kernel_agent.agent import events as ev
from kernel_agent.agent.events import PhaseName
from kernel_agent.agent.ledger import read_ledger
from kernel_agent.agent.snapshots import Snapshots
from kernel_agent.agent.state import fold
from kernel_agent.bench.records import Basis
from kernel_agent.certificate.integrity import disagreements
from kernel_agent.certificate.reading import read_certificate
from kernel_agent.report.trace import render_trace

ROOT = Path(__file__).parents[2]
RUNS = sorted(folder.name for folder in (ROOT / "LOGS").iterdir() if folder.is_dir())


def test_the_page_of_the_runs_is_what_their_ledgers_say(capsys: pytest.CaptureFixture[str]):
    # A figure changed by hand, or a run exchanged without its page, is a difference here.
    spec = importlib.util.spec_from_file_location("recorded_runs_page", ROOT / "bench" / "logs.py")
    assert spec is not None
    assert spec.loader is not None
    page = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = page  # a frozen dataclass looks its module up
    spec.loader.exec_module(page)
    page.page()
    assert capsys.readouterr().out == (ROOT / "LOGS" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", RUNS)
def test_the_readable_trace_is_the_ledger(name: str):
    folder = ROOT / "LOGS" / name
    entries = read_ledger(folder / "trace.jsonl").entries
    assert render_trace(entries) == (folder / "trace.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", RUNS)
def test_replies_and_snapshots_are_those_of_the_ledger(name: str):
    folder = ROOT / "LOGS" / name
    entries = read_ledger(folder / "trace.jsonl").entries
    for entry in entries:
        if isinstance(entry.event, ev.Replied):
            kept = (folder / "replies" / f"{entry.event.number:04d}.md").read_text(encoding="utf-8")
            assert kept == entry.event.reply.text
    best = fold(entries).best
    assert best is not None
    Snapshots(folder / "snapshots").get(best.digest)  # raises when its text was changed


@pytest.mark.parametrize("name", RUNS)
def test_every_run_was_proven_and_measured_on_a_gpu_in_all_three_phases(name: str):
    folder = ROOT / "LOGS" / name
    state = fold(read_ledger(folder / "trace.jsonl").entries)
    assert state.begun == set(PhaseName)
    assert state.delivered is not None
    assert state.best is not None
    assert state.best.verdict.green
    measured = state.measured(state.best.digest, Basis.MEASURED)
    assert measured is not None
    assert measured.device == "NVIDIA H200"
    certificate = json.loads((folder / "certificate.json").read_text(encoding="utf-8"))
    assert certificate["verdict"]["status"] == "GREEN"
    assert certificate["provenance"]["asks"] == state.asks


@pytest.mark.parametrize("name", RUNS)
def test_the_certificate_can_be_judged_again_and_agrees_with_itself_and_the_ledger(name: str):
    # One of an earlier format carries no sources: `recheck` of a shipped run ended with exit code 2.
    folder = ROOT / "LOGS" / name
    certificate = read_certificate(folder / "certificate.json")
    assert disagreements(certificate, folder) == ()
    best = fold(read_ledger(folder / "trace.jsonl").entries).best
    assert best is not None
    assert certificate.verdict.cases == best.verdict.cases
    candidate = Snapshots(folder / "snapshots").get(best.digest)
    assert candidate.backward.strip() in certificate.sources.pair
