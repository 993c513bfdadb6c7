"""Mistakes in what is read and written: masks, bounds, loops, addresses and atomics of the kernels of a backward."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from kernel_agent.gate.mutants.edit import Edit
from kernel_agent.gate.mutants.flow import BackwardFlow, KernelFlow
from kernel_agent.gate.mutants.trees import called, calls, first, keyword, parameters, text, without_keyword


def unmasked_tail(backward: BackwardFlow) -> Iterator[Edit]:
    """Lanes beyond the end that are not zero: without `tl.where`, or loaded as one."""
    for kernel in backward.kernels.values():
        for call in _zeroing(kernel):
            if not _is_causal(call.args[0]):
                yield Edit(call, text(call.args[1]))
        for call in calls(kernel.node, "load"):
            other = keyword(call, "other")
            if kernel.is_float(call) and other is not None and text(other) == "0.0":
                yield Edit(other, "1.0")


def dropped_causal_mask(backward: BackwardFlow) -> Iterator[Edit]:
    """A mask between two indices that is not applied."""
    for kernel in backward.kernels.values():
        for call in _zeroing(kernel):
            if _is_causal(call.args[0]):
                yield Edit(call, text(call.args[1]))


def dropped_mask(backward: BackwardFlow) -> Iterator[Edit]:
    """A load or store without its mask."""
    for kernel in backward.kernels.values():
        for call in calls(kernel.node, "load", "store", "atomic_add"):
            if keyword(call, "mask") is not None:
                yield Edit(call, without_keyword(call, "mask", "other"))


def off_by_one_bound(backward: BackwardFlow) -> Iterator[Edit]:
    """A comparison with a bound that takes one element too many or one too few."""
    strict = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
    for kernel in backward.kernels.values():
        for node in ast.walk(kernel.node):
            if not (isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in strict):
                continue
            if kernel.is_linear(node.left) or kernel.is_float(node.left):
                continue  # a threshold of values, not a bound of indices
            left, right = text(node.left), text(node.comparators[0])
            yield Edit(node, f"({left} {strict[type(node.ops[0])]} {right})")
            if isinstance(node.ops[0], ast.Lt):
                yield Edit(node, f"({left} < {right} - 1)")


def last_block_skipped(backward: BackwardFlow) -> Iterator[Edit]:
    """A loop over blocks that leaves out the last one, or the last one that is not full."""
    for call in _stepped(backward):
        stop, step = (text(arg) for arg in call.args[1:])
        yield Edit(call.args[1], f"{stop} - {step} + 1")
        yield Edit(call.args[1], f"{stop} - {step}")


def first_block_skipped(backward: BackwardFlow) -> Iterator[Edit]:
    """A loop that begins one step late."""
    for call in _stepped(backward):
        yield Edit(call.args[0], f"{text(call.args[0])} + {text(call.args[2])}")


def stale_statistic(backward: BackwardFlow) -> Iterator[Edit]:
    """The statistic of the first row or block in place of one's own."""
    for kernel in backward.kernels.values():
        for call in calls(kernel.node, "load"):
            address = call.args[0] if call.args else None
            if not (isinstance(address, ast.BinOp) and isinstance(address.left, ast.Name)):
                continue
            if kernel.pointer(address) in kernel.statistics:
                yield Edit(address.right, f"0 * {text(address.right)}")


def shifted_cotangent(backward: BackwardFlow) -> Iterator[Edit]:
    """The cotangent of the next element."""
    for kernel in backward.kernels.values():
        for call in calls(kernel.node, "load"):
            if kernel.is_linear(call) and isinstance(call.args[0], ast.BinOp):
                yield Edit(call.args[0], f"{text(call.args[0])} + 1")


def wrong_input(backward: BackwardFlow) -> Iterator[Edit]:
    """What lies behind the next pointer, loaded in place of what lies behind this one."""
    for kernel in backward.kernels.values():
        loads = [call for call in calls(kernel.node, "load") if call.args]
        loaded = {kernel.pointer(call.args[0]) for call in loads}
        pointers = [name for name in parameters(kernel.node) if name in loaded]
        for call in loads:
            base: ast.expr = call.args[0]
            while isinstance(base, ast.BinOp):
                base = base.left
            if isinstance(base, ast.Name) and base.id in pointers and len(pointers) > 1:
                yield Edit(base, pointers[(pointers.index(base.id) + 1) % len(pointers)])


def plain_store(backward: BackwardFlow) -> Iterator[Edit]:
    """An atomic addition as a load, a sum and a store: programs that meet lose what the other one added."""
    for kernel in backward.kernels.values():
        for call in calls(kernel.node, "atomic_add"):
            if len(call.args) > 1:
                mask = keyword(call, "mask") or (call.args[2] if len(call.args) > 2 else None)
                masked = "" if mask is None else f", mask={text(mask)}"
                address, value = text(call.args[0]), text(call.args[1])
                yield Edit(call, f"tl.store({address}, tl.load({address}{masked}) + {value}{masked})")


def overwritten_sum(backward: BackwardFlow) -> Iterator[Edit]:
    """An atomic addition as a store: the last program's share is all that is left."""
    for kernel in backward.kernels.values():
        for call in calls(kernel.node, "atomic_add"):
            if isinstance(call.func, ast.Attribute):
                kept = without_keyword(call, "sem", "scope")
                yield Edit(call, kept.replace("atomic_add", "store", 1))


def wrong_program_axis(backward: BackwardFlow) -> Iterator[Edit]:
    """The index of the other axis of the grid, in kernels that use two."""
    for kernel in backward.kernels.values():
        found = [call for call in calls(kernel.node, "program_id") if call.args and first(call) in ("0", "1")]
        if len({first(call) for call in found}) == 2:
            for call in found:
                yield Edit(call.args[0], "1" if first(call) == "0" else "0")


def _zeroing(kernel: KernelFlow) -> Iterator[ast.Call]:
    for call in calls(kernel.node, "where"):
        if len(call.args) == 3 and text(call.args[2]) in ("0.0", "0"):
            yield call


def _stepped(backward: BackwardFlow) -> Iterator[ast.Call]:
    """The ranges of loops with a start, a stop and a step."""
    for kernel in backward.kernels.values():
        for node in ast.walk(kernel.node):
            if not (isinstance(node, ast.For) and isinstance(node.iter, ast.Call)):
                continue
            if called(node.iter) == "range" and len(node.iter.args) == 3:
                yield node.iter


def _is_causal(mask: ast.expr) -> bool:
    """Whether a mask compares two index tiles with each other: what it leaves out is no tail."""
    return isinstance(mask, ast.Compare) and all(
        any(isinstance(part, ast.Subscript) for part in ast.walk(side)) for side in (mask.left, *mask.comparators)
    )
