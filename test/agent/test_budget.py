"""Limits are kept before an ask is sent, never found broken afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripted import BACKWARD, SWAPPED, Script, config, reply_text

from kernel_agent.agent.asks import input_tokens
from kernel_agent.agent.budget import EXPECTED_OUTPUT, Budget, expected_output
from kernel_agent.agent.events import PhaseName, PromptName
from kernel_agent.agent.orchestrator import FinishedRun
from kernel_agent.agent.runs import run
from kernel_agent.agent.state import Round, RunState
from kernel_agent.config import Backend
from kernel_agent.errors import InputError
from kernel_agent.models.prices import Price, Rates
from kernel_agent.models.protocol import Conversation, Usage

WRONG, GOOD = reply_text(SWAPPED), reply_text(BACKWARD)
DOLLAR_PER_KILOTOKEN = Price(rates=Rates(input=1000.0, cached=1000.0, cache_written=1000.0, output=1000.0))


def start(script: Script, out: Path, **changes: object) -> FinishedRun:
    return run(config(out, **changes), tools=script.tools, model=script.model)


def test_the_ask_that_would_exceed_the_tokens_is_not_sent(tmp_path: Path) -> None:
    # The first ask is let through by its estimate; it then turns out to have used nearly everything.
    script = Script(WRONG, GOOD, usage=Usage(input=18_000, output=1_000))
    finished = start(script, tmp_path, max_tokens=20_000)
    assert len(script.asked) == 1
    assert "--max-tokens" in finished.state.exhausted
    assert finished.state.usage.input + finished.state.usage.output <= 20_000


def test_a_budget_below_the_first_ask_asks_nothing(tmp_path: Path) -> None:
    script = Script(GOOD)
    finished = start(script, tmp_path, max_tokens=1_000)
    assert script.asked == []
    assert finished.state.best is None


def test_the_cost_of_the_next_ask_is_counted_before_it_is_sent() -> None:
    budget = Budget(max_asks=9, max_tokens=None, max_cost_usd=8.0, price=DOLLAR_PER_KILOTOKEN)
    assert budget.refusal(RunState(), 1_000) == "", "1,000 in and 6,000 out cost $7"
    assert "--max-cost-usd" in budget.refusal(RunState(), 3_000)
    assert "--max-cost-usd" in budget.refusal(RunState(cost_usd=2.0), 1_000)


def test_a_cost_limit_that_cannot_be_kept_is_refused_before_anything_runs(tmp_path: Path) -> None:
    script = Script(GOOD)
    with pytest.raises(InputError, match="no known price") as refused:
        start(script, tmp_path, backend=Backend.OPENAI, model="home-made", max_cost_usd=1.0)
    assert "--max-tokens" in refused.value.remedy
    assert script.asked == []
    assert list(tmp_path.iterdir()) == []


def test_replies_written_by_hand_cost_nothing(tmp_path: Path) -> None:
    assert start(Script(GOOD), tmp_path, max_cost_usd=0.001).state.green


def test_a_reply_may_use_what_the_tokens_leave(tmp_path: Path) -> None:
    # Else one long reply could exceed the budget that the ask before it was held to.
    script = Script(WRONG, GOOD, usage=Usage(input=4_000, output=1_000))
    start(script, tmp_path, max_tokens=30_000)
    first, second = script.limits
    asked = [input_tokens(conversation) for conversation in script.asked]
    assert first == 30_000 - asked[0]
    assert second == 30_000 - 5_000 - asked[1]


def test_a_run_without_limits_sets_none(tmp_path: Path) -> None:
    script = Script(GOOD)
    start(script, tmp_path)
    assert script.limits == [None]


def waiting(*inputs: int) -> RunState:
    """Asks that were sent and not answered."""
    rounds = (
        Round(
            number=number,
            phase=PhaseName.BACKWARD,
            prompt=PromptName.DRAFT,
            conversation=Conversation(system="", turns=()),
            digest="",
            estimated_input=size,
        )
        for number, size in enumerate(inputs, 1)
    )
    return RunState(rounds=tuple(rounds))


def test_replies_that_are_awaited_together_share_what_is_left() -> None:
    budget = Budget(max_asks=9, max_tokens=20_000, max_cost_usd=None)
    assert budget.output_limit(waiting(1_000, 3_000), 1_000) == 8_000


def test_dollars_limit_a_reply_as_tokens_do() -> None:
    budget = Budget(max_asks=9, max_tokens=20_000, max_cost_usd=8.0, price=DOLLAR_PER_KILOTOKEN)
    assert budget.output_limit(waiting(1_000), 1_000) == 7_000, "$1 is for the ask, $7 are left"


@pytest.mark.parametrize(("outputs", "expected"), [((), EXPECTED_OUTPUT), ((0,), EXPECTED_OUTPUT), ((300, 200), 300)])
def test_the_next_reply_is_expected_to_be_as_long_as_the_longest(
    tmp_path: Path, outputs: tuple[int, ...], expected: int
) -> None:
    state = RunState()
    for index, output in enumerate(outputs):
        script = Script(WRONG, usage=Usage(output=output))
        finished = start(script, tmp_path / str(index), max_iters=1)
        state = RunState(rounds=(*state.rounds, *finished.state.rounds))
    assert expected_output(state) == expected
