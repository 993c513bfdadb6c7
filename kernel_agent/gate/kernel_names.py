"""Whether Triton may compile a kernel in a process that is to be believed: it calls what a kernel names.

Triton evaluates Python while it compiles: attributes of modules, and calls of any function a name leads to. So every
name of a kernel that is not its own must lead to Triton's language, to a kernel, to a number, or to a function of the
file that computes numbers. Modules have names before a dot alone: one that is given another name is looked at by
nobody, and Triton's own hold Python's `exec`.
"""

from __future__ import annotations

import ast
import types
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.core import is_builtin
from triton.runtime.jit import ConstexprFunction, JITFunction

from kernel_agent.ir.recorded.forms import CannotRecord

_FORBIDDEN = frozenset({"getattr", "hasattr", "setattr", "delattr", "eval", "exec", "compile", "vars", "globals"})
_OF_TRITON = (triton.cdiv, triton.next_power_of_2, triton.language)
_NUMBERS = (bool, int, float, str, type(None), torch.dtype, tl.dtype, tl.constexpr)


def refuse_foreign_names(text: str, module: types.ModuleType, first_line: int) -> None:
    """Look at every kernel of a file from a line on; `module` is the file imported. Raises `CannotRecord`.

    What else those lines bind that no kernel may use is taken out of the module.
    """
    tree = [node for node in ast.parse(text).body if node.lineno > first_line]
    for name in {name for node in tree for name in _bound(node)} & vars(module).keys():
        value = vars(module)[name]
        if not isinstance(value, types.ModuleType) and not _harmless(value):
            delattr(module, name)
    for node in tree:
        if not isinstance(node, ast.FunctionDef):
            continue
        parts = [part for own in (node.args, *node.body) for part in ast.walk(own)]
        own = {part.arg for part in parts if isinstance(part, ast.arg)}
        given = frozenset(own)
        own |= {part.id for part in parts if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
        before_dots = {id(part.value) for part in parts if isinstance(part, ast.Attribute)}
        for part in parts:
            reason = _reason(part, vars(module), own)
            if not reason and id(part) not in before_dots and _is_module(_chain(part), vars(module), given):
                reason = f"it uses the module {ast.unparse(part)} as a value"
            if reason:
                line = getattr(part, "lineno", node.lineno)
                raise CannotRecord(
                    f"kernel {node.name}, line {line}: {reason}",
                    remedy="Kernels may use triton.language, constants, and kernels at the top level of the file.",
                    line=line,
                )


def _bound(node: ast.stmt) -> set[str]:
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}


def _reason(node: ast.AST, names: dict[str, Any], own: set[str]) -> str:
    """Why a part of a kernel is refused; empty for one that is not. `own` are names that the kernel binds itself."""
    if isinstance(node, (ast.Import, ast.ImportFrom, ast.Lambda, ast.Await, ast.Yield, ast.YieldFrom)):
        return "it does what kernels cannot"
    if isinstance(node, ast.Attribute):
        if node.attr.startswith("_"):
            return f"it reads the private attribute {node.attr}"
        chain = _chain(node)
        if chain and isinstance(names.get(chain[0]), types.ModuleType):
            return _reason_of_chain(chain, names)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):  # a name of its own may be bound on no path
        return _reason(node.func, names, set())
    if isinstance(node, ast.Name):
        if node.id.startswith("__") or node.id in _FORBIDDEN:
            return f"it uses {node.id}"
        found = names.get(node.id)
        if node.id not in own and not isinstance(found, types.ModuleType) and not _harmless(found):
            return f"{node.id} is a {type(found).__name__}, which kernels cannot use"
    return ""


def _chain(node: ast.AST) -> list[str]:
    """`a.b.c` as names; empty for anything else."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        inner = _chain(node.value)
        return [*inner, node.attr] if inner else []
    return []


def _is_module(chain: list[str], names: dict[str, Any], given: frozenset[str]) -> bool:
    """Whether `a.b.c` is a module; the parameters that a kernel is `given` are none."""
    value: Any = names.get(chain[0]) if chain and chain[0] not in given else None
    for attribute in chain[1:]:
        value = getattr(value, attribute, None)
    return isinstance(value, types.ModuleType)


def _reason_of_chain(chain: list[str], names: dict[str, Any]) -> str:
    value: Any = names[chain[0]]
    for attribute in chain[1:]:
        if not isinstance(value, types.ModuleType):  # a part of a dtype or of a constant
            return ""
        inside = value.__name__
        value = getattr(value, attribute, None)
        if inside == "triton" and not any(value is known for known in _OF_TRITON):
            return f"it uses {'.'.join(chain)}"
        if inside == "torch" and not isinstance(value, torch.dtype):
            return f"it uses {'.'.join(chain)}"
        language = inside == "triton" or inside.startswith("triton.language")
        if not language and inside not in ("torch", "math"):
            return f"it uses {'.'.join(chain)}"
        if not isinstance(value, types.ModuleType) and not _harmless(value):
            return f"it uses {'.'.join(chain)}"
    return ""


def _harmless(value: Any) -> bool:
    """Whether Triton may meet this value while it compiles."""
    if (
        isinstance(value, (*_NUMBERS, JITFunction))
        or is_builtin(value)
        or value in (triton.cdiv, triton.next_power_of_2)
    ):
        return True
    if isinstance(value, (tuple, list)):
        return all(_harmless(part) for part in value)
    if hasattr(value, "fn") and isinstance(value.fn, JITFunction):  # an autotuner of the user's own
        return True
    if isinstance(value, ConstexprFunction):  # of the file: `kernels_alone` has left those that compute constants
        value = value.fn
        if str(value.__module__).partition(".")[0] not in ("triton", "torch"):
            return True
    home = str(getattr(value, "__module__", ""))
    return callable(value) and (home == "math" or home.startswith("triton.language"))
