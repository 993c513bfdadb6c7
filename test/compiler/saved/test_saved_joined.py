"""The whole way: what a forward stored, its gauge, and a backward that goes over rows as seldom as can be."""

from __future__ import annotations

from dataclasses import replace

import pytest
import saved_forwards as forwards
from saved_checks import Forward, run, same_gradients, tensor

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.reverse import Adjoint
from kernel_agent.compiler.saved.prepare import prepared
from kernel_agent.compiler.schedule import schedules
from kernel_agent.compiler.schedule.joined import joined
from kernel_agent.compiler.schedule.schedules import plans
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.value import Kernel, walk


def _prepared(forward: Forward) -> Kernel:
    return prepared(forward.kernel, frozenset(forward.written)).kernel


def _fewer(forward: Forward) -> Adjoint:
    adjoint = forward.adjoint(_prepared(forward))
    return Adjoint(joined(prune(adjoint.kernel)), adjoint.cotangents, adjoint.gradients, (), ())


def test_a_looped_layer_norm_takes_two_loops_and_writes_its_gradient_once() -> None:
    forward = forwards.layer_norm(looped=True)
    backward = run(_fewer(forward), forward)
    same_gradients(backward, forward.backward(forward.kernel))
    assert backward.loops == 2
    size = tensor(forward.arguments["x_ptr"]).numel()
    assert backward.loads("x_ptr") == 2 * size
    assert (backward.counts.added["dx"] == 1).all()


def test_a_softmax_in_two_passes_writes_its_gradient_once() -> None:
    forward = forwards.softmax_looped()
    backward = run(_fewer(forward), forward)
    same_gradients(backward, forward.backward(forward.kernel))
    assert (backward.counts.added["dx"] == 1).all()
    assert backward.loops == 2


def test_the_scale_of_attention_leaves_the_loop_of_its_query_gradient() -> None:
    forward = replace(forwards.attention(), read=["q_ptr"])
    backward = run(_fewer(forward), forward)
    same_gradients(backward, forward.backward(forward.kernel))
    plain = forward.backward(_prepared(forward))
    assert _multiplications_in_loops(backward.kernel) < _multiplications_in_loops(plain.kernel)


def _multiplications_in_loops(kernel: Kernel) -> int:
    return sum(op.code is Code.MUL for loop in kernel.ops if loop.code is Code.FOR for op in walk(loop.blocks[0]))


def test_plans_take_the_spared_adjoint_and_plain_the_other() -> None:
    forward = forwards.layer_norm(looped=True)
    found = plans(forward.kernel, forward.adjoint(forward.kernel), 1, spared=forward.adjoint(_prepared(forward)))
    *better, plain = found
    assert better
    assert all(set(plan.saved) == {"mean_ptr", "rstd_ptr"} for plan in better)
    assert (plain.schedule, plain.saved) == ("plain", ())


def test_kernels_that_own_what_they_sum_multiply_by_the_scale_once() -> None:
    forward = forwards.attention()
    found = plans(forward.kernel, forward.adjoint(forward.kernel), 2, spared=forward.adjoint(_prepared(forward)))
    split = next(plan for plan in found if plan.schedule == "split")
    for step in split.steps:
        for loop in (op for op in step.kernel.ops if op.code is Code.FOR):  # of whole tiles, and of the last one
            products = [op for op in walk(loop.blocks[0]) if op.code is Code.MUL and op.result.is_float]
            scaled = [op for op in products if len(op.result.shape) == 2 and any(v.shape == () for v in op.operands)]
            # The one that is left makes the scores; those of dq and dk are out of the loops.
            assert len(scaled) == 1, step.kernel.name


def test_where_tapes_have_no_bound_a_forward_with_its_gauge_is_planned_all_the_same() -> None:
    # all schedules were refused with `plain`, though the adjoint without tapes was there
    forward = forwards.segment_logsumexp()
    whole = forward.adjoint(forward.kernel)
    with pytest.raises(CannotDerive, match="how often a loop runs"):
        plans(forward.kernel, whole, 1)
    found = plans(forward.kernel, whole, 1, spared=forward.adjoint(_prepared(forward)))
    assert found
    assert all(plan.saved == ("y_ptr",) for plan in found)


def test_a_schedule_that_is_refused_says_why_in_the_plan_that_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    # `derive --explain` prints remarks: without this one a better schedule would be missing for no visible reason.
    def refuses(*_: object) -> None:
        raise CannotDerive("its sums differ")

    monkeypatch.setitem(schedules._MAKERS, "rows", refuses)
    forward = forwards.layer_norm(looped=True)
    found = plans(forward.kernel, forward.adjoint(forward.kernel), 1)
    assert found[0].schedule != "rows"
    assert "`rows` is not had: its sums differ" in found[0].remarks


def test_a_defect_of_one_schedule_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    # an assertion that fails in one pass must not cost the backward, and must be told
    def broken(*_: object) -> None:
        raise AssertionError("a defect")

    forward = forwards.layer_norm()
    adjoint = forward.adjoint(forward.kernel)
    whole = [plan.schedule for plan in plans(forward.kernel, adjoint, 1)]
    monkeypatch.setitem(schedules._MAKERS, "rows", broken)
    monkeypatch.setattr(schedules, "joined", broken)
    with pytest.raises(AssertionError, match="a defect"):
        plans(forward.kernel, adjoint, 1)
    told: list[str] = []
    found = plans(forward.kernel, adjoint, 1, defect=lambda name, error: told.append(f"{name}: {error}"))
    assert [plan.schedule for plan in found] == [name for name in whole if name != "rows"]
    assert told == ["joined: a defect", "rows: a defect"]
