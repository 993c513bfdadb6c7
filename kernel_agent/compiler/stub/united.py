"""`united`: one kernel for two configurations, whose texts differ below a constexpr `if` alone.

Statements that both texts have stand once, in loops and branches too; what one of them has alone stands under the
flag. Triton compiles the branch that a launch asks for, so that each configuration is what it was before.
"""

from __future__ import annotations

import ast
import itertools
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher

from kernel_agent.compiler.emit.layout import WIDTH, bracketed
from kernel_agent.compiler.emit.source import KernelSource

_WORTH = 0.85
"""Of the lines of two kernels, docstrings aside, what one for both may have: with more, two are easier to read."""
_MOST = 0.95
"""The same, of their statements."""
_PAD = "    "
_WRITING = ("tl.store(", "tl.atomic", "tl.debug_barrier(", ".store(")


@dataclass(frozen=True)
class _Part:
    """A statement, with the comments above it."""

    text: str
    """Of one with a body the head."""
    body: tuple[_Part, ...] = ()
    others: tuple[_Part, ...] = ()
    """Behind `else`."""

    def lines(self) -> list[str]:
        """As they stand."""
        found = self.text.split("\n")
        found += [_PAD + line for part in self.body for line in part.lines()]
        if self.others:
            found += ["else:", *(_PAD + line for part in self.others for line in part.lines())]
        return found


def united(one: KernelSource, other: KernelSource, flag: str) -> KernelSource | None:
    """The kernel that is `one` where the constexpr `flag` is true and `other` where it is not; None where that would
    not be shorter by much, or cannot be written."""
    taken = {*one.parameters, *other.parameters, *re.findall(r"\w+", one.text + other.text)}
    if flag in taken or (one.helpers, one.imports) != (other.helpers, other.imports):
        return None
    first, second = _function(one), _function(other)
    body, its_body = _body(one, first), _body(other, second)
    lines = _joined(body, its_body, flag)
    if len(lines) > _MOST * sum(len(part.lines()) for part in (*body, *its_body)):
        return None
    rows = [row for line in lines for row in _broken(_PAD + line)]
    names, its_names = one.parameters, other.parameters
    plain = _merged([n for n in names if n not in one.constexprs], [n for n in its_names if n not in other.constexprs])
    constants = [*_merged(one.constexprs, other.constexprs), flag]
    head = bracketed(f"def {one.name}", [*plain, *(f"{name}: tl.constexpr" for name in constants)], ":", 0)
    document = _docstring(ast.get_docstring(first) or "", ast.get_docstring(second) or "", flag)
    text = "\n".join(["@triton.jit", *head, *document, *rows]) + "\n"
    both = (one.text + other.text).count("\n") - len(_documented(first)) - len(_documented(second))
    if any(len(row) > WIDTH for row in rows) or 1 + len(head) + len(rows) > _WORTH * both:
        return None
    return replace(one, text=text, parameters=(*plain, *constants), constexprs=tuple(constants))


# --- reading


def _function(source: KernelSource) -> ast.FunctionDef:
    return next(node for node in ast.parse(source.text).body if isinstance(node, ast.FunctionDef))


def _body(source: KernelSource, node: ast.FunctionDef) -> tuple[_Part, ...]:
    """The statements of a function behind its docstring."""
    documented = _documented(node)
    start = documented.stop if documented else node.body[0].lineno - 1
    return _parts(source.text.split("\n"), node.body[bool(documented) :], start)


def _documented(node: ast.FunctionDef) -> range:
    """The rows of the docstring."""
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        return range(first.lineno - 1, first.end_lineno or first.lineno)
    return range(0)


def _parts(rows: Sequence[str], statements: Sequence[ast.stmt], start: int) -> tuple[_Part, ...]:
    """Statements of a block. `start`: the rows above the first one and its comments."""
    found = []
    for node in statements:
        end = node.end_lineno or node.lineno
        if isinstance(node, (ast.If, ast.For, ast.While)):
            head = node.body[0].lineno - 1
            while rows[head - 1].lstrip().startswith("#"):
                head -= 1
            others = _parts(rows, node.orelse, _else_of(rows, node)) if node.orelse else ()
            found.append(_Part(_dedented(rows[start:head]), _parts(rows, node.body, head), others))
        else:
            found.append(_Part(_dedented(rows[start:end])))
        start = end
    return tuple(found)


def _else_of(rows: Sequence[str], node: ast.If | ast.For | ast.While) -> int:
    """The rows up to `else:`."""
    row = node.orelse[0].lineno - 1
    while rows[row - 1].strip() != "else:":
        row -= 1
    return row


def _dedented(rows: Sequence[str]) -> str:
    return textwrap.dedent("\n".join(rows))


# --- joining


@dataclass
class _Run:
    """Statements of both texts, or of each alone."""

    one: list[_Part]
    other: list[_Part]
    same: bool


def _joined(one: Sequence[_Part], other: Sequence[_Part], flag: str) -> list[str]:
    lines: list[str] = []
    for run in _together(_runs(one, other)):
        if run.same:
            for mine, its in zip(run.one, run.other, strict=True):
                lines += mine.text.split("\n")
                lines += _indented(_joined(mine.body, its.body, flag))
                lines += ["else:", *_indented(_joined(mine.others, its.others, flag))] if mine.others else []
            continue
        own, its_own = ([line for part in parts for line in part.lines()] for parts in (run.one, run.other))
        lines += [f"if {flag}:" if own else f"if not {flag}:", *_indented(own or its_own)]
        lines += ["else:", *_indented(its_own)] if own and its_own else []
    return lines


def _runs(one: Sequence[_Part], other: Sequence[_Part]) -> list[_Run]:
    """What is the same in both and what is not, in order."""
    keys, its_keys = ([(part.text, bool(part.body), bool(part.others)) for part in parts] for parts in (one, other))
    found: list[_Run] = []
    for tag, start, end, begin, stop in SequenceMatcher(None, keys, its_keys, autojunk=False).get_opcodes():
        mine, its = list(one[start:end]), list(other[begin:stop])
        named = _one_loop(mine[0], its[0]) if len(mine) == len(its) == 1 and tag == "replace" else None
        if named is None:
            found.append(_Run(mine, its, tag == "equal"))
        else:
            found += [_Run([], list(named[0]), False), _Run(mine, [named[1]], True)]
    return found


def _one_loop(one: _Part, other: _Part) -> tuple[tuple[_Part, ...], _Part] | None:
    """`end = S`, and the loop to `end` in place of one to `S`: what has a name in one text gets it in the other."""
    heads = [re.fullmatch(r"for (\w+) in range\(([^()]*)\):", part.text) for part in (one, other)]
    if heads[0] is None or heads[1] is None or heads[0][1] != heads[1][1]:
        return None
    bounds = [head[2].split(", ") for head in heads if head is not None]
    if len(bounds[0]) != len(bounds[1]):
        return None
    apart = {mine: its for mine, its in zip(*bounds, strict=True) if mine != its}
    if not apart or not all(map(str.isidentifier, apart)) or any(name in " ".join(other.lines()) for name in apart):
        return None
    return tuple(_Part(f"{name} = {value}") for name, value in apart.items()), replace(other, text=one.text)


def _together(runs: Sequence[_Run]) -> list[_Run]:
    """What differs put off until the next that differs, where nothing between them has to do with it."""
    found: list[_Run] = []
    waiting: _Run | None = None
    for place, run in enumerate(runs):
        if not run.same:
            if waiting is not None:
                run = _Run([*waiting.one, *run.one], [*waiting.other, *run.other], False)
            between = runs[place + 1 : place + 2]
            can_wait = len(runs) > place + 2 and between[0].same and _may_wait([*run.one, *run.other], between[0].one)
            waiting = run if can_wait else None
            found += [] if can_wait else [run]
        else:
            found.append(run)
    return found


def _may_wait(parts: Sequence[_Part], between: Sequence[_Part]) -> bool:
    """Whether assignments may be made behind other statements."""
    mine, its = ([ast.parse("\n".join(part.lines())) for part in some] for some in (parts, between))
    if not all(isinstance(node, ast.Assign) for tree in mine for node in tree.body):
        return False
    loads = any(".load(" in part.text for part in parts)
    if loads and any(word in line for part in between for line in part.lines() for word in _WRITING):
        return False
    binds, reads = _names(mine)
    bound, read = _names(its)
    return not (binds & (bound | read) or reads & bound)


def _names(trees: Sequence[ast.AST]) -> tuple[set[str], set[str]]:
    """Names that are given a value, and those that are read."""
    names = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)]
    bound = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    return bound, {node.id for node in names if not isinstance(node.ctx, ast.Store)}


def _indented(lines: Sequence[str]) -> list[str]:
    return [_PAD + line for line in lines]


def _merged(one: Sequence[str], other: Sequence[str]) -> list[str]:
    """Names of two lists in the order of both, that of the first where they differ."""
    found = list(one)
    for place, name in enumerate(other):
        if name not in found:
            before = [found.index(earlier) for earlier in other[:place] if earlier in found]
            found.insert(max(before, default=-1) + 1, name)
    return found


def _broken(line: str) -> Iterator[str]:
    """A row that indentation has made too long, as the items of its last call in rows of their own."""
    depth = (len(line) - len(line.lstrip())) // len(_PAD)
    text = line.strip()
    if len(line) <= WIDTH or not text.endswith(")"):
        yield line
        return
    level, commas = 0, [len(text) - 1]
    for place in range(len(text) - 1, -1, -1):
        level += {")": 1, "]": 1, "(": -1, "[": -1}.get(text[place], 0)
        if level == 1 and text[place] == ",":
            commas.insert(0, place)
        if level == 0:
            ends = [place, *commas]
            items = [text[begin + 1 : end].strip() for begin, end in itertools.pairwise(ends)]
            yield from bracketed(text[:place], items, "", depth)
            return
    yield line


def _docstring(one: str, other: str, flag: str) -> list[str]:
    """Lines of the docstring: of what the two say of themselves, each with its condition where they differ."""
    if re.search(r"^With(out)? \w+:", one + "\n" + other, re.MULTILINE):
        parts = [_PAD + line if line else "" for text in (one, other) for line in ("", *text.split("\n"))]
        half = len(one.split("\n")) + 1
        lines = [f"With {flag}:", *parts[:half], "", f"Without {flag}:", *parts[half:]]
        return [f'{_PAD}"""{lines[0]}', *(_PAD + line if line else "" for line in lines[1:]), f'{_PAD}"""']
    mine, its = _Said.of(one), _Said.of(other)
    lines = _filled(*_apart([mine.first], [its.first]), flag)
    lines += _listed(*_apart(mine.formulas, its.formulas), flag)
    lines += _filled(*_apart(mine.rest, its.rest), flag)
    lines = lines[1:]
    if len(lines) == 1:
        return [f'{_PAD}"""{lines[0]}"""']
    return [f'{_PAD}"""{lines[0]}', *(_PAD + line if line else "" for line in lines[1:]), f'{_PAD}"""']


@dataclass(frozen=True)
class _Said:
    """What a docstring says."""

    first: str
    """A sentence."""
    formulas: Sequence[str]
    """Lines."""
    rest: Sequence[str]
    """Sentences."""

    @classmethod
    def of(cls, text: str) -> _Said:
        """Read a docstring."""
        first, *others = text.split("\n\n")
        formulas = [line.strip() for part in others if part.startswith(_PAD) for line in part.split("\n")]
        rest = " ".join(" ".join(part.split()) for part in others if not part.startswith(_PAD))
        return cls(" ".join(first.split()), formulas, re.split(r"(?<=\.) (?=[A-Z`d])", rest) if rest else [])


def _apart(one: Sequence[str], other: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """What both say, and what each says alone."""
    both = [text for text in one if text in other]
    return both, [text for text in one if text not in both], [text for text in other if text not in both]


def _listed(both: Sequence[str], mine: Sequence[str], its: Sequence[str], flag: str) -> list[str]:
    """Lines as they are, a blank one before each paragraph."""
    lines: list[str] = []
    for texts, condition in ((both, ""), (mine, f"With {flag}:"), (its, f"Without {flag}:")):
        if texts:
            lines += ["", *([condition, ""] if condition else []), *(_PAD + text for text in texts)]
    return lines


def _filled(both: Sequence[str], mine: Sequence[str], its: Sequence[str], flag: str) -> list[str]:
    """Sentences as paragraphs, a blank line before each."""
    lines: list[str] = []
    for texts, condition in ((both, []), (mine, [f"With {flag}:"]), (its, [f"Without {flag}:"])):
        if texts:
            whole = " ".join([*condition, *texts])
            lines += ["", *textwrap.wrap(whole, WIDTH - 8, break_long_words=False, break_on_hyphens=False)]
    return lines
