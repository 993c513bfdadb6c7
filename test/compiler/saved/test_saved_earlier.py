"""States that a recurrence stored are read by the trips behind, and only where memory has just these."""

from __future__ import annotations

import pytest
import saved_kernels as kernels
from saved_checks import Forward, empty, kernel_from, ran, same_gradients, seeded

from kernel_agent.compiler.reverse import differentiate
from kernel_agent.compiler.saved.earlier import use_earlier
from kernel_agent.compiler.saved.prepare import prepared

PROGRAMS, BLOCK = 2, 8


def _forward(kind: str = "", n: int = 5, m: int = 4) -> Forward:
    types = {**dict.fromkeys(("x_ptr", "s_ptr", "y_ptr"), "*fp32"), "n": "i32", "m": "i32"}
    states = empty(PROGRAMS, n + m - 1, n)
    given = {"x_ptr": seeded(PROGRAMS, n, m), "s_ptr": states, "y_ptr": empty(PROGRAMS, BLOCK), "n": n, "m": m}
    kernel = kernel_from(kernels.second_order, types, BLOCK=BLOCK, KIND=kind)
    return ran(kernel, (PROGRAMS,), given, ["x_ptr"], ["y_ptr"])


@pytest.mark.parametrize("kind", ["", "no band"])
@pytest.mark.parametrize(("n", "m"), [(5, 4), (8, 1), (1, 1), (2, 1), (1, 3)])
def test_states_of_the_two_trips_before_are_read_and_no_tape_has_them(kind: str, n: int, m: int) -> None:
    # Of loops of one trip and of two, and of more: a state of another trip or program, or a lane that nothing was
    # stored to, NaN here, would change the gradient; so would 3 where the loop began with 7.
    forward = _forward(kind, n, m)
    saved = use_earlier(forward.kernel)
    assert saved.read == {"s_ptr"}
    backward, plain = forward.backward(saved.kernel), forward.backward(forward.kernel)
    same_gradients(backward, plain)
    assert plain.tapes > 0
    assert backward.tapes == 0
    assert backward.loads("s_ptr") <= 2 * PROGRAMS * n * (n + m - 1)


@pytest.mark.parametrize("kind", ["what was loaded", "one row", "two trips a row", "another mask", "twice"])
def test_states_that_memory_does_not_have_stay_on_a_tape(kind: str) -> None:
    # Outside of the mask the state is no number, later trips overwrite it, it is stored for some of the lanes only,
    # or something else is stored over it: what is read would be another number.
    saved = use_earlier(_forward(kind).kernel)
    assert saved.read == frozenset()


def test_states_that_are_overwritten_later_stay_on_a_tape() -> None:
    # The backward would find another launch's numbers.
    forward = _forward()
    saved = prepared(forward.kernel, frozenset(forward.written), frozenset({"s_ptr"}))
    assert "s_ptr" not in saved.read
    adjoint = differentiate(saved.kernel, read=frozenset(forward.read), written=frozenset(forward.written))
    assert "s_ptr" not in {op.base.name for op in adjoint.kernel.ops if "base" in op.attributes}
