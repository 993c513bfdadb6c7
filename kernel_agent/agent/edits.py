"""Edits: a reply that changes a candidate by SEARCH/REPLACE blocks instead of giving it whole.

    <<<<<<< SEARCH
    lines of the candidate as shown, which occur there exactly once
    =======
    the lines that take their place
    >>>>>>> REPLACE

All blocks of a reply refer to the candidate as it was shown. Either all apply or none does, and the problem says which
one does not and why, so that the same change can be asked for again.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from kernel_agent.errors import KernelAgentError

_SEARCH = re.compile(r"^\s*<{5,9} ?SEARCH\s*$")
_BETWEEN = re.compile(r"^\s*={5,9}\s*$")
_REPLACE = re.compile(r"^\s*>{5,9} ?REPLACE\s*$")
_SHOWN = 100
"""Characters of a line that a problem quotes."""
_COMPARED = 400
"""Characters of a line that are compared with others: the time for it grows with their square."""
_SIMILAR = 0.6
"""Least likeness of lines that are offered as those that were meant."""


class EditProblem(KernelAgentError):
    """An edit cannot be read or does not apply."""


@dataclass(frozen=True)
class Edit:
    """One block."""

    search: tuple[str, ...]
    """Lines to be found."""
    replace: tuple[str, ...]
    """Lines that take their place."""


def has_edits(text: str) -> bool:
    """Whether a reply holds the beginning of an edit block."""
    return any(_SEARCH.match(line) for line in text.splitlines())


def read_edits(text: str) -> tuple[Edit, ...]:
    """The edit blocks of a reply, fenced or not. Raises `EditProblem` for a block that is not complete."""
    edits: list[Edit] = []
    search: list[str] = []
    replace: list[str] = []
    current: list[str] | None = None
    for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n"):
        if _SEARCH.match(line):
            if current is not None:
                raise _broken(len(edits) + 1, "it is not ended by `>>>>>>> REPLACE` before the next one begins")
            search, replace = [], []
            current = search
        elif current is search and current is not None and _BETWEEN.match(line):
            current = replace
        elif current is not None and _REPLACE.match(line):
            if current is search:
                raise _broken(len(edits) + 1, "it has no line `=======` between the old and the new lines")
            edits.append(Edit(tuple(search), tuple(replace)))
            current = None
        elif current is not None:
            current.append(line)
    if current is not None:
        raise _broken(len(edits) + 1, "it is cut off before `>>>>>>> REPLACE`")
    return tuple(edits)


def without_edits(text: str) -> str:
    """A reply without its edit blocks: what else it holds."""
    kept: list[str] = []
    inside = False
    for line in text.split("\n"):
        inside = inside or _SEARCH.match(line) is not None
        if not inside:
            kept.append(line)
        elif _REPLACE.match(line):
            inside = False
    return "\n".join(kept)


def apply_edits(code: str, edits: tuple[Edit, ...]) -> str:
    """`code` with all edits made. Raises `EditProblem` when one does not apply; blanks at line ends do not count."""
    lines = code.split("\n")
    placed: list[_Placed] = []
    for number, edit in enumerate(edits, 1):
        here = _Placed(edit, _place(lines, edit, number))
        clash = next((n for n, other in enumerate(placed, 1) if here.first < other.last and other.first < here.last), 0)
        if clash:
            raise _broken(number, f"it changes lines that edit {clash} changes too: make one edit of the two")
        placed.append(here)
    for here in sorted(placed, key=lambda one: one.first, reverse=True):
        lines[here.first : here.last] = here.edit.replace
    return "\n".join(lines)


@dataclass(frozen=True)
class _Placed:
    """An edit and the lines it replaces: from index `first` to before `last`."""

    edit: Edit
    first: int

    @property
    def last(self) -> int:
        return self.first + len(self.edit.search)


def _place(lines: list[str], edit: Edit, number: int) -> int:
    """Index of the first line that the edit replaces."""
    wanted = [line.rstrip() for line in edit.search]
    if not any(wanted):
        raise _broken(number, "its SEARCH part is empty: quote the lines beside the place that is meant")
    present = [line.rstrip() for line in lines]
    found = _matches(present, wanted)
    if len(found) == 1:
        return found[0]
    if found:
        where = ", ".join(str(index + 1) for index in found)
        raise _broken(
            number, f"its SEARCH part occurs {len(found)} times, at lines {where}: quote more lines around it"
        )
    shifted = _matches([line.lstrip() for line in present], [line.lstrip() for line in wanted])
    if shifted:
        there = present[shifted[0]]
        blanks = len(there) - len(there.lstrip())
        raise _broken(
            number, f"its SEARCH part differs in indentation: line {shifted[0] + 1} begins with {blanks} blanks"
        )
    raise _broken(number, _missing(present, wanted))


def _matches(present: list[str], wanted: list[str]) -> list[int]:
    size = len(wanted)
    return [index for index in range(len(present) - size + 1) if present[index : index + size] == wanted]


def _missing(present: list[str], wanted: list[str]) -> str:
    """Which line of a SEARCH part is not there, and the one that is most like it."""
    absent = next((line for line in wanted if line.strip() and line not in present), None)
    if absent is None:
        return "its SEARCH part does not occur: every line of it is there, but not one after the other"
    begins = [line[:_COMPARED] for line in present]
    near = difflib.get_close_matches(absent[:_COMPARED], begins, n=1, cutoff=_SIMILAR)
    said = f"the line `{absent.strip()[:_SHOWN]}` of its SEARCH part does not occur"
    if not near:
        return said
    return f"{said}; line {begins.index(near[0]) + 1} is `{near[0].strip()[:_SHOWN]}`"


def _broken(number: int, problem: str) -> EditProblem:
    return EditProblem(f"edit {number}: {problem}", remedy="Quote whole lines of the code exactly as they were shown.")
