"""What runs side by side in a check: only behind walls, ended with the check, and every case in some part of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernel_agent.gate import GateOptions
from kernel_agent.gate.ahead import Ahead
from kernel_agent.gate.cases import make_plan
from kernel_agent.gate.questions import ask
from kernel_agent.gate.recomputed import ENTRY, parts
from kernel_agent.sandbox import Call, Ending, Job, Sandbox

HERE = Path(__file__).resolve().parent


def wait(call: Call) -> None:
    """The entry of a child that would run on."""
    call.send({})
    time.sleep(60)


@pytest.fixture
def walled() -> Iterator[Sandbox]:
    with Sandbox(preload=("torch",)) as sandbox:
        sandbox.run(Job("builtins:id"))
        if not sandbox.keeps_apart:
            pytest.skip("this machine lacks a wall")
        yield sandbox


def test_a_sandbox_that_has_run_nothing_promises_no_walls():
    with Sandbox(preload=("torch",)) as sandbox:
        assert not sandbox.keeps_apart


def test_two_jobs_run_at_once_behind_walls(walled):
    # Each waits for a minute: one after the other, the second would not begin while the first runs.
    begun = threading.Semaphore(0)
    job = Job("test_gate_ahead:wait", readable=(HERE,))
    with Ahead(walled) as ahead:
        reports = [ahead.begin(job, lambda _: begun.release()) for _ in range(2)]
        assert all(begun.acquire(timeout=30) for _ in reports)
    assert [report().ending for report in reports] == [Ending.CANCELLED] * 2, "leaving ends what still runs"


def test_without_a_wall_a_job_does_not_begin_before_it_is_asked_for():
    # A candidate that reaches other processes must not run beside one that computes its truth.
    started: list[Job] = []

    class Open(Sandbox):
        keeps_apart = False

        def run(self, job, *args, **kwargs):
            started.append(job)
            return super().run(job, *args, **kwargs)

    with Open(preload=("torch",)) as sandbox, Ahead(sandbox) as ahead:
        report = ahead.begin(Job("builtins:id"))
        assert not started
        assert report().finished
        assert report() is report()
        assert len(started) == 1


def test_the_parts_that_are_carried_out_again_hold_every_case_and_share_no_point(judge):
    # What may be smuggled in a record is counted among all cases of a point: a part must see all of them.
    truths = judge.truths("layernorm")
    shapes = ask(truths, make_plan(truths, GateOptions(), accepts_needs=False).shapes).questions
    rest = [question for shape in shapes[1:] for question in shape]
    found = parts(rest)
    assert [number for part in found for number in part] == list(range(len(rest)))
    points = [{rest[number].case.point.label for number in part} for part in found]
    assert len(set().union(*points)) == sum(map(len, points))
    assert len(found) == 3
    assert len(found[0]) >= len(rest) // 2, "what is left when the candidate has answered is small"
    assert parts(shapes[0]) == [range(len(shapes[0]))], "its cases are of two points, in turns"


def test_what_a_part_lowers_is_told_with_the_case_that_needs_it(judge, monkeypatch):
    # Told with its last case alone, it came too late for the part beside it, which lowered the same kernels again.
    told, run = [], Sandbox.run

    def listened(sandbox, job, *args, **kwargs):
        report = run(sandbox, job, *args, **kwargs)
        if job.entry == ENTRY:
            told.append([set(message.record.get("lowered", ())) for message in report.messages])
        return report

    monkeypatch.setattr(Sandbox, "run", listened)
    assert judge("layernorm").green
    lowered = [[kernels for kernels in part if kernels] for part in told]
    assert any(len(part) > 1 for part in lowered)
    assert all(sum(map(len, part)) == len(set().union(*part)) for part in lowered), "each is told once"


def test_few_questions_are_carried_out_again_in_no_more_parts_than_there_are(judge):
    # An empty part would be a process that is asked nothing, and answers that nobody begins with.
    truths = judge.truths("layernorm")
    shapes = ask(truths, make_plan(truths, GateOptions(), accepts_needs=False).shapes).questions
    rest = [question for shape in shapes[1:] for question in shape]
    for count in (1, 2, 3, 4, 5):
        found = parts(rest[:count])
        assert all(found)
        assert [number for part in found for number in part] == list(range(count))
