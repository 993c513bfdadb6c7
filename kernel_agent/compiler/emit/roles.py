"""What values are for, as far as names tell it: what is summed for a gradient, what an offset belongs to."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kernel_agent.compiler.emit.places import Places
from kernel_agent.compiler.ssa.code import MEMORY, Code
from kernel_agent.compiler.ssa.value import Op, Value

_SAME = frozenset((Code.CAST, Code.RESHAPE))
_SUMS = frozenset((Code.ADD, Code.SUB, Code.DOT))
_PARTS = frozenset((Code.ADD, Code.CAST, Code.EXPAND, Code.BROADCAST))
_NUMBERS = frozenset((*_PARTS, Code.MUL))


def stem_of(pointer: str) -> str:
    """What a tile of a pointer argument is called: `dY` -> `d_y`, `W_ptr` -> `w`, `x_ptr` -> `x`."""
    stem = re.sub(r"_?(ptrs?|pointer|desc|descriptor)$", "", pointer) or pointer
    stem = re.sub(r"^(ptr|p)_", "", stem)
    stem = re.sub(r"^d(?=[A-Z])", "d_", stem)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", stem).lower()


def summed_for(values: Sequence[Value], places: Places) -> str:
    """The pointer argument that a sum is stored to, scaled perhaps, and nowhere else; empty where there is none such.

    `values`: those of one variable.
    """
    found: set[str] = set()
    seen = set(values)
    pending = list(values)
    while pending:
        value = pending.pop()
        for use in places.readers(value):
            made: list[Value] = []
            if use.op is None:
                op, _ = places.owner.get(use.block, (None, None))
                if op is None or op.code is Code.WHILE:
                    return ""
                made = [op.results[n] for n, given in enumerate(use.block.yields) if given is value]
                if op.code is Code.FOR:
                    made += [use.block.arguments[n + 1] for n, given in enumerate(use.block.yields) if given is value]
            elif use.op.code in (Code.STORE, Code.STORE_BLOCK, Code.ATOMIC_ADD) and use.op.stored is value:
                found.add(use.op.base.name)
            elif use.op.code is Code.FOR and value in use.op.operands[3:]:
                places_of = [n for n, given in enumerate(use.op.operands[3:]) if given is value]
                made = [use.op.results[n] for n in places_of]
                made += [use.op.blocks[0].arguments[n + 1] for n in places_of]
            elif _goes_on(use.op, value, places):
                made = [use.op.result]
            else:
                return ""
            pending += [one for one in made if one not in seen]
            seen |= set(made)
    return found.pop() if len(found) == 1 else ""


def _goes_on(op: Op, value: Value, places: Places) -> bool:
    """Whether an operation adds to a sum that a block yields, or scales it."""
    if len(op.results) != 1 or op.result.shape != value.shape:
        return False
    if op.code in _SAME:
        return True
    if op.code in (Code.MUL, Code.DIV):
        return all(one is value or one.shape == () for one in op.operands)
    return op.code in _SUMS and all(use.op is None for use in places.readers(op.result))


def offset_of(value: Value, places: Places) -> str:
    """The stem of the pointers that a whole number is a part of the offset to; empty for several, or for none."""
    stems: dict[str, None] = {}
    seen, pending = {value}, [value]
    while pending:
        here = pending.pop()
        for use in places.readers(here):
            op = use.op
            if op is not None and op.code in MEMORY and op.offset is here:
                stems[stem_of(op.base.name).removeprefix("d_")] = None
            elif op is not None and op.code in _PARTS and op.result not in seen:
                seen.add(op.result)
                pending.append(op.result)
    return common_stem(list(stems))


def common_stem(stems: Sequence[str]) -> str:
    """`q` of `q` and `q_out`; empty where no stem is the beginning of all. What launches share (`delta`, `saved_top`)
    lies as what a tensor of the forward does, and has no say."""
    stems = [stem for stem in stems if not re.fullmatch(r"delta(_\d+)?|saved_\w+", stem)] or stems
    shortest = min(stems, key=len, default="")
    return shortest if all(stem == shortest or stem.startswith(f"{shortest}_") for stem in stems) else ""


def masked_by(value: Value, places: Places) -> str:
    """The stem of the pointers that are accessed under a mask; see `offset_of`."""
    ops = [use.op for use in places.readers(value) if use.op is not None]
    stems = {stem_of(op.base.name).removeprefix("d_"): None for op in ops if op.code in MEMORY and op.mask is value}
    return common_stem(list(stems))


def walked_by(index: Value, places: Places) -> str:
    """`row` of the number of a block of `rows`: of the first tile with a name that is counted from it."""
    seen, pending = {index}, [index]
    while pending:
        here = pending.pop(0)
        for use in places.readers(here):
            op = use.op
            if op is None or op.code not in _NUMBERS or op.result in seen:
                continue
            if op.result.shape and (one := singular(op.result.name)):
                return one
            seen.add(op.result)
            pending.append(op.result)
    return ""


def singular(name: str) -> str:
    """`row` of `rows`; empty for what is no plural."""
    return name[:-1] if re.fullmatch(r"(?!.*offs$)[a-z_]{2,}[^ious]s", name) else ""
