"""A fingerprint of the forward's functions, so that a delivered backward notices when its forward has moved on."""

from __future__ import annotations

import ast
import hashlib

NOT_FORWARD = frozenset({"make_args", "reference", "surrogate", "flops", "setup", "backward"})


def forward_fingerprint(source: str) -> str:
    """SHA-256 over every kernel, helper and stub of a file: comments, layout and `@autodiff` do not count.

    Adding `backward=...` to the decorator therefore keeps the fingerprint, editing the kernel does not.
    """
    functions = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name not in NOT_FORWARD and not node.name.endswith("_autograd")
    ]
    parts = []
    for function in functions:
        function.decorator_list = [d for d in function.decorator_list if "autodiff" not in ast.unparse(d)]
        parts.append(ast.unparse(function))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
