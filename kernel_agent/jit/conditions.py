"""What the backward of a pair asks of a call before it launches, as a function of what the forward saved.

The backward raises where a fact does not hold, or a configuration is another one. That would be too late: its checks
are cut out of it, with the assignments they need, and asked when the forward has run.
"""

from __future__ import annotations

import ast
import builtins
import enum
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from kernel_agent.jit.names import free_names


class Objection(enum.Enum):
    """Why a pair is not for a call."""

    CONFIGURATION = "configuration"
    """It was derived for another one."""
    FACT = "fact"
    """Something that its schedule relies on does not hold."""


@dataclass(frozen=True)
class Objected:
    """One objection, in the words of the pair."""

    why: Objection
    words: str


Conditions = Callable[[tuple[Any, ...]], Objected | None]
"""From what was saved to what is objected; None where the backward will launch."""


def conditions_of(module: ModuleType, source: str) -> Conditions:
    """The conditions of the pair in a module. What needs cotangents or buffers is left to the backward."""
    functions = [
        node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == "backward"
    ]
    backward = functions[-1]
    cotangents = {argument.arg for argument in (*backward.args.args[1:], *backward.args.kwonlyargs)}
    known = frozenset(argument.arg for argument in backward.args.args[:1])
    cut = _needed(_Cutter(cotangents, frozenset(vars(module))).cut(backward.body, known), set())
    if not any(isinstance(node, ast.Raise) for one in cut for node in ast.walk(one)):
        return lambda _saved: None
    backward.name = "conditions"
    backward.args = ast.arguments(
        [], [ast.arg(argument.arg) for argument in backward.args.args[:1]], None, [], [], None, []
    )
    backward.body = cut
    scope: dict[str, Any] = {}
    tree = ast.fix_missing_locations(ast.Module([backward], []))
    exec(compile(tree, str(module.__file__), "exec"), vars(module), scope)
    checks = scope["conditions"]

    def asked(saved: tuple[Any, ...]) -> Objected | None:
        try:
            checks(saved)
        except NotImplementedError as error:
            return Objected(Objection.CONFIGURATION, str(error))
        except ValueError as error:
            return Objected(Objection.FACT, str(error))
        return None

    return asked


def _needed(body: list[ast.stmt], wanted: set[str]) -> list[ast.stmt]:
    """The checks of a body and the assignments that they need; `wanted` grows by the names that these read."""
    kept: list[ast.stmt] = []
    for statement in reversed(body):
        if isinstance(statement, ast.If):
            statement.orelse = _needed(statement.orelse, wanted)
            statement.body = _needed(statement.body, wanted) or [ast.Pass()]
            if not any(isinstance(node, (ast.Raise, ast.Return)) for node in ast.walk(statement)):
                continue
        elif isinstance(statement, ast.Assign):
            if not wanted & {
                node.id for one in statement.targets for node in ast.walk(one) if isinstance(node, ast.Name)
            }:
                continue
        elif not isinstance(statement, (ast.Raise, ast.Return)):
            continue
        wanted |= {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
        kept.insert(0, statement)
    return kept


class _Cutter:
    """Keeps of a body its checks and what they need."""

    def __init__(self, cotangents: set[str], module: frozenset[str]) -> None:
        self.cotangents = cotangents
        self.module = module

    def cut(self, body: list[ast.stmt], known: frozenset[str]) -> list[ast.stmt]:
        """The kept statements, in order. `known`: names that have values from what was saved alone."""
        kept: list[ast.stmt] = []
        for statement in body:
            if isinstance(statement, ast.Assign):
                targets = statement.targets
                bound = {node.id for one in targets for node in ast.walk(one) if isinstance(node, ast.Name)}
                if self._tells(statement.value, known) and all(
                    isinstance(one, (ast.Name, ast.Tuple)) for one in targets
                ):
                    kept.append(statement)
                    known |= bound
                else:
                    known -= bound
            elif isinstance(statement, ast.If):
                if self._tells(statement.test, known):
                    kept.append(self._branch(statement, known))
                known -= {
                    inner.id
                    for inner in ast.walk(statement)
                    if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)
                }
            elif isinstance(statement, (ast.Raise, ast.Return)):
                kept.append(statement if isinstance(statement, ast.Raise) else ast.Return(None))
                break
        return kept or [ast.Pass()]

    def _branch(self, statement: ast.If, known: frozenset[str]) -> ast.stmt:
        orelse = self.cut(statement.orelse, known) if statement.orelse else []
        return ast.If(statement.test, self.cut(statement.body, known), orelse)

    def _tells(self, value: ast.expr, known: frozenset[str]) -> bool:
        """Whether an expression has its value from what was saved, without making tensors."""
        names = free_names(ast.unparse(ast.Expression(value)))
        if any(name in self.cotangents or (name not in known and not self._outer(name)) for name in names):
            return False
        return not any(
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and self._computes(node.func)
            for node in ast.walk(value)
        )

    def _outer(self, name: str) -> bool:
        return name in self.module or hasattr(builtins, name)

    @staticmethod
    def _computes(function: ast.Attribute) -> bool:
        """`torch.zeros_like(...)`, `x.contiguous()`: more than asking a tensor for its form."""
        asks = {"stride", "size", "numel", "dim", "is_contiguous", "element_size", "cdiv", "next_power_of_2", "get"}
        asks |= {"storage_offset", "bit_length", "index", "count"}
        return function.attr not in asks
