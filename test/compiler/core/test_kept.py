"""Proven pairs on disk: what comes back is what was kept, and nothing that was changed since is believed."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from kernel_agent.compiler.derived import Derived, Draft
from kernel_agent.compiler.errors import CannotDerive, NotThisTime
from kernel_agent.compiler.kept import KeptPairs, derivation_key
from kernel_agent.errors import EnvironmentProblem
from kernel_agent.gate.verdict import CaseResult, Status, Verdict
from kernel_agent.pairs.spec import Candidate

GREEN = Verdict(status=Status.GREEN, cases=(CaseResult(case="N=8", required=True, status=Status.GREEN),))
DRAFT = Draft("owned", Candidate(backward="def backward(): ..."), "# the pair\n", ("owned",), ("a remark",), 0.5)
DERIVED = Derived(DRAFT, GREEN, ("rows: no axis is summed",), 2.0)


@pytest.fixture
def kept(tmp_path: Path) -> KeptPairs:
    return KeptPairs(tmp_path / "derived")


def entry(kept: KeptPairs) -> Path:
    (path,) = kept.folder.glob("*.json")
    return path


def test_what_was_kept_comes_back_whole(kept):
    kept.put("k", DERIVED)
    assert kept.get("k") == DERIVED


def test_an_unknown_key_has_no_pair(kept):
    assert kept.get("k") is None


def test_an_entry_whose_text_was_changed_is_none(kept):
    # The pair is code that will run: an edited one must not pass for a proven one.
    kept.put("k", DERIVED)
    entry(kept).write_text(entry(kept).read_text().replace("# the pair", "# another one"))
    assert kept.get("k") is None


def test_an_entry_whose_verdict_was_changed_is_none(kept):
    kept.put("k", DERIVED)
    entry(kept).write_text(entry(kept).read_text().replace("N=8", "N=9"))
    assert kept.get("k") is None


def test_an_entry_that_was_cut_short_is_none(kept):
    kept.put("k", DERIVED)
    entry(kept).write_text(entry(kept).read_text()[:100])
    assert kept.get("k") is None


def test_an_entry_without_a_green_verdict_is_none(kept):
    # Its hash fits: only the status says that nothing was proven.
    kept.put("k", Derived(DRAFT, GREEN.model_copy(update={"status": Status.RACE}), (), 1.0))
    assert json.loads(entry(kept).read_text())["derived"]["verdict"]["status"] == "RACE"
    assert kept.get("k") is None


def test_the_key_tells_forwards_schedules_and_configurations_apart():
    keys = {
        derivation_key("a"),
        derivation_key("b"),
        derivation_key("a", "b"),
        derivation_key("a", schedules=("plain",)),
    }
    assert len(keys) == 4


def test_a_folder_that_cannot_be_written_is_said_with_a_remedy(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(EnvironmentProblem, match="cannot write the derived pairs"):
        KeptPairs(tmp_path / "file").put("k", DERIVED)


def test_of_several_that_want_one_pair_only_one_derives_it(kept):
    # Ranks of a distributed run meet the same stub at the same moment. The lock is the file's: threads, each with the
    # file open for itself, wait for each other as processes do.
    derivations = []

    def derive_slowly() -> None:
        with kept.deriving("k"):
            if kept.get("k") is None:
                derivations.append("k")
                time.sleep(0.2)
                kept.put("k", DERIVED)

    ranks = [threading.Thread(target=derive_slowly) for _ in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(30)
    assert derivations == ["k"]
    assert kept.get("k") == DERIVED


def test_a_refusal_comes_back_with_its_remedy_and_line(kept):
    kept.refuse("k", CannotDerive("the launch stands in a loop", remedy="Launch once.", line=7))
    found = kept.refusal("k")
    assert (found.message, found.remedy, found.line) == ("the launch stands in a loop", "Launch once.", 7)
    assert kept.get("k") is None
    assert kept.refusal("another key") is None


def test_a_refusal_for_want_of_time_is_tried_again(kept):
    # a crowded machine would refuse a forward for good
    kept.refuse("k", NotThisTime("no derived backward is proven: rows: the gate says TIMED_OUT"))
    assert kept.refusal("k") is None


def test_a_damaged_refusal_is_none(kept):
    kept.refuse("k", CannotDerive("no"))
    entry(kept).write_text(entry(kept).read_text()[:9])
    assert kept.refusal("k") is None
