"""What a model is shown, word for word. A change is accepted with `UPDATE_GOLDEN=1 pytest test/agent` and read."""

from __future__ import annotations

import os
from pathlib import Path

import jinja2
import pytest
from prompted import DERIVED, DIAGNOSED, FACTS, HITS, MEASURED, MODELLED, PLAN, PRICES
from scripted import BACKWARD, CRASHING, FORWARD, PAIR, SWAPPED, spec_of, verdict_of

from kernel_agent.agent import prompts
from kernel_agent.agent.attempts import change_of
from kernel_agent.agent.brief import MOST_ADJOINT, Brief, make_brief
from kernel_agent.agent.derived import Derived
from kernel_agent.agent.hits import shown_hits
from kernel_agent.agent.plan import Difference, ExtraSaved, GradientPlan, PairReading, Plan, Reduction
from kernel_agent.agent.planform import MEANINGS
from kernel_agent.agent.prompts import Progressing, Prompt
from kernel_agent.agent.snapshots import render
from kernel_agent.gate.verdict import Verdict
from kernel_agent.models.protocol import Role
from kernel_agent.pairs.assemble import assemble
from kernel_agent.pairs.observe import observe
from kernel_agent.pairs.spec import Candidate, KernelSpec
from kernel_agent.pairs.userfile import read_file

GOLDEN = Path(__file__).parent / "golden"
PAIR_FILE = Path(__file__).parents[1] / "gate" / "pairs" / "two_outputs.py"


def spec() -> KernelSpec:
    return spec_of(read_file(FORWARD))


def brief(**changes: object) -> Brief:
    arguments = {"pairs": (PAIR,), "freeze_forward": False, "max_asks": 10, **changes}
    return make_brief(spec(), **arguments)  # type: ignore[arg-type]


def last(prompt: Prompt) -> str:
    return prompt.conversation.turns[-1].text


def repaired(code: str, run: Progressing, verdict: Verdict | None = None, **changes: object) -> Prompt:
    candidate = Candidate(backward=code)
    source = assemble(spec(), candidate)
    return prompts.repair(brief(), render(candidate), source, verdict or verdict_of(source), run, **changes)  # type: ignore[arg-type]


def same_as_golden(name: str, text: str) -> None:
    path = GOLDEN / f"{name}.md"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"{path.name} has changed"


def test_the_system_text_states_the_contract_of_a_reply() -> None:
    same_as_golden("system", prompts.draft(brief()).conversation.system)


def test_the_opening_shows_the_forward_the_reply_to_fill_in_and_the_pairs() -> None:
    same_as_golden("opening", prompts.draft(brief()).conversation.turns[0].text)


def test_the_opening_shows_what_the_forward_does_and_what_is_forbidden() -> None:
    # Everything the plain opening lacks: facts, a derivative, a frozen forward, torch operations, no pairs.
    stub = spec().model_copy(update={"torch_ops": ("torch.softmax",)})
    full = make_brief(stub, (), freeze_forward=True, max_asks=1, facts=FACTS)
    same_as_golden("opening_with_facts", prompts.draft(full).conversation.turns[0].text)


def test_the_opening_shows_the_adjoint_or_why_there_is_none() -> None:
    adjoint = "def product_kernel_adjoint(X, W, dY, dX, dW):\n    ...\n"
    known = prompts.draft(brief(derived=Derived(adjoint=adjoint))).conversation.turns[0].text
    assert adjoint in known
    refused = (
        prompts.draft(brief(derived=Derived(reason="a launch stands in a loop (line 7)"))).conversation.turns[0].text
    )
    assert "The compiler cannot derive this forward: a launch stands in a loop (line 7)" in refused
    assert "# The adjoint" not in refused


def test_an_adjoint_that_is_too_long_is_left_out() -> None:
    # A tape and twelve loops say less of the mathematics than they cost in every ask.
    long = "def k():\n" + "    d_x += tl.load(dY + offs)\n" * MOST_ADJOINT
    assert "# The adjoint" not in prompts.draft(brief(derived=Derived(adjoint=long))).conversation.turns[0].text


def test_a_derived_backward_is_shown_to_be_beaten_with_its_schedule_and_its_times() -> None:
    prompt = prompts.beat(brief(), BACKWARD, DERIVED, MEASURED, 0.02, 9)
    same_as_golden("beat", last(prompt))
    assert BACKWARD.strip() in prompt.conversation.turns[1].text, "edits apply to it"


def test_the_opening_of_a_pair_file_lists_the_arguments_of_its_forward() -> None:
    own = make_brief(observe(read_file(PAIR_FILE)), (), freeze_forward=False, max_asks=3)
    same_as_golden("opening_of_a_pair", prompts.draft(own).conversation.turns[0].text)


def test_every_ask_of_a_run_begins_with_the_same_text() -> None:
    # Providers cache what is equal from the first byte on: one word that differs would be paid for in every ask.
    run = Progressing(("reply 1: CRASHED",), 3)
    asks = [
        prompts.plan(brief()),
        prompts.plan_refused(brief(), "{}", "no gradients"),
        prompts.draft(brief(), PLAN, PRICES, HITS),
        prompts.draft(brief(), anchor="scaled_copy", several=True),
        prompts.beat(brief(), BACKWARD, DERIVED, MEASURED, 0.02, 9),
        repaired(SWAPPED, run),
        prompts.edit_failed(brief(), BACKWARD, "edits", "no such line", run),
        prompts.no_code(brief(), "Shall I?", "No block.", None, run),
        prompts.optimize(brief(), BACKWARD, MEASURED, 0.02, run),
    ]
    assert len({(ask.conversation.system, ask.conversation.turns[0]) for ask in asks}) == 1


def test_a_plan_is_asked_for_by_example() -> None:
    same_as_golden("plan", last(prompts.plan(brief())))


def test_a_plan_that_does_not_hold_is_asked_for_again() -> None:
    prompt = prompts.plan_refused(brief(), "{}", "`gradients` lacks w.", 9)
    same_as_golden("plan_refused", last(prompt))
    assert prompt.conversation.turns[1].text == "{}"


def test_a_draft_follows_the_plan_with_its_prices_and_pairs_by_technique() -> None:
    prompt = prompts.draft(brief(), PLAN, PRICES, HITS, remaining=9)
    same_as_golden("draft_after_a_plan", last(prompt))
    assert '"owner": "a block of elements"' in prompt.conversation.turns[1].text


def test_several_drafts_differ_in_what_they_follow() -> None:
    same_as_golden("draft_after_a_pair", last(prompts.draft(brief(), anchor="scaled_copy", several=True)))
    same_as_golden("draft_after_no_pair", last(prompts.draft(brief(), several=True)))


def test_the_plans_anchor_holds_where_one_draft_is_asked_for() -> None:
    assert "Write it after the pair scaled_copy" in last(prompts.draft(brief(), PLAN))


def test_a_wrong_gradient_is_told_in_words() -> None:
    same_as_golden(
        "repair_wrong_gradient", last(repaired(SWAPPED, Progressing(("reply 1: WRONG_GRADIENT, gradient w",), 9)))
    )


def test_a_diagnosis_says_what_where_and_which_line_and_locks_what_is_right() -> None:
    verdict = verdict_of(assemble(spec(), Candidate(backward=SWAPPED))).model_copy(update={"diagnosis": DIAGNOSED})
    run = Progressing(("reply 1: dw from x: WRONG_GRADIENT",), 9)
    same_as_golden("repair_diagnosed", last(repaired(SWAPPED, run, verdict, locked=("x",), technique_hits=HITS)))


def test_a_crash_shows_the_line_it_came_from() -> None:
    run = Progressing(("reply 1: NO_CODE", "reply 2: CRASHED"), 8)
    same_as_golden("repair_crash", last(repaired(CRASHING, run)))


def test_a_rollback_lists_what_did_not_help() -> None:
    run = Progressing(("reply 2: CRASHED", "reply 3: CRASHED"), 7, rolled_back=True)
    same_as_golden("repair_rolled_back", last(repaired(SWAPPED, run)))


def test_edits_that_do_not_apply_are_quoted_with_the_reason() -> None:
    edits = "<<<<<<< SEARCH\nx = 1\n=======\nx = 2\n>>>>>>> REPLACE"
    reply = f"Change: x is 2.\n\n```\n{edits}\n```\n\nThat is all."
    prompt = prompts.edit_failed(brief(), BACKWARD, reply, "The lines of edit 1 do not occur.", Progressing((), 4))
    same_as_golden("edit_failed", last(prompt))


def test_a_reply_without_code_is_told_the_form_again() -> None:
    prompt = prompts.no_code(brief(), "Shall I?", "It holds no fenced Python block.", None, Progressing((), 1))
    same_as_golden("no_code", last(prompt))


def test_a_reply_without_code_goes_on_from_the_candidate() -> None:
    verdict = verdict_of(assemble(spec(), Candidate(backward=SWAPPED)))
    prompt = prompts.no_code(brief(), prompts.fenced(SWAPPED), "No block.", verdict, Progressing((), 2))
    same_as_golden("no_code_with_a_candidate", last(prompt))


def test_optimizing_shows_measured_times_kernels_and_baselines() -> None:
    run = Progressing(("reply 2: GREEN",), 5)
    same_as_golden("optimize", last(prompts.optimize(brief(), BACKWARD, MEASURED, 0.02, run, "8 warps for 4 save 6 %")))


def test_modelled_times_are_called_modelled() -> None:
    # Nobody may take them for measured ones: the words stand at the table itself.
    same_as_golden("optimize_modelled", last(prompts.optimize(brief(), BACKWARD, MODELLED, 0.02, Progressing((), 5))))


def test_pairs_by_technique_leave_the_prefix_its_share() -> None:
    # A pair that is longer than the whole opening would be sent, uncached, with every repair.
    long = HITS[1].pair.model_copy(update={"backward": HITS[1].pair.backward * 200})
    prompt = prompts.draft(brief(), PLAN, PRICES, (HITS[1].model_copy(update={"pair": long}),))
    assert long.slug not in last(prompt)
    assert prompt.prefix_tokens / prompt.tokens >= prompts.PREFIX_SHARE


def test_a_pair_by_technique_that_does_not_fit_whole_is_shown_by_its_backward() -> None:
    hit = HITS[1].model_copy(update={"pair": HITS[1].pair.model_copy(update={"forward": "# long\n" * 5000})})
    shown = shown_hits(brief(), (hit,), 500)
    (fresh,) = shown.fresh
    assert not fresh.with_forward
    assert "# long" not in last(prompts.draft(brief(), PLAN, (), (hit,)))
    assert "Its backward:" in last(prompts.draft(brief(), PLAN, (), (hit,)))


def test_the_form_of_a_plan_has_every_field_that_is_read() -> None:
    # A field that is added to the record and not asked for would always be empty.
    text = last(prompts.plan(brief()))
    for record in (Plan, PairReading, Difference, ExtraSaved, GradientPlan):
        for field in record.model_fields:
            assert f'"{field}"' in text, f"{record.__name__}.{field}"
    assert set(MEANINGS) == set(Reduction), "every kind of reduction is explained"


def test_the_users_shapes_and_the_checks_are_not_in_a_prompt() -> None:
    conversation = prompts.draft(brief()).conversation
    text = conversation.system + conversation.turns[0].text
    for name in ("SWEEP", "make_args", "def reference", "__main__", "@autodiff"):
        assert name not in text, f"{name} serves checking, not writing"
    for entry in spec().sweep:
        assert entry.label not in text, "a model that sees shapes writes code for them"
    assert "`N` from 64 to 100" in text
    assert "# One multiplication per element." in text, "comments of the kernel stay"


def test_a_gradient_of_the_users_own_is_shown_as_its_surrogate() -> None:
    source = FORWARD.read_text() + "\n\ndef surrogate(x, w):\n    return x * w.clamp(-1, 1)\n"
    own = spec().model_copy(update={"custom_gradient": True})
    own = own.model_copy(update={"facts": own.facts.model_copy(update={"source": source, "has_surrogate": True})})
    text = prompts.draft(make_brief(own, (), freeze_forward=False, max_asks=1)).conversation.turns[0].text
    assert "return x * w.clamp(-1, 1)" in text
    assert "the truth" not in text


def test_a_prompt_ends_with_what_the_user_side_says() -> None:
    roles = [turn.role for turn in repaired(SWAPPED, Progressing((), 3)).conversation.turns]
    assert roles == [Role.USER, Role.ASSISTANT, Role.USER]
    assert [turn.role for turn in prompts.plan(brief()).conversation.turns] == [Role.USER, Role.USER]


def test_an_earlier_attempt_is_told_by_what_the_reply_says_it_changes() -> None:
    code = f"```python\n{SWAPPED}```"
    assert change_of(f"Change: line 12 stores w; it stores x now.\n\n{code}\n") == "line 12 stores w; it stores x now"
    assert change_of(f"Hm.\n\n**Change:** flip the sign.\n{code}") == "flip the sign"
    assert change_of(f"The sign is wrong. I flip it.\n{code}") == "The sign is wrong"
    assert change_of(code) == ""
    assert len(change_of("Change: " + "very long " * 100)) < 200


def test_a_template_with_a_missing_variable_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = prompts._environment()
    with pytest.raises(jinja2.UndefinedError):
        environment.from_string("{{ forgotten }}").render()
