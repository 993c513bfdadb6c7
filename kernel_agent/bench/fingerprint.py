"""Fingerprints: two candidates that say the same in other words have the same one, and are judged once.

The source fingerprint is a hash of the candidate's syntax tree in a normal form: no comments, docstrings or layout, and
all names renamed that nothing outside of the code can see. It is made here, from text alone, so equal ones may share a
verdict.

The PTX fingerprint puts the compiled code of all launches in the place of the kernels. It is what the candidate's own
child says of it: equal ones are a reason to leave the later candidate out, never a reason to call it green.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
from collections.abc import Iterable

from kernel_agent.bench.modelled import NotModelled, entry_facts, required
from kernel_agent.errors import InputError
from kernel_agent.pairs.sections import split_sections
from kernel_agent.pairs.spec import KernelSpec
from kernel_agent.pairs.statements import is_text
from kernel_agent.sandbox import Limits, Sandbox

LIMITS = Limits(wall_s=45.0)
"""Where counting takes longer, the text has to do: a fingerprint is to save time."""

_BY_NAME = frozenset(
    {"eval", "exec", "globals", "locals", "vars", "dir", "getattr", "setattr", "compile", "__import__"}
)
"""Who uses one of these may look names up that are written nowhere."""

_MODULES_BY_NAME = frozenset({"inspect", "sys", "gc", "ast", "linecache", "importlib", "builtins"})

_Function = (ast.FunctionDef, ast.AsyncFunctionDef)


def fingerprint(spec: KernelSpec, pair_source: str, sandbox: Sandbox, device: str = "H100 SXM") -> str | None:
    """`ptx:...` where the candidate's backward compiles at the required entries of SWEEP, else `source:...`.

    None where the text cannot be read. Runs the candidate in a child; see the module for what equality allows.
    """
    found = source_fingerprint(pair_source)
    if found is None:
        return None
    try:
        entries = entry_facts(spec, pair_source, sandbox, device, required(spec), LIMITS)
    except NotModelled:
        return found
    if any(kernel.problem for entry in entries for kernel in entry.compiled.values()):
        return found
    launches = [(launch.grid, entry.compiled[launch.build].ptx) for entry in entries for launch in entry.launches]
    tree = _shown(pair_source)
    return f"ptx:{_hash([_normal(tree, kernels=False), repr(launches)])}"


def source_fingerprint(pair_source: str) -> str | None:
    """`source:` and a hash of a pair file above its check section, in its normal form; None where it is no Python."""
    try:
        return f"source:{_hash([_normal(_shown(pair_source), kernels=True)])}"
    except (InputError, SyntaxError, ValueError, RecursionError, MemoryError):  # the gate says what is wrong with it
        return None


def _shown(pair_source: str) -> ast.Module:
    sections = split_sections(pair_source)
    tree = ast.parse(sections.above_check)
    tree.body = [node for node in tree.body if not _is_meta(node)]
    return tree


def _is_meta(node: ast.stmt) -> bool:
    """META says what the gate already knows, or holds against the candidate elsewhere."""
    targets = node.targets if isinstance(node, ast.Assign) else []
    return any(isinstance(target, ast.Name) and target.id == "META" for target in targets)


def _normal(tree: ast.Module, *, kernels: bool) -> str:
    """The normal form as text; without `kernels`, compiled functions are left out but for their decorators."""
    _WithoutTexts().visit(tree)
    body = tree.body if kernels else [part for node in tree.body for part in _around_kernels(node)]
    module = ast.Module(body=body, type_ignores=[])
    if _looks_names_up(module):
        return ast.unparse(module)
    pinned = _pinned(module)
    globally = _Names("g", pinned)
    return "\n".join(ast.unparse(_Renamed(node, globally, pinned).tree) for node in module.body)


class _WithoutTexts(ast.NodeTransformer):
    """Drops docstrings and other texts that stand alone."""

    def visit(self, node: ast.AST) -> ast.AST:
        """Clean every list of statements."""
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [item for item in body if not is_text(item)] or [ast.Pass()]  # type: ignore[attr-defined]
        if isinstance(node, _Function):
            node.returns = None
        return self.generic_visit(node)


def _around_kernels(node: ast.stmt) -> list[ast.stmt]:
    """A statement; of a function that Triton compiles, its decorators."""
    if isinstance(node, _Function) and any("jit" in ast.unparse(decorator) for decorator in node.decorator_list):
        return [ast.Expr(decorator) for decorator in node.decorator_list]
    return [node]


def _looks_names_up(module: ast.Module) -> bool:
    names = {node.id for node in ast.walk(module) if isinstance(node, ast.Name)}
    imported = {part for node in ast.walk(module) for part in _imported(node)}
    return bool((names & _BY_NAME) | (imported & _MODULES_BY_NAME)) or any(
        alias.name == "*" for node in ast.walk(module) if isinstance(node, ast.ImportFrom) for alias in node.names
    )


def _imported(node: ast.AST) -> Iterable[str]:
    if isinstance(node, ast.Import):
        return [alias.name.partition(".")[0] for alias in node.names]
    return [(node.module or "").partition(".")[0]] if isinstance(node, ast.ImportFrom) else []


def _pinned(module: ast.Module) -> frozenset[str]:
    """Names that must stay: others than the code itself may know them, or their scope is not plain."""
    pinned = {"forward", "backward", *dir(builtins)}
    inner: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.keyword) and node.arg:
            pinned.add(node.arg)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            pinned.add(node.value)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            pinned.update(alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            pinned.update(node.names)
        elif isinstance(node, ast.ClassDef):  # its names are attributes elsewhere
            pinned.update(_bound(node))
    for statement in module.body:
        if isinstance(statement, _Function):
            inner |= _bound(statement) - {statement.name}
    outer = {name for statement in module.body for name in _bound(statement, nested=False)}
    return frozenset(pinned | (inner & outer))


def _bound(node: ast.AST, *, nested: bool = True) -> set[str]:
    """Names that a statement binds, in itself or anywhere in it."""
    if not nested and isinstance(node, (*_Function, ast.ClassDef)):
        return {node.name}
    found: set[str] = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, (ast.Store, ast.Del)):
            found.add(inner.id)
        elif isinstance(inner, ast.arg):
            found.add(inner.arg)
        elif isinstance(inner, (*_Function, ast.ClassDef, ast.ExceptHandler)) and inner.name:
            found.add(inner.name)
    return found


class _Names:
    """New names in the order in which old ones are met."""

    def __init__(self, prefix: str, pinned: frozenset[str]) -> None:
        self._prefix, self._pinned = prefix, pinned
        self._given: dict[str, str] = {}

    def of(self, name: str) -> str:
        """The new name."""
        if name in self._pinned:
            return name
        return self._given.setdefault(name, f"{self._prefix}{len(self._given)}")


class _Renamed(ast.NodeTransformer):
    """One statement of a module with new names: those of a function's own by function, all others by module."""

    def __init__(self, statement: ast.stmt, globally: _Names, pinned: frozenset[str]) -> None:
        own = _bound(statement) - {statement.name} if isinstance(statement, _Function) else set()
        self._own = own
        self._locally = _Names("l", pinned)
        self._globally = globally
        self.tree = self.visit(statement)

    def _new(self, name: str) -> str:
        return self._locally.of(name) if name in self._own else self._globally.of(name)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """A variable."""
        node.id = self._new(node.id)
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        """A parameter; its annotation stays."""
        node.arg = self._new(node.arg)
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """A function, of the module or inside of another one."""
        node.name = self._new(node.name)
        return self.generic_visit(node)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        """`except ... as name`."""
        node.name = self._new(node.name) if node.name else None
        return self.generic_visit(node)


def _hash(parts: list[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
