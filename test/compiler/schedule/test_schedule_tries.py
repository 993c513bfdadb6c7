"""What schedules have in common is made once, and said as often as it is asked for."""

from __future__ import annotations

import pytest
from schedule_kernels import made

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.planning import LaunchPlans, Wanted, planned
from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.schedule.tries import Tries
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.value import Value


def test_a_schedule_behind_another_takes_the_plan_that_was_made_for_it() -> None:
    # A kernel without sums has neither rows nor owners, so that both schedules end at the same plan.
    def build(b: Builder, x: Value, y: Value) -> None:
        lanes = b.add(b.mul(b.program_id(0), b.const(16)), b.arange(0, 16))
        b.store(y, lanes, b.mul(b.load(x, lanes), b.const(2.0, "f32")))

    wanted = Wanted(made("X:*f32 Y:*f32", build), 1, Calls(), frozenset("X"), frozenset("Y"))
    known: dict[Wanted, LaunchPlans] = {}
    first, second = (planned(schedule, wanted, known) for schedule in ("rows", "owned"))
    assert first.schedule == second.schedule == "owned"
    assert first.steps[0].kernel is second.steps[0].kernel


def test_a_refusal_is_told_each_time_though_the_pass_runs_once() -> None:
    runs: list[None] = []

    def refuse() -> None:
        runs.append(None)
        raise CannotDerive("rows meet")

    tries = Tries()
    for _ in range(2):
        refused: dict[str, None] = {}
        assert tries.once("rows", refuse, None, refused) is None
        assert list(refused) == ["`rows` is not had: rows meet"]
    assert len(runs) == 1


def test_a_defect_is_never_taken_for_what_was_made() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    tries, told = Tries(), list[str]()
    for _ in range(2):  # each plan that does without the pass has to say so
        assert tries.once("rows", fail, lambda name, _: told.append(name)) is None
    assert told == ["rows", "rows"]
    with pytest.raises(ZeroDivisionError):
        tries.once("rows", fail, None)
