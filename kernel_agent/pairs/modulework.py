"""Refuses files that work while they are imported: kernels launched, models trained, large tensors made."""

from __future__ import annotations

import ast
import math
from pathlib import Path

from kernel_agent.errors import InputError
from kernel_agent.pairs.syntax import Function, ImportedNames, called_names, defined_functions, module_level

_REMEDY = 'Move it into a function or under `if __name__ == "__main__":`; importing the file must only define things.'
_LARGE = 1 << 24
_BENCHMARKS = frozenset(f"triton.testing.{name}" for name in ("do_bench", "do_bench_cudagraph"))
_FACTORIES = frozenset(
    f"torch.{name}"
    for name in ("rand", "randn", "zeros", "ones", "empty", "full", "randint", "arange", "eye", "linspace")
)


def check_module_work(tree: ast.Module, imported: ImportedNames, path: Path) -> None:
    """Raise `InputError` with the line of the first heavy statement that importing the file would run.

    Seen: a launch `kernel[grid](...)`, a call of a function of the file that launches, `.backward()` and `.step()`,
    `.run()` of a benchmark, `triton.testing.do_bench`, and torch factories asked for more than 2**24
    elements. What is not seen here is met while the file is imported (`pairs.load`).
    """
    functions = defined_functions(tree)
    launching = launching_functions(functions)
    for node in module_level(tree):
        if isinstance(node, ast.Call):
            reason = _reason(node, functions, launching, imported)
            if reason:
                raise InputError(f"heavy work at module level: {reason}", remedy=_REMEDY, path=path, line=node.lineno)


def launching_functions(functions: dict[str, Function]) -> frozenset[str]:
    """Names of the functions that launch a kernel, themselves or through another function of the file."""
    launching = {name for name, node in functions.items() if any(is_launch(inner) for inner in ast.walk(node))}
    while True:
        callers = {name for name, node in functions.items() if name not in launching and called_names(node) & launching}
        if not callers:
            return frozenset(launching)
        launching |= callers


def is_launch(node: ast.AST) -> bool:
    """Whether a node has the form of a launch: `kernel[grid](...)`."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) and isinstance(node.func.value, ast.Name)


def _reason(
    call: ast.Call, functions: dict[str, Function], launching: frozenset[str], imported: ImportedNames
) -> str | None:
    target = call.func
    if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name) and target.value.id in functions:
        return f"the kernel `{target.value.id}` is launched"
    if isinstance(target, ast.Name) and target.id in launching:
        return f"`{target.id}(...)` launches a kernel"
    if isinstance(target, ast.Attribute) and target.attr in ("backward", "step") and not imported.resolve(target):
        return f"`.{target.attr}()` is called, as in a training loop"
    if isinstance(target, ast.Attribute) and target.attr == "run" and isinstance(target.value, ast.Name):
        return f"the benchmark `{target.value.id}` is run" if target.value.id in functions else None
    if imported.resolve(target) in _BENCHMARKS:
        return f"`{ast.unparse(target)}(...)` measures"
    if imported.resolve(target) in _FACTORIES:
        sizes = [
            n.value for arg in call.args for n in ast.walk(arg) if isinstance(n, ast.Constant) and type(n.value) is int
        ]
        return f"a tensor of {math.prod(sizes):,} elements is made" if sizes and math.prod(sizes) > _LARGE else None
    return None
