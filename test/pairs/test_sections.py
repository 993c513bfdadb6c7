"""Cutting pair files at their markers."""

from __future__ import annotations

import pytest

from kernel_agent.errors import InputError
from kernel_agent.pairs.sections import split_sections, truth_source, without_backward

PAIR = '''"""Doc."""
META = dict(grads=("x",))


# --- forward ---
def forward(x):
    return x, (x,)


# --- backward ---
def backward(saved, g):
    return g


# --- check ---
SWEEP = [dict(N=1)]
'''


def test_joining_the_sections_gives_the_file_back() -> None:
    assert split_sections(PAIR).join() == PAIR


def test_sections_know_the_lines_of_their_markers() -> None:
    sections = split_sections(PAIR)
    lines = PAIR.splitlines()
    assert lines[sections.forward_line - 1] == "# --- forward ---"
    assert lines[sections.backward_line - 1] == "# --- backward ---"
    assert lines[sections.check_line - 1] == "# --- check ---"


def test_blanking_the_backward_keeps_every_other_line_in_its_place() -> None:
    """A finding in the truth must point at the same line of the file the user sees."""
    blanked = without_backward(PAIR).splitlines()
    backward = range(10, 14)
    assert len(blanked) == len(PAIR.splitlines())
    for number, (before, after) in enumerate(zip(PAIR.splitlines(), blanked, strict=True)):
        assert after == ("" if number in backward else before)


def test_the_truth_of_a_users_file_is_the_whole_file() -> None:
    assert truth_source("x = 1\n") == "x = 1\n"


def test_windows_line_ends_are_understood() -> None:
    assert split_sections(PAIR.replace("\n", "\r\n")).join() == PAIR


@pytest.mark.parametrize("marker", ["forward", "backward", "check"])
def test_a_missing_marker_is_named(marker: str) -> None:
    with pytest.raises(InputError, match=f"`# --- {marker} ---` is missing"):
        split_sections(PAIR.replace(f"# --- {marker} ---\n", ""))


def test_a_marker_that_stands_twice_is_refused() -> None:
    """Else a candidate could bring a check section of its own."""
    with pytest.raises(InputError, match="stands twice, on lines 15 and 17"):
        split_sections(PAIR + "# --- check ---\n")


def test_markers_out_of_order_are_refused() -> None:
    swapped = PAIR.replace("# --- check ---", "#").replace("# --- forward ---", "# --- check ---\n# --- forward ---")
    with pytest.raises(InputError, match="out of order"):
        split_sections(swapped)


def test_an_indented_marker_is_text() -> None:
    with pytest.raises(InputError, match="missing"):
        split_sections(PAIR.replace("# --- check ---", "    # --- check ---"))
