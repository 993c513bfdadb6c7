"""`registers_operators`: whether importing a file may register operators, told from its text.

Torch knows one operator of each name, that of the last import: where a file that registers some is imported twice, the
functions of the second module stand in for those of the first.
"""

from __future__ import annotations

import ast

from kernel_agent.pairs.syntax import ImportedNames

_REGISTRIES = ("torch.library", "torch._library", "torch._custom_op", "torch._custom_ops")
_HARMLESS = frozenset({"torch.library.wrap_triton", "torch.library.opcheck"})
"""Of a registry, and no registration."""
_IMPLEMENTATIONS = frozenset({"py_impl", "py_functionalize_impl"})
"""What registers a function for an operator that is there: `torch.ops.aten.add.default.py_impl`."""


def registers_operators(tree: ast.Module) -> bool:
    """Whether a file uses a registry of torch's, wherever it imports it and whatever it calls it. Calling an operator,
    `torch.ops.mine.square`, registers none."""
    imported = ImportedNames(tree, everywhere=True)
    parts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    whole = (node for node in ast.walk(tree) if isinstance(node, (ast.Name, ast.Attribute)) and id(node) not in parts)
    paths = [*imported.stars, *filter(None, map(imported.resolve, whole))]
    return any(map(_registers, paths))


def _registers(path: str) -> bool:
    if path.startswith("torch.ops."):
        return path.rpartition(".")[2] in _IMPLEMENTATIONS
    registry = any(path == one or path.startswith(f"{one}.") for one in _REGISTRIES)
    return registry and path not in _HARMLESS
