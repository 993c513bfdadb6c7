"""`trace.md` reads like a story of the run, and the same ledger always gives the same text."""

from __future__ import annotations

import os
from pathlib import Path

from scripted import BACKWARD, SWAPPED

from kernel_agent.agent.events import Entry
from kernel_agent.agent.orchestrator import FinishedRun
from kernel_agent.report.trace import render_trace

GOLDEN = Path(__file__).parent / "golden" / "trace.md"


def test_the_trace_is_the_one_that_was_read_and_accepted(entries: tuple[Entry, ...]) -> None:
    text = render_trace(entries)
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(text, encoding="utf-8")
    assert text == GOLDEN.read_text(encoding="utf-8")


def test_the_same_ledger_gives_the_same_text(entries: tuple[Entry, ...]) -> None:
    assert render_trace(entries) == render_trace(list(entries))


def test_the_first_ask_is_whole_and_later_ones_show_only_what_is_new(entries: tuple[Entry, ...]) -> None:
    text = render_trace(entries)
    assert text.count("You write backward passes for Triton kernels.") == 1
    assert text.count("> # The forward") == 1
    assert text.count("> Verdict:") == 3, "one for each ask after the first"


def test_prompts_reasoning_tokens_checks_and_rollbacks_are_told_in_order(entries: tuple[Entry, ...]) -> None:
    text = render_trace(entries)
    places = [
        text.index(words)
        for words in (
            "## Phase 1, reference",
            "## Retrieval",
            "### Ask 1 (draft)",
            "1,000 tokens in",
            "> Think of the product rule.",
            "### Check 1",
            "Kept as the best candidate",
            "### Rolled back",
            "### Ask 4 (repair)",
            "GREEN",
            "## Phase 3, optimize: skipped",
            "## Delivered",
            "## Result",
        )
    ]
    assert places == sorted(places)


def test_code_of_replies_is_quoted_whole(entries: tuple[Entry, ...]) -> None:
    unquoted = "\n".join(line.removeprefix(">").removeprefix(" ") for line in render_trace(entries).splitlines())
    assert BACKWARD.strip() in unquoted
    assert SWAPPED.strip() in unquoted


def test_an_unfinished_ledger_is_rendered_too(entries: tuple[Entry, ...]) -> None:
    for length in range(len(entries) + 1):
        assert render_trace(entries[:length]).endswith("\n")


def test_the_file_in_the_run_folder_is_this_text(finished: FinishedRun) -> None:
    from kernel_agent.agent.ledger import read_ledger

    assert finished.folder.trace.read_text() == render_trace(read_ledger(finished.folder.ledger).entries)
