"""Python text that becomes functions without a file: Triton reads it from `linecache`, as debuggers do."""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Mapping
from typing import Any

_HEAD = "import triton\nimport triton.language as tl\n"


def defined(text: str, names: Mapping[str, Any], label: str) -> dict[str, Any]:
    """The globals of a module of this text, which may use `names` without importing them.

    Equal texts with equal names are one module to Triton, different ones are two: Triton tells device functions apart
    by module and name.
    """
    source = f"{_HEAD}{text}"
    known = [f"{name}:{getattr(value, 'cache_key', '')}" for name, value in sorted(names.items())]
    digest = hashlib.sha256("|".join((source, *known)).encode()).hexdigest()[:12]
    path = f"<{label} {digest}>"
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    module: dict[str, Any] = {"__name__": f"kernel_agent.tile_{digest}", "__file__": path, **names}
    exec(compile(source, path, "exec"), module)
    return module
