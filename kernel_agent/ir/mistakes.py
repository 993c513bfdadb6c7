"""The classes of mistakes that are made in the IR of kernels: see `mutations`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kernel_agent.ir.attributes import Dense
from kernel_agent.ir.mutations import OperationMutator, Program, Run
from kernel_agent.ir.operations.atomics import Update
from kernel_agent.ir.program import Block, Op
from kernel_agent.ir.rounding import rounded
from kernel_agent.ir.types import Kind
from kernel_agent.ir.values import Active, Pointer

_ORDERED = frozenset(
    {"arith.subf", "arith.divf", "tt.precise_divf", "arith.subi", "arith.cmpi", "arith.cmpf"}
    | {"arith.divsi", "arith.remsi", "arith.divui", "arith.remui"}
)
"""Operations whose operands do not commute."""
_OTHER_END = {2: 3, 3: 2, 4: 5, 5: 4, 6: 7, 7: 6, 8: 9, 9: 8}
"""Predicates of `arith.cmpi` with the bound and without it."""
_FUNCTIONS = {
    "math.exp": "math.exp2",
    "math.exp2": "math.exp",
    "math.log": "math.log2",
    "math.log2": "math.log",
    "math.sin": "math.cos",
    "math.cos": "math.sin",
    "math.sqrt": "math.rsqrt",
    "math.rsqrt": "math.sqrt",
    "math.floor": "math.ceil",
    "math.ceil": "math.floor",
    "arith.maximumf": "arith.minimumf",
    "arith.minimumf": "arith.maximumf",
    "arith.maxnumf": "arith.minnumf",
    "arith.minnumf": "arith.maxnumf",
    "arith.maxsi": "arith.minsi",
    "arith.minsi": "arith.maxsi",
}
"""Functions that are taken for one another."""
_COMBINES = {
    "arith.addf": "arith.maxnumf",
    "arith.maxnumf": "arith.addf",
    "arith.maximumf": "arith.minimumf",
    "arith.minimumf": "arith.maximumf",
    "arith.minnumf": "arith.maxnumf",
    "arith.mulf": "arith.addf",
    "arith.addi": "arith.maxsi",
    "arith.maxsi": "arith.addi",
}
_ADDS = (int(Update.ADD), int(Update.FADD))
_NARROW = torch.bfloat16


def _is_float(op: Op) -> bool:
    return bool(op.results) and op.results[0].type.scalar.kind is Kind.FLOAT


def _is_index(op: Op) -> bool:
    return bool(op.results) and op.results[0].type.scalar.kind is Kind.INT and op.results[0].type.scalar.name != "i1"


def _same(_: Op, operands: list[Any], __: Active, ___: Run, way: int) -> Sequence[Any]:
    """The operand in place of the result."""
    return [operands[way]]


# --- arithmetic


def _exchanged_ways(_: Program, op: Op) -> Iterable[int]:
    return (0,) if op.name in _ORDERED and op.operands[0] is not op.operands[1] else ()


def _exchanged(op: Op, operands: list[Any], active: Active, run: Run, _: int) -> Sequence[Any]:
    return run(op, operands[::-1], active)


def _dropped_operand_ways(_: Program, op: Op) -> Iterable[int]:
    if op.name in ("arith.addf", "arith.mulf"):
        return (0, 1)
    return (0,) if op.name in ("arith.subf", "arith.divf", "arith.negf", "math.absf") else ()


def _other_sign_ways(_: Program, op: Op) -> Iterable[int]:
    return (0,) if op.name in ("arith.addf", "arith.subf") else ()


def _other_sign(op: Op, operands: list[Any], active: Active, run: Run, _: int) -> Sequence[Any]:
    name = "arith.subf" if op.name == "arith.addf" else "arith.addf"
    return run(replace(op, name=name), operands, active)


def _doubled_ways(_: Program, op: Op) -> Iterable[int]:
    return (0, 1) if op.name in ("arith.addf", "arith.subf") else ()


def _doubled(op: Op, operands: list[Any], active: Active, run: Run, way: int) -> Sequence[Any]:
    return run(op, [2.0 * value if k == way else value for k, value in enumerate(operands)], active)


def _function_ways(_: Program, op: Op) -> Iterable[int]:
    return (0,) if op.name in _FUNCTIONS else ()


def _other_function(op: Op, operands: list[Any], active: Active, run: Run, _: int) -> Sequence[Any]:
    return run(replace(op, name=_FUNCTIONS[op.name]), operands, active)


def _constant(op: Op) -> Any:
    value = op.attributes["value"]
    return value.data if isinstance(value, Dense) else value


def _constant_ways(_: Program, op: Op) -> Iterable[int]:
    if op.name != "arith.constant" or not _is_float(op):
        return ()
    data = _constant(op)
    return (0,) if isinstance(data, float) and data and abs(data) < 1e30 else ()


def _other_constant(op: Op, operands: list[Any], active: Active, run: Run, _: int) -> Sequence[Any]:
    return [1.5 * result for result in run(op, operands, active)]


def _start_ways(program: Program, op: Op) -> Iterable[int]:
    """Floats that loops begin with, and the accumulators of products."""
    first = {"scf.for": 3, "tt.dot": 2}.get(op.name, len(op.operands))
    return tuple(
        k
        for k, value in enumerate(op.operands)
        if k >= first and value.type.scalar.kind is Kind.FLOAT and _is_zero(program.makers.get(value.id))
    )


def _is_zero(op: Op | None) -> bool:
    return op is not None and op.name == "arith.constant" and _constant(op) == 0


def _begun_at_one(op: Op, operands: list[Any], active: Active, run: Run, way: int) -> Sequence[Any]:
    return run(op, [value + 1.0 if k == way else value for k, value in enumerate(operands)], active)


def _forgotten_ways(program: Program, op: Op) -> Iterable[int]:
    return (0,) if op.name == "tt.dot" and not _is_zero(program.makers.get(op.operands[2].id)) else ()


def _forgotten(op: Op, operands: list[Any], active: Active, run: Run, _: int) -> Sequence[Any]:
    return run(op, [operands[0], operands[1], torch.zeros_like(operands[2])], active)


# --- reductions and layouts


def _combine_ways(_: Program, op: Op) -> Iterable[int]:
    if op.name not in ("tt.reduce", "tt.scan") or len(op.regions[0][0].ops) != 2:
        return ()
    return (0,) if op.regions[0][0].ops[0].name in _COMBINES else ()


def _other_combine(op: Op, operands: list[Any], active: Active, run: Run, _: int) -> Sequence[Any]:
    block = op.regions[0][0]
    first, last = block.ops
    other = Block(block.label, block.arguments, [replace(first, name=_COMBINES[first.name]), last])
    return run(replace(op, regions=[[other]]), operands, active)


def _axis_ways(program: Program, op: Op) -> Iterable[int]:
    if op.name in ("tt.reduce", "tt.scan"):
        tile = op.operands[0].type.tile
        return (1 - int(op.attributes["axis"]),) if len(tile) == 2 and tile[0] == tile[1] else ()
    if op.name == "tt.get_program_id":
        return tuple(axis for axis in sorted(program.axes) if axis != int(op.attributes["axis"]))
    return ()


def _other_axis(op: Op, operands: list[Any], active: Active, run: Run, way: int) -> Sequence[Any]:
    return run(replace(op, attributes={**op.attributes, "axis": way}), operands, active)


def _transpose_ways(_: Program, op: Op) -> Iterable[int]:
    return (0,) if op.name == "tt.trans" and op.operands[0].type.tile == op.results[0].type.tile else ()


def _direction_ways(_: Program, op: Op) -> Iterable[int]:
    return (0,) if op.name == "tt.scan" else ()


def _other_direction(op: Op, operands: list[Any], active: Active, run: Run, _: int) -> Sequence[Any]:
    backwards = not op.attributes.get("reverse", False)
    return run(replace(op, attributes={**op.attributes, "reverse": backwards}), operands, active)


# --- masks, bounds and branches


def _mask_place(op: Op) -> int | None:
    if op.name == "tt.load" and len(op.operands) > 1 and op.operands[1].type.scalar.name == "i1":
        return 1
    return 2 if op.name in ("tt.store", "tt.atomic_rmw") and len(op.operands) > 2 else None


def _mask_ways(_: Program, op: Op) -> Iterable[int]:
    place = _mask_place(op)
    return () if place is None else (place,)


def _dropped_mask(op: Op, operands: list[Any], active: Active, run: Run, way: int) -> Sequence[Any]:
    return run(op, [torch.ones_like(v) if k == way else v for k, v in enumerate(operands)], active)


def _half_ways(_: Program, op: Op) -> Iterable[int]:
    return (0, 1) if op.name == "arith.andi" and op.results[0].type.scalar.name == "i1" else ()


def _bound_ways(_: Program, op: Op) -> Iterable[int]:
    return (0,) if op.name == "arith.cmpi" and op.attributes["predicate"] in _OTHER_END else ()


def _other_bound(op: Op, operands: list[Any], active: Active, run: Run, _: int) -> Sequence[Any]:
    predicate = _OTHER_END[op.attributes["predicate"]]
    return run(replace(op, attributes={**op.attributes, "predicate": predicate}), operands, active)


def _select_ways(_: Program, op: Op) -> Iterable[int]:
    return (1, 2) if op.name == "arith.select" else ()


def _branch_ways(_: Program, op: Op) -> Iterable[int]:
    return (0,) if op.name == "scf.if" else ()


def _other_branch(op: Op, operands: list[Any], active: Active, run: Run, _: int) -> Sequence[Any]:
    return run(op, [~operands[0], *operands[1:]], active)


def _loop_ways(_: Program, op: Op) -> Iterable[int]:
    return (0, 1) if op.name == "scf.for" else ()


def _shorter(op: Op, operands: list[Any], active: Active, run: Run, way: int) -> Sequence[Any]:
    low, high, step, *carried = operands
    return run(op, [low + step, high, step, *carried] if way == 0 else [low, high - step, step, *carried], active)


# --- indices and memory


def _index_ways(_: Program, op: Op) -> Iterable[int]:
    return (0,) if op.name in ("tt.make_range", "tt.addptr") else ()


def _shifted(op: Op, operands: list[Any], active: Active, run: Run, _: int) -> Sequence[Any]:
    (result,) = run(op, operands, active)
    if isinstance(result, Pointer):
        return [Pointer(result.buffer, result.offset + 1, result.view)]
    return [result + 1] if isinstance(result, Tensor) else [result]


def _dropped_index_ways(_: Program, op: Op) -> Iterable[int]:
    return (0, 1) if op.name in ("arith.addi", "arith.muli") and _is_index(op) else ()


def _first_ways(_: Program, op: Op) -> Iterable[int]:
    return (0,) if op.name == "tt.get_program_id" else ()


def _first_program(op: Op, operands: list[Any], active: Active, run: Run, _: int) -> Sequence[Any]:
    return [torch.zeros_like(result) for result in run(op, operands, active)]


def _atomic_ways(_: Program, op: Op) -> Iterable[int]:
    return (0,) if op.name == "tt.atomic_rmw" and op.attributes["atomic_rmw_op"] in _ADDS else ()


def _plain_store(op: Op, operands: list[Any], active: Active, run: Run, _: int) -> Sequence[Any]:
    run(replace(op, name="tt.store", results=[]), operands, active)
    type_ = op.results[0].type
    return [torch.zeros((1,) * (len(type_.tile) + 1), dtype=type_.dtype)]


def _value_ways(_: Program, op: Op) -> Iterable[int]:
    stored = op.name in ("tt.store", "tt.atomic_rmw") and op.operands[1].type.scalar.kind is Kind.FLOAT
    return (1,) if stored else ()


def _halved(op: Op, operands: list[Any], active: Active, run: Run, way: int) -> Sequence[Any]:
    return run(op, [0.5 * v if k == way and isinstance(v, Tensor) else v for k, v in enumerate(operands)], active)


# --- rounding


def _product_ways(_: Program, op: Op) -> Iterable[int]:
    return (0,) if op.name == "tt.dot" and op.results[0].type.scalar.name == "f32" else ()


def _sum_ways(program: Program, op: Op) -> Iterable[int]:
    carried = op.name == "arith.addf" and op.results[0].id in program.yielded
    adds = op.name == "tt.reduce" and op.regions[0][0].ops[0].name == "arith.addf"
    return (0,) if (carried or adds) and op.results[0].type.scalar.name == "f32" else ()


def _narrow_results(op: Op, operands: list[Any], active: Active, run: Run, _: int) -> Sequence[Any]:
    return [rounded(result, _NARROW) if isinstance(result, Tensor) else result for result in run(op, operands, active)]


def _summed_ways(_: Program, op: Op) -> Iterable[int]:
    adds = op.name == "tt.reduce" and op.regions[0][0].ops[0].name == "arith.addf"
    return (0,) if adds and op.operands[0].type.scalar.name == "f32" else ()


def _narrow_operands(op: Op, operands: list[Any], active: Active, run: Run, _: int) -> Sequence[Any]:
    return run(op, [rounded(v, _NARROW) if isinstance(v, Tensor) else v for v in operands], active)


_IR = OperationMutator
OPERATION_MUTATORS = (
    _IR("IR: operands exchanged", "b - a for a - b.", _exchanged_ways, _exchanged),
    _IR("IR: operand left out", "One operand of a sum, product or sign for the result.", _dropped_operand_ways, _same),
    _IR("IR: other sign", "Plus for minus.", _other_sign_ways, _other_sign),
    _IR("IR: doubled operand", "One summand counted twice.", _doubled_ways, _doubled),
    _IR("IR: other function", "exp2 for exp, minimum for maximum.", _function_ways, _other_function),
    _IR("IR: other constant", "A number half as large again.", _constant_ways, _other_constant),
    _IR("IR: accumulator begun at one", "A sum that begins with one.", _start_ways, _begun_at_one),
    _IR("IR: accumulator forgotten", "Of several products the last one alone.", _forgotten_ways, _forgotten),
    _IR("IR: other combine", "A maximum where a sum is taken.", _combine_ways, _other_combine),
    _IR("IR: other axis", "The other axis of a tile or of the grid.", _axis_ways, _other_axis),
    _IR("IR: not transposed", "A tile as it was.", _transpose_ways, _same),
    _IR("IR: other direction", "A scan from the other end.", _direction_ways, _other_direction),
    _IR("IR: mask left out", "A load or store in all lanes.", _mask_ways, _dropped_mask),
    _IR("IR: half of a mask left out", "One of two conditions.", _half_ways, _same),
    _IR("IR: bound off by one", "Less for less or equal.", _bound_ways, _other_bound),
    _IR("IR: one side of a selection", "A selection that always takes the same side.", _select_ways, _same),
    _IR("IR: other branch", "A branch taken when it should not be.", _branch_ways, _other_branch),
    _IR("IR: loop one step shorter", "A loop without its first or last step.", _loop_ways, _shorter),
    _IR("IR: index off by one", "The next element.", _index_ways, _shifted),
    _IR("IR: term of an index left out", "An offset or a stride forgotten.", _dropped_index_ways, _same),
    _IR("IR: program id is zero", "Every program does the work of the first.", _first_ways, _first_program),
    _IR("IR: plain store for an atomic", "The last program's share is all that is left.", _atomic_ways, _plain_store),
    _IR("IR: half of what is stored", "A value halved on its way to memory.", _value_ways, _halved),
    _IR("IR: product kept in bfloat16", "An accumulator in bfloat16.", _product_ways, _narrow_results, rounds=True),
    _IR("IR: sum kept in bfloat16", "A sum rounded to bfloat16.", _sum_ways, _narrow_results, rounds=True),
    _IR("IR: summands in bfloat16", "Summands rounded before a sum.", _summed_ways, _narrow_operands, rounds=True),
)
"""All classes."""
