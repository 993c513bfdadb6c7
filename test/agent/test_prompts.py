"""What a model is shown, word for word. A change is accepted with `UPDATE_GOLDEN=1 pytest test/agent` and read."""

from __future__ import annotations

import os
from pathlib import Path

import jinja2
import pytest
from scripted import BACKWARD, CRASHING, FORWARD, PAIR, SWAPPED, spec_of, verdict_of

from kernel_agent.agent import prompts
from kernel_agent.agent.brief import Brief, make_brief
from kernel_agent.agent.prompts import Progressing, Prompt
from kernel_agent.agent.snapshots import render
from kernel_agent.bench.records import Basis, Measurement, ShapeTime
from kernel_agent.models.protocol import Role
from kernel_agent.pairs.assemble import assemble
from kernel_agent.pairs.spec import Candidate, KernelSpec
from kernel_agent.pairs.userfile import read_file

GOLDEN = Path(__file__).parent / "golden"


def spec() -> KernelSpec:
    return spec_of(read_file(FORWARD))


def brief(**changes: object) -> Brief:
    arguments = {"pairs": (PAIR,), "freeze_forward": False, "max_asks": 10, **changes}
    return make_brief(spec(), **arguments)  # type: ignore[arg-type]


def judged(code: str, run: Progressing) -> Prompt:
    candidate = Candidate(backward=code)
    source = assemble(spec(), candidate)
    return prompts.repair(brief(), render(candidate), source, verdict_of(source), run)


def same_as_golden(name: str, text: str) -> None:
    path = GOLDEN / f"{name}.md"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"{path.name} has changed"


def test_the_system_text_states_the_contract_of_a_reply() -> None:
    same_as_golden("system", prompts.draft(brief()).conversation.system)


def test_the_first_prompt_shows_the_forward_the_saved_tuple_and_the_pairs() -> None:
    same_as_golden("draft", prompts.draft(brief()).conversation.turns[0].text)


def test_a_frozen_forward_without_pairs_is_said_in_the_first_prompt() -> None:
    text = prompts.draft(brief(pairs=(), freeze_forward=True)).conversation.turns[0].text
    assert "The user has frozen the forward" in text
    assert "No proven pair that resembles this forward" in text


def test_a_wrong_gradient_is_told_in_words() -> None:
    prompt = judged(SWAPPED, Progressing(("reply 1: WRONG_GRADIENT, gradient w",), 9))
    same_as_golden("repair_wrong_gradient", prompt.conversation.turns[2].text)


def test_a_crash_shows_the_line_it_came_from() -> None:
    prompt = judged(CRASHING, Progressing(("reply 1: NO_CODE", "reply 2: CRASHED"), 8))
    same_as_golden("repair_crash", prompt.conversation.turns[2].text)


def test_a_rollback_lists_what_did_not_help() -> None:
    prompt = judged(SWAPPED, Progressing(("reply 2: CRASHED", "reply 3: CRASHED"), 7, rolled_back=True))
    same_as_golden("repair_rolled_back", prompt.conversation.turns[2].text)


def test_a_reply_without_code_is_told_the_form_again() -> None:
    prompt = prompts.no_code(brief(), "Shall I?", "It holds no fenced Python block.", None, Progressing((), 1))
    same_as_golden("no_code", prompt.conversation.turns[2].text)


def test_optimizing_shows_measured_facts() -> None:
    measurement = Measurement(
        basis=Basis.MEASURED,
        device="a GPU",
        shapes=(ShapeTime(label="N=64", median_us=1250.0),),
        facts=("reads 3 N elements, the least is 3 N",),
    )
    prompt = prompts.optimize(brief(), BACKWARD, measurement, 0.02, Progressing(("reply 2: GREEN",), 5))
    same_as_golden("optimize", prompt.conversation.turns[2].text)


def test_the_truth_and_the_checks_are_not_in_a_prompt() -> None:
    conversation = prompts.draft(brief()).conversation
    text = conversation.system + conversation.turns[0].text
    for name in ("SWEEP", "make_args", "def reference", "__main__", "@autodiff"):
        assert name not in text, f"{name} serves checking, not writing"
    assert "# One multiplication per element." in text, "comments of the kernel stay"


def test_a_gradient_of_the_users_own_is_shown_as_its_surrogate() -> None:
    source = FORWARD.read_text() + "\n\ndef surrogate(x, w):\n    return x * w.clamp(-1, 1)\n"
    own = spec().model_copy(update={"custom_gradient": True})
    own = own.model_copy(update={"facts": own.facts.model_copy(update={"source": source, "has_surrogate": True})})
    text = prompts.draft(make_brief(own, (), freeze_forward=False, max_asks=1)).conversation.turns[0].text
    assert "return x * w.clamp(-1, 1)" in text
    assert "the truth" not in text


def test_a_prompt_ends_with_what_the_user_side_says() -> None:
    roles = [turn.role for turn in judged(SWAPPED, Progressing((), 3)).conversation.turns]
    assert roles == [Role.USER, Role.ASSISTANT, Role.USER]


def test_a_template_with_a_missing_variable_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = prompts._environment()
    with pytest.raises(jinja2.UndefinedError):
        environment.from_string("{{ forgotten }}").render()
