"""The forward half: the user's own stub, changed in nothing but what it returns beside its outputs."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.stub.source import StubSource, own_nodes

WIDTH = 110


@dataclass(frozen=True)
class Edit:
    """Text in place of a span of the file, in lines from 1 and bytes from 0."""

    start: tuple[int, int]
    end: tuple[int, int]
    text: str


@dataclass(frozen=True)
class Kept:
    """One element of `saved`."""

    name: str
    """What the backward calls it."""
    expression: str
    """What the forward saves, at its return."""


def forward_function(
    source: StubSource,
    saved: Sequence[Kept],
    first: Sequence[str] = (),
    spare: Sequence[int] = (),
    kept: Mapping[int, str] | None = None,
    *,
    returns_saved: bool = False,
) -> str:
    """Text of `forward(...) -> (outputs, saved)`, the stub with another return.

    `first` are statements to begin with, `spare` lines that are left out, `kept` statements to put in ahead of those of
    some lines. `returns_saved`: the stub is the forward of a
    pair, and already returns (outputs, saved). Raises `CannotDerive` for a stub whose return cannot be extended.
    """
    function = source.function
    edits = [_renamed(source)] if function.name != "forward" else []
    edits += _without_context(source)
    edits += [Edit((line, 0), (line + 1, 0), "") for line in spare]
    edits += [_ahead(source, line, text) for line, text in (kept or {}).items()]
    returns = [node for node in own_nodes(function) if isinstance(node, ast.Return)]
    if len(returns) != 1 or returns[0].value is None:
        raise CannotDerive(
            f"the stub `{function.name}` has {len(returns)} return statements",
            remedy="Return in one place, at the end.",
            line=returns[1].lineno if len(returns) > 1 else function.lineno,
        )
    edits += _returning(returns[0], saved, source.text, returns_saved=returns_saved)
    if first:
        body = function.body[1:] if ast.get_docstring(function, clean=False) is not None else function.body
        start = (body[0].lineno, body[0].col_offset)
        edits.append(Edit(start, start, "".join(f"{line}\n{' ' * body[0].col_offset}" for line in first)))
    return _edited(source, edits) + "\n"


def _ahead(source: StubSource, line: int, text: str) -> Edit:
    """A statement ahead of that of a line."""
    pad = len(source.lines[line - 1]) - len(source.lines[line - 1].lstrip())
    return Edit((line, 0), (line, 0), f"{' ' * pad}{text}\n")


def _renamed(source: StubSource) -> Edit:
    line = source.function.lineno
    text = source.lines[line - 1]
    at = text.index("def ") + len("def ")
    at = len(text[: text.index(source.function.name, at)].encode())
    return Edit((line, at), (line, at + len(source.function.name.encode())), "forward")


def _without_context(source: StubSource) -> list[Edit]:
    """The tolerated parameter `ctx`, which nobody fills, as a name that is None."""
    arguments = source.function.args
    if not any(argument.arg == "ctx" for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)):
        return []
    raise CannotDerive(
        f"the stub `{source.function.name}` takes `ctx`",
        remedy="Remove the parameter: what is saved for the backward is derived.",
        line=source.function.lineno,
    )


def _returning(node: ast.Return, saved: Sequence[Kept], source_text: str, *, returns_saved: bool) -> list[Edit]:
    value = node.value
    assert value is not None
    end = _end(value)
    items = [kept.expression for kept in saved]
    shown = f"({', '.join(items)}{',' if len(items) == 1 else ''})"
    if len(shown) + end[1] > WIDTH:
        pad = " " * (node.col_offset + 4)
        shown = "(\n" + "".join(f"{pad}{item},\n" for item in items) + " " * node.col_offset + ")"
    if returns_saved:
        if not (isinstance(value, ast.Tuple) and len(value.elts) == 2):
            raise CannotDerive(
                "the forward does not return `outputs, (saved, ...)` written out", remedy="", line=node.lineno
            )
        old = value.elts[1]
        return [Edit((old.lineno, old.col_offset), _end(old), shown)]
    start = (value.lineno, value.col_offset)
    if isinstance(value, ast.Tuple) and not _parenthesised(value, source_text):
        return [Edit(start, start, "("), Edit(end, end, f"), {shown}")]
    return [Edit(end, end, f", {shown}")]


def _end(node: ast.expr) -> tuple[int, int]:
    """Where an expression ends; the parser always knows."""
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return node.end_lineno, node.end_col_offset


def _parenthesised(value: ast.Tuple, source_text: str) -> bool:
    """Whether a tuple has parentheses of its own: without its first and last character it is a tuple still."""
    text = ast.get_source_segment(source_text, value) or ""
    try:
        inner = ast.parse(text[1:-1].strip(), mode="eval").body
    except SyntaxError:
        return False
    return text.startswith("(") and isinstance(inner, ast.Tuple) and len(inner.elts) == len(value.elts)


def _edited(source: StubSource, edits: Sequence[Edit]) -> str:
    """The function's text without decorators, with the edits made from the last one to the first."""
    function = source.function
    lines = [line.encode() for line in source.lines]
    last = function.end_lineno or function.lineno
    for edit in sorted(edits, key=lambda one: one.start, reverse=True):
        (first_line, first_byte), (last_line, last_byte) = edit.start, edit.end
        joined = lines[first_line - 1][:first_byte] + edit.text.encode() + lines[last_line - 1][last_byte:]
        lines[first_line - 1 : last_line] = joined.split(b"\n")
        last += edit.text.count("\n") - (last_line - first_line)
    return b"\n".join(lines[function.lineno - 1 : last]).decode()
