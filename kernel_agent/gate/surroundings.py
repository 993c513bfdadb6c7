"""Whether a backward asks where it runs: frames of its callers, modules that are loaded, arguments, environment.

One that is honest when it is judged does nothing wrong in any process of the gate, so this is told by its text. What
`backward` computes may hang on what it is given and on the machine; it has no business with who calls it. Names that a
statement makes of such an answer are followed to `backward`, so that a file may look at its environment for something
that no gradient hangs on, as for whether it logs.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kernel_agent.gate.origins import LOGGER, Origins
from kernel_agent.gate.telling import BY_NAME, leads, tells
from kernel_agent.pairs.syntax import is_main_guard

_SPOKEN = frozenset(
    {*("__str__", "__repr__", "__format__", "__bool__", "__len__", "__getattribute__"), *("write", "emit", "filter")}
)
"""Methods that a line of a log may call: a file that has its own can answer in them."""
_PLAIN_CALLS = frozenset({("len",), ("str",), ("repr",), ("tuple",), ("list",), ("int",), ("float",), ("type",)})


@dataclass(frozen=True)
class Asked:
    """A place where a file asks for its surroundings, and `backward` or `forward` hangs on it."""

    what: str
    """As `sys.modules`."""
    line: int


def asks_where(text: str, users_lines: int) -> Asked | None:
    """The first such place of a file below the lines that are the user's own; None where there is none."""
    tree = ast.parse(text)
    reader = _Reader(Origins(tree), _free_to_log(tree))
    parts = [reader.part(node) for node in tree.body if node.lineno > users_lines]
    defined = {name for part in parts for name in part.binds if part.runs}
    tainted: dict[str, Asked] = {}
    while True:
        known = len(tainted)
        for part in parts:
            asked = part.asked or next((tainted[name] for name in sorted(part.uses) if name in tainted), None)
            if asked is None:
                continue
            at_once = part.asked_at_once or not part.uses_at_once.isdisjoint(tainted)
            if part.is_guarded or (part.is_function and not at_once) or part.is_quiet(defined):
                tainted |= {name: asked for name in part.binds if name not in tainted}
            else:
                tainted.setdefault("backward", asked)
        if len(tainted) == known:
            return tainted.get("backward") or tainted.get("forward")


@dataclass(frozen=True)
class _Part:
    """A statement at the top level."""

    binds: frozenset[str]
    uses: frozenset[str]
    """Names of the file's top level that it reads."""
    uses_at_once: frozenset[str]
    """Those of them that a definition reads when it is made: in decorators, defaults and the bodies of classes."""
    asked: Asked | None
    asked_at_once: bool
    is_function: bool
    """A function or a class runs when it is used; any other statement does now."""
    is_guarded: bool
    """It runs where the file is the program itself, and nowhere that another one imports it."""
    runs: bool
    """Whether what it binds may be changed or called by statements after it."""
    assigns: bool
    """Whether it only gives names values."""

    def is_quiet(self, defined: set[str]) -> bool:
        """Whether nothing but the names that it binds can hold what it was told: it calls nothing of the file."""
        return self.assigns and self.uses.isdisjoint(defined)


@dataclass(frozen=True)
class _Reader:
    """Reads statements of one file."""

    origins: Origins
    free_to_log: bool
    """Whether a branch that only logs may hang on anything: nothing of the file is called by it."""

    def part(self, node: ast.stmt) -> _Part:
        """Look at a statement at the top level."""
        parts = list(self._walk(node))
        at_once = [part for one in _made_at_once(node) for part in self._walk(one)]
        function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names = {part.id for part in parts if isinstance(part, ast.Name) and not isinstance(part.ctx, ast.Load)}
        names |= {part.name for part in parts if isinstance(part, (ast.FunctionDef, ast.ClassDef))}
        return _Part(
            binds=frozenset({node.name} if function else names),  # type: ignore[attr-defined]
            uses=self._uses(parts),
            uses_at_once=self._uses(at_once),
            asked=next(self._asked(parts), None),
            asked_at_once=next(self._asked(at_once), None) is not None,
            is_function=function,
            is_guarded=is_main_guard(node) and not getattr(node, "orelse", None),
            runs=not isinstance(node, (ast.Import, ast.ImportFrom)),
            assigns=isinstance(node, (ast.Assign, ast.AnnAssign)) and all(isinstance(t, ast.Name) for t in targets),
        )

    def _uses(self, parts: Iterable[ast.AST]) -> frozenset[str]:
        loads = (part for part in parts if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load))
        return frozenset(part.id for part in loads if self.origins.is_of_the_file(part))

    def _walk(self, node: ast.AST) -> Iterator[ast.AST]:
        """Everything in a statement but questions that only a line of a log hangs on."""
        if isinstance(node, ast.If) and self._only_logs(node):
            for line in node.body:
                yield from self._walk(line)
            return
        yield node
        for part in ast.iter_child_nodes(node):
            yield from self._walk(part)

    def _only_logs(self, branch: ast.If) -> bool:
        if branch.orelse or not self.free_to_log or not self._is_plain_question(branch.test):
            return False
        return all(isinstance(node, ast.Expr) and self._is_line_of_log(node.value) for node in branch.body)

    def _is_plain_question(self, test: ast.expr) -> bool:
        if isinstance(test, ast.BoolOp):
            return all(map(self._is_plain_question, test.values))
        if isinstance(test, ast.UnaryOp):
            return isinstance(test.op, ast.Not) and self._is_plain_question(test.operand)
        if isinstance(test, ast.Call):
            return self.origins.of(test.func) == ((*LOGGER, "isEnabledFor"),)
        return isinstance(test, ast.Name)

    def _is_line_of_log(self, call: ast.expr) -> bool:
        if not isinstance(call, ast.Call):
            return False
        said = self.origins.of(call.func)
        speaks = len(said) == 1 and (said[0] in (("print",), ("warnings", "warn")) or said[0][:1] == ("logging",))
        inside = [part for argument in (*call.args, *call.keywords) for part in ast.walk(argument)]
        calls = [self.origins.of(part.func) for part in inside if isinstance(part, ast.Call)]
        return (
            speaks
            and not any(isinstance(part, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)) for part in inside)
            and all(len(one) == 1 and one[0] in _PLAIN_CALLS for one in calls)
            and not any(tells(chain) for chain in said)
        )

    def _asked(self, parts: Iterable[ast.AST]) -> Iterator[Asked]:
        """Every place in a part of a file that asks for surroundings."""
        parts = list(parts)
        inside = {id(part.value) for part in parts if isinstance(part, ast.Attribute)}
        inside |= {id(part) for call in parts for part in self._names_a_logger(call)}
        called = {id(part.func) for part in parts if isinstance(part, ast.Call)}
        for part in sorted(parts, key=lambda one: (getattr(one, "lineno", 0), getattr(one, "col_offset", 0))):
            what = ""
            if isinstance(part, ast.ImportFrom) and any(alias.name == "*" for alias in part.names):
                what = f"all of {part.module}" if tells([*str(part.module).split("."), "*"]) else ""
            elif isinstance(part, (ast.Name, ast.Attribute)) and id(part) not in inside:
                what = self._asks(part) or ("" if id(part) in called else self._handed_on(part))
            elif isinstance(part, ast.Call):
                what = self._by_computed_name(part)
            if what:
                yield Asked(what, getattr(part, "lineno", 0))

    def _asks(self, node: ast.Name | ast.Attribute) -> str:
        """What an expression with all its attributes asks for; empty where that is none of the surroundings."""
        attributes: list[str] = []
        base: ast.expr = node
        while isinstance(base, ast.Attribute):
            attributes.insert(0, base.attr)
            base = base.value
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            return ""
        chains = self.origins.of(node)
        for chain in chains:
            if tells(chain):
                return ".".join(name or "()" for name in chain).replace(".()", "()")
        if not chains and any(map(leads, attributes)):
            return ".".join([*([base.id] if isinstance(base, ast.Name) else []), *attributes])
        return ""

    def _handed_on(self, node: ast.Name | ast.Attribute) -> str:
        """A function that looks names up where it is neither called nor given a name: who calls it, and with what?"""
        if isinstance(node.ctx, ast.Load) and not self.origins.is_followed(node):
            for chain in self.origins.of(node):
                if chain in _LOOKS_UP:
                    return f"{chain[-1]} as a value"
        return ""

    def _names_a_logger(self, node: ast.AST) -> list[ast.AST]:
        """The name of its own module in `logging.getLogger(__name__)`."""
        if isinstance(node, ast.Call) and LOGGER in self.origins.of(node):
            return [part for part in node.args if isinstance(part, ast.Name) and part.id == "__name__"]
        return []

    def _by_computed_name(self, call: ast.Call) -> str:
        """Whether an attribute is looked up by a name that no reader of the text knows, or by one that leads there."""
        named = {chain[-1] for chain in self.origins.of(call.func)}
        named |= {call.func.attr} if isinstance(call.func, ast.Attribute) else set()
        for function in sorted(named & BY_NAME):
            for name in _names_given(function, call.args):
                said = name.value if isinstance(name, ast.Constant) else None
                if not isinstance(said, str):
                    return f"{function} of a name that is computed"
                if any(map(leads, said.split("."))):
                    return f"{function} of {said}"
        return ""


def _names_given(function: str, arguments: list[ast.expr]) -> list[ast.expr]:
    if function == "__setattr__":  # with or without the object before
        return arguments[-2:-1]
    if function.endswith("attr"):
        return arguments[1:2]
    return arguments if function == "attrgetter" else arguments[:1]


_LOOKS_UP = frozenset({("getattr",), ("operator", "attrgetter"), ("operator", "methodcaller")})


def _free_to_log(tree: ast.Module) -> bool:
    """Whether no function of the file is called by writing a line of a log, which `print` and loggers do by name."""
    for part in ast.walk(tree):
        said = part.value if isinstance(part, ast.Constant) else getattr(part, "name", None)
        if isinstance(said, str) and said in _SPOKEN:
            return False
    return True


def _made_at_once(node: ast.stmt) -> list[ast.AST]:
    """What of a function's or a class's definition runs when it is made."""
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return []
    found: list[ast.AST] = [*node.decorator_list]
    if isinstance(node, ast.ClassDef):
        found += [*node.bases, *node.keywords]
        for part in node.body:
            found += _made_at_once(part) if isinstance(part, (ast.FunctionDef, ast.ClassDef)) else [part]
        return found
    return [*found, *node.args.defaults, *(default for default in node.args.kw_defaults if default)]
