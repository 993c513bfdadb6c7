"""What is seen while a run goes on and when it is over."""

from __future__ import annotations

import io
import json

from rich.console import Console

from kernel_agent.agent.events import Entry, Outcome
from kernel_agent.agent.orchestrator import FinishedRun
from kernel_agent.gate.verdict import CaseResult, Status
from kernel_agent.models.protocol import Notice, NoticeKind
from kernel_agent.report.record import FinalRecord, final_record
from kernel_agent.report.table import final_table
from kernel_agent.report.terminal import TerminalProgress


def progress_of(entries: tuple[Entry, ...], *, terminal: bool, verbose: bool = False) -> str:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=100, highlight=False)
    case = CaseResult(case="N=64 seed=0", required=True, status=Status.GREEN)
    with TerminalProgress(console, verbose=verbose) as progress:
        for entry in entries:
            progress.on_event(entry)
            if entry.event.event == "asked":
                progress.on_text("def backward(")
                progress.on_notice(Notice(kind=NoticeKind.WAITING, text="asks/0001.md waits"))
            if entry.event.event == "candidate_extracted":
                progress.on_case(case, 1, 2)
    return stream.getvalue()


def test_each_step_is_one_line_where_there_is_no_terminal(entries: tuple[Entry, ...]) -> None:
    lines = progress_of(entries, terminal=False).splitlines()
    assert lines[0].startswith("run 20260102T030405Z-abcd: manual (script), because")
    assert "phase 2 backward: draft a backward and repair it until every check passes" in lines
    assert "phase 3 optimize: skipped, no GPU here, so nothing can be timed" in lines
    assert "  GREEN: 2 cases passed, every gradient right" in lines
    assert "  asks/0001.md waits" in lines
    assert not any("case 1 of 2" in line for line in lines), "counters move, and nothing moves in a file"


def test_counters_move_on_a_terminal(entries: tuple[Entry, ...]) -> None:
    text = progress_of(entries, terminal=True)
    assert "checking: case 1 of 2" in text or "\x1b[" in text


def test_verbose_shows_streamed_text_and_every_case(entries: tuple[Entry, ...]) -> None:
    text = progress_of(entries, terminal=False, verbose=True)
    assert "def backward(" in text
    assert "GREEN  N=64 seed=0" in text


def shown(finished: FinishedRun) -> str:
    stream = io.StringIO()
    Console(file=stream, width=200, highlight=False).print(final_table(finished))
    return stream.getvalue()


def test_the_final_table_names_gradients_asks_cost_and_files(finished: FinishedRun) -> None:
    rows = [line.split() for line in shown(finished).splitlines()]
    assert ["asks", "4"] in rows
    assert ["cost", "$0.0000"] in rows
    assert any("x" in row and "2" in row and "of" in row for row in rows)
    assert any(row[0] == "file" and row[1].endswith("product_backward.py") for row in rows if row)


def test_the_final_record_carries_the_status_for_programs(finished: FinishedRun) -> None:
    record = final_record(finished)
    read = json.loads(record.model_dump_json())
    assert read["verdict"]["status"] == "GREEN"
    assert read["outcome"] == Outcome.DELIVERED.value
    assert read["asks"] == 4
    assert FinalRecord.model_validate(read) == record
