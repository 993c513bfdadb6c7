"""Prints docs/ops.md: which operations of Triton's IR the executor runs, and by which conventions.

python bench/supported_ops.py > docs/ops.md
"""

from __future__ import annotations

import importlib
import inspect
import textwrap
from collections import defaultdict

from kernel_agent.ir.machine import LEAVES_BLOCK
from kernel_agent.ir.operations import libdevice, ptx
from kernel_agent.ir.operations.registry import POINTWISE, RULES

HEAD = """\
# Operations

What the executor runs of Triton's IR, family by family, with the conventions of each. This page is printed by
`python bench/supported_ops.py`; a test keeps it fresh. Anything else is refused with an `UnsupportedOp` that names the
operation, the line of the kernel and what to do.

Floats are float64 and nothing rounds, casts included (`Numerics.FAITHFUL` rounds as the IR declares). Integers have
their declared width. A masked lane of a load without `other` is undefined in Triton and zero here, as on NVIDIA GPUs.
"""


def families() -> dict[str, list[str]]:
    """Names of operations by the module that holds their rule."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, function in {**POINTWISE, **RULES}.items():
        module = function.__module__.rpartition(".")[2]
        found[module if module in _MODULES else "floats"].append(name)
    return found


_MODULES = (
    *("access", "atomics", "flags", "descriptors", "pointers", "shape", "reduction", "scaled", "control"),
    *("integers", "floats", "bits", "libdevice", "assembly"),
)


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    found = families()
    for module in _MODULES:
        text = inspect.getdoc(importlib.import_module(f"kernel_agent.ir.operations.{module}")) or ""
        title, _, rest = text.partition("\n\n")
        lines = [f"## {module.capitalize()}\n", _filled(" ".join(title.split()))]
        if rest:
            lines.append("\n" + "\n\n".join(_filled(" ".join(block.split())) for block in rest.split("\n\n")))
        lines.append("\n" + _filled(", ".join(f"`{name}`" for name in sorted(found[module]))) + "\n")
        parts.append("\n".join(lines))
    ends = ", ".join(f"`{name}`" for name in sorted({*LEAVES_BLOCK, "cf.br", "cf.cond_br"}))
    parts.append(f"Ends of blocks, which the walk itself follows: {ends}\n")
    functions = ", ".join(f"`{name}`" for name in sorted(libdevice.FUNCTIONS))
    parts.append(
        "## Functions of libdevice\n\nBy their name without `__nv_` and the suffix of their width. Arithmetic and\n"
        "conversions with a rounding mode (`fadd_rz`, `float2int_rn`) and casts of bits (`float_as_int`) besides.\n\n"
        f"{_filled(functions)}\n"
    )
    instructions = ", ".join(f"`{name}`" for name in sorted(ptx.OPERATIONS))
    parts.append(
        "## Inline assembly\n\nOne of these instructions on floats, or the same one for each element of a pack:\n"
        f"{_filled(instructions)}. Conversions of `fp8e4b15` and the waits of dependent launches besides.\n"
        "`kernel_agent.ir.register_asm(text or predicate, function)` adds others."
    )
    return "\n".join(parts)


def _filled(text: str) -> str:
    return textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    print(page())
