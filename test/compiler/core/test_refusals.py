"""What a person reads where no schedule's pair is proven."""

from kernel_agent.compiler.derive import each_once


def test_a_reason_that_schedules_have_in_common_is_said_once_with_their_names() -> None:
    # One forward whose gradients overflow was told so four times over, a screen of the same figures.
    red = "the gate says WRONG: dx is off: 3 times the allowance"
    told = each_once([f"rows: {red}", "split: it would need a grid of more than three axes", f"plain: {red}"])
    assert told == f"rows, plain: {red}; split: it would need a grid of more than three axes"


def test_a_reason_without_a_schedule_stays_as_it_is() -> None:
    # What is said of the whole forward may have a colon, too, and stands in front of no schedule's name.
    assert each_once(["the stub was not followed: line 3", "rows: no"]) == "the stub was not followed: line 3; rows: no"
