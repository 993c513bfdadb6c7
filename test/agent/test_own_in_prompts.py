"""What a model is told of pairs that are the user's own: whether they are proven, and their licence."""

from __future__ import annotations

from prompted import HITS, PLAN, PRICES
from scripted import FORWARD, PAIR, spec_of

from kernel_agent.agent import prompts
from kernel_agent.agent.brief import Brief, make_brief
from kernel_agent.agent.events import PairsRetrieved, RetrievedPair
from kernel_agent.pairs.userfile import read_file
from kernel_agent.report import trace

HARVESTED = PAIR.model_copy(
    update={
        "slug": "library_norm",
        "standing": "own, unverified, from library, GPL-3.0-only",
        "verified": False,
    }
)


def brief(*pairs: RetrievedPair) -> Brief:
    return make_brief(spec_of(read_file(FORWARD)), pairs=pairs, freeze_forward=False, max_asks=10)


def opening(*pairs: RetrievedPair) -> str:
    return prompts.draft(brief(*pairs)).conversation.turns[0].text


def test_a_harvested_pair_is_shown_with_its_licence() -> None:
    shown = opening(PAIR, HARVESTED).partition("library_norm (")[2]
    assert "- own, unverified, from library, GPL-3.0-only" in shown.partition("Its forward")[0]


def test_what_nobody_has_proven_is_not_called_proven() -> None:
    text = opening(PAIR, HARVESTED)
    assert "Nobody has proven library_norm: its backward may be wrong." in text
    assert "The others passed the same judgement as yours will." in text
    assert "# Proven pairs" not in text


def test_proven_pairs_alone_are_introduced_as_before() -> None:
    text = opening(PAIR)
    assert "# Proven pairs" in text
    assert "Nobody has proven" not in text


def test_an_unproven_pair_alone_passed_no_judgement() -> None:
    assert "passed the same judgement" not in opening(HARVESTED)


def test_a_pair_by_technique_says_its_licence_too() -> None:
    hit = HITS[1].model_copy(update={"pair": HARVESTED})
    text = prompts.draft(brief(PAIR), PLAN, PRICES, (hit,)).conversation.turns[-1].text
    assert "Another pair, library_norm" in text
    assert "GPL-3.0-only" in text


def test_the_trace_names_the_licence_of_what_was_shown() -> None:
    lines = trace._pairs(PairsRetrieved(pairs=(HARVESTED.model_copy(update={"chosen": True}),)))
    assert "[own, unverified, from library, GPL-3.0-only]" in "\n".join(lines)
