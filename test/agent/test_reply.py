"""What of a reply becomes a candidate, and what is told when nothing does."""

from __future__ import annotations

import time

import pytest
from scripted import BACKWARD, NO_CODE

from kernel_agent.agent.attempts import change_of
from kernel_agent.agent.reply import Extraction, extract, fenced_blocks
from kernel_agent.gate.verdict import Status
from kernel_agent.models.protocol import StopReason

GIVEN = "def forward(x, w):\n    y = product(x, w)\n    return y, (x, w, y)\n"
FORWARD = "def forward(x, w):\n    return product(x, w), (x, w)\n"
OTHER = BACKWARD.replace("BLOCK=32", "BLOCK=64")


def found(text: str, *, freeze: bool = False, stop: StopReason = StopReason.COMPLETE) -> Extraction:
    return extract(text, given_forward=GIVEN, freeze_forward=freeze, stop=stop)


def block(code: str, language: str = "python", fence: str = "```") -> str:
    return f"{fence}{language}\n{code}{fence}\n"


def backward_of(text: str) -> str:
    candidate = found(text).candidate
    assert candidate is not None
    return candidate.backward


def refusal_of(text: str, **options: object) -> tuple[Status, str]:
    extraction = found(text, **options)  # type: ignore[arg-type]
    assert extraction.candidate is None
    assert extraction.refusal is not None
    return extraction.refusal.status, extraction.refusal.message


@pytest.mark.parametrize(
    "text",
    [
        block("# --- backward ---\n" + BACKWARD),
        block(BACKWARD),
        block("# --- backward ---\n" + BACKWARD, language=""),
        block("# --- backward ---\n" + BACKWARD, language="py", fence="~~~~"),
        "Because of\n```text\ndef backward(...)\n```\nthis:\n" + block(BACKWARD) + "Done.",
        block("#---backward---\n".replace("#---", "# --- ").replace("---\n", " ---\n") + BACKWARD),
        block("# --- Backward ---\n" + BACKWARD).replace("\n", "\r\n"),
    ],
    ids=["marked", "unmarked", "no language", "tildes", "prose around", "spaced marker", "windows line ends"],
)
def test_one_block_is_the_backward_section(text: str) -> None:
    assert backward_of(text) == BACKWARD


def test_of_two_blocks_the_last_that_defines_backward_counts() -> None:
    extraction = found(
        block(BACKWARD) + "No, wait:\n" + block(OTHER) + "Call it so:\n" + block("dx, dw = backward(s, g)\n")
    )
    assert extraction.candidate is not None
    assert extraction.candidate.backward == OTHER
    assert extraction.notes == ("several blocks define backward: the last complete one counts",)


def test_a_block_that_was_cut_off_does_not_replace_a_complete_one() -> None:
    assert backward_of(block(BACKWARD) + "Better:\n```python\n" + OTHER[:200]) == BACKWARD


def test_forward_and_backward_may_stand_in_one_block() -> None:
    candidate = found(block(f"# --- forward ---\n{FORWARD}\n\n# --- backward ---\n{BACKWARD}")).candidate
    assert candidate is not None
    assert candidate.forward == FORWARD
    assert candidate.backward == BACKWARD


def test_forward_and_backward_may_stand_in_two_blocks() -> None:
    candidate = found(block(FORWARD) + "and\n" + block(BACKWARD)).candidate
    assert candidate is not None
    assert candidate.forward == FORWARD
    assert candidate.backward == BACKWARD


def test_a_repeated_given_forward_is_no_forward_of_its_own() -> None:
    extraction = found(block(f"# --- forward ---\n{GIVEN}\n# --- backward ---\n{BACKWARD}"), freeze=True)
    assert extraction.candidate is not None
    assert extraction.candidate.forward is None


def test_a_frozen_forward_refuses_another_one() -> None:
    text = block(f"# --- forward ---\n{FORWARD}\n# --- backward ---\n{BACKWARD}")
    assert refusal_of(text, freeze=True)[0] is Status.BAD_FORMAT
    assert "--freeze-forward" in refusal_of(text, freeze=True)[1]


def test_both_functions_without_markers_cannot_be_told_apart() -> None:
    status, message = refusal_of(block(FORWARD + "\n\n" + BACKWARD))
    assert status is Status.BAD_FORMAT
    assert "# --- forward ---" in message


def test_imports_above_the_marker_are_kept_and_a_check_section_is_not() -> None:
    head = '"""A pair."""\nimport math\n\nMETA = dict(slug="x")\n\n'
    extraction = found(block(f"{head}# --- backward ---\n{BACKWARD}\n\n# --- check ---\nSWEEP = []\n"))
    assert extraction.candidate is not None
    assert extraction.candidate.backward == f"import math\n\n\n{BACKWARD}"
    assert extraction.notes == ("META was left out", "the section # --- check --- was left out")


def test_a_whole_pair_file_gives_its_two_sections() -> None:
    text = block(
        f"import torch\n\n# --- forward ---\n{FORWARD}\n# --- backward ---\n{BACKWARD}\n# --- check ---\nx = 1\n"
    )
    candidate = found(text).candidate
    assert candidate is not None
    assert candidate.forward is not None
    assert "def forward" in candidate.forward
    assert "def forward" not in candidate.backward


def test_code_that_does_not_parse_goes_to_the_gate_which_names_the_line() -> None:
    assert backward_of(block("def backward(saved, g:\n    return g\n")).startswith("def backward(saved, g:")


@pytest.mark.parametrize(
    ("text", "stop", "words"),
    [
        (NO_CODE, StopReason.COMPLETE, "no fenced Python block"),
        ("", StopReason.COMPLETE, "no fenced Python block"),
        ("I cannot help with that.", StopReason.REFUSAL, "declined"),
        ("```python\n" + BACKWARD, StopReason.LENGTH, "cut off"),
        ("Let me think", StopReason.LENGTH, "cut off"),
        (block(FORWARD), StopReason.COMPLETE, "`backward` is missing"),
        (block("print(1)\n"), StopReason.COMPLETE, "at the left margin"),
        (block("class A:\n    def backward(self):\n        pass\n"), StopReason.COMPLETE, "at the left margin"),
        (block(BACKWARD, language="cpp"), StopReason.COMPLETE, "no fenced Python block"),
    ],
)
def test_a_reply_without_a_backward_is_told_why_and_the_contract(text: str, stop: StopReason, words: str) -> None:
    status, message = refusal_of(text, stop=stop)
    assert status is Status.NO_CODE
    assert words in message
    assert "# --- backward ---" in message


def test_code_above_the_marker_that_no_parser_takes_reaches_the_gate() -> None:
    # Nested too deeply for Python's parser, which then raises no SyntaxError.
    assert "--1" in backward_of(block(f"x = {'-' * 20_000}1\n# --- backward ---\n{BACKWARD}"))


def test_a_line_that_nearly_opens_a_block_is_read_in_linear_time() -> None:
    # One pattern for the whole line would look at every split of it: hours for a megabyte.
    start = time.monotonic()
    for almost in ("~~~" + "a" * 1_000_000 + "`", "```" + " " * 1_000_000 + "`", "```" + "`" * 1_000_000):
        fenced_blocks(f"{almost}\n")
        change_of(f"{almost}\n" * 3)
    assert time.monotonic() - start < 5


def test_many_openings_that_nothing_closes_are_read_in_linear_time() -> None:
    # Looking for the end of each anew would be the square of their number.
    start = time.monotonic()
    assert change_of("Masks the tail.\n" + "```x\n" * 100_000) == "Masks the tail"
    assert time.monotonic() - start < 5


def test_a_marker_behind_a_form_feed_is_refused_and_ends_no_run() -> None:
    # Files are cut at lines as `splitlines` sees them; the section would otherwise be refused outside of any verdict.
    status, message = refusal_of(block(f"# --- backward ---\n{BACKWARD}x = 1 \f# --- check ---\n"))
    assert status is Status.BAD_FORMAT
    assert "form feed" in message


def test_carriage_returns_alone_end_lines_as_in_python() -> None:
    # Else the file on disk, read as text, would be another than the one that was judged.
    assert backward_of(block(f"# --- backward ---\n{BACKWARD}".replace("\n", "\r"))) == BACKWARD
