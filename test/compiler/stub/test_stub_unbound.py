"""A backward never reads a name that nothing has bound on the way."""

from __future__ import annotations

from kernel_agent.compiler.stub.unbound import unbound


def test_a_name_that_is_bound_further_down_is_found() -> None:
    # A setting asked of a buffer that was allocated behind it: only calls of that configuration would fail.
    text = "def backward(saved, grad):\n    if saved:\n        A = asks(kept)\n        kept = room()\n    return grad\n"
    assert unbound(text, ()) == ["kept"]


def test_what_only_one_gradient_binds_is_not_read_for_another() -> None:
    text = (
        "def backward(saved, grad, needs=None):\n"
        "    need_x, need_w = needs or (True,) * 2\n"
        "    if need_x:\n        kept = room()\n"
        "    if need_x or need_w:\n        use(kept)\n"
        "    return kept if need_x else None\n"
    )
    assert unbound(text, ("need_x", "need_w")) == ["kept"]
    assert not unbound(text.replace("need_x or need_w", "need_x and need_w"), ("need_x", "need_w"))


def test_a_name_that_the_same_condition_bound_before_is_bound() -> None:
    text = (
        "def backward(saved, grad):\n    flag = saved[0]\n    if flag:\n        kept = room()\n"
        "    if flag:\n        use(kept)\n    return [one for one in grad]\n"
    )
    assert not unbound(text, ())


def test_what_another_condition_binds_in_a_loop_is_found() -> None:
    # Which gradients are wanted is the same in all trips: no earlier one has bound it either.
    text = (
        "def backward(saved, grad, needs=None):\n"
        "    need_x, need_w = needs or (True,) * 2\n"
        "    for first in range(0, 9, 3):\n"
        "        if need_x:\n            kept = room()\n"
        "        if need_w:\n            use(kept)\n"
    )
    assert unbound(text, ("need_x", "need_w")) == ["kept"]
    assert not unbound(text.replace("if need_w", "if need_x"), ("need_x", "need_w"))


def test_what_a_loop_counts_by_and_its_trips_bind_is_bound() -> None:
    text = (
        "def backward(saved, grad):\n    for first, last in pairs(grad):\n        part = grad[first:last]\n"
        "        use(part)\n    return part\n"
    )
    assert not unbound(text, ())


def test_what_the_first_trip_reads_and_binds_behind_that_is_found() -> None:
    # Later trips have it of the one before.
    text = "def backward(saved, grad):\n    for first in range(3):\n        use(kept)\n        kept = room()\n"
    assert unbound(text, ()) == ["kept"]


def test_what_a_loop_runs_over_is_read_before_its_trips_bind_anything() -> None:
    text = "def backward(saved, grad):\n    for first in range(0, 9, step):\n        step = 3\n"
    assert unbound(text, ()) == ["step"]
