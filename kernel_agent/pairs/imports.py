"""Refuses files that lean on a module beside them: a forward is one file, else it could not be delivered as one."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

from kernel_agent.errors import InputError
from kernel_agent.pairs.syntax import is_main_guard

_REMEDY = "A forward lives in one file: copy the helper into it."


def check_imports(tree: ast.Module, path: Path) -> None:
    """Raise `InputError` for an import that is relative, of a file beside `path`, or of what is not installed.

    Nothing is imported. Imports under `try` (with an except) and in the `__main__` block are the user's own business;
    those inside functions are only refused when they reach for a neighbour.
    """
    for node, optional, at_module_level in _imports(tree.body, False, True):
        if isinstance(node, ast.ImportFrom) and node.level:
            name = "." * node.level + (node.module or "")
            raise InputError(
                f"helper in another module: `from {name} import ...`", remedy=_REMEDY, path=path, line=node.lineno
            )
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
        for module in modules:
            top = module.partition(".")[0]
            if top == "kernel_agent" or _installed(top, path.parent):
                continue
            if _beside(top, path.parent):
                raise InputError(f"helper in another module: `{module}`", remedy=_REMEDY, path=path, line=node.lineno)
            if at_module_level and not optional:
                raise InputError(
                    f"the module `{module}` is not installed here",
                    remedy=f"Install `{top}` into this environment, or copy what you need of it into the file.",
                    path=path,
                    line=node.lineno,
                )


def _imports(
    body: list[ast.stmt], optional: bool, at_module_level: bool
) -> list[tuple[ast.Import | ast.ImportFrom, bool, bool]]:
    found: list[tuple[ast.Import | ast.ImportFrom, bool, bool]] = []
    for node in body:
        if is_main_guard(node):
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found.append((node, optional, at_module_level))
            continue
        inner_optional = optional or (isinstance(node, ast.Try) and bool(node.handlers))
        inner_level = at_module_level and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for block in ("body", "orelse", "finalbody"):
            found += _imports(getattr(node, block, []), inner_optional, inner_level)
        for handler in getattr(node, "handlers", []):
            found += _imports(handler.body, True, inner_level)
    return found


def _installed(top: str, folder: Path) -> bool:
    """Whether a top-level module can be imported from elsewhere than `folder`. Finding a spec runs no code of it."""
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return False
    if spec is None:
        return False
    places = [spec.origin] if spec.has_location else list(spec.submodule_search_locations or ())
    folder = folder.resolve()
    return not places or not all(place is not None and _directly_in(Path(place), folder) for place in places)


def _directly_in(place: Path, folder: Path) -> bool:
    place = place.resolve()
    return place.parent == folder or (place.name == "__init__.py" and place.parent.parent == folder)


def _beside(top: str, folder: Path) -> bool:
    package = folder / top
    return (folder / f"{top}.py").is_file() or (package.is_dir() and any(package.glob("*.py")))
