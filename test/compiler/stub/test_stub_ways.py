"""Configurations whose backward is the same go one way, and what all ways begin with stands before they part."""

from __future__ import annotations

from kernel_agent.compiler.stub.backward import Written
from kernel_agent.compiler.stub.lines import Line
from kernel_agent.compiler.stub.ways import Tests, branched


def way(*lines: str, result: str = "dx") -> Written:
    return Written([Line(line) for line in lines], [], [], [result])


def shown(tests: list[Tests], *ways: Written) -> list[str]:
    return [row for line in branched(tests, ways) for row in line.shown(str, 0)]


def test_a_flag_that_changes_nothing_is_not_asked() -> None:
    same = way("dx = f(y)")
    assert shown([{"causal": True}, {"causal": False}], same, same) == ["dx = f(y)", "return dx"]


def test_ways_that_return_other_views_share_what_comes_before() -> None:
    tests: list[Tests] = [{"a": one, "b": other} for one in (False, True) for other in (False, True)]
    ways = [way("dx = f(y)", result="dx.T" if one["a"] else "dx") for one in tests]
    rows = shown(tests, *ways)
    # f was in each way, and a call for which none is was refused behind them: there is none
    assert rows == ["dx = f(y)", "if not a:", "    return dx", "return dx.T"]


def test_a_configuration_that_was_not_seen_is_refused_before_anything_is_done() -> None:
    # two of three modes: what they share must not run for the third
    rows = shown([{"mode": 1}, {"mode": 2}], way("dx = f(y)", "g()"), way("dx = f(y)", "h()"))
    assert rows[0] == "if mode == 1:"
    assert rows[-1].startswith("raise NotImplementedError(")


def test_ways_that_two_conditions_tell_apart_stay_two() -> None:
    # not a and not b: as one way without conditions it would be taken where only one of them holds
    same = way("dx = f(y)")
    rows = shown([{"a": True, "b": True}, {"a": False, "b": False}], same, same)
    assert rows.count("    dx = f(y)") == 2
    assert rows[-1].startswith("raise NotImplementedError(")


def test_what_is_one_text_is_not_asked_whether_it_is_another() -> None:
    # `reduction != "mean" and reduction == "sum"` was written where a stub asks for one after the other. Without the
    # test for the first text alone, a call for "none" would go the way of neither.
    known = [("mean", True, False), ("sum", False, True), ("none", False, False)]
    tests: list[Tests] = [{'reduction == "mean"': mean, 'reduction == "sum"': total} for _, mean, total in known]
    rows = shown(tests, *(way(f"dx = {name}()") for name, _, _ in known))
    asked = [row for row in rows if row.startswith("if ")]
    assert asked == [
        'if reduction == "mean":',
        'if reduction == "sum":',
        'if reduction != "mean" and reduction != "sum":',
    ]
