"""The search for a right backward: plans, drafts at once, locks, splices, edits, and what is not paid for twice."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
from scripted import (
    BACKWARD,
    CRASHING,
    FORWARD,
    NO_CODE,
    OTHER_WRONG,
    PAIR,
    PAIRS,
    PLAN,
    SWAPPED,
    Script,
    ScriptedModel,
    config,
    reply_text,
)

from kernel_agent.agent import events as ev
from kernel_agent.agent.events import Outcome, PromptName
from kernel_agent.agent.ledger import read_ledger
from kernel_agent.agent.orchestrator import FinishedRun
from kernel_agent.agent.plan import GradientPrice
from kernel_agent.agent.recorded import as_recorded
from kernel_agent.agent.runs import Changes, resume, run
from kernel_agent.bench.records import Basis, Measurement, ShapeTime
from kernel_agent.config import Backend, RunConfig
from kernel_agent.errors import WaitingForReply
from kernel_agent.gate.verdict import Status
from kernel_agent.models.protocol import Conversation, Progress, Reply, Usage

GOOD, WRONG, OTHER = reply_text(BACKWARD), reply_text(SWAPPED), reply_text(OTHER_WRONG)
CRASH = reply_text(CRASHING)
TWO_PAIRS = PAIRS.model_copy(
    update={"pairs": (PAIR, PAIR.model_copy(update={"slug": "product_row"}), *PAIRS.pairs[1:])}
)


def start(script: Script, out: Path, **changes: object) -> FinishedRun:
    return run(config(out, **changes), tools=script.tools, model=script.model)


def events(finished: FinishedRun) -> list[ev.Event]:
    return [entry.event for entry in read_ledger(finished.folder.ledger).entries]


def of_kind(finished: FinishedRun, kind: type) -> list:  # type: ignore[type-arg]
    return [event for event in events(finished) if isinstance(event, kind)]


def modelled(times: dict[str, float]):  # type: ignore[no-untyped-def]
    """`Tools.modelled_cost` that reads the time off the candidate's own text."""

    def cost(spec: object, candidate: object) -> Measurement:
        time = next(t for text, t in times.items() if text in candidate.backward)  # type: ignore[attr-defined]
        return Measurement(
            basis=Basis.MODELLED, device="none", shapes=(ShapeTime(label="N=64", median_us=time, bound_us=1.0),)
        )

    return cost


# Drafts at once.


def test_three_drafts_are_written_before_the_first_reply_is_waited_for(tmp_path: Path) -> None:
    with pytest.raises(WaitingForReply, match=r"asks/0001.md, 0002.md and 0003.md wait for replies"):
        run(config(tmp_path, candidates=3, wait=False), tools=Script(retrieved=TWO_PAIRS).tools)
    (path,) = tmp_path.glob("product-*/runs/2*")
    assert sorted(ask.name for ask in (path / "asks").iterdir()) == ["0001.md", "0002.md", "0003.md"]


def test_each_draft_is_written_after_another_pair_and_the_last_after_none(tmp_path: Path) -> None:
    finished = start(Script(GOOD, GOOD, GOOD, retrieved=TWO_PAIRS), tmp_path, candidates=3)
    assert [event.anchor for event in of_kind(finished, ev.Asked)] == ["scaled_copy", "product_row", None]


def test_all_replies_to_drafts_are_waited_for_at_the_same_time(tmp_path: Path) -> None:
    # Each reply comes only when all three were asked for: one after the other, the first would never come.
    everyone = threading.Barrier(3, timeout=20)

    class Together(ScriptedModel):
        def ask(
            self,
            conversation: Conversation,
            *,
            number: int | None = None,
            on_text: Progress | None = None,
            max_output: int | None = None,
        ) -> Reply:
            everyone.wait()
            return super().ask(conversation, number=number, on_text=on_text, max_output=max_output)

    script = Script(WRONG, CRASH, GOOD, retrieved=TWO_PAIRS)
    finished = run(
        config(tmp_path, candidates=3),
        tools=script.tools,
        model=lambda config, run_dir, /, *, on_notice: Together(script.replies, run_dir),
    )
    assert finished.outcome is Outcome.DELIVERED
    assert [event.number for event in of_kind(finished, ev.Replied)] == [1, 2, 3]


def test_of_two_proven_drafts_the_one_with_the_lower_modelled_time_goes_on_and_only_that_is_measured(
    tmp_path: Path,
) -> None:
    slow, fast = reply_text(BACKWARD + "# slow\n"), reply_text(BACKWARD + "# fast\n")
    measured: list[str] = []

    def measure(spec: object, candidate: object) -> Measurement:
        measured.append(candidate.backward.strip().split("\n")[-1])  # type: ignore[attr-defined]
        return Measurement(
            basis=Basis.MEASURED, device="a GPU", shapes=(ShapeTime(label="N=64", median_us=1.0, bound_us=1.0),)
        )

    cost = modelled({"# slow": 9.0, "# fast": 4.0})
    script = Script(slow, fast, retrieved=TWO_PAIRS, modelled_cost=cost, measure=measure, basis=Basis.MEASURED)
    finished = start(script, tmp_path, candidates=2)
    assert finished.state.best is not None
    assert finished.state.best.number == 2
    assert measured == ["# fast"]


def test_a_wave_is_cut_to_what_the_budget_of_asks_allows_before_it_is_sent(tmp_path: Path) -> None:
    script = Script(WRONG, CRASH, retrieved=TWO_PAIRS)
    finished = start(script, tmp_path, candidates=3, max_iters=2)
    (planned,) = of_kind(finished, ev.DraftsPlanned)
    assert len(planned.anchors) == 2
    assert planned.line == "2 of 3 drafts fit: all 2 asks are used (--max-iters)"
    assert len(script.asked) == 2


def test_a_wave_is_cut_to_what_the_budget_of_tokens_allows_before_it_is_sent(tmp_path: Path) -> None:
    # One draft needs its input and 6,000 tokens of reply; the second would pass the limit, although none is answered.
    script = Script(WRONG, retrieved=TWO_PAIRS, usage=Usage(input=3_000, output=6_000))
    finished = start(script, tmp_path, candidates=3, max_tokens=12_000)
    assert len(of_kind(finished, ev.DraftsPlanned)[0].anchors) == 1
    assert len(script.asked) == 1


def test_a_reply_of_a_wave_that_was_received_is_not_asked_for_again(tmp_path: Path) -> None:
    # By hand: the second reply is there, the first and third are not.
    script = Script(retrieved=TWO_PAIRS)
    with pytest.raises(WaitingForReply):
        run(config(tmp_path, candidates=3, wait=False), tools=script.tools)
    (path,) = tmp_path.glob("product-*/runs/2*")
    (path / "replies" / "0002.md").write_text(GOOD)
    with pytest.raises(WaitingForReply, match=r"asks/0001.md and 0003.md wait"):
        resume(path, tools=script.tools)
    later = Script(WRONG, "never asked for", CRASH, retrieved=TWO_PAIRS)
    finished = resume(path, tools=later.tools, model=later.model)
    assert finished.outcome is Outcome.DELIVERED
    assert len(later.asked) == 2
    assert [r.verdict.status for r in finished.state.rounds if r.verdict] == [
        Status.WRONG_GRADIENT,
        Status.GREEN,
        Status.CRASHED,
    ]


def test_the_best_of_several_red_drafts_is_repaired_not_the_last(tmp_path: Path) -> None:
    script = Script(CRASH, WRONG, NO_CODE, GOOD, retrieved=TWO_PAIRS)
    finished = start(script, tmp_path, candidates=3)
    repair = of_kind(finished, ev.Asked)[3]
    assert repair.prompt is PromptName.REPAIR
    assert repair.base == finished.state.rounds[1].candidate
    assert finished.outcome is Outcome.DELIVERED


# Gradients that are right.


def test_a_right_gradient_is_locked_and_the_other_asked_for_alone(tmp_path: Path) -> None:
    script = Script(WRONG, GOOD)
    finished = start(script, tmp_path)
    (lock,) = of_kind(finished, ev.Locked)
    assert lock.grads == ("x",)
    assert lock.digest == finished.state.rounds[0].candidate
    assert "Repair dw alone" in script.asked[1].turns[-1].text


def test_three_drafts_one_lock_and_a_splice_end_green_without_another_ask(tmp_path: Path) -> None:
    script = Script(CRASH, WRONG, OTHER, retrieved=TWO_PAIRS)
    finished = start(script, tmp_path, candidates=3)
    assert finished.outcome is Outcome.DELIVERED
    (spliced,) = of_kind(finished, ev.Spliced)
    assert spliced.number == 3, "the third draft completes the second"
    assert spliced.grads == (("x",), ("w",))
    assert spliced.from_digests == (finished.state.rounds[1].candidate, finished.state.rounds[2].candidate)
    assert len(script.asked) == 3
    delivered = (finished.folder.product / "product_backward.py").read_text()
    assert "def backward_1(" in delivered
    assert "def backward_2(" in delivered


def test_a_reply_without_the_locked_gradient_is_completed_by_the_candidate_it_was_shown(tmp_path: Path) -> None:
    alone = BACKWARD.replace("return dx, dw", "return dx, None").replace("DW + cols, dy", "DW + cols, 0 * dy")
    finished = start(Script(OTHER, reply_text(alone)), tmp_path)
    (spliced,) = of_kind(finished, ev.Spliced)
    assert spliced.grads == (("w",), ("x",))
    assert finished.outcome is Outcome.DELIVERED


# Edits.


def edit(search: str, replace: str) -> str:
    return f"Change: w from x.\n\n<<<<<<< SEARCH\n{search}\n=======\n{replace}\n>>>>>>> REPLACE\n"


BAD_LINE = "    tl.store(DW + cols, dy * tl.load(W + cols, mask=mask), mask=mask)"
GOOD_LINE = BAD_LINE.replace("tl.load(W", "tl.load(X")


def test_a_repair_may_be_an_edit_of_the_candidate_that_was_shown(tmp_path: Path) -> None:
    finished = start(Script(WRONG, edit(BAD_LINE, GOOD_LINE)), tmp_path)
    assert finished.outcome is Outcome.DELIVERED
    assert [event.edits for event in of_kind(finished, ev.CandidateExtracted)] == [0, 1]


def test_an_edit_that_does_not_apply_is_asked_for_once_more_and_does_not_count(tmp_path: Path) -> None:
    script = Script(WRONG, edit(BAD_LINE.strip() + " ", GOOD_LINE), edit(BAD_LINE, GOOD_LINE))
    finished = start(script, tmp_path, max_iters=2)
    assert finished.outcome is Outcome.DELIVERED, "two asks count, the third is free"
    failed = of_kind(finished, ev.EditFailed)
    assert [event.line for event in failed] == [
        "edit 1: its SEARCH part differs in indentation: line 8 begins with 4 blanks"
    ]
    again = of_kind(finished, ev.Asked)[2]
    assert (again.prompt, again.free) == (PromptName.EDIT_FAILED, True)
    assert "line 8 begins with 4 blanks" in again.turns[-1].text
    assert finished.state.asks == 2


def test_an_edit_that_fails_twice_counts_and_the_candidate_is_shown_anew(tmp_path: Path) -> None:
    bad = edit("    nothing like it", GOOD_LINE)
    script = Script(WRONG, bad, bad, GOOD)
    finished = start(script, tmp_path, max_iters=3)
    asked = of_kind(finished, ev.Asked)
    assert [event.prompt.value for event in asked] == ["draft", "repair", "edit_failed", "repair"]
    assert [event.free for event in asked] == [False, False, True, False]
    assert "the edits did not apply" in asked[3].turns[-1].text
    assert finished.outcome is Outcome.DELIVERED


def test_a_free_retry_still_costs_tokens(tmp_path: Path) -> None:
    script = Script(WRONG, edit("    nothing like it", GOOD_LINE), GOOD, usage=Usage(input=6_000, output=1_000))
    finished = start(script, tmp_path, max_tokens=16_000)
    assert len(script.asked) == 2
    assert "--max-tokens" in finished.state.exhausted


# What is not paid for twice.


def test_a_candidate_with_the_same_fingerprint_is_not_judged_again(tmp_path: Path) -> None:
    script = Script(
        WRONG, reply_text(SWAPPED + "# other words\n"), GOOD, fingerprint=lambda spec, source, compiled: source[:1]
    )
    finished = start(script, tmp_path, max_iters=2)
    assert script.checked == 1
    assert of_kind(finished, ev.Judged)[1].same_as == 1
    assert of_kind(finished, ev.SetAside)[0].line == "the same code as in reply 1"


# Plans.


def test_a_plan_is_asked_for_first_priced_and_shown_to_the_draft(tmp_path: Path) -> None:
    prices = (GradientPrice(grad="x", line="dx: reads 3 N elements"),)
    searched: list[tuple[str, ...]] = []

    def find(spec: object, wanted: tuple, shown: tuple[str, ...]) -> tuple:  # type: ignore[type-arg]
        searched.append(tuple(one.grad for one in wanted))
        return ()

    script = Script(PLAN, WRONG, GOOD, price=lambda spec, plan, facts: prices, retrieve_techniques=find)
    finished = start(script, tmp_path, reflect=True)
    (planned,) = of_kind(finished, ev.Planned)
    assert planned.problem == ""
    assert planned.plan is not None
    assert planned.prices == prices
    assert "dx: reads 3 N elements" in script.asked[1].turns[-1].text
    assert [event.prompt.value for event in of_kind(finished, ev.Asked)] == ["plan", "draft", "repair"]
    assert searched == [("x", "w"), ("w",)], "all gradients after the plan, the red one after its verdict"


def test_a_plan_that_is_refused_is_asked_for_once_more_and_then_done_without(tmp_path: Path) -> None:
    script = Script("No plan.", "Still none.", GOOD)
    finished = start(script, tmp_path, reflect=True)
    assert [event.prompt.value for event in of_kind(finished, ev.Asked)] == ["plan", "plan", "draft"]
    assert of_kind(finished, ev.Planned)[0].problem
    assert of_kind(finished, ev.Planned)[0].problem in script.asked[1].turns[-1].text
    assert finished.outcome is Outcome.DELIVERED


def test_the_last_ask_goes_to_code_not_to_a_plan(tmp_path: Path) -> None:
    script = Script(GOOD)
    assert start(script, tmp_path, reflect=True, max_iters=1).outcome is Outcome.DELIVERED


# Memory.


def test_nothing_of_the_attempts_of_one_phase_is_told_in_the_next(tmp_path: Path) -> None:
    wrong = "I forgot the mask of the tail.\n" + WRONG
    slower = reply_text(BACKWARD + "# slower\n").replace("The product rule gives both.", "Change: bigger blocks.")
    script = Script(wrong, GOOD, slower, slower + " ", times={"# slower": 120.0, "": 100.0})
    start(script, tmp_path, max_iters=4)
    first, second = script.asked[2].turns[-1].text, script.asked[3].turns[-1].text
    assert "forgot the mask" not in first + second
    assert "WRONG_GRADIENT" not in first + second
    assert "bigger blocks" in second, "what was tried in this phase is told: change and outcome"
    assert "20.0% more time" in second


def test_a_conversation_does_not_grow_with_the_asks(tmp_path: Path) -> None:
    script = Script(WRONG, CRASH, *(reply_text(CRASHING + f"# {n}\n") for n in range(4)), GOOD)
    start(script, tmp_path)
    assert [len(conversation.turns) for conversation in script.asked[1:]] == [3] * 6


# Replays of recorded runs.


def test_a_replay_takes_its_steps_as_the_recorded_run_did(tmp_path: Path) -> None:
    script = Script(PLAN, WRONG, OTHER)
    recorded = start(script, tmp_path / "recorded", reflect=True, candidates=2)
    again = run(
        RunConfig(file=FORWARD, out=tmp_path / "again", backend=Backend.REPLAY, replay=recorded.folder.path),
        tools=script.tools,
    )
    assert again.outcome is Outcome.DELIVERED
    assert [r.prompt for r in again.state.rounds] == [r.prompt for r in recorded.state.rounds]
    assert not [notice for r in again.state.rounds if r.reply for notice in r.reply.notices], "the asks are the same"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU sweeps by the clock, as the recorded one")
def test_what_was_swept_by_the_clock_is_not_swept_by_a_model_in_a_replay() -> None:
    # A modelled sweep picks other parameters, and the edits of the next recorded reply apply to nothing.
    recorded = Path(__file__).parents[2] / "LOGS" / "layernorm"
    config = RunConfig(file=FORWARD, backend=Backend.REPLAY, replay=recorded)
    assert as_recorded(config, recorded).tune_variants == 0
    asked = RunConfig(file=FORWARD, backend=Backend.REPLAY, replay=recorded, tune_variants=3)
    assert as_recorded(asked, recorded).tune_variants == 3, "who asks for a sweep gets it"


def test_a_recording_from_before_there_were_plans_is_replayed_without_one(tmp_path: Path) -> None:
    script = Script(WRONG, GOOD)
    recorded = start(script, tmp_path / "recorded")
    ledger = recorded.folder.ledger
    first, rest = ledger.read_text().split("\n", 1)
    entry = json.loads(first)
    for field in ("reflect", "candidates", "tune_variants", "diagnosis"):
        del entry["event"]["config"][field]
    ledger.write_text(json.dumps(entry) + "\n" + rest)
    again = run(
        RunConfig(file=FORWARD, out=tmp_path / "again", backend=Backend.REPLAY, replay=recorded.folder.path),
        tools=script.tools,
    )
    assert [r.prompt.value for r in again.state.rounds] == ["draft", "repair"]


def test_a_recording_that_ends_with_a_proven_backward_ends_the_optimize_phase(tmp_path: Path) -> None:
    recorded = start(Script(GOOD), tmp_path / "recorded")
    script = Script(times={"": 100.0})
    again = run(
        RunConfig(file=FORWARD, out=tmp_path / "again", backend=Backend.REPLAY, replay=recorded.folder.path),
        tools=script.tools,
    )
    assert again.outcome is Outcome.DELIVERED
    assert "holds no further reply" in again.state.exhausted


def test_a_larger_budget_does_not_ask_for_drafts_again(tmp_path: Path) -> None:
    script = Script(WRONG, CRASH, GOOD, retrieved=TWO_PAIRS)
    path = start(script, tmp_path, candidates=2, max_iters=2).folder.path
    finished = resume(path, changes=Changes(max_iters=3), tools=script.tools, model=script.model)
    assert [r.prompt.value for r in finished.state.rounds] == ["draft", "draft", "repair"]
    assert finished.outcome is Outcome.DELIVERED
