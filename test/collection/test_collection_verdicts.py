"""Verdicts are data: the same ones give the same text, one file per family, and none covers an edited pair."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_agent.collection.kernelfacts import KernelFacts
from kernel_agent.collection.verdicts import PairVerdict, Standing, VerdictBook, one_digit
from kernel_agent.errors import InputError
from kernel_agent.gate.verdict import Status
from kernel_agent.pairs.spec import content_hash


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """An entry of a small dataset."""
    path = tmp_path / "datasets" / "kernel_pairs" / "softmax" / "softmax_row.py"
    path.parent.mkdir(parents=True)
    path.write_text("x = 1\n")
    return path


def verdict_of(pair: Path, **changes: object) -> PairVerdict:
    """A green verdict on a file."""
    kernel = KernelFacts(part="backward", kernel="_bwd", registers=40, spills=0, shared_bytes=32)
    green = PairVerdict(
        slug=pair.stem,
        hash=content_hash(pair.read_text()),
        rule="1.1",
        status=Status.GREEN,
        right=26,
        planned=26,
        worst={"x": 3e-08},
        kernels=(kernel,),
        torch="2.11.0",
        triton="3.6.0",
    )
    return green.model_copy(update=changes)


def book_of(pair: Path) -> VerdictBook:
    """The book beside a file."""
    book = VerdictBook.beside(pair)
    assert book is not None
    return book


def test_what_was_recorded_is_read_back_and_recording_it_again_changes_nothing(pair):
    book, verdict = book_of(pair), verdict_of(pair)
    book.record(pair, verdict)
    first = book.file("softmax").read_bytes()
    book.record(pair, verdict)
    assert book.file("softmax").read_bytes() == first
    assert book.standing(pair, "1.1") == (Standing.CURRENT, verdict)


def test_lines_are_sorted_whatever_the_order_of_judgement(pair):
    other = pair.with_name("log_softmax.py")
    other.write_text("y = 2\n")
    book = book_of(pair)
    for path in (pair, other):
        book.record(path, verdict_of(path))
    assert list(book.family("softmax")) == ["log_softmax", "softmax_row"]
    assert [path.name for path in book.folder.iterdir()] == ["softmax.jsonl"]


def test_an_edited_pair_or_an_older_rule_is_not_covered(pair):
    # The danger: a verdict that speaks of another text than the one that ships.
    book = book_of(pair)
    assert book.standing(pair, "1.1")[0] is Standing.NONE
    book.record(pair, verdict_of(pair))
    assert book.standing(pair, "2.1")[0] is Standing.STALE
    pair.write_text("x = 2\n")
    assert book.standing(pair, "1.1")[0] is Standing.STALE


def test_the_verdict_of_a_pair_that_is_gone_goes_with_it(pair):
    book = book_of(pair)
    other = pair.with_name("log_softmax.py")
    other.write_text("y = 2\n")
    book.record(other, verdict_of(other))
    other.unlink()
    book.record(pair, verdict_of(pair))
    assert list(book.family("softmax")) == ["softmax_row"]


def test_of_two_lines_that_a_merge_left_the_one_of_this_text_counts(pair):
    # Verdict files are merged by keeping the lines of both sides (.gitattributes).
    book, current = book_of(pair), verdict_of(pair)
    old = verdict_of(pair, hash="0" * 64)
    for lines in ([current, old], [old, current]):
        book.folder.mkdir(parents=True, exist_ok=True)
        book.file("softmax").write_text("".join(verdict.line + "\n" for verdict in lines))
        assert book.standing(pair, "1.1") == (Standing.CURRENT, current)
        book.tidy(pair)
        assert book.file("softmax").read_text() == current.line + "\n"


def test_a_damaged_line_is_told_with_its_place(pair):
    book = book_of(pair)
    book.record(pair, verdict_of(pair))
    book.file("softmax").write_text(book.file("softmax").read_text() + "<<<<<<< ours\n")
    with pytest.raises(InputError, match="no recorded verdict") as caught:
        book.standing(pair, "1.1")
    assert caught.value.line == 2


def test_a_file_outside_of_a_dataset_has_no_book(tmp_path):
    assert VerdictBook.beside(tmp_path / "mine.py") is None


@pytest.mark.parametrize(
    "changes", [{"status": Status.WRONG_GRADIENT}, {"right": 0}, {"problems": ("spills on sm_90",)}], ids=str
)
def test_green_needs_the_gate_a_case_and_no_problem(pair, changes):
    assert verdict_of(pair).green
    assert not verdict_of(pair, **changes).green


def test_ratios_keep_one_digit():
    assert one_digit(2.4649e-11) == 2e-11
    assert one_digit(0.0) == 0.0
    assert one_digit(float("inf")) == float("inf")
