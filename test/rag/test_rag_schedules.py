"""Pairs are found by how their backwards are organised, for each gradient that asks."""

import dataclasses
from pathlib import Path

import pytest

from kernel_agent.pairs.techniques import TECHNIQUES
from rag import Query, Wanted, search, search_techniques

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def pairs(pair_index):
    return pair_index


def example(name):
    path = EXAMPLES / f"{name}.py"
    return Query(path.read_text(encoding="utf-8"), path)


def slugs(matches):
    return [match.pair.slug for match in matches]


@pytest.mark.parametrize(
    ("technique", "forward"),
    [
        ("atomics", "attention"),
        ("column-owner", "layernorm"),
        ("loop-swap", "attention"),
        ("reverse-scan", "gated_recurrence"),
        ("two-stage-partials", "matmul"),
    ],
)
def test_a_pair_is_given_whole_and_has_the_technique(pairs, technique, forward):
    (match,) = search_techniques([Wanted("weight", (technique,))], example(forward), n=1, index=pairs)
    assert match.technique == technique
    assert technique in match.pair.techniques
    row = next(row for row, entry in enumerate(pairs.entries) if entry.slug == match.pair.slug)
    assert match.pair.backward == pairs.read(row).backward


def test_a_gradient_of_the_same_name_beats_a_nearer_forward(pairs):
    # A scan with a matrix state resembles the recurrence more than a table look-up does, and has no such gradient.
    (match,) = search_techniques([Wanted("weight", ("atomics",))], example("gated_recurrence"), n=1, index=pairs)
    assert match.pair.slug == "embedding_atomic"
    (match,) = search_techniques([Wanted("u", ("atomics",))], example("gated_recurrence"), n=1, index=pairs)
    assert match.pair.slug == "selective_scan_recompute"


@pytest.mark.parametrize(
    ("technique", "forward"), [("atomics", "layernorm"), ("sorted-segments", "attention"), ("reverse-scan", "softmax")]
)
def test_no_pair_is_better_than_one_that_is_like_the_forward_in_nothing(pairs, technique, forward):
    # A table look-up was shown for the sums of a norm: tokens for a model to misread.
    assert technique in {tag for entry in pairs.entries for tag in entry.techniques}
    assert search_techniques([Wanted("weight", (technique,))], example(forward), index=pairs) == ()


def test_among_equals_the_nearest_forward_comes_first(pairs):
    (match,) = search_techniques([Wanted("weight", ("two-stage-partials",))], example("rmsnorm"), n=1, index=pairs)
    assert match.pair.slug == "rmsnorm_row"


def test_gradients_take_turns(pairs):
    # With one gradient's list first, the budget would be spent before the second gradient is looked at.
    wanted = [Wanted("x", ("row-local", "two-pass")), Wanted("weight", ("persistent-grid",))]
    matches = search_techniques(wanted, example("layernorm"), n=2, index=pairs)
    assert [(match.grad, match.technique) for match in matches] == [("x", "row-local"), ("weight", "persistent-grid")]


def test_what_a_shown_pair_shows_already_is_not_searched_for(pairs):
    wanted = [Wanted("weight", ("two-stage-partials", "column-owner"))]
    matches = search_techniques(wanted, example("layernorm"), shown=("layernorm_row",), n=2, index=pairs)
    assert [match.technique for match in matches] == ["column-owner"]


def test_again_another_pair_is_given_than_the_shown_ones(pairs):
    # A red gradient saw the shown pairs and was written wrong all the same.
    shown = [hit.pair.slug for hit in search(example("layernorm"), pairs).chosen]
    wanted = [Wanted("weight", ("two-stage-partials",))]
    (match,) = search_techniques(wanted, example("layernorm"), shown=shown, again=True, n=1, index=pairs)
    assert match.pair.slug not in shown


def test_excluded_pairs_stay_excluded(pairs):
    # A pair held out of the first search would otherwise come in by the back door.
    query = dataclasses.replace(example("gated_recurrence"), exclude=("embedding",))
    (match,) = search_techniques([Wanted("weight", ("atomics",))], query, n=1, index=pairs)
    assert "embedding" not in match.pair.slug


def test_a_technique_of_nearly_every_pair_is_not_searched_for(pairs):
    assert search_techniques([Wanted("x", ("strided-cotangent",))], example("layernorm"), index=pairs) == ()


def test_pairs_that_do_not_fit_are_passed_over_for_smaller_ones(pairs):
    wanted, query = [Wanted("decay", ("atomics",))], example("gated_recurrence")
    large, small = (search_techniques(wanted, query, n=1, room=room, index=pairs)[0].pair for room in (24_000, 2500))
    assert len(large.forward) + len(large.backward) > 2500
    assert len(small.forward) + len(small.backward) <= 2500
    assert search_techniques(wanted, query, n=1, room=100, index=pairs) == ()


def test_near_identical_backwards_are_given_once(pairs):
    wanted = [Wanted(f"x{number}", (tag,)) for number, tag in enumerate(TECHNIQUES)]
    found = slugs(search_techniques(wanted, example("gated_recurrence"), n=20, room=10**6, index=pairs))
    assert len(found) == len(set(found)) > 5


def test_a_stale_pair_is_never_given(pairs):
    entries = tuple(
        entry.model_copy(update={"hash": "of another text"}) if entry.slug == "embedding_atomic" else entry
        for entry in pairs.entries
    )
    stale = dataclasses.replace(pairs, entries=entries)
    wanted, query = [Wanted("weight", ("atomics",))], example("gated_recurrence")
    (match,) = search_techniques(wanted, query, n=1, index=stale)
    assert match.pair.slug != "embedding_atomic"
