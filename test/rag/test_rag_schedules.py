"""Pairs are found by how their backwards are organised, for each gradient that asks."""

import dataclasses
from pathlib import Path

import pytest

from kernel_agent.pairs.techniques import TECHNIQUES
from rag import Query, Wanted, load_index, search, search_techniques

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def pairs():
    """The shipped index, searched by words alone: no model is loaded."""
    return dataclasses.replace(load_index(), vectors=None)


def example(name):
    path = EXAMPLES / f"{name}.py"
    return Query(path.read_text(encoding="utf-8"), path)


def slugs(matches):
    return [match.pair.slug for match in matches]


@pytest.mark.parametrize(
    "technique", ["atomics", "column-owner", "loop-swap", "reverse-scan", "sorted-segments", "two-stage-partials"]
)
def test_a_pair_is_given_whole_and_has_the_technique(pairs, technique):
    (match,) = search_techniques([Wanted("weight", (technique,))], example("layernorm"), n=1, index=pairs)
    assert match.technique == technique
    assert technique in match.pair.techniques
    assert match.pair.backward == pairs.read(next(e for e in pairs.entries if e.slug == match.pair.slug)).backward


def test_a_gradient_of_the_same_name_beats_a_nearer_forward(pairs):
    # Attention by atomics resembles attention more than a table look-up does, and sums no gradient of a table.
    (match,) = search_techniques([Wanted("weight", ("atomics",))], example("attention"), n=1, index=pairs)
    assert match.pair.slug == "embedding_atomic"
    (match,) = search_techniques([Wanted("q", ("atomics",))], example("attention"), n=1, index=pairs)
    assert match.pair.slug == "fa_onekernel_dq_atomic"


def test_among_equals_the_nearest_forward_comes_first(pairs):
    (match,) = search_techniques([Wanted("weight", ("two-stage-partials",))], example("rmsnorm"), n=1, index=pairs)
    assert match.pair.slug == "rmsnorm_row"


def test_gradients_take_turns(pairs):
    # With one gradient's list first, the budget would be spent before the second gradient is looked at.
    wanted = [Wanted("x", ("row-local", "two-pass")), Wanted("weight", ("atomics",))]
    matches = search_techniques(wanted, example("layernorm"), n=2, index=pairs)
    assert [(match.grad, match.technique) for match in matches] == [("x", "row-local"), ("weight", "atomics")]


def test_what_a_shown_pair_shows_already_is_not_searched_for(pairs):
    wanted = [Wanted("weight", ("two-stage-partials", "atomics"))]
    matches = search_techniques(wanted, example("layernorm"), shown=("layernorm_row",), n=2, index=pairs)
    assert [match.technique for match in matches] == ["atomics"]


def test_again_another_pair_is_given_than_the_shown_ones(pairs):
    # A red gradient saw the shown pairs and was written wrong all the same.
    shown = [hit.pair.slug for hit in search(example("layernorm"), pairs).chosen]
    wanted = [Wanted("weight", ("two-stage-partials",))]
    (match,) = search_techniques(wanted, example("layernorm"), shown=shown, again=True, n=1, index=pairs)
    assert match.pair.slug not in shown


def test_excluded_pairs_stay_excluded(pairs):
    # A pair held out of the first search would otherwise come in by the back door.
    query = dataclasses.replace(example("layernorm"), exclude=("embedding",))
    (match,) = search_techniques([Wanted("weight", ("atomics",))], query, n=1, index=pairs)
    assert "embedding" not in match.pair.slug


def test_a_technique_of_nearly_every_pair_is_not_searched_for(pairs):
    assert search_techniques([Wanted("x", ("strided-cotangent",))], example("layernorm"), index=pairs) == ()


def test_pairs_that_do_not_fit_are_passed_over_for_smaller_ones(pairs):
    wanted = [Wanted("q", ("atomics",))]
    large, small = (
        search_techniques(wanted, example("attention"), n=1, room=room, index=pairs)[0].pair for room in (24_000, 2500)
    )
    assert len(large.forward) + len(large.backward) > 2500
    assert len(small.forward) + len(small.backward) <= 2500
    assert search_techniques(wanted, example("attention"), n=1, room=100, index=pairs) == ()


def test_near_identical_backwards_are_given_once(pairs):
    wanted = [Wanted(f"x{number}", (tag,)) for number, tag in enumerate(TECHNIQUES)]
    found = slugs(search_techniques(wanted, example("layernorm"), n=20, room=10**6, index=pairs))
    assert len(found) == len(set(found)) == 20


def test_a_stale_pair_is_never_given(pairs, tmp_path):
    manifest = pairs.manifest.model_copy(
        update={"sources": {**pairs.manifest.sources, "gather_scatter/embedding_atomic.py": "another text"}}
    )
    stale = dataclasses.replace(pairs, manifest=manifest)
    (match,) = search_techniques([Wanted("weight", ("atomics",))], example("layernorm"), n=1, index=stale)
    assert match.pair.slug != "embedding_atomic"
