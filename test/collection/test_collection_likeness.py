"""Near-duplicates are found by what the code does, whatever its names, comments and layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_agent.collection.likeness import likenesses, near_duplicates, token_grams
from kernel_agent.data import pairs_root

SOFTMAX = (pairs_root() / "softmax" / "softmax_row.py").read_text()
LAYERNORM = (pairs_root() / "norm_row" / "layernorm_row.py").read_text()


def test_a_renamed_copy_is_a_twin_in_both_sections():
    # A copy with other names, comments and line breaks teaches nothing new.
    copy = (
        SOFTMAX.replace("_softmax", "_other")
        .replace(" y", " result")
        .replace(", N", ", COLUMNS")
        .replace("    # ", "    #  ")
    )
    found = near_duplicates({Path("softmax/a.py"): SOFTMAX, Path("softmax/b.py"): copy.replace("grad_y", "g")})
    assert [twins.section for twins in found] == ["forward", "backward"]
    assert all(twins.likeness > 0.95 for twins in found)
    assert "softmax/a and softmax/b" in str(found[0])


def test_other_operators_are_no_twins():
    assert near_duplicates({Path("a/a.py"): SOFTMAX, Path("b/b.py"): LAYERNORM}) == []


def test_likeness_is_the_jaccard_index_of_runs_of_five_tokens():
    one, other = "x = 1 + 2 + 3 + 4", "x = 1 + 2 + 3 + 5"
    both = token_grams(one) & token_grams(other)
    either = token_grams(one) | token_grams(other)
    matrix = likenesses([one, other])
    assert matrix[0, 1] == pytest.approx(len(both) / len(either))
    assert matrix[0, 0] == 1.0
    assert 0 < matrix[0, 1] < 1


def test_a_backward_that_only_calls_the_forwards_kernel_is_compared_by_its_forward():
    # Rotations are undone by the forward's own kernel with the other sign: such backwards are all alike.
    head, rest = SOFTMAX.split("# --- backward ---")
    short = f"{head}# --- backward ---\n\n\ndef backward(saved, grad_y, needs=None):\n    return turn(grad_y, -1)\n\n\n"
    pair = short + "# --- check ---" + rest.split("# --- check ---")[1]
    found = near_duplicates({Path("a/a.py"): pair, Path("b/b.py"): pair})
    assert [twins.section for twins in found] == ["forward"]


def test_docstrings_and_comments_count_for_nothing():
    plain = "def f(x):\n    return x + 1\n"
    told = 'def f(x):\n    """Adds one."""\n    # one more\n    return x + 1\n'
    assert token_grams(plain) == token_grams(told)


def test_operators_numbers_and_attributes_count():
    # Else a reverse scan would be a twin of a forward one.
    assert likenesses(["a = tl.cumsum(b, 0) + c * 2", "a = tl.cumsum(b, 0, reverse=True) - c * 4"])[0, 1] < 0.5
