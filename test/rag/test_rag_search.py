"""The nearest pairs come first, whole, with the reason beside each one that is not shown."""

import pytest

from kernel_agent.errors import InputError
from rag import Exclusion, Query, QueryVector, Signal, search
from rag.describe import describe
from rag.ranking import known_words, weights_of

STRANGER = '''
"""Plans railway timetables."""
import triton

def timetable(stations, carriages):
    return sorted(stations, key=carriages.get)
'''


def slugs(hits):
    return [hit.pair.slug for hit in hits]


def test_layernorm_finds_the_row_norm_first(index, layernorm):
    result = search(Query(layernorm), index)
    assert result.chosen[0].pair.slug == "rmsnorm_one_row"
    assert result.judged_by is Signal.DENSE
    assert result.notice == ""


@pytest.mark.parametrize(
    "slug", ["attention_one_tile", "cross_entropy_one_row", "matmul_one_tile_k", "softmax_one_row"]
)
def test_every_pair_finds_itself_first(index, pair_source, slug):
    assert search(Query(pair_source(slug)), index).hits[0].pair.slug == slug


def test_pairs_are_given_whole(index, pair_source):
    source = pair_source("attention_one_tile")
    pair = search(Query(source), index).hits[0].pair
    assert source.endswith(source.split("# --- check ---")[1])
    assert pair.forward == source.split("# --- forward ---")[1].split("# --- backward ---")[0].strip()
    assert pair.backward == source.split("# --- backward ---")[1].split("# --- check ---")[0].strip()
    assert pair.path.as_posix() == "attention/attention_one_tile.py"
    assert pair.family == "attention"


def test_scores_tell_ranks_per_signal_and_their_fusion(index, pair_source):
    scores = search(Query(pair_source("softmax_one_row")), index).hits[0].scores
    assert (scores.dense_rank, scores.lexical_rank, scores.structure_rank) == (1, 1, 1)
    weights = weights_of(len(known_words(describe(pair_source("softmax_one_row")), index)))
    assert scores.fused == pytest.approx(sum(weights.values()) / 61)
    assert scores.similarity == scores.dense > 0.9


def test_near_identical_backward_is_collapsed_into_the_better_hit(index, pair_source):
    # Both are SiLU under different names: shown twice, they would push a different pair out of the prompt.
    hits = search(Query(pair_source("silu_flat"), min_sim=0.0), index).hits
    twin = next(hit for hit in hits if hit.pair.slug == "swish_renamed")
    assert twin.excluded is Exclusion.NEAR_IDENTICAL
    assert twin.reason == "near-identical backward: silu_flat"


def test_collapsed_pair_makes_room_for_the_next(index, pair_source):
    chosen = search(Query(pair_source("silu_flat"), k=2, min_sim=0.0), index).chosen
    assert len(chosen) == 2
    assert "swish_renamed" not in slugs(chosen)


def test_k_cuts_the_chosen_but_not_the_hits(index, layernorm):
    result = search(Query(layernorm, k=1, min_sim=0.0), index)
    assert len(result.chosen) == 1
    assert len(result.hits) == 7
    assert Exclusion.BEYOND_K in {hit.excluded for hit in result.hits}


def test_k_zero_chooses_nothing_without_complaint(index, layernorm):
    result = search(Query(layernorm, k=0), index)
    assert result.chosen == ()
    assert result.notice == ""


def test_min_sim_shuts_out_what_is_dissimilar(index, pair_source):
    result = search(Query(pair_source("attention_one_tile"), min_sim=0.9), index)
    assert slugs(result.chosen) == ["attention_one_tile"]
    assert {hit.excluded for hit in result.hits[1:]} == {Exclusion.DISSIMILAR}


def test_nothing_similar_is_said_and_no_error(index):
    result = search(Query(STRANGER), index)
    assert result.chosen == ()
    assert "no pair is similar enough" in result.notice


def test_exclude_ignores_case_and_looks_at_the_whole_path(index, layernorm):
    result = search(Query(layernorm, exclude=("NORM_Row/",)), index)
    first = next(hit for hit in result.hits if hit.pair.slug == "rmsnorm_one_row")
    assert first.excluded is Exclusion.TERM
    assert first.detail == "NORM_Row/"
    assert "rmsnorm_one_row" not in slugs(result.chosen)


def test_exclude_terms_that_match_nothing_are_reported(index, layernorm):
    # A typo in an exclusion would otherwise leave the held-out pair in the prompt unnoticed.
    assert search(Query(layernorm, exclude=("rmsnrom", "silu")), index).unmatched_excludes == ("rmsnrom",)


def test_blank_exclude_terms_exclude_nothing(index, layernorm):
    # `--rag-exclude a,` splits into "a" and "": an empty string is part of every path.
    result = search(Query(layernorm, exclude=("", " ")), index)
    assert result.chosen
    assert result.unmatched_excludes == ()


def test_strange_names_are_searched_by_structure(index, pair_source):
    source = pair_source("attention_one_tile").split("# --- forward ---")[1].split("# --- backward ---")[0]
    for number, name in enumerate(("_attention_fwd", "forward", "scale", "inside", "lse", "LSE", "BLOCK", "OUT", "at")):
        source = source.replace(name, f"wuxyz{chr(97 + number)}qqj")
    result = search(Query(source), index)
    assert result.judged_by is Signal.STRUCTURE
    assert result.chosen[0].pair.slug == "attention_one_tile"
    assert "structure" in result.notice


def test_words_of_memory_layout_do_not_hide_a_strange_file(index):
    # Every kernel says ptr, offs, mask: known words, and yet nothing is known.
    source = """
@triton.jit
def k1(a_ptr, b_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    t = tl.load(a_ptr + offs, mask=mask)
    tl.store(b_ptr + offs, t * tl.sigmoid(t), mask=mask)
"""
    result = search(Query(source), index)
    assert result.judged_by is Signal.STRUCTURE
    assert result.chosen[0].pair.family == "activation"


def test_options_out_of_range_are_refused(index, layernorm):
    with pytest.raises(InputError, match=r"top k must not be negative"):
        search(Query(layernorm, k=-1), index)
    with pytest.raises(InputError, match=r"min-sim must lie in \[0, 1\]"):
        search(Query(layernorm, min_sim=1.5), index)


def test_lexical_index_searches_alone_and_says_so(lexical_index, layernorm):
    result = search(Query(layernorm), lexical_index)
    assert result.judged_by is Signal.LEXICAL
    assert result.hits[0].pair.slug == "rmsnorm_one_row"
    assert "lexical search alone" in result.notice
    assert result.hits[0].scores.similarity == result.hits[0].scores.lexical


def test_a_pair_without_room_gives_way_to_a_smaller_one_and_is_never_cut(index, layernorm):
    whole = search(Query(layernorm, k=4, min_sim=0.0), index).chosen
    room = sum(hit.pair.size for hit in whole) - 1
    result = search(Query(layernorm, k=4, min_sim=0.0, room=room), index)
    assert Exclusion.NO_ROOM in {hit.excluded for hit in result.hits}
    assert sum(hit.pair.size for hit in result.chosen) <= room
    assert result.chosen[0].pair == whole[0].pair


def test_room_must_not_be_negative(index, layernorm):
    with pytest.raises(InputError, match="nor room"):
        search(Query(layernorm, room=-1), index)


def test_a_backward_beside_the_forward_changes_no_hit(index, layernorm):
    # A library's file brings its own backward: a class's method, and a kernel that only it launches.
    own = layernorm + (
        "\n\n@triton.jit\ndef attention_cross_entropy_kernel(p):\n    tl.store(p, tl.dot(tl.load(p), tl.load(p)))\n\n"
        "class F(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n"
        "        return layer_norm(x)\n\n"
        "    @staticmethod\n    def backward(ctx, g):\n        attention_cross_entropy_kernel[(1,)](g)\n"
    )
    assert "attention" not in describe(own).words
    assert "tl.dot" not in describe(own).ops
    assert search(Query(own), index).hits[0].pair.slug == "rmsnorm_one_row"


def test_a_pair_that_one_signal_finds_near_is_similar(index, layernorm):
    # Judged by the embedding alone, a tenth of all queries lost the family that words and structure found.
    far = QueryVector(index.embedding.identity, tuple(-number for number in index.vectors[0].tolist()))
    hits = search(Query(layernorm, vector=far), index).hits
    assert all(hit.scores.dense < 0.51 for hit in hits if hit.chosen)
    assert "rmsnorm_one_row" in slugs([hit for hit in hits if hit.chosen])
    assert not search(Query(layernorm, vector=far, min_sim=0.51), index).chosen, "what is asked for holds"


def test_an_explained_hit_names_what_it_shares(index, layernorm):
    result = search(Query(layernorm, explain=True), index)
    assert set(result.hits[0].shared) & {"rstd", "norm", "row"}
    assert "rstd" in result.known
    assert set(result.weights) == set(Signal)
    assert search(Query(layernorm), index).hits[0].shared == ()
