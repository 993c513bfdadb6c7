"""`import_module`: a user's file, imported on a machine that may have no GPU.

Triton reads the source of kernels from the file, so that it is compiled as it stands on disk. What must be done once
the first of its statements have run is done between them and the others.
"""

from __future__ import annotations
import __future__

import ast
import functools
import importlib.util
import operator
import sys
import types
from collections.abc import Callable
from pathlib import Path

from kernel_agent.ir.capture.device import standin

_FUTURE = functools.reduce(
    operator.or_, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
)
"""What `from __future__` imports mean for statements that are compiled after them."""


def import_module(
    path: Path, name: str, lines: int = 0, between: Callable[[], object] = lambda: None
) -> types.ModuleType:
    """Import a Python file under the stand-in and register it in `sys.modules` as `name`.

    `between` is called once the statements in the first `lines` are done, and before the others are. The file must stay
    on disk: Triton reads the source of kernels from it. What the file raises is raised; the module is then not left
    behind.
    """
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file", path=str(path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with standin():
            _run_file(path, module, lines, between)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _run_file(path: Path, module: types.ModuleType, lines: int, between: Callable[[], object]) -> None:
    tree = ast.parse(path.read_bytes(), str(path))
    first = [node for node in tree.body if (node.end_lineno or node.lineno) <= lines]
    code = compile(ast.Module(first, tree.type_ignores), str(path), "exec", dont_inherit=True)
    exec(code, vars(module))
    between()
    rest = ast.Module(tree.body[len(first) :], tree.type_ignores)
    exec(compile(rest, str(path), "exec", flags=code.co_flags & _FUTURE, dont_inherit=True), vars(module))
