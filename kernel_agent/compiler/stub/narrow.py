"""`is_narrow`, of calls, and `refused_narrow`: a backward derived of calls with wide floats alone refuses others.

`tl.load(X).to(tl.float32)` does nothing in float32, and what is derived there has no conversion: with bfloat16 it would
sum in bfloat16 where the forward does not.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence

from torch import Tensor

from kernel_agent.compiler.errors import WIDER_FLOATS
from kernel_agent.compiler.stub.forward import Kept
from kernel_agent.compiler.stub.lines import Line
from kernel_agent.compiler.stub.source import StubSource
from kernel_agent.compiler.stub.trace import Trace
from kernel_agent.ir.capture.images import declared_dtype

_WIDE = 4
"""Bytes of a float from which nothing converts it."""
_CONVERSIONS = ("to", "cast")
_OF_INDICES = re.compile(r"^tl\.(arange|program_id)\([^()]*\)$|^tl\.u?int\d+$")


def refused_narrow(
    traces: Sequence[Trace], source: StubSource, saved: Sequence[Kept], values: Mapping[str, object]
) -> list[Line]:
    """Statements that refuse a call with floats of 16 bits or fewer, where none was seen and kernels of the file
    convert some. `saved`: what the backward is given; `values`: of locals of the stub, by name, without those that are
    None in some call."""
    if any(map(is_narrow, traces)) or not _converts(source.tree):
        return []
    floats = [one for one in saved if _is_wide(values.get(one.expression))]
    floats = [one for one in floats if one.expression in source.parameters] or floats
    sizes = tuple(f"{one.name}.element_size()" for one in floats)
    if not sizes:
        return []
    asked = Line("if min(", sizes, f") < {_WIDE}:") if len(sizes) > 1 else Line(f"if {sizes[0]} < {_WIDE}:")
    return [asked, Line(f'raise NotImplementedError("{WIDER_FLOATS}")', depth=1)]


def is_narrow(seen: Trace) -> bool:
    """Whether a launch of a call is given floats of 16 bits or fewer."""
    launched = [tensor for launch in seen.launches for tensor in launch.tensors.values()]
    return any(_is_float(tensor) and not _is_wide(tensor) for tensor in launched)


def _is_float(value: object) -> bool:
    return isinstance(value, Tensor) and declared_dtype(value).is_floating_point


def _is_wide(value: object) -> bool:
    return isinstance(value, Tensor) and _is_float(value) and declared_dtype(value).itemsize >= _WIDE


def _converts(tree: ast.Module) -> bool:
    """Whether a kernel of a file, or a function that kernels call, converts floats: no indices, and to none."""
    kernels = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(one) for one in node.decorator_list)
    ]
    return any(isinstance(node, ast.Call) and _is_conversion(node) for kernel in kernels for node in ast.walk(kernel))


def _is_conversion(call: ast.Call) -> bool:
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in _CONVERSIONS:
        return False
    what = [ast.unparse(one) for one in (call.func.value, *call.args, *(one.value for one in call.keywords))]
    return not any(_OF_INDICES.search(text) for text in what)
