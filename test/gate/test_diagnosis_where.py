"""Where a gradient is wrong is told exactly: a wrong place would send a reader to the wrong line."""

from __future__ import annotations

import pytest
import torch

from kernel_agent.gate.diagnosis.where import region


def _normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _statement(shape, spoil, **known):
    """The statement on a truth of this shape whose copy `spoil` changes in place."""
    truth = _normal(*shape)
    given = truth.clone()
    spoil(given)
    found = region("dk", given, truth, 1.0, **known)
    assert found is not None
    return found.statement


def test_an_equal_gradient_has_no_region():
    assert region("dk", _normal(40, 100), _normal(40, 100), 1.0) is None


def test_rounding_is_not_a_wrong_element():
    # The candidate adds in another order: that alone must never look like a place.
    assert region("dk", _normal(40, 100) * (1 + 1e-12), _normal(40, 100), 1.0) is None


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (lambda g: g, "everywhere"),
        (lambda g: g[:, 96:], "only in columns 96 to 99 (the last 4 of 100, from 96 on, a multiple of 32)"),
        (lambda g: g[0], "only in row 0 (the first)"),
        (lambda g: g[-1], "only in row 39 (the last)"),
        (lambda g: g[1:], "only in all rows but 0 (the first)"),
        (lambda g: g[1::2], "only in every row that is 1 modulo 2"),
        (lambda g: g[:32, :16], "only in rows 0 to 31 (the first 32 of 40) and columns 0 to 15 (the first 16 of 100)"),
        (lambda g: g[3:19:5], "only in rows 3, 8, 13 and 18"),
        (lambda g: g.view(-1)[2048:], "only in elements 2048 to 3999 (the last 1952 of 4000, from 2048 on), counted"),
    ],
)
def test_the_place_is_named(place, words):
    assert _statement((40, 100), lambda g: place(g).zero_()).startswith(words)


def test_the_few_rows_that_are_right_are_named_where_the_wrong_ones_are_many():
    # Rows at the ends of chunks that alone are right tell of a recurrence what a count of wrong rows does not.
    wrong = torch.tensor([row for row in range(40) if row not in (15, 38)])
    assert _statement((40, 100), lambda g: g.index_fill_(0, wrong, 0.0)) == "only in all rows but 15 and 38"


def test_a_block_is_called_so_when_the_block_size_is_known():
    last = _statement((40, 100), lambda g: g[:, 96:].zero_(), blocks=(32,))
    assert last == "only in columns 96 to 99 (the part block at the end, blocks of 32)"
    middle = _statement((40, 96), lambda g: g[:, 32:64].zero_(), blocks=(32,))
    assert middle == "only in columns 32 to 63 (block 1, blocks of 32)"


def test_a_dimension_is_called_by_the_name_that_it_alone_has():
    dims = {"B": 2, "H": 3, "M": 33, "N": 33}
    assert _statement((2, 3, 33, 33), lambda g: g[1].zero_(), dims=dims).startswith(
        "only in index 1 of dimension 0 (B)"
    )
    both = _statement((2, 3, 33, 33), lambda g: g[..., 32].zero_(), dims=dims)
    assert both == "only in index 32 of dimension 3 (the last)", "M and N are equal here: neither may be named"


def test_a_relation_of_row_and_column_is_seen():
    # What a causal mask that is off by one does to a gradient of the scores.
    above = _statement((2, 33, 33), lambda g: g.tril_())
    assert above == "only above the diagonal (column > row)"
    assert _statement((33, 33), lambda g: g.fill_diagonal_(0.0)) == "only on the diagonal (row = column)"


def test_not_a_number_is_a_wrong_element():
    # NaN compares false with everything: a mask made with `>` would miss it.
    assert _statement((40, 100), lambda g: g[39].fill_(float("nan"))) == "only in row 39 (the last)"


def test_elements_without_a_pattern_are_counted_not_explained():
    chosen = torch.randperm(4000, generator=torch.Generator().manual_seed(1))[:800]
    text = _statement((40, 100), lambda g: g.view(-1).index_fill_(0, chosen, 9.0))
    assert text == "in 800 of 4000 elements, in every row and column"


def test_a_single_element_of_a_scalar_gradient():
    assert _statement((), lambda g: g.zero_()) == "in its only element"
