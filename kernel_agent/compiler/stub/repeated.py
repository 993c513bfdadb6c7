"""`repeated`: computing torch functions of a stub that its backward calls as the stub does.

A loss is divided by `mask.sum().clamp(min=1)`: the backward divides by the same, and has no other name for it than what
the stub wrote.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

from kernel_agent.compiler.stub.flow import tensors_in
from kernel_agent.compiler.stub.trace import TorchSeen, Trace
from kernel_agent.ir.capture.images import declared_dtype
from kernel_agent.ir.capture.torch_calls import CallClass, class_of
from kernel_agent.pairs.adjoints import plain_name

_OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.Pow: "pow", ast.MatMult: "matmul",
    ast.USub: "neg", ast.Invert: "bitwise_not", ast.BitAnd: "and", ast.BitOr: "or",
    ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge",
}  # fmt: skip


def repeated(backward: str, traces: Iterable[Trace]) -> set[str]:
    """Plain names of the functions that a backward's text has and that compute in the stub. `traces`: of its calls."""
    written = set()
    for node in ast.walk(ast.parse(backward)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            written.add(plain_name(node.func.attr))
        elif type(node) in _OPERATORS:
            written.add(_OPERATORS[type(node)])
    events = (event for trace in traces for event in trace.events if isinstance(event, TorchSeen))
    return written & {plain_name(event.name) for event in events if _computes(event)}


def _computes(event: TorchSeen) -> bool:
    tensors = tensors_in((event.args, event.kwargs, event.result))
    floats = any(declared_dtype(tensor).is_floating_point for tensor in tensors)
    return class_of(event.name, floats=floats) is CallClass.COMPUTE
