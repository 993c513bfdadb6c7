"""Whatever a candidate does, it has a verdict, in time, and leaves nothing. The examples are those of bench/fuzz.py."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzz import GRACE_S, JOBS, LIMITS, Gate, drawn
from fuzzed_candidates import CANDIDATES, section
from leftovers import left_since, own_temporary_folder, take_inventory

from kernel_agent.gate.verdict import Status
from kernel_agent.sandbox import Sandbox


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with own_temporary_folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def gate(folder: Path, sandbox: Sandbox) -> Gate:
    return Gate(sandbox)


def judged_without_a_trace(gate: Gate, text: str) -> Status:
    """The status, after looking that the verdict came in time and that nothing stayed."""
    before, start = take_inventory(gate.sandbox.server_pid), time.monotonic()
    verdict = gate.judge(text)
    assert time.monotonic() - start < JOBS * LIMITS.wall_s + GRACE_S
    left = left_since(before, gate.sandbox.server_pid)
    assert left.nothing, (left, text)
    assert left.memory_bytes < 100 << 20, text
    return verdict.status


def test_any_candidate_has_a_typed_verdict_in_time_and_leaves_nothing(gate: Gate) -> None:
    # An exception out of the gate, a job past its clock, a process, a file or an open descriptor that stays, fails.
    statuses: list[Status] = []
    drawn(CANDIDATES, 6, 3, lambda text: statuses.append(judged_without_a_trace(gate, text)))
    assert len(set(statuses)) > 1, "the examples differ"


@pytest.mark.parametrize(
    ("deed", "status"),
    [
        ("print 100 MB", Status.GREEN),
        ("print without end", Status.TIMED_OUT),
        ("fork bomb", None),
        ("name of an error too long", Status.CRASHED),
        ("error with halves of characters", Status.CRASHED),
        ("leave deep folders", Status.TAMPERED),  # it stays in the deepest
    ],
)
def test_a_deed_at_import_or_in_a_call_leaves_nothing(gate: Gate, deed: str, status: Status | None) -> None:
    # What is printed must not be kept whole, and a scratch folder of any shape must go. Of two limits, one is first.
    found = judged_without_a_trace(gate, section((), (deed,), (), "honest"))
    assert found is status or (status is None and found in (Status.OUT_OF_MEMORY, Status.TOO_MANY_PROCESSES))


def test_files_that_a_candidate_leaves_are_told_with_the_verdict(gate: Gate) -> None:
    # Its gradients are right, and it asks for files: which, the reader learns before it runs where they would stay.
    verdict = gate.judge(section((), ("leave files",), (), "honest"))
    assert verdict.status is Status.UNEXPLAINED, verdict.message
    (note,) = [note for note in verdict.notes if "candidate left" in note]
    assert "left 50 files where it ran, since removed: left" in note


def test_an_honest_candidate_leaves_no_file(gate: Gate) -> None:
    # Else what the gate itself puts into the folder, or a library's cache, would be told of every candidate.
    verdict = gate.judge(section((), (), (), "honest"))
    assert verdict.green, verdict.message
    assert not [note for note in verdict.notes if "candidate left" in note]
