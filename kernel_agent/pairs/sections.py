"""The three marked sections of a pair file, as text: cutting a file up, and blanking a part in place."""

from __future__ import annotations

from dataclasses import dataclass

from kernel_agent.errors import InputError

FORWARD_MARKER = "# --- forward ---"
BACKWARD_MARKER = "# --- backward ---"
CHECK_MARKER = "# --- check ---"
SECTION_MARKERS = (FORWARD_MARKER, BACKWARD_MARKER, CHECK_MARKER)
"""The lines that open the sections, in the order in which they stand in a file."""


@dataclass(frozen=True)
class Sections:
    """A pair file cut at its markers. Every text is without the marker that opened it and may be empty."""

    head: str
    """Docstring, imports and META: everything above the first marker."""
    forward: str
    """Kernels and `forward`."""
    backward: str
    """Kernels and `backward`."""
    check: str
    """`SWEEP`, `make_args`, `reference`, and in delivered files the operator that follows them."""
    forward_line: int
    """Line of the forward marker; the section's text starts on the next line. The first line of a file is 1."""
    backward_line: int
    """Line of the backward marker."""
    check_line: int
    """Line of the check marker."""

    @property
    def above_check(self) -> str:
        """Everything above the check marker, with the same line numbers."""
        return f"{self.head}{FORWARD_MARKER}\n{self.forward}{BACKWARD_MARKER}\n{self.backward}"

    def join(self) -> str:
        """Return the whole file; the exact inverse of `split_sections`."""
        return f"{self.above_check}{CHECK_MARKER}\n{self.check}"


def has_all_markers(source: str) -> bool:
    """Whether each of the three markers stands on a line of its own."""
    lines = {line.rstrip() for line in source.splitlines()}
    return all(marker in lines for marker in SECTION_MARKERS)


def has_marker(source: str) -> bool:
    """Whether any line is a section marker. A candidate's section may hold none: it would move a border of the file."""
    return any(line.rstrip() in SECTION_MARKERS for line in source.splitlines())


def split_sections(source: str) -> Sections:
    """Cut a pair file at its markers.

    Raises `InputError` when a marker is missing, stands twice, or the markers are out of order.
    """
    lines = source.replace("\r\n", "\n").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    found: dict[str, int] = {}
    for index, line in enumerate(lines):
        marker = line.rstrip()
        if marker not in SECTION_MARKERS:
            continue
        if marker in found:
            raise InputError(
                f"the marker `{marker}` stands twice, on lines {found[marker] + 1} and {index + 1}",
                remedy="A pair file has each of its three section markers once.",
                line=index + 1,
            )
        found[marker] = index
    missing = [marker for marker in SECTION_MARKERS if marker not in found]
    if missing:
        raise InputError(
            f"the marker `{missing[0]}` is missing",
            remedy="A pair file has three marked sections in this order: "
            + ", ".join(f"`{m}`" for m in SECTION_MARKERS)
            + ".",
        )
    forward, backward, check = (found[marker] for marker in SECTION_MARKERS)
    if not forward < backward < check:
        raise InputError(
            "the section markers are out of order",
            remedy="Put forward first, then backward, then check.",
            line=min(backward, check) + 1,
        )
    return Sections(
        head="".join(lines[:forward]),
        forward="".join(lines[forward + 1 : backward]),
        backward="".join(lines[backward + 1 : check]),
        check="".join(lines[check + 1 :]),
        forward_line=forward + 1,
        backward_line=backward + 1,
        check_line=check + 1,
    )


def without_backward(source: str) -> str:
    """Return a pair file whose backward section is blank lines: every other line keeps its number.

    Raises `InputError` as `split_sections` does.
    """
    sections = split_sections(source)
    blank = "\n" * sections.backward.count("\n")
    parts = (sections.head, FORWARD_MARKER, "\n", sections.forward, BACKWARD_MARKER, "\n", blank)
    return "".join((*parts, CHECK_MARKER, "\n", sections.check))


def truth_source(source: str) -> str:
    """What a truth child may see of a file: a pair without its backward section, a user's file as it is."""
    return without_backward(source) if has_all_markers(source) else source
