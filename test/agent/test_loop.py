"""The loop from the first ask to the delivery, with scripted replies and verdicts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scripted import BACKWARD, CRASHING, FORWARD, NO_CODE, SWAPPED, Script, config, reply_text

from kernel_agent.agent import events as ev
from kernel_agent.agent.events import Entry, Outcome, PromptName
from kernel_agent.agent.ledger import read_ledger
from kernel_agent.agent.orchestrator import FinishedRun, TruthDoubted
from kernel_agent.agent.runs import Changes, first_prompt, list_runs, resume, run
from kernel_agent.errors import InputError
from kernel_agent.gate.verdict import Status

GOOD = reply_text(BACKWARD)
WRONG = reply_text(SWAPPED)
CRASH = reply_text(CRASHING)


def start(script: Script, out: Path, **changes: object) -> FinishedRun:
    return run(config(out, **changes), tools=script.tools, model=script.model)


def events(finished: FinishedRun) -> list[ev.Event]:
    return [entry.event for entry in read_ledger(finished.folder.ledger).entries]


def kinds(finished: FinishedRun) -> list[str]:
    return [event.event for event in events(finished)]


def test_a_right_first_draft_is_delivered_after_one_ask(tmp_path: Path) -> None:
    finished = start(Script(GOOD), tmp_path)
    assert finished.outcome is Outcome.DELIVERED
    assert len(finished.state.rounds) == 1
    assert (finished.folder.product / "product_backward.py").is_file()
    assert kinds(finished) == [
        "run_started",
        "spec_described",
        "phase_started",
        "truth_cross_checked",
        "phase_ended",
        "pairs_retrieved",
        "phase_started",
        "drafts_planned",
        "asked",
        "replied",
        "candidate_extracted",
        "judged",
        "snapshot_kept",
        "phase_ended",
        "phase_skipped",
        "delivered",
        "finished",
    ]


def test_a_wrong_draft_is_repaired_on_its_verdict(tmp_path: Path) -> None:
    script = Script(WRONG, GOOD)
    finished = start(script, tmp_path)
    assert finished.outcome is Outcome.DELIVERED
    shown = script.asked[1].turns
    assert SWAPPED.strip() in shown[1].text, "the failing code is shown as the model's own turn"
    assert "WRONG_GRADIENT" in shown[2].text
    assert "- Gradient: dw" in shown[2].text


def test_every_ask_begins_with_the_same_prefix_so_that_providers_can_cache_it(tmp_path: Path) -> None:
    script = Script(WRONG, NO_CODE, CRASH, GOOD)
    start(script, tmp_path)
    prefixes = {(conversation.system, conversation.turns[0]) for conversation in script.asked}
    assert len(script.asked) == 4
    assert len(prefixes) == 1


def test_a_reply_without_code_costs_an_ask_and_is_told_the_contract(tmp_path: Path) -> None:
    script = Script(NO_CODE, GOOD)
    finished = start(script, tmp_path)
    assert finished.state.rounds[0].verdict is not None
    assert finished.state.rounds[0].verdict.status is Status.NO_CODE
    assert [r.prompt for r in finished.state.rounds] == [PromptName.DRAFT, PromptName.NO_CODE]
    assert "no fenced Python block" in script.asked[1].turns[2].text


def test_the_budget_of_asks_ends_a_run_red_with_its_best_candidate(tmp_path: Path) -> None:
    finished = start(Script(WRONG, CRASH), tmp_path, max_iters=2)
    assert finished.outcome is Outcome.NO_GREEN_VERDICT
    assert finished.state.delivered is None
    assert finished.state.best is not None
    # The wrong gradient came further than the crash, so the later candidate does not replace it.
    assert finished.state.best.verdict.status is Status.WRONG_GRADIENT
    assert "--max-iters" in finished.state.exhausted


def test_without_progress_work_goes_back_to_the_best_candidate(tmp_path: Path) -> None:
    crashes = [reply_text(CRASHING + f"# attempt {n}\n") for n in range(2)]
    script = Script(WRONG, *crashes, GOOD)
    finished = start(script, tmp_path, patience=2)
    (rollback,) = [event for event in events(finished) if isinstance(event, ev.RolledBack)]
    assert finished.state.rounds[0].candidate == rollback.digest
    assert CRASHING.strip() in script.asked[2].turns[1].text, "before patience ends the last candidate is repaired"
    assert SWAPPED.strip() in script.asked[3].turns[1].text, "afterwards the best one is"
    assert "The last replies brought no progress" in script.asked[3].turns[2].text
    assert finished.outcome is Outcome.DELIVERED


def test_a_repeated_candidate_is_not_judged_twice(tmp_path: Path) -> None:
    script = Script(WRONG, WRONG, GOOD)
    finished = start(script, tmp_path)
    assert script.checked == 2
    repeated = [event for event in events(finished) if isinstance(event, ev.Judged)][1]
    assert repeated.same_as == 1


def test_without_a_gpu_the_optimize_phase_is_skipped_with_one_line(tmp_path: Path) -> None:
    (skipped,) = [event for event in events(start(Script(GOOD), tmp_path)) if isinstance(event, ev.PhaseSkipped)]
    assert skipped.phase is ev.PhaseName.OPTIMIZE
    assert skipped.line == "no GPU here, so nothing can be timed"


def test_a_faster_proven_candidate_is_kept_and_a_slower_one_is_dropped(tmp_path: Path) -> None:
    slower, faster = reply_text(BACKWARD + "# slower\n"), reply_text(BACKWARD + "# faster\n")
    script = Script(GOOD, slower, WRONG, faster, times={"# slower": 120.0, "# faster": 60.0, "": 100.0})
    finished = start(script, tmp_path, max_iters=4)
    assert finished.state.best is not None
    assert finished.state.best.number == 4
    assert finished.state.best.verdict.green
    assert [r.prompt.value for r in finished.state.rounds] == ["draft", "optimize", "optimize", "repair"]
    delivered = (finished.folder.product / "product_backward.py").read_text()
    assert "# faster" in delivered
    assert delivered.startswith("# 4 asks, 60 us"), "the certificate quotes the time of what is delivered"


def test_a_gain_below_the_least_improvement_is_not_kept(tmp_path: Path) -> None:
    script = Script(GOOD, reply_text(BACKWARD + "# faster\n"), times={"# faster": 99.0, "": 100.0})
    finished = start(script, tmp_path, max_iters=2, min_rel_impr=0.02)
    assert finished.state.best is not None
    assert finished.state.best.number == 1


def test_nothing_is_asked_when_the_truth_does_not_stand_its_cross_check(tmp_path: Path) -> None:
    script = Script(GOOD, truth_passes=False)
    with pytest.raises(TruthDoubted):
        start(script, tmp_path)
    assert script.asked == []


def test_a_wrong_file_leaves_no_run_folder(tmp_path: Path) -> None:
    path = tmp_path / "bare.py"
    path.write_text("x = 1\n")
    with pytest.raises(InputError):
        start(Script(GOOD), tmp_path / "out", file=path)
    assert not (tmp_path / "out").exists()


def test_a_frozen_forward_refuses_a_reply_that_brings_its_own(tmp_path: Path) -> None:
    own = "```python\n# --- forward ---\ndef forward(x, w):\n    return product(x, w), (x, w, x)\n"
    script = Script(f"{own}# --- backward ---\n{BACKWARD}```", GOOD)
    finished = start(script, tmp_path, freeze_forward=True)
    assert finished.state.rounds[0].verdict is not None
    assert finished.state.rounds[0].verdict.status is Status.BAD_FORMAT
    assert "--freeze-forward" in script.asked[1].turns[2].text


def test_the_run_folder_holds_no_absolute_path_and_a_copy_of_the_file(tmp_path: Path) -> None:
    finished = start(Script(WRONG, GOOD), tmp_path / "out")
    folder = finished.folder
    assert folder.source.read_text() == FORWARD.read_text()
    assert str(tmp_path) not in folder.ledger.read_text()
    assert str(FORWARD.parent) not in folder.ledger.read_text()
    assert (folder.path.parent / "latest").resolve() == folder.path.resolve()
    assert sorted(path.name for path in folder.asks.iterdir()) == ["0001.md", "0002.md"]
    assert json.loads((folder.replies / "0002.json").read_text())["model"] == "script"


def test_a_moved_run_goes_on(tmp_path: Path) -> None:
    finished = start(Script(WRONG), tmp_path / "here", max_iters=1)
    moved = tmp_path / "there"
    (tmp_path / "here").rename(moved)
    script = Script(WRONG, GOOD)
    path = moved / finished.folder.path.relative_to(tmp_path / "here")
    again = resume(path, changes=Changes(max_iters=3), tools=script.tools, model=script.model)
    assert again.outcome is Outcome.DELIVERED
    assert len(script.asked) == 1, "the first reply is not asked for again"
    assert (moved / finished.folder.product.name / "product_backward.py").is_file()


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    finished = start(Script(GOOD), tmp_path)
    before = finished.folder.ledger.read_bytes()
    script = Script()
    again = resume(finished.folder.path, tools=script.tools, model=script.model)
    assert again.state == finished.state
    assert finished.folder.ledger.read_bytes() == before


def test_runs_are_listed_newest_first(tmp_path: Path) -> None:
    first, second = start(Script(GOOD), tmp_path), start(Script(WRONG), tmp_path, max_iters=1)
    listed = [found.folder.run_id for found in list_runs(tmp_path)]
    assert sorted(listed, reverse=True) == listed
    assert set(listed) == {first.folder.run_id, second.folder.run_id}


def test_a_dry_run_shows_the_first_prompt_and_writes_nothing(tmp_path: Path) -> None:
    script = Script(GOOD)
    prompt = first_prompt(config(tmp_path / "out"), tools=script.tools)
    start(script, tmp_path / "other")
    assert prompt.conversation == script.asked[0]
    assert prompt.input_tokens > 500
    assert not (tmp_path / "out").exists()


def test_the_observer_hears_every_event_in_order(tmp_path: Path) -> None:
    class Heard:
        entries: list[Entry] = []  # noqa: RUF012
        text = ""
        cases = 0

        def on_event(self, entry: Entry) -> None:
            self.entries.append(entry)

        def on_text(self, piece: str) -> None:
            self.text += piece

        def on_case(self, case: object, done: int, planned: int) -> None:
            self.cases += 1

        def on_notice(self, notice: object) -> None: ...

    heard, script = Heard(), Script(GOOD)
    finished = run(config(tmp_path), heard, tools=script.tools, model=script.model)
    assert tuple(heard.entries) == read_ledger(finished.folder.ledger).entries
    assert heard.text == GOOD
    assert heard.cases == 2
