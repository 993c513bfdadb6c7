"""Shapes that are shrunk: what is looked at where the user asked, and that the words claim no more."""

from __future__ import annotations

import pytest
from forwards import SCALED

from kernel_agent.oracle import Truths, at_full_size, describe
from kernel_agent.pairs.userfile import read_file

LARGE = ("dict(n=1 << 24, required=False)", "dict(n=1 << 18)")


@pytest.fixture
def looks_of(tmp_path, sandbox):
    def look(*changes):
        text = SCALED
        for old, new in (LARGE, *changes):
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "user.py"
        path.write_text(text)
        truths = Truths(describe(read_file(path), sandbox), sandbox)
        return at_full_size(truths, truths.fit(truths.spec.sweep, max_elements=1 << 12, max_volume=1 << 20))

    return look


def test_outputs_and_gradients_of_sampled_rows_are_compared_at_the_size_asked_for(looks_of):
    (full,) = looks_of()
    assert full.look.shares == ("4 of 4096 programs of scaled_kernel",)
    assert list(full.look.parts.values()) == [(256, 1 << 18)]
    assert len(full.look.errors) == 3, "one output and two gradients"
    assert full.look.disagrees == ()
    assert "at n=262144 itself, 4 of 4096 programs" in full.words
    assert "agree with the reference on sampled rows" in full.words
    assert f"compared at {full.fit.entry.label} only" in full.words


def test_a_forward_that_is_wrong_at_the_asked_size_alone_is_told(looks_of):
    # The shrunk shape cannot show it: the last program differs from the first there only.
    wrong = "tl.load(X + i, mask=i < n) * tl.load(W + i, mask=i < n)"
    (full,) = looks_of((wrong, wrong + " * tl.where(i > 260000, 2.0, 1.0)"))
    assert "`y`" in full.look.disagrees or len(full.look.disagrees) == 3
    assert "differs from the reference" in full.words


def test_an_access_that_leaves_its_buffer_at_the_asked_size_alone_is_told(looks_of):
    (full,) = looks_of(
        ("mask=i < n) *", "mask=i < n + tl.where(i > 260000, 64, 0)) *"),
        ("n=1 << 18", "n=(1 << 18) - 32"),
    )
    assert "outside of" in full.words


def test_sums_by_atomics_are_not_looked_at_and_the_words_say_so(looks_of):
    (full,) = looks_of(("tl.store(Y + i,", "tl.atomic_add(Y + i,"), ("torch.empty_like(x)", "torch.zeros_like(x)"))
    assert full.look is None
    assert "nothing was run at n=262144 itself" in full.words
    assert "atomics" in full.words
