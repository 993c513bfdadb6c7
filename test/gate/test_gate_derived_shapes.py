"""Which shapes are derived beside SWEEP: every size goes beyond one tile somewhere, however large the others are."""

from __future__ import annotations

import math

from kernel_agent.gate.derived_shapes import apart_entries
from kernel_agent.gate.options import STANDARD
from kernel_agent.pairs.spec import ShapeEntry


def asked(*entries):
    """Dims of the first choice of every shape that is asked once."""
    found = apart_entries([ShapeEntry(dims=dims) for dims in entries], set(), STANDARD)
    return [group.entries[0].dims for group in found]


def test_a_size_that_another_entry_shows_to_be_no_count_goes_beyond_one_tile():
    # Seven steps look like a batch. A factor that is wrong beyond 128 of them was green.
    shapes = asked({"B": 5, "S": 7, "D": 45}, {"B": 2, "S": 9, "D": 64})
    assert {"B": 5, "S": 129, "D": 45} in shapes
    assert max(dims["B"] for dims in shapes) == 5, "what is small in all entries counts"


def test_each_size_of_a_large_product_goes_beyond_one_tile():
    # Two of these sizes at 129 are more work than a case may be. A program id that was zero was green.
    convolution = {"B": 2, "S": 32, "CI": 16, "CO": 16, "TAPS": 4, "stride": 2}
    shapes = asked(convolution)
    for name in ("S", "CI", "CO"):
        assert any(dims[name] > 128 for dims in shapes), name
    assert all(math.prod(dims.values()) <= STANDARD.max_volume // 2 for dims in shapes)


def test_sizes_are_halved_beside_one_that_goes_beyond_a_tile_where_the_product_is_too_large():
    window = {"H": 12, "W": 10, "CI": 16, "CO": 16, "SIDE": 5, "pad": 3}
    assert {**window, "H": 129, "W": 5, "CI": 8, "CO": 8} in asked(window)


def test_few_rows_go_beyond_one_tile_beside_a_wide_one_in_the_same_case():
    # A case of its own for rows would make each verdict of a norm longer.
    shapes = asked({"M": 5, "N": 64}, {"M": 19, "N": 100})
    assert [dims for dims in shapes if dims["M"] > 128] == [{"M": 129, "N": 129}]


def test_a_size_that_is_cut_in_all_entries_is_asked_where_no_tile_is_and_where_only_wide_ones_are():
    # A tail that is lost where there is none, and a mask that is left out where another tile is whole, were green.
    shapes = asked({"M": 3, "N": 20}, {"M": 5, "N": 37})
    assert {"M": 3, "N": 128} in shapes
    assert {"M": 3, "N": 192} in shapes


def test_whole_sizes_that_entries_have_are_not_asked_again():
    # Most files ask for powers of two: their verdicts take as long as before.
    assert not {128, 192} & {dims["N"] for dims in asked({"M": 3, "N": 64}, {"M": 5, "N": 256})}
    assert 128 in {dims["N"] for dims in asked({"M": 3, "N": 64}, {"M": 5, "N": 100})}


def test_whole_sizes_of_a_large_product_are_asked_along_fewer_axes():
    (narrow,) = [dims for dims in asked({"M": 40, "N": 36, "K": 33}) if 192 in dims.values()]
    assert narrow == {"M": 192, "N": 192, "K": 33}
