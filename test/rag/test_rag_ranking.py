"""What names are worth decides the fusion; near ties go to the faster, and to what shows another technique."""

import dataclasses

import numpy as np
import pytest

from rag import Query, Signal, search
from rag.dense import DenseIndex
from rag.ranking import MANY_KNOWN_WORDS, Ranking, Rankings, weights_of
from rag.retrieval import _next


def rankings(**cosines):
    """Rankings of three entries with the weights of a query without names."""
    weights = weights_of(0)
    return Rankings({Signal(n): Ranking.of(np.array(c), weights[Signal(n)]) for n, c in cosines.items()}, named=False)


def test_without_names_the_order_is_that_of_structure():
    # Fused with words that mean nothing, structure found less than alone.
    fused = rankings(lexical=[0.9, 0.5, 0.1], structure=[0.1, 0.2, 0.3]).fused()
    assert list(np.argsort(-fused)) == [2, 1, 0]


def test_telling_names_count_more_the_more_there_are():
    words = [weights_of(known)[Signal.LEXICAL] for known in range(MANY_KNOWN_WORDS + 1)]
    assert words == sorted(set(words)), "strictly growing"
    assert weights_of(MANY_KNOWN_WORDS) == weights_of(10 * MANY_KNOWN_WORDS)


def test_an_embedding_is_trusted_less_than_words_while_few_are_known():
    weights = weights_of(MANY_KNOWN_WORDS // 2)
    assert weights[Signal.DENSE] < weights[Signal.LEXICAL] / 2


def test_a_near_family_lifts_its_entries_over_a_lone_neighbour():
    cosines, families = np.array([0.50, 0.49, 0.49, 0.48]), np.array([0, 1, 1, 1])
    alone, together = (
        Ranking.of(cosines),
        Ranking.of(np.append(cosines, [0.0, 0.0]), families=np.append(families, [0, 0])),
    )
    assert alone.ranks[0] == 1
    assert together.ranks[1] == 1


def entries(index, **changes):
    return tuple(entry.model_copy(update=changes.get(entry.slug, {})) for entry in index.entries)


def chosen_after_first(index, fused, techniques):
    """The row that follows row 0, when rows 0 and 1 are of one family and have these techniques."""
    changed = [
        entry.model_copy(update={"family": "one" if row < 2 else entry.family, "techniques": tags})
        for row, (entry, tags) in enumerate(zip(index.entries, techniques, strict=True))
    ]
    index = dataclasses.replace(index, entries=tuple(changed))
    first = dataclasses.replace(index.read(0), family="one", techniques=techniques[0])
    return _next([1, 2], np.array(fused), index, [first])


@pytest.mark.parametrize(("second", "follows"), [(("atomics",), 2), (("split-k",), 1)], ids=["the same", "another"])
def test_a_pair_that_shows_what_its_family_has_shown_gives_way_to_a_near_one(lexical_index, second, follows):
    techniques = [("atomics",), second, *[("recompute",)] * (len(lexical_index.entries) - 2)]
    fused = [1 / 61, 1 / 62, 1 / 63, *[0.0] * (len(lexical_index.entries) - 3)]
    assert chosen_after_first(lexical_index, fused, techniques) == follows


@pytest.mark.parametrize(("second", "follows"), [(1 / 62, 1), (1 / 61, 2)], ids=["a rank apart", "equal"])
def test_speed_decides_between_equals_only(lexical_index, second, follows):
    size = len(lexical_index.entries)
    index = dataclasses.replace(lexical_index)
    index.__dict__["shares_of_bound"] = np.array([0.0, 0.1, 0.9, *[0.0] * (size - 3)])
    other = 1 / 61 if follows == 2 else 1 / 63
    assert _next([1, 2], np.array([0.0, second, other, *[0.0] * (size - 3)]), index, []) == follows


def test_lists_of_many_vectors_find_the_nearest(embedding_model, monkeypatch):
    # Vectors lie in clusters, as those of families do.
    generator = np.random.default_rng(0)
    centres = generator.standard_normal((40, 32))
    vectors = (np.repeat(centres, 250, axis=0) + 0.3 * generator.standard_normal((10_000, 32))).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    exact = DenseIndex(vectors)
    monkeypatch.setattr("rag.dense.EXACT_UP_TO", 1000)
    lists = DenseIndex(vectors)
    assert (exact.exact, lists.exact) == (True, False)
    for row in range(0, 10_000, 500):
        assert int(np.argmax(lists.cosines(vectors[row]))) == row
        best = set(np.argsort(-exact.cosines(vectors[row]))[:10])
        assert len(best & set(np.argsort(-lists.cosines(vectors[row]))[:10])) >= 9


def test_structure_is_found_under_other_names_and_other_statements(index):
    # A softmax whose steps stand in one expression, with helpers and names that mean nothing.
    source = """
import triton
import triton.language as tl

@triton.jit
def zqa(zqb):
    return tl.exp(zqb - tl.max(zqb, axis=0))

@triton.jit
def zqc(zqd, zqe, zqf, zqg: tl.constexpr):
    zqh = zqa(tl.load(zqd + tl.program_id(0) * zqf + tl.arange(0, zqg), tl.arange(0, zqg) < zqf, -float("inf")))
    tl.store(zqe + tl.program_id(0) * zqf + tl.arange(0, zqg), zqh / tl.sum(zqh, axis=0), tl.arange(0, zqg) < zqf)
"""
    result = search(Query(source), index)
    assert result.judged_by is Signal.STRUCTURE
    assert result.hits[0].pair.family == "softmax"
