"""What memory is called in a candidate's own code: kernels say `X`, `backward` says `x`, the sanitizer `saved[0]`."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import lru_cache

_SAVED = re.compile(r"saved\[([0-9]{1,4})\]")
_KERNEL = re.compile(r"(\w+), line \d+: ")
_OF = re.compile(r"(?P<before>outside of |element \d+(?: \[[\d, ]*\])? of )(?P<name>[A-Za-z_]\w*)\b")


def in_own_words(message: str, source: str, line: int | None) -> str:
    """A sanitizer's sentence with the names of `backward` beside those of the kernel, and the index it is about.

    >>> # load outside of saved[0]: ...   becomes   load outside of X = x (saved[0]), index row * N + c: ...
    """
    names = _names(source)
    kernel = _KERNEL.match(message)
    access = _access(source, line)

    def saved(match: re.Match[str]) -> str:
        place = int(match[1])
        if place >= len(names.unpacked):
            return match[0]
        return f"{names.unpacked[place]} ({match[0]})"

    def passed(match: re.Match[str]) -> str:
        given = names.arguments.get((kernel[1], match["name"])) if kernel else None
        return match[0] if given is None or given == match["name"] else f"{match[0]} = {given}"

    text = _OF.sub(passed, message)
    text = _SAVED.sub(saved, text)
    if access is not None and kernel is not None and access.index and "outside of " in text:
        pointer = f"{access.pointer} = " if f"{access.pointer} = " not in text and access.pointer not in text else ""
        text = text.replace("outside of ", f"outside of {pointer}", 1)
        text = text.replace(": element", f", index {access.index}: element", 1)
    return text


def passed_as(kernel: str, parameter: str, source: str) -> str:
    """`DW = dw`: a kernel's parameter with what `backward` passes there, where that is one name and another."""
    given = _names(source).arguments.get((kernel, parameter), parameter)
    return parameter if given == parameter else f"{parameter} = {given}"


def saved_as(grad: str, source: str) -> str:
    """` (saved[2])` where `backward` unpacks its saved values to names and one of them is the gradient's input."""
    unpacked = _names(source).unpacked
    return f" (saved[{unpacked.index(grad)}])" if grad in unpacked else ""


def unpacked_names(source: str) -> list[str]:
    """Names that `backward` unpacks its first parameter to; empty if it does it otherwise."""
    return list(_names(source).unpacked)


@dataclass(frozen=True)
class _Names:
    unpacked: tuple[str, ...]
    arguments: dict[tuple[str, str], str]
    """(kernel, parameter) -> what `backward` passes there; only where all its launches pass the same."""


@dataclass(frozen=True)
class _Access:
    pointer: str
    index: str


@lru_cache(maxsize=8)
def _names(source: str) -> _Names:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return _Names((), {})
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    backward = functions.get("backward")
    if backward is None or not backward.args.args:
        return _Names((), {})
    return _Names(_unpacked(backward), _arguments(backward, functions))


def _unpacked(backward: ast.FunctionDef) -> tuple[str, ...]:
    first = backward.args.args[0].arg
    for node in ast.walk(backward):
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id == first):
            continue
        target = node.targets[0]
        if isinstance(target, ast.Tuple) and all(isinstance(e, ast.Name) for e in target.elts):
            return tuple(e.id for e in target.elts if isinstance(e, ast.Name))
    return ()


def _arguments(backward: ast.FunctionDef, functions: dict[str, ast.FunctionDef]) -> dict[tuple[str, str], str]:
    found: dict[tuple[str, str], set[str]] = {}
    for node in ast.walk(backward):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)):
            continue
        kernel = functions.get(node.func.value.id) if isinstance(node.func.value, ast.Name) else None
        if kernel is None or any(isinstance(arg, ast.Starred) for arg in node.args):
            continue
        bound = dict(zip([arg.arg for arg in kernel.args.args], node.args, strict=False))
        bound |= {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
        for parameter, value in bound.items():
            found.setdefault((kernel.name, parameter), set()).add(ast.unparse(value))
    return {key: texts.pop() for key, texts in found.items() if len(texts) == 1}


def _access(source: str, line: int | None) -> _Access | None:
    """The pointer and the index of the one access that stands on a line; None where there are several or none."""
    text = "" if line is None or not 1 <= line <= len(source.splitlines()) else source
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    found = [
        node.args[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and (node.func.attr in ("load", "store") or node.func.attr.startswith("atomic_"))
        and node.args
        and node.lineno == line
    ]
    if len(found) != 1 or not isinstance(found[0], ast.BinOp):
        return None
    node: ast.expr = found[0]
    parts = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts.append(ast.unparse(node.right))
        node = node.left
    if not isinstance(node, ast.Name) or not parts:
        return None
    return _Access(node.id, f"`{' + '.join(reversed(parts))}`")
