"""From the text of a reply to a `Candidate`, or to the verdict that says why there is none.

The rules are those the system prompt states: the last complete fenced block that defines `backward` counts; a forward
stands above it in the same block or in a block of its own. What is no code of either section is left out and noted.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, replace

from kernel_agent.agent.edits import apply_edits, has_edits, read_edits, without_edits
from kernel_agent.agent.snapshots import render
from kernel_agent.gate.verdict import Status, Verdict
from kernel_agent.models.protocol import StopReason
from kernel_agent.pairs.sections import BACKWARD_MARKER, CHECK_MARKER, FORWARD_MARKER, has_marker
from kernel_agent.pairs.spec import Candidate, content_hash

CONTRACT = (
    f"Give one fenced Python block that starts with the line `{BACKWARD_MARKER}` and holds the kernels and a function "
    "`backward(saved, ..., needs=None)`."
)
PYTHON = frozenset({"", "python", "py", "python3", "triton"})
_OPEN = re.compile(r" {0,3}(?P<fence>`{3,}|~{3,})(?P<info>.*)", re.DOTALL)
_LANGUAGE = re.compile(r"[ \t]*(?P<name>[\w+-]*)")
_MARKER = re.compile(r"^\s*#\s*-{2,}\s*(?P<name>forward|backward|check)\s*-{2,}\s*$", re.IGNORECASE)


@dataclass(frozen=True)
class Extraction:
    """What a reply holds: a candidate, or a red verdict that says why not."""

    candidate: Candidate | None
    refusal: Verdict | None
    notes: tuple[str, ...] = ()
    """What of the reply was left out, for the reader."""
    edits: int = 0
    """Edit blocks that the candidate was made with; 0 when the reply gives whole sections."""


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    text: str
    complete: bool
    """False when the reply ended before the closing fence."""
    line: int = 1
    """Line of the reply on which the text begins."""


@dataclass(frozen=True)
class Parts:
    """The sections of one block."""

    backward: str | None
    forward: str | None
    dropped: tuple[str, ...] = ()
    """What else the block held, in words."""


def extract(
    text: str,
    *,
    given_forward: str,
    freeze_forward: bool,
    stop: StopReason = StopReason.COMPLETE,
    shown: Candidate | None = None,
) -> Extraction:
    """Find the candidate in a reply: whole sections, or edits of the candidate that was `shown`.

    `given_forward` is the forward section that is used anyway: a reply that repeats it brings no forward of its own.
    With `freeze_forward` any other forward is refused.
    Raises `EditProblem` when there are edits and no whole section, and they do not apply.
    """
    whole = without_edits(text)
    found = _extract(whole, given_forward, freeze_forward, stop)
    if shown is None or not has_edits(text):
        return found
    if found.candidate is not None or (found.refusal is not None and found.refusal.status is Status.BAD_FORMAT):
        return replace(found, notes=(*found.notes, "the edits were left out: the reply gives the whole section"))
    edits = read_edits(text)
    made = f"```python\n{apply_edits(render(shown), edits)}\n```"
    return replace(_extract(made, given_forward, freeze_forward, StopReason.COMPLETE), edits=len(edits))


def _extract(text: str, given_forward: str, freeze_forward: bool, stop: StopReason) -> Extraction:
    """Find whole sections in a reply."""
    blocks = fenced_blocks(text)
    parts = [sections(block.text) for block in blocks if block.complete]
    chosen = next((part for part in reversed(parts) if part.backward is not None), None)
    if chosen is None or chosen.backward is None:
        return Extraction(None, _no_backward(blocks, parts, stop))
    forward = chosen.forward
    if forward is None:
        forward = next(
            (part.forward for part in reversed(parts) if part.backward is None and part.forward is not None), None
        )
    if _defines(chosen.backward, "forward"):
        message = (
            "`forward` and `backward` stand in one section. Put `forward` with its kernels under a line "
            f"`{FORWARD_MARKER}`, above `{BACKWARD_MARKER}`."
        )
        return Extraction(None, Verdict(status=Status.BAD_FORMAT, message=message))
    notes = list(chosen.dropped)
    if sum(part.backward is not None for part in parts) > 1:
        notes.append("several blocks define backward: the last complete one counts")
    if forward is not None and content_hash(forward) == content_hash(given_forward):
        forward = None
        notes.append("the forward section repeats the given forward")
    if forward is not None and freeze_forward:
        message = (
            f"The forward is frozen (--freeze-forward) and the reply has a section `{FORWARD_MARKER}`. "
            "Leave it out and work with what the given forward saves."
        )
        return Extraction(None, Verdict(status=Status.BAD_FORMAT, message=message))
    if has_marker(chosen.backward) or has_marker(forward or ""):
        message = (
            "A section marker stands behind a form feed or another rare line break. Give each marker a line of its own."
        )
        return Extraction(None, Verdict(status=Status.BAD_FORMAT, message=message))
    return Extraction(Candidate(backward=chosen.backward, forward=forward), None, tuple(notes))


def lines_of(text: str) -> list[str]:
    """Lines as Python counts them: a lone carriage return ends one, too."""
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")


def fenced_blocks(text: str, languages: frozenset[str] = PYTHON) -> tuple[Block, ...]:
    """Fenced blocks in one of the languages, "" for blocks that name none, by the rules of CommonMark."""
    blocks: list[Block] = []
    lines = lines_of(text)
    inside: list[str] | None = None
    fence, wanted, first = "", False, 1
    for number, line in enumerate(lines, start=1):
        if inside is None:
            opening = _OPEN.match(line)
            # Asked apart: a pattern for the whole line takes the square of its length to find that it does not fit.
            if opening and "`" not in opening["info"]:
                inside, fence, first = [], opening["fence"], number + 1
                language = _LANGUAGE.match(opening["info"])
                wanted = language is not None and language["name"].lower() in languages
        elif _closes(line, fence):
            if wanted:
                blocks.append(Block("\n".join(inside) + "\n", complete=True, line=first))
            inside = None
        else:
            inside.append(line)
    if inside is not None and wanted:
        blocks.append(Block("\n".join(inside) + "\n", complete=False, line=first))
    return tuple(blocks)


def _closes(line: str, fence: str) -> bool:
    indent, bare = len(line) - len(line.lstrip(" ")), line.strip()
    return indent <= 3 and len(bare) >= len(fence) and not bare.strip(fence[0]) and line.lstrip(" ").startswith(bare)


def outside_blocks(text: str) -> str:
    """A reply without its fenced blocks, of whatever language; one that is not closed reaches to the end."""
    kept: list[str] = []
    fence = ""
    for line in lines_of(text):
        opening = _OPEN.match(line)
        if fence:
            fence = "" if _closes(line, fence) else fence
        elif opening and "`" not in opening["info"]:
            fence = opening["fence"]
        else:
            kept.append(line)
    return "\n".join(kept)


def sections(code: str) -> Parts:
    """Cut a block at its markers. Without markers, a block is the section of the one function it defines."""
    head: list[str] = []
    found: dict[str, list[str]] = {}
    current = head
    for line in code.split("\n"):
        marker = _MARKER.match(line)
        if marker:
            current = found[marker["name"].lower()] = []
        else:
            current.append(line)
    if not found:
        if _defines(code, "backward"):
            return Parts(code.strip("\n") + "\n", None)
        return Parts(None, code.strip("\n") + "\n" if _defines(code, "forward") else None)
    kept, dropped = _head("\n".join(head))
    if "check" in found:
        dropped.append(f"the section {CHECK_MARKER} was left out")
    backward = _joined(kept, found["backward"]) if "backward" in found else None
    forward = _joined(kept, found["forward"]) if "forward" in found else None
    return Parts(
        backward if backward is not None and _defines(backward, "backward") else None,
        forward if forward is not None and _defines(forward, "forward") else None,
        tuple(dropped),
    )


def _head(text: str) -> tuple[str, list[str]]:
    """What stands above the first marker: imports, constants and helpers are kept, a docstring and META are not."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the gate says what is wrong with it
        return text, []
    kept: list[str] = []
    dropped: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "META" for t in node.targets):
            dropped.append("META was left out")
            continue
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        kept.append("\n".join(text.split("\n")[first - 1 : node.end_lineno]))
    return "\n".join(kept), dropped


def _joined(head: str, lines: list[str]) -> str:
    body = "\n".join(lines).strip("\n") + "\n"
    return f"{head}\n\n\n{body}" if head else body


def _defines(code: str, function: str) -> bool:
    # By text, not by syntax tree: code that does not parse is to reach the gate, which names the line.
    return re.search(rf"^def {function}\s*\(", code, re.MULTILINE) is not None


def _no_backward(blocks: tuple[Block, ...], parts: list[Parts], stop: StopReason) -> Verdict:
    if stop is StopReason.REFUSAL:
        message = "The model declined to answer."
    elif any(not block.complete for block in blocks) or (stop is StopReason.LENGTH and not parts):
        message = "The reply was cut off before its code ended: give the code first and keep the rest short."
    elif not blocks:
        message = "It holds no fenced Python block."
    elif any(part.forward is not None for part in parts):
        message = "It defines `forward` only; `backward` is missing."
    else:
        message = "No block in it defines a function `backward` at the left margin."
    return Verdict(status=Status.NO_CODE, message=f"{message} {CONTRACT}")
