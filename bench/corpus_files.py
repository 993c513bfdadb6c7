"""`corpus_files`: the kernels of the executor's corpus as users' files, for what reads files."""

from __future__ import annotations

import ast
import base64
import importlib
import io
import sys
from pathlib import Path
from types import ModuleType

import torch

TESTS = Path(__file__).parents[1] / "test"

_ARGUMENTS = """

SWEEP = [dict(case={name!r})]


def make_args(case, device="cuda"):
    held = torch.load(io.BytesIO(base64.b64decode(ARGUMENTS)), weights_only=True)
    return tuple(one.to(device) if isinstance(one, torch.Tensor) else one for one in held)


ARGUMENTS = {arguments!r}
"""
"""A case has arguments and no sizes, so they are written down as they are."""


def corpus_files(folder: Path) -> list[Path]:
    """Write one file per case that has a gradient into `folder/corpus`, and name them."""
    sys.path[:0] = [str(TESTS)] if str(TESTS) not in sys.path else []
    themes = sorted(path.stem for path in (TESTS / "corpus").glob("corpus_*.py"))
    place = folder / "corpus"
    place.mkdir(parents=True, exist_ok=True)
    found = []
    for theme in themes:
        module = importlib.import_module(f"corpus.{theme}")
        for case in module.CASES:
            if case.wrt == ():
                continue
            path = place / f"{theme.removeprefix('corpus_')}_{case.name.replace('-', '_')}.py"
            path.write_text(_text(module, case))
            found.append(path)
    return found


def _text(module: ModuleType, case: object) -> str:
    """What the stub needs of its module, under a mark, and its arguments."""
    source = Path(str(module.__file__)).read_text()
    kept = _needed(ast.parse(source).body, case.stub.__name__)
    lines = source.split("\n")
    parts = []
    for node in kept:
        first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
        text = "\n".join(lines[first - 1 : node.end_lineno])
        marked = isinstance(node, ast.FunctionDef) and node.name == case.stub.__name__
        parts.append(f"\n\n{_mark(case)}\n{text}" if marked else text)
    held = io.BytesIO()
    torch.save(case.args(), held)
    arguments = base64.b64encode(held.getvalue()).decode()
    head = f'"""{case.name} of the corpus."""\n\nimport base64\nimport io\n\nfrom kernel_agent import autodiff\n'
    return head + "\n".join(parts) + "\n" + _ARGUMENTS.format(name=case.name, arguments=arguments)


def _mark(case: object) -> str:
    return "@autodiff" if case.wrt is None else f"@autodiff(inputs_require_grad={case.wrt})"


def _needed(body: list[ast.stmt], stub: str) -> list[ast.stmt]:
    """The imports, and what a function reaches of the definitions of its module."""
    defined = {name: node for node in body for name in _defines(node)}
    wanted, left = set(), [stub]
    while left:
        node = defined.get(left.pop())
        if node is not None and node not in wanted:
            wanted.add(node)
            left += [inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)]
    imports = (ast.Import, ast.ImportFrom)
    ours = ("__future__", "corpus")
    return [
        node
        for node in body
        if node in wanted
        or (isinstance(node, imports) and (getattr(node, "module", None) or "").partition(".")[0] not in ours)
    ]


def _defines(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [inner.id for target in targets for inner in ast.walk(target) if isinstance(inner, ast.Name)]
