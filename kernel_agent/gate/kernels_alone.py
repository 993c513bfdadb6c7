"""A candidate's file with nothing left in it that could run: its kernels, the constants they use, and imports.

A process that is to be believed may import what comes out. Lines keep their numbers.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass

from kernel_agent.gate.nested_kernels import nested_kernels
from kernel_agent.pairs.sections import split_sections

_MODULES = ("triton", "torch", "math", "typing", "__future__")
_PLAIN_CALLS = frozenset({"float", "int", "bool", "min", "max", "abs", "round", "len", "tuple", "hasattr"})
_CALLS = frozenset({"triton.language.constexpr", "triton.cdiv", "triton.next_power_of_2", "torch.finfo", "torch.iinfo"})
"""Functions that a constant may call, by the names they are imported from; and all of `math`."""
_AT_COMPILE_TIME = frozenset({"triton.constexpr_function", "triton.runtime.jit.constexpr_function"})
_LACKS = frozenset({"ImportError", "ModuleNotFoundError", "AttributeError"})
"""What an import from another version of a library raises."""
_OF_LAUNCHES = frozenset({"launch_metadata", "repr"})
"""Functions of `triton.jit` that name a launch for profilers, and change nothing in what it computes."""


@dataclass(frozen=True)
class KernelsAlone:
    """What of a candidate's file may be imported without running its code."""

    text: str
    """With the line numbers of the file."""
    trusted_lines: int
    """So many lines from the top are the user's own and stand as they are; 0 where the candidate changed them."""


def kernels_alone(source: str, default: str) -> KernelsAlone:
    """Reduce a pair file; `default` is the pair file that the user's own code gives, with any backward section.

    Where both have the same statements above the backward section, those are the user's own. Raises `InputError` for a
    file without sections, `SyntaxError` for one that is no Python.
    """
    sections, own = split_sections(source), split_sections(default)
    shown = sections.above_check
    tree = ast.parse(shown)
    above = [node for node in tree.body if node.lineno < sections.backward_line]
    below = [node for node in tree.body if node.lineno >= sections.backward_line]
    users = [node for node in ast.parse(own.above_check).body if node.lineno < own.backward_line]
    kept = _Kept()
    if _dumped(above) == _dumped(users):
        kept.bind_all(above)
        some = kept.only(_in_order(tree.body, below, shown))
        if not _rebinds(some, above):
            text = _blanked(shown, some, sections.backward_line)
            return KernelsAlone(_only_if(text, [*above, *some]), sections.backward_line)
    some = _Kept().only(_in_order(tree.body, tree.body, shown))
    return KernelsAlone(_only_if(_blanked(shown, some, 0), some), 0)


def users_lines(source: str, default: str) -> int:
    """So many lines from the top of a pair file hold nothing but statements that the user's own file begins with.

    `default` as for `kernels_alone`. Raises as that does.
    """
    sections, own = split_sections(source), split_sections(default)
    users = _dumped([node for node in ast.parse(own.above_check).body if node.lineno < own.backward_line])
    tree = ast.parse(sections.above_check)
    agreed = 0
    for node in tree.body:
        (said,) = _dumped([node]) or [""]
        if said and said not in users[:1]:
            return agreed if _first(node) > agreed else 0
        users = users[1:] if said else users
        agreed = node.end_lineno or node.lineno
    return agreed


def _only_if(text: str, nodes: list[ast.stmt]) -> str:
    """The text if it says these statements; nothing where Python counts lines otherwise (a lone carriage return)."""

    try:
        found = ast.parse(text).body
    except SyntaxError:
        return ""
    return text if list(map(_said, found)) == list(map(_said, nodes)) else ""


def _said(node: ast.stmt) -> str:
    """A statement without its decorators."""
    named = [str(getattr(node, name, "")) for name in ("name", "module")]
    parts = [ast.dump(part) for part in ast.iter_child_nodes(node) if part not in _decorators(node)]
    return " ".join([type(node).__name__, *named, *parts])


def _apart(nodes: list[ast.stmt]) -> list[ast.stmt]:
    """Statements that share no line with another one: a line is kept or left out as a whole."""
    spans = [(_first(node), node.end_lineno or node.lineno) for node in nodes]
    return [
        node
        for k, node in enumerate(nodes)
        if (k == 0 or spans[k - 1][1] < spans[k][0]) and (k + 1 == len(nodes) or spans[k][1] < spans[k + 1][0])
    ]


def _in_order(module: list[ast.stmt], some: list[ast.stmt], source: str) -> list[ast.stmt]:
    """Statements, and the kernels within them that mean the same at the top level, by lines."""
    apart = _apart(some)
    nested = nested_kernels(module, apart, lambda node: any(map(_is_jit, node.decorator_list)))
    lines = source.split("\n")
    moved = [node for node in nested if _only_if("\n".join(_dedented(node, lines).values()), [node])]
    return sorted([*apart, *moved], key=_first)


def _dedented(node: ast.stmt, lines: list[str]) -> dict[int, str]:
    """The lines of a statement by number, moved to the left margin, and of its decorators those that make kernels."""
    kept = {number: lines[number - 1] for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    if not any(line[: node.col_offset].strip() for line in kept.values()):
        kept = {number: line[node.col_offset :] for number, line in kept.items()}
    for decorator in _decorators(node):
        if _is_jit(decorator) or len(_decorators(node)) == 1:
            kept[decorator.lineno] = f"@{ast.unparse(_without_functions(decorator))}"
    return dict(sorted(kept.items()))


def _first(node: ast.stmt) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in _decorators(node))])


def _decorators(node: ast.stmt) -> list[ast.expr]:
    return list(getattr(node, "decorator_list", ()))


def _dumped(nodes: list[ast.stmt]) -> list[str]:
    """Statements for comparison, without the docstring and META, of which a candidate writes its own."""
    return [ast.dump(node) for node in nodes if not _is_text(node) and _bound(node) != {"META"}]


def _is_name(target: ast.expr) -> bool:
    """Whether an assignment binds names alone."""
    return isinstance(target, ast.Name) or (isinstance(target, ast.Tuple) and all(map(_is_name, target.elts)))


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _rebinds(some: list[ast.stmt], above: list[ast.stmt]) -> bool:
    """Whether statements give a new meaning to a name that others bind or use."""
    imports = {ast.dump(node) for node in above if isinstance(node, (ast.Import, ast.ImportFrom))}
    names = {part.id for node in above for part in ast.walk(node) if isinstance(part, ast.Name)}
    names |= {name for node in above for name in _bound(node)}
    return any(_bound(node) & names for node in some if ast.dump(node) not in imports)


def _bound(node: ast.stmt) -> set[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, (ast.Try, ast.If)):
        parts = [part for part in ast.walk(node) if part is not node and isinstance(part, ast.stmt)]
        return {name for part in parts for name in _bound(part)}
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}


class _Kept:
    """Chooses statements that compute nothing but constants, in order; later ones may use names of earlier ones."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._imported: dict[str, str] = {}
        """What imported names mean, as `triton.language.constexpr`."""
        self._pure: set[str] = set()
        """Kept functions that compute constants."""
        self._used: set[str] = set()
        """Names in their bodies, which are looked up when they are called: nothing else may get these names."""

    def bind_all(self, nodes: list[ast.stmt]) -> None:
        """Names of statements that stay as they are."""
        for node in nodes:
            self._bind(node)

    def _bind(self, node: ast.stmt) -> None:
        self._give(_bound(node))
        if isinstance(node, ast.Import):
            self._imported |= {a.asname: a.name for a in node.names if a.asname}
            self._imported |= {(top := a.name.partition(".")[0]): top for a in node.names if not a.asname}
        elif isinstance(node, ast.ImportFrom):
            self._imported |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}

    def _give(self, names: Iterable[str]) -> None:
        """Names get values of which nothing is known."""
        for name in names:
            self._names.add(name)
            self._pure.discard(name)
            self._imported.pop(name, None)

    def only(self, nodes: list[ast.stmt]) -> list[ast.stmt]:
        """Those that are harmless; of functions only kernels."""
        found = []
        for node in nodes:
            if self._harmless(node) and not _bound(node) & self._used:
                found.append(node)
                self._bind(node)
                if isinstance(node, ast.FunctionDef) and not any(map(_is_jit, node.decorator_list)):
                    self._pure.add(node.name)
                    self._used |= {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
            else:
                self._names -= _bound(node)
        return found

    def _harmless(self, node: ast.stmt) -> bool:
        if isinstance(node, ast.Import):
            return all(_known(alias.name) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            named = all(alias.name != "*" and not alias.name.startswith("_") for alias in node.names)
            return node.level == 0 and _known(node.module or "") and named
        if isinstance(node, ast.Assign):
            return all(map(_is_name, node.targets)) and self._constant(node.value)
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            parts = (node.value, node.annotation)
            return isinstance(node.target, ast.Name) and all(self._constant(part) for part in parts)
        if isinstance(node, (ast.Try, ast.If)):
            return self._is_choice(node)
        return isinstance(node, ast.FunctionDef) and (self._is_kernel(node) or self._is_of_constants(node))

    def _is_choice(self, node: ast.Try | ast.If) -> bool:
        """Whether names are imported from where this version of a library has them, or given to one of two constants.

        A name that is used there keeps its meaning: none of the branches binds it.
        """
        used = {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)}
        if _bound(node) & used:
            return False
        if isinstance(node, ast.If):
            return self._constant(node.test) and all(map(self._binds, (*node.body, *node.orelse)))
        kinds = [handler.type for handler in node.handlers]
        caught = [one for kind in kinds for one in (kind.elts if isinstance(kind, ast.Tuple) else [kind])]
        known = all(isinstance(one, ast.Name) and self._meaning(one) in _LACKS for one in caught)
        plain = not node.orelse and not node.finalbody and all(handler.name is None for handler in node.handlers)
        inside = (*node.body, *(part for handler in node.handlers for part in handler.body))
        return known and plain and all(map(self._binds, inside))

    def _binds(self, node: ast.stmt) -> bool:
        """Whether a statement in a branch only imports or gives names to constants."""
        kinds = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.If, ast.Try)
        return isinstance(node, ast.Pass) or (isinstance(node, kinds) and self._harmless(node))

    def _is_of_constants(self, node: ast.FunctionDef) -> bool:
        """Whether a function that Triton calls while it compiles only computes with constants."""
        if len(node.decorator_list) != 1 or self._meaning(node.decorator_list[0]) not in _AT_COMPILE_TIME:
            return False
        parameters = [part for part in ast.walk(node.args) if isinstance(part, ast.arg)]
        outside = (*node.args.defaults, *node.args.kw_defaults, node.returns, *(one.annotation for one in parameters))
        if not all(self._constant(part) for part in outside if part is not None):
            return False
        inner = _Kept()
        inner._names, inner._imported, inner._pure = set(self._names), dict(self._imported), set(self._pure)
        inner._give([one.arg for one in parameters])
        return all(map(inner._computes, node.body))

    def _computes(self, node: ast.stmt) -> bool:
        """Whether a statement of a function gives a name to a constant, or returns one."""
        if isinstance(node, ast.If):
            return self._constant(node.test) and all(map(self._computes, (*node.body, *node.orelse)))
        if isinstance(node, ast.Return):
            return node.value is None or self._constant(node.value)
        if isinstance(node, ast.Assign) and self._harmless(node):
            self._bind(node)
            return True
        return _is_text(node)

    def _is_kernel(self, node: ast.FunctionDef) -> bool:
        defaults = [*node.args.defaults, *(part for part in node.args.kw_defaults if part is not None)]
        everyone = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        annotations = [part for part in (*(one.annotation for one in everyone), node.returns) if part is not None]
        jit = [decorator for decorator in node.decorator_list if _is_jit(decorator)]
        if len(jit) != 1 or not all(self._constant(part) for part in (*defaults, *annotations)):
            return False
        return self._meaning(jit[0].func if isinstance(jit[0], ast.Call) else jit[0]) == "triton.jit"

    def _constant(self, node: ast.expr) -> bool:
        """Whether an expression only computes with constants."""
        if isinstance(node, ast.Constant):
            return True
        if isinstance(node, ast.Name):
            return node.id in self._names or node.id in _PLAIN_CALLS
        if isinstance(node, ast.Attribute):
            return (not node.attr.startswith("_") or node.attr == "__version__") and self._constant(node.value)
        if isinstance(node, ast.Call):
            called = self._meaning(node.func)
            allowed = called in _CALLS or called in _PLAIN_CALLS or called.startswith("math.")
            allowed = allowed or (isinstance(node.func, ast.Name) and node.func.id in self._pure)
            plain = not any(isinstance(part, ast.Starred) for part in node.args) and not node.keywords
            return allowed and plain and all(self._constant(part) for part in (node.func, *node.args))
        if isinstance(node, (ast.UnaryOp, ast.BinOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Tuple, ast.List)):
            return all(self._constant(part) for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr))
        return False

    def _meaning(self, node: ast.expr) -> str:
        """What a name stands for, as it was imported; empty for one that was given a meaning here."""
        if isinstance(node, ast.Attribute):
            inner = self._meaning(node.value)
            return f"{inner}.{node.attr}" if inner else ""
        if not isinstance(node, ast.Name):
            return ""
        return self._imported.get(node.id, "" if node.id in self._names else node.id)


def _known(module: str) -> bool:
    return module.partition(".")[0] in _MODULES


def _is_jit(decorator: ast.expr) -> bool:
    if isinstance(decorator, ast.Call):
        given = [part.value for part in decorator.keywords if part.arg not in _OF_LAUNCHES]
        flat = [inner for value in given for inner in (value.elts if isinstance(value, ast.List) else [value])]
        return not decorator.args and all(isinstance(part, ast.Constant) for part in flat) and _is_jit(decorator.func)
    return ast.unparse(decorator) in ("triton.jit", "jit")


def _blanked(source: str, nodes: list[ast.stmt], trusted_lines: int) -> str:
    """The source with its first lines and those of these statements only; kernels keep what makes them kernels."""
    lines = source.split("\n")
    kept = dict(enumerate(lines[:trusted_lines], start=1))
    for node in nodes:
        kept |= _dedented(node, lines)
    return "\n".join(kept.get(number, "") for number in range(1, len(lines) + 1)) + "\n"


def _without_functions(decorator: ast.expr) -> ast.expr:
    """A decorator that makes a kernel, without what names its launches."""
    if not isinstance(decorator, ast.Call):
        return decorator
    keywords = [part for part in decorator.keywords if part.arg not in _OF_LAUNCHES]
    return ast.Call(decorator.func, decorator.args, keywords)
