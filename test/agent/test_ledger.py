"""The ledger keeps what it was given, in order, through damage and between processes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from kernel_agent.agent.events import Delivered, Interrupted, Judged
from kernel_agent.agent.ledger import Ledger, LedgerBusy, read_ledger
from kernel_agent.errors import InputError
from kernel_agent.gate.verdict import CaseResult, GradientScore, Status, Verdict


def three_lines(path: Path) -> None:
    with Ledger.create(path) as ledger:
        for word in ("one", "two", "three"):
            ledger.append(Interrupted(line=word))


def words(path: Path) -> list[str]:
    return [entry.event.line for entry in read_ledger(path).entries if isinstance(entry.event, Interrupted)]


def test_events_come_back_as_they_were(tmp_path: Path) -> None:
    score = GradientScore(grad="x", passed=False, ratio=math.inf)
    case = CaseResult(case="N=1", required=True, status=Status.WRONG_GRADIENT, grads=(score,))
    event = Judged(number=1, digest="ab", verdict=Verdict(status=Status.WRONG_GRADIENT, cases=(case,), ratio=math.inf))
    with Ledger.create(tmp_path / "trace.jsonl") as ledger:
        written = ledger.append(event)
    assert read_ledger(tmp_path / "trace.jsonl").entries == (written,)
    assert written.event == event


@pytest.mark.parametrize("cut", [1, 5, 30])
def test_a_line_cut_short_is_dropped_and_the_next_event_takes_its_place(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "trace.jsonl"
    three_lines(path)
    path.write_bytes(path.read_bytes()[:-cut])
    with Ledger.open(path) as ledger:
        assert ledger.dropped.startswith('{"number":3')
        ledger.append(Interrupted(line="again"))
    assert words(path) == ["one", "two", "again"]


def test_bytes_that_are_no_text_are_dropped_too(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    three_lines(path)
    path.write_bytes(path.read_bytes() + b"\x00\xff\x00\n")
    with Ledger.open(path) as ledger:
        assert len(tuple(ledger)) == 3
    assert words(path) == ["one", "two", "three"]


def test_damage_above_the_last_line_is_an_error_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    three_lines(path)
    path.write_text(path.read_text().replace('"two"', '"two'))
    with pytest.raises(InputError) as caught:
        read_ledger(path)
    assert caught.value.line == 2


def test_a_line_that_is_missing_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    three_lines(path)
    first, _, third = path.read_text().splitlines(keepends=True)
    path.write_text(first + third + third)
    with pytest.raises(InputError):
        read_ledger(path)


def test_two_processes_cannot_write_the_same_ledger(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with Ledger.create(path), pytest.raises(LedgerBusy):
        Ledger.open(path)


def test_a_ledger_is_never_overwritten(tmp_path: Path) -> None:
    three_lines(tmp_path / "trace.jsonl")
    with pytest.raises(FileExistsError):
        Ledger.create(tmp_path / "trace.jsonl")


def test_half_a_line_is_taken_back_when_writing_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.jsonl"
    with Ledger.create(path) as ledger:
        ledger.append(Interrupted(line="one"))
        monkeypatch.setattr("os.fsync", _pressed)
        with pytest.raises(KeyboardInterrupt):
            ledger.append(Delivered(files=()))
        monkeypatch.undo()
        ledger.append(Interrupted(line="two"))
    assert words(path) == ["one", "two"]


def _pressed(descriptor: int) -> None:
    raise KeyboardInterrupt
