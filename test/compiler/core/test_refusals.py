"""What a person reads where no schedule's pair is proven."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kernel_agent.compiler import faults
from kernel_agent.compiler.child import refusal
from kernel_agent.compiler.derive import each_once
from kernel_agent.ir import LoweringError


def test_a_reason_that_schedules_have_in_common_is_said_once_with_their_names() -> None:
    # One forward whose gradients overflow was told so four times over, a screen of the same figures.
    red = "the gate says WRONG: dx is off: 3 times the allowance"
    told = each_once([f"rows: {red}", "split: it would need a grid of more than three axes", f"plain: {red}"])
    assert told == f"rows, plain: {red}; split: it would need a grid of more than three axes"


def test_a_reason_without_a_schedule_stays_as_it_is() -> None:
    # What is said of the whole forward may have a colon, too, and stands in front of no schedule's name.
    assert each_once(["the stub was not followed: line 3", "rows: no"]) == "the stub was not followed: line 3; rows: no"


def test_what_triton_refuses_is_told_without_the_source_that_it_quotes() -> None:
    # Of several lines a refusal shows the first, and that ended before the reason: "at 2:4:".
    message = "Triton cannot compile kernel k (line 9): at 2:4:\ndef k(X):\n    tl.dot(x, x)\n    ^\nK must be >= 16"
    error = LoweringError(message, kernel="k", line=9)
    assert refusal("", error)["refused"] == "Triton cannot compile kernel k: K must be >= 16"
    assert refusal("", error)["line"] == 9


@pytest.mark.parametrize("wrong", ["128 elements are infinite or NaN on one side only", "3 times the allowance"])
def test_gradients_that_are_not_finite_on_one_side_come_with_what_to_ask_of_the_forward(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The spread of one member divides by zero in the forward: to report it was all that a user was told to do, though
    # make_args may refuse the size.
    monkeypatch.setattr(faults, "_parts", lambda *_: [])
    file = cast(Any, SimpleNamespace(path=Path("forward.py")))
    error = faults.unproven(f"plain: the gate says WRONG_GRADIENT: {wrong} [M=1]", file, cast(Any, None))
    assert ("raise ValueError" in error.remedy) == wrong.endswith("side only")
