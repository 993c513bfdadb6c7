"""Rows of a stub that are too long, broken where formatters break them: what is said of strides and sizes may take any
length. Strings are left whole."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from kernel_agent.compiler.emit.layout import WIDTH

_STEP = "    "


def broken(row: str) -> list[str]:
    """A row as several where it is longer than a page and can be told apart: an assignment, or an item of a call. The
    same tree stands in them."""
    if len(row) <= WIDTH:
        return [row]
    text = row.lstrip()
    pad = row[: len(row) - len(text)]
    parts = _item(text) if text.endswith(",") else _assignment(text)
    if parts is None:
        return [row]
    head, value, tail = parts
    rows = list(_laid(pad, head, value, tail, bracketed=tail == ","))
    before, after = (f"_({text})", f"_({''.join(rows)})") if tail == "," else (text, "\n".join(rows).strip())
    return rows if _same(before, after) else [row]


def _assignment(text: str) -> tuple[str, str, str] | None:
    """`name = `, the value and what follows; None of anything else."""
    tree = _parsed(text)
    if tree is None or len(tree.body) != 1 or not isinstance(tree.body[0], ast.Assign):
        return None
    value = tree.body[0].value
    head = _up_to(text, value).rstrip("(")
    return head, text[len(head) :], ""


def _item(text: str) -> tuple[str, str, str] | None:
    """`key=`, the value and its comma, of a row that has one item of a call."""
    tree = _parsed(f"_({text})")
    call = tree.body[0].value if tree is not None and isinstance(tree.body[0], ast.Expr) else None
    if not isinstance(call, ast.Call) or len(call.args) + len(call.keywords) != 1:
        return None
    name = f"{call.keywords[0].arg}=" if call.keywords and call.keywords[0].arg else ""
    return (name, text[len(name) : -1], ",") if text.startswith(name) else None


def _laid(pad: str, head: str, text: str, tail: str, *, bracketed: bool) -> Iterator[str]:
    """A value behind its head; `bracketed`: within brackets, where a line may end anywhere."""
    whole = f"{pad}{head}{text}{tail}"
    node = _expression(text)
    if len(whole) <= WIDTH or node is None:
        yield whole
        return
    inner = pad + _STEP
    items = _items(text, node)
    if items is not None:
        opening, given, closing = items
        if opening.endswith(")(") and opening.startswith("(") and len(pad + head + opening) > WIDTH:
            yield f"{pad}{head}("
            yield from _laid(inner, "", opening[1:-2], "", bracketed=True)
            yield f"{pad})({', '.join(given)}{closing}{tail}"
            return
        yield f"{pad}{head}{opening}"
        together = inner + ", ".join(given)
        if len(together) <= WIDTH and not together.endswith(","):
            yield together
        else:
            for one in given:
                name, _, value = one.partition("=") if _named(one) else ("", "", one)
                yield from _laid(inner, f"{name}=" if name else "", value, ",", bracketed=True)
        yield f"{pad}{closing}{tail}"
        return
    parts = _operands(text, node)
    if parts is None:
        yield whole
    elif bracketed:
        for place, part in enumerate(parts):
            ends = tail if place == len(parts) - 1 else ""
            yield from _laid(pad, head if place == 0 else "", part, ends, bracketed=True)
    else:
        yield f"{pad}{head}("
        yield from _laid(inner, "", text, "", bracketed=True)
        yield f"{pad}){tail}"


def _items(text: str, node: ast.expr) -> tuple[str, list[str], str] | None:
    """What opens a call or a tuple, its items, and what closes it; None of anything else."""
    if isinstance(node, ast.Call):
        given: list[ast.expr | ast.keyword] = [*node.args, *node.keywords]
        opening = text[: _end(text, node.func, 0) + 1]
        if len(given) == 1 and isinstance(given[0], ast.GeneratorExp):  # it may have the brackets of the call
            return opening, [text[len(opening) : -1]], ")"
        return (opening, [_of(text, one, len(opening)) for one in given], ")") if given else None
    if isinstance(node, ast.Tuple) and text.startswith("(") and len(node.elts) > 1:
        return "(", [_of(text, one, 1) for one in node.elts], ")"
    return None


def _operands(text: str, node: ast.expr) -> list[str] | None:
    """A value with several parts, each from its operator on; None where it has one."""
    if isinstance(node, ast.IfExp):
        places = [node.body, node.test, node.orelse]
        while isinstance(node.orelse, ast.IfExp) and not _in_brackets(text, node.orelse):
            node = node.orelse
            places[-1:] = [node.body, node.test, node.orelse]
    elif isinstance(node, ast.BoolOp):
        places = node.values
    elif isinstance(node, ast.Compare):
        places = [node.left, *node.comparators]
    elif isinstance(node, ast.BinOp):
        places = [node.left, node.right]
        while isinstance(node.left, ast.BinOp) and _alike(node.left.op, node.op) and not _in_brackets(text, node.left):
            node = node.left
            places[:1] = [node.left, node.right]
    else:
        return None
    ends = [_end(text, one, 0) for one in places]
    starts = [0, *ends[:-1]]
    return [text[start:end].strip() for start, end in zip(starts, [*ends[:-1], len(text)], strict=True)]


def _alike(left: ast.operator, right: ast.operator) -> bool:
    sums = (ast.Add, ast.Sub)
    return isinstance(left, sums) == isinstance(right, sums)


def _in_brackets(text: str, node: ast.expr) -> bool:
    return text[: _offset(text, node)].endswith("(")


def _end(text: str, node: ast.expr, first: int) -> int:
    """Where a part ends, with the brackets around it that open from `first` on."""
    return _span(text, node, first)[1]


def _span(text: str, node: ast.expr, first: int) -> tuple[int, int]:
    assert node.end_col_offset is not None
    start, end = _offset(text, node), len(text.encode()[: node.end_col_offset].decode())
    while start > first and text[start - 1] == "(" and text[end : end + 1] == ")":
        start, end = start - 1, end + 1
    return start, end


def _offset(text: str, node: ast.expr | ast.keyword) -> int:
    return len(text.encode()[: node.col_offset].decode())


def _up_to(text: str, node: ast.expr) -> str:
    return text[: _offset(text, node)]


def _of(text: str, node: ast.expr | ast.keyword, first: int) -> str:
    """The text of an item with the brackets around it that open from `first` on."""
    if isinstance(node, ast.keyword):
        name = f"{node.arg}=" if node.arg else "**"
        return name + _of(text, node.value, _offset(text, node) + len(name))
    start, end = _span(text, node, first)
    return text[start:end]


def _named(text: str) -> bool:
    name, equals, value = text.partition("=")
    return bool(equals) and name.isidentifier() and not value.startswith("=")


def _expression(text: str) -> ast.expr | None:
    """None of what starts with an operator, and of what spans no expression."""
    tree = _parsed(text)
    only = tree.body[0] if tree is not None and len(tree.body) == 1 else None
    return only.value if isinstance(only, ast.Expr) else None


def _parsed(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except SyntaxError:
        return None


def _same(before: str, after: str) -> bool:
    old, new = _parsed(before), _parsed(after)
    return old is not None and new is not None and ast.dump(old) == ast.dump(new)
