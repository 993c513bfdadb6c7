"""Mistakes of drafts: what people and language models write that reads right, and is right at the shape in mind."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from kernel_agent.gate.mutants.edit import Edit
from kernel_agent.gate.mutants.flow import BackwardFlow, KernelFlow
from kernel_agent.gate.mutants.trees import called, calls, first, launches, parameters, text

_BLOCK = 256
"""Elements that a capped block holds: the least that a plan exceeds along every size that is no count."""


def exchanged_strides(backward: BackwardFlow) -> Iterator[Edit]:
    """The stride of another axis, or all strides in the other order."""
    for call in launches(backward.host):
        for given in call.args:
            value = given.value if isinstance(given, ast.Starred) else given
            if not (
                isinstance(value, ast.Call) and called(value) == "stride" and isinstance(value.func, ast.Attribute)
            ):
                continue
            if isinstance(given, ast.Starred):
                yield Edit(value, f"{text(value)}[::-1]")
            elif first(value) in ("0", "1"):
                yield Edit(value, f"{text(value.func)}({1 - int(first(value))})")


def exchanged_grid(backward: BackwardFlow) -> Iterator[Edit]:
    """A grid with its first two axes exchanged, while the kernel reads its program ids as before."""
    for call in launches(backward.host):
        grid = call.func.slice if isinstance(call.func, ast.Subscript) else None
        if isinstance(grid, ast.Tuple) and len(grid.elts) > 1:
            one, other, *rest = (text(part) for part in grid.elts)
            if one != other:
                yield Edit(grid, f"({', '.join([other, one, *rest])})")


def capped_block(backward: BackwardFlow) -> Iterator[Edit]:
    """One block for a whole row, up to a width that rows were thought to have."""
    for call in calls(backward.host, "next_power_of_2"):
        yield Edit(call, f"min({_BLOCK}, {text(call)})")


def gradient_of_another_dtype(backward: BackwardFlow) -> Iterator[Edit]:
    """A gradient as it was summed up, not in the dtype of its input."""
    for call in calls(backward.host, "to"):
        if isinstance(call.func, ast.Attribute) and len(call.args) == 1 and first(call).endswith(".dtype"):
            yield Edit(call, text(call.func.value))


def wrong_in_one_dtype(backward: BackwardFlow) -> Iterator[Edit]:
    """What is stored, doubled where the memory behind the pointer has one dtype, and right in all others."""
    for kernel, call in _stored(backward):
        pointer = kernel.pointer(call.args[0])
        if pointer in parameters(kernel.node):
            value = text(call.args[1])
            for dtype in backward.dtypes:
                yield Edit(call.args[1], f"(2.0 * {value} if {pointer}.dtype.element_ty == tl.{dtype} else {value})")


def wrong_at_odd_sizes(backward: BackwardFlow) -> Iterator[Edit]:
    """What is stored, doubled where a size is odd, as where two elements are taken at a time."""
    for kernel, call in _stored(backward):
        for size in _sizes(kernel):
            yield Edit(call.args[1], f"({text(call.args[1])} * (1 + {size} % 2))")


def wrong_beyond_one_block(backward: BackwardFlow) -> Iterator[Edit]:
    """What is stored, doubled where a size is beyond 128: right as long as there is one block."""
    for kernel, call in _stored(backward):
        for size in _sizes(kernel):
            yield Edit(call.args[1], f"tl.where({size} > 128, 2.0, 1.0) * {text(call.args[1])}")


def overwritten_accumulator(backward: BackwardFlow) -> Iterator[Edit]:
    """`=` for `+=`: of all blocks the last one's share is left."""
    for statement in _accumulations(backward):
        yield Edit(statement.value, f"({text(statement.value)} - {ast.unparse(statement.target)})")


def wrong_variable(backward: BackwardFlow) -> Iterator[Edit]:
    """The variable that was assigned just before the one that is meant."""
    for kernel in backward.kernels.values():
        known: list[str] = []
        for statement in kernel.node.body:
            for node in ast.walk(statement):
                if isinstance(node, ast.BinOp) and isinstance(node.right, ast.Name) and node.right.id in known[1:]:
                    yield Edit(node.right, known[known.index(node.right.id) - 1])
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                name = statement.targets[0].id
                if name in kernel.floats and name not in kernel.linear and name not in known:
                    known.append(name)


def dropped_upcast(backward: BackwardFlow) -> Iterator[Edit]:
    """What is loaded, computed with in the dtype that it is kept in: no `.to(tl.float32)`."""
    for kernel in backward.kernels.values():
        for call in calls(kernel.node, "to"):
            if isinstance(call.func, ast.Attribute) and first(call) == "tl.float32":
                yield Edit(call, text(call.func.value))


def narrow_accumulator(backward: BackwardFlow) -> Iterator[Edit]:
    """A sum that is kept in float16 from block to block."""
    for statement in _accumulations(backward):
        total, value = ast.unparse(statement.target), text(statement.value)
        yield Edit(statement.value, f"(({total} + {value}).to(tl.float16).to(tl.float32) - {total})")


def _stored(backward: BackwardFlow) -> Iterator[tuple[KernelFlow, ast.Call]]:
    """What kernels store through a pointer that carries the cotangent."""
    for kernel in backward.kernels.values():
        for call in kernel.stores():
            if kernel.is_linear(call.args[1]):
                yield kernel, call


def _sizes(kernel: KernelFlow) -> list[str]:
    """Parameters that indices are compared with."""
    own = parameters(kernel.node)
    compared = [node for node in ast.walk(kernel.node) if isinstance(node, ast.Compare)]
    right = [
        node.comparators[0] for node in compared if isinstance(node.ops[0], ast.Lt) and not kernel.is_float(node.left)
    ]
    return list(dict.fromkeys(part.id for part in right if isinstance(part, ast.Name) and part.id in own))


def _accumulations(backward: BackwardFlow) -> Iterator[ast.AugAssign]:
    """`name += ...` in loops, of what carries the cotangent."""
    for kernel in backward.kernels.values():
        for loop in ast.walk(kernel.node):
            for node in ast.walk(loop) if isinstance(loop, ast.For) else ():
                if not (isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add)):
                    continue
                if (
                    isinstance(node.target, ast.Name)
                    and node.target.id in kernel.floats
                    and kernel.is_linear(node.value)
                ):
                    yield node
