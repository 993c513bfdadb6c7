"""Edits change exactly what they quote, or nothing; what is wrong with one is said so that it can be put right."""

from __future__ import annotations

import pytest
from scripted import BACKWARD

from kernel_agent.agent.edits import Edit, EditProblem, apply_edits, has_edits, read_edits, without_edits
from kernel_agent.agent.reply import extract
from kernel_agent.agent.snapshots import render
from kernel_agent.gate.verdict import Status
from kernel_agent.pairs.spec import Candidate

CODE = "a = 1\nb = 2\nif b:\n    c = 3\nb = 2\nd = 4\n"


def block(search: str, replace: str) -> str:
    return f"<<<<<<< SEARCH\n{search}=======\n{replace}>>>>>>> REPLACE\n"


def edited(*blocks: str, code: str = CODE) -> str:
    return apply_edits(code, read_edits("Change: so.\n" + "".join(blocks)))


def problem(*blocks: str) -> str:
    with pytest.raises(EditProblem) as caught:
        edited(*blocks)
    return caught.value.message


def test_an_edit_replaces_the_lines_it_quotes() -> None:
    assert edited(block("a = 1\n", "a = 10\na += 1\n")) == CODE.replace("a = 1\n", "a = 10\na += 1\n")


def test_all_edits_of_a_reply_refer_to_the_code_as_it_was_shown() -> None:
    # The first edit makes a line that the second quotes: applied one after the other, that would be found twice.
    assert edited(block("a = 1\n", "d = 4\n"), block("d = 4\n", "d = 5\n")) == CODE.replace("d = 4", "d = 5").replace(
        "a = 1", "d = 4"
    )


def test_an_edit_may_delete_lines_and_blanks_at_line_ends_do_not_count() -> None:
    assert edited(block("a = 1   \n", "")) == CODE.removeprefix("a = 1\n")


def test_edits_are_found_in_a_fence_too() -> None:
    fenced = "```python\n" + block("a = 1\n", "a = 7\n") + "```\n"
    assert edited(fenced) == CODE.replace("a = 1", "a = 7")


def test_lines_that_do_not_occur_are_named_with_the_most_similar_ones() -> None:
    assert problem(block("d = 5\n", "d = 6\n")) == (
        "edit 1: the line `d = 5` of its SEARCH part does not occur; line 6 is `d = 4`"
    )


def test_lines_that_occur_more_than_once_are_told_with_their_places() -> None:
    assert "occurs 2 times, at lines 2, 5" in problem(block("b = 2\n", "b = 3\n"))


def test_another_indentation_is_told_as_such() -> None:
    assert "line 4 begins with 4 blanks" in problem(block("c = 3\n", "c = 4\n"))


def test_lines_that_are_there_but_not_together_are_told_as_such() -> None:
    assert "not one after the other" in problem(block("a = 1\nd = 4\n", "\n"))


def test_two_edits_of_the_same_lines_are_refused() -> None:
    said = problem(block("a = 1\nb = 2\n", "x\n"), block("b = 2\nif b:\n", "y\n"))
    assert said == "edit 2: it changes lines that edit 1 changes too: make one edit of the two"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (block("", "a\n"), "SEARCH part is empty"),
        ("<<<<<<< SEARCH\na = 1\n>>>>>>> REPLACE\n", "no line `=======`"),
        ("<<<<<<< SEARCH\na = 1\n=======\na = 2\n", "cut off"),
        ("<<<<<<< SEARCH\na = 1\n=======\na = 2\n<<<<<<< SEARCH\n", "before the next one begins"),
    ],
)
def test_a_block_that_is_not_complete_is_refused_with_the_reason(text: str, words: str) -> None:
    assert words in problem(text)


def test_the_text_around_edits_is_what_is_left_without_them() -> None:
    text = "Before.\n" + block("a = 1\n", "a = 2\n") + "After.\n"
    assert has_edits(text)
    assert without_edits(text) == "Before.\nAfter.\n"


SHOWN = Candidate(backward=BACKWARD)
LINE = "    dx, dw = torch.empty_like(x), torch.empty_like(w)\n"


def test_a_reply_of_edits_makes_a_candidate_of_the_one_that_was_shown() -> None:
    text = "Change: zeros.\n" + block(LINE, LINE.replace("empty", "zeros"))
    found = extract(text, given_forward="", freeze_forward=False, shown=SHOWN)
    assert found.candidate is not None
    assert found.candidate.backward == BACKWARD.replace("empty_like", "zeros_like")
    assert found.edits == 1


def test_a_whole_section_counts_more_than_edits_beside_it() -> None:
    whole = f"```python\n# --- backward ---\n{BACKWARD}# whole\n```\n"
    found = extract(block("a\n", "b\n") + whole, given_forward="", freeze_forward=False, shown=SHOWN)
    assert found.candidate is not None
    assert "# whole" in found.candidate.backward
    assert found.notes == ("the edits were left out: the reply gives the whole section",)


def test_an_edit_cannot_bring_a_forward_past_a_frozen_one() -> None:
    first = render(SHOWN).split("\n")[0] + "\n"
    own = "# --- forward ---\ndef forward(x, w):\n    return x * w, (x, w, x)\n\n\n" + first
    found = extract(block(first, own), given_forward="", freeze_forward=True, shown=SHOWN)
    assert found.refusal is not None
    assert found.refusal.status is Status.BAD_FORMAT


def test_edits_without_anything_shown_are_no_code() -> None:
    found = extract(block(LINE, LINE), given_forward="", freeze_forward=False)
    assert found.refusal is not None
    assert found.refusal.status is Status.NO_CODE


def test_an_edit_holds_its_lines() -> None:
    assert read_edits(block("a\nb\n", "c\n")) == (Edit(("a", "b"), ("c",)),)
