"""A candidate as a pair file: the forward with all it needs, the backward with what only it needs, what joins them.

Text is taken as it was written. A Function's class is split: its backward and what only that uses stand in a class of
their own in the backward section. Where the syntax says what is kept and what is returned, `forward` and `backward` of
the pair format follow, so that the gate can judge the file once it has SWEEP and make_args.
"""

from __future__ import annotations

import ast
import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from kernel_agent.pairs.sections import BACKWARD_MARKER, CHECK_MARKER, FORWARD_MARKER
from kernel_agent.pairs.syntax import Function, parse
from rag.harvest.adapter import Adapter, adapter_of
from rag.harvest.candidates import Candidate
from rag.harvest.closure import Gathered, Gatherer, Piece
from rag.harvest.edit import Editor
from rag.harvest.module import Module
from rag.harvest.names import Names
from rag.harvest.report import Kind
from rag.harvest.resolve import Definition, Resolver
from rag.harvest.scope import references

CHECK = """# To have this pair proven, add SWEEP and make_args(...) for `forward` (docs/pair-format.md),
# then run kernel-agent dataset check on this file.
"""
NOT_RUNNABLE = "# What this code keeps for its backward cannot be told from its text: it is for reading.\n"


@dataclass(frozen=True)
class Origin:
    """Where a pair comes from."""

    repository: str
    commit: str
    licence: str
    """Empty: none was found."""


@dataclass(frozen=True)
class Rendered:
    """A candidate's code as one file."""

    head: str
    """Docstring and imports."""
    forward: str
    backward: str
    adapter: Adapter | None
    grads: tuple[str, ...]
    files: tuple[str, ...]
    unbound: tuple[str, ...]
    """Names that nothing in the file binds."""

    @property
    def code(self) -> str:
        """What tells one pair from another."""
        return f"{self.forward}\n{self.backward}"

    def text(self, meta: str) -> str:
        """The pair file."""
        check = CHECK if self.adapter is not None else NOT_RUNNABLE
        return (
            f"{self.head}\n\n{meta}\n\n{FORWARD_MARKER}\n{self.forward}\n\n\n"
            f"{BACKWARD_MARKER}\n{self.backward}\n\n\n{CHECK_MARKER}\n{check}"
        )


def render(candidate: Candidate, gatherer: Gatherer, resolver: Resolver, ahead: Gathered, back: Gathered) -> Rendered:
    """Write a candidate whose halves are gathered: `ahead` for forward and setup, `back` for the backward."""
    known = {(id(piece.node), piece.header) for piece in ahead.pieces}
    behind = [piece for piece in back.pieces if (id(piece.node), piece.header) not in known]
    family = () if candidate.family is None else tuple(node for _, node in candidate.family.classes.values())
    names = Names(resolver, ("SavedContext",))
    names.learn([*ahead.pieces, *behind], gatherer)
    half = f"{candidate.name}Backward"
    moved = {name: half for piece in behind if piece.owner in family for name in _bound(piece.node)}
    editor = Editor(gatherer, names, moved)
    editor.prepare([*ahead.pieces, *behind])
    forward = _section(ahead.pieces, editor, family)
    backward = _section([piece for piece in behind if piece.owner is None and not piece.header], editor, ())
    own = [piece for piece in behind if piece.owner is not None]
    if own:
        root = names.of(Definition(candidate.module.path, candidate.name))
        body = "\n\n".join(textwrap.indent(editor.text(piece), "    ") for piece in own)
        backward = "\n\n\n".join(part for part in (backward, f"class {half}({root}):\n{body}") if part)
    adapter = adapter_of(candidate, lambda path, name: names.of(Definition(path, name)), half, bool(own))
    if adapter is not None:
        forward, backward = f"{forward}\n\n\n{adapter.forward}", f"{backward}\n\n\n{adapter.backward}"
    pieces = [*ahead.pieces, *behind]
    head = _head(candidate, names, [piece.module for piece in pieces])
    return Rendered(
        head=head,
        forward=forward,
        backward=backward,
        adapter=adapter,
        grads=_grads(candidate, adapter),
        files=tuple(sorted({piece.module.path for piece in pieces})),
        unbound=unbound_names(f"{head}\n{forward}\n{backward}"),
    )


def _section(pieces: Sequence[Piece], editor: Editor, family: Sequence[ast.ClassDef]) -> str:
    """Pieces one after the other; the members of a class of the family below its line."""
    members = {id(node): [piece for piece in pieces if piece.owner is node] for node in family}
    parts: list[tuple[bool, str]] = []
    for piece in pieces:
        if piece.owner is not None and id(piece.owner) in members:
            continue
        text = editor.text(piece)
        if piece.header:
            body = "\n\n".join(textwrap.indent(editor.text(one), "    ") for one in members[id(piece.node)])
            text = f"{text}\n{body or '    pass'}"
        parts.append((isinstance(piece.node, (*Function.__args__, ast.ClassDef)), text))
    joined = ""
    for place, (defines, text) in enumerate(parts):
        apart = "" if place == 0 else "\n\n\n" if defines or parts[place - 1][0] else "\n"
        joined += apart + text
    return joined


def _bound(node: ast.stmt) -> tuple[str, ...]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return (node.name,)
    return tuple(n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))


def _head(candidate: Candidate, names: Names, modules: Sequence[Module]) -> str:
    future = ["from __future__ import annotations", ""] if any(m.future_annotations for m in modules) else []
    standard = [] if candidate.family is None else ["import torch"]
    imports = sorted({*names.imports, *standard}, key=lambda line: (line.startswith("from"), line))
    return "\n".join([f'"""{_sentence(candidate)}"""', "", *future, *imports])


def _sentence(candidate: Candidate) -> str:
    """What the code says of itself, else what it is called."""
    spoken: list[ast.AST | None] = [candidate.forward_function, candidate.backward_function]
    if candidate.family is not None:
        spoken.insert(0, candidate.family.classes[candidate.family.root][1])
    for node in spoken:
        said = ast.get_docstring(node) if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else None
        sentence = " ".join((said or "").split("\n\n")[0].split()).partition(". ")[0].rstrip(".")
        if sentence and not set('"\\') & set(sentence):
            return f"{sentence[:200]}."
    return f"{candidate.name} and its backward."


def meta_text(candidate: Candidate, rendered: Rendered, origin: Origin, slug: str, family: str) -> str:
    """META of a harvested pair."""
    values: dict[str, object] = {
        "slug": slug,
        "family": family,
        "op": candidate.name,
        "schema": 1,
        "techniques": (),
        "grads": rendered.grads,
        "license": origin.licence,
        "origin": "harvested",
        "repository": origin.repository,
        "commit": origin.commit,
        "file": candidate.module.path,
        "line": candidate.line,
    }
    return "META = dict(\n" + "".join(f"    {name}={_literal(value)},\n" for name, value in values.items()) + ")"


def _literal(value: object) -> str:
    if isinstance(value, tuple):
        inner = ", ".join(json.dumps(item) for item in value)
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _grads(candidate: Candidate, adapter: Adapter | None) -> tuple[str, ...]:
    """The inputs with gradients: as returned, else as the backward's names say, else the first input."""
    if adapter is not None:
        return adapter.grads
    function, other = candidate.forward_function, candidate.backward_function
    arguments = [a.arg for a in (*function.args.posonlyargs, *function.args.args)] if function is not None else []
    if candidate.kind is Kind.FUNCTION and arguments[:1] == ["ctx"]:
        arguments = arguments[1:]
    said = {n.id for n in ast.walk(other) if isinstance(n, ast.Name)} if other is not None else set()
    spellings = ("d{0}", "d_{0}", "grad_{0}", "{0}_grad", "{0}grad")
    named = tuple(a for a in arguments if any(form.format(a) in said for form in spellings))
    return named or tuple(arguments[:1]) or ("x",)


def unbound_names(source: str) -> tuple[str, ...]:
    """Names that the text of a file uses and neither binds nor gets from Python. Nothing if it is no Python at all."""
    import builtins

    tree = parse(source)
    module = Module("", source, tree)
    found = (reference.path[0] for statement in tree.body for reference in references(statement))
    own = set(module.bindings) | set(dir(builtins)) | {"__name__", "__file__", "__doc__"}
    return tuple(dict.fromkeys(name for name in found if name not in own))
