"""Mistakes in `backward` itself: strides, buffers, grids, and what is returned."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from kernel_agent.gate.mutants.edit import Edit
from kernel_agent.gate.mutants.flow import BackwardFlow
from kernel_agent.gate.mutants.trees import called, calls, first, launches, text


def ignored_cotangent_stride(backward: BackwardFlow) -> Iterator[Edit]:
    """The cotangent taken as contiguous."""
    for call in calls(backward.host, "contiguous", "stride"):
        if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name):
            base = call.func.value.id
            if called(call) == "contiguous" and base in backward.cotangents:
                yield Edit(call, base)
            if called(call) == "stride" and base in backward.cotangents and first(call) in ("1", "-1"):
                yield Edit(call, "1")


def wrong_axis_of_partial_sums(backward: BackwardFlow) -> Iterator[Edit]:
    """Partial sums of programs added up along the other axis."""
    for call in calls(backward.host, "sum"):
        if isinstance(call.func, ast.Attribute) and first(call) in ("0", "1"):
            yield Edit(call.args[0], "1" if first(call) == "0" else "0")


def ignored_output(backward: BackwardFlow) -> Iterator[Edit]:
    """The cotangent of one of several outputs taken as zero."""
    entry = next((node for node in backward.host.body if isinstance(node, ast.Assign)), None)
    if len(backward.cotangents) > 1 and entry is not None:
        for name in backward.cotangents:
            empty = f"({text(entry.value)}, {name} := {name} if {name} is None else torch.zeros_like({name}))[0]"
            yield Edit(entry.value, empty)


def transposed_gradient(backward: BackwardFlow) -> Iterator[Edit]:
    """A gradient with its last two axes exchanged, in the shape that is wanted."""
    for part in _returned(backward):
        yield Edit(part, f"(t := {text(part)}).mT.contiguous().view(t.shape)")


def swapped_gradients(backward: BackwardFlow) -> Iterator[Edit]:
    """Two gradients in each other's place."""
    for value in _return_values(backward):
        if isinstance(value, ast.Tuple):
            texts = [text(part) for part in value.elts]
            for i in range(len(texts)):
                for j in range(i + 1, len(texts)):
                    swapped = list(texts)
                    swapped[i], swapped[j] = swapped[j], swapped[i]
                    yield Edit(value, ", ".join(swapped))


def missing_dependence(backward: BackwardFlow) -> Iterator[Edit]:
    """One input that is taken to have no influence: its gradient is zero."""
    for part in _returned(backward):
        yield Edit(part, f"(None if (t := {text(part)}) is None else torch.zeros_like(t))")


def result_of_the_first_call(backward: BackwardFlow) -> Iterator[Edit]:
    """What the first call returned, returned again by all later ones."""
    for value in _return_values(backward):
        yield Edit(value, f'globals().setdefault("_kept", ({ast.unparse(value)}))')


def overwritten_saved_tensor(backward: BackwardFlow) -> Iterator[Edit]:
    """A gradient written over the tensor that it is shaped like, which belongs to the caller."""
    for call in calls(backward.host, "empty_like"):
        if isinstance(call.func, ast.Attribute) and len(call.args) == 1 and isinstance(call.args[0], ast.Name):
            yield Edit(call, call.args[0].id)


def uninitialised_accumulator(backward: BackwardFlow) -> Iterator[Edit]:
    """A buffer that is added to, and not filled with zeros before."""
    for call in calls(backward.host, "zeros", "zeros_like", "new_zeros"):
        if isinstance(call.func, ast.Attribute):
            yield Edit(call.func, f"{text(call.func.value)}.{call.func.attr.replace('zeros', 'empty')}")


def missing_program(backward: BackwardFlow) -> Iterator[Edit]:
    """A grid with one program too few along an axis."""
    for call in launches(backward.host):
        grid = call.func.slice if isinstance(call.func, ast.Subscript) else None
        for extent in grid.elts if isinstance(grid, ast.Tuple) else ():
            yield Edit(extent, f"max(1, {text(extent)} - 1)")


def wrong_needs(backward: BackwardFlow) -> Iterator[Edit]:
    """The gradient of one input computed when that of another one is wanted."""
    for node in ast.walk(backward.host):
        if not (isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "needs"):
            continue
        if isinstance(node.slice, ast.Constant) and type(node.slice.value) is int:
            yield Edit(node, f"needs[{node.slice.value - 1}]")


def narrow_partial_sums(backward: BackwardFlow) -> Iterator[Edit]:
    """A buffer of partial sums in float16."""
    for call in calls(backward.host, "zeros", "empty", "zeros_like", "empty_like"):
        for given in call.keywords:
            if given.arg == "dtype" and ast.unparse(given.value) == "torch.float32":
                yield Edit(given.value, "torch.float16")


def _return_values(backward: BackwardFlow) -> Iterator[ast.expr]:
    for node in ast.walk(backward.host):
        if isinstance(node, ast.Return) and node.value is not None:
            yield node.value


def _returned(backward: BackwardFlow) -> Iterator[ast.expr]:
    for value in _return_values(backward):
        yield from value.elts if isinstance(value, ast.Tuple) else [value]
