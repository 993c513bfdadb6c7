"""`offered` and `accepted`: which results of a launch may shift and scale together, and whether a reader minds.

See `joint` for what that is good for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kernel_agent.compiler.saved.degree import STAYS, Degree, Degrees, Kind
from kernel_agent.compiler.saved.gauge import use_gauge
from kernel_agent.compiler.saved.joint import Joint, Scaled, forms_of, only_stores, read_with, tied
from kernel_agent.compiler.saved.online import examine, turned_alone
from kernel_agent.compiler.saved.prefetch import without_prefetch
from kernel_agent.compiler.saved.rates import same, scaled, whole
from kernel_agent.compiler.saved.remainder import with_last_trips
from kernel_agent.compiler.saved.softmax import maxima, settle_maxima
from kernel_agent.compiler.saved.trip import NotOneError
from kernel_agent.compiler.schedule.forms import Forms
from kernel_agent.compiler.schedule.polynomial import Polynomial
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Block, Kernel, Op, Value, bare, constant


def offered(kernel: Kernel) -> Joint | None:
    """What a kernel stores that shifts and scales with one of its maxima; None where there is nothing, or the elements
    do not show which belong together. It is for `Ties` to say that they do so in the passes that rely on it."""
    kernel = with_last_trips(without_prefetch(kernel))
    stores = only_stores(kernel)
    if len(stores) < 2:
        return None
    forms = forms_of(kernel)
    for degrees in (*(chain.degrees() for chain in turned_alone(kernel)), *maxima(kernel)):
        known = {name: degree for name, op in stores.items() if (degree := degrees[op.stored]) is not None}
        shifts = [name for name, degree in known.items() if degree.kind is Kind.SHIFT]
        scales = [name for name, degree in known.items() if degree.kind is Kind.SCALE]
        if len(shifts) != 1 or not scales:
            continue
        found = [_scaled(forms, stores[shifts[0]], stores[name], known[shifts[0]], known[name]) for name in scales]
        if None not in found:
            return Joint(shifts[0], tuple(one for one in found if one is not None))
    return None


def _scaled(forms: Forms, pivot: Op, other: Op, shift: Degree, scale: Degree) -> Scaled | None:
    tie = tied(forms, pivot, other)
    if tie is None or len(shift.rates) != 1 or len(scale.rates) != 1:
        return None
    rate = scale.rates[0].number / shift.rates[0].number
    same_shift = same(scale.rates, scaled(tie.moved(shift.rates), rate))
    return Scaled(other.base.name, rate, tie.width) if same_shift else None


def accepted(kernel: Kernel, pivot: str, rates: Mapping[str, float]) -> dict[str, Polynomial] | None:
    """The widths of arguments that scale at these rates when another one, `pivot`, shifts, where nothing that a kernel
    does depends on the shift; None where that is not proved. Every element of `pivot` shifts by itself.

    Numbers without a derivative, as those of maxima that cancel, are taken as they are: what is stored is the same
    for any others.
    """
    kernel = settle_maxima(use_gauge(with_last_trips(without_prefetch(kernel))).kernel).kernel
    loads = {name: list(_loads(kernel, name)) for name in (pivot, *rates)}
    forms = forms_of(kernel)
    given: dict[Value, Degree | None] = {}
    units = {}
    for op in loads[pivot]:
        if op is None:
            return None
        units[op] = whole(op.result, unit=op.result.id)
        given[op.result] = Degree(Kind.SHIFT, units[op])
    widths: dict[str, Polynomial] = {}
    for name, rate in rates.items():
        for op in loads[name]:
            ties = [] if op is None else [(one, tie) for one in units if (tie := read_with(forms, one, op)) is not None]
            if op is None or not ties or widths.setdefault(name, ties[0][1].width) != ties[0][1].width:
                return None
            given[op.result] = Degree(Kind.SCALE, scaled(ties[0][1].moved(units[ties[0][0]]), rate))
    for op in kernel.ops:
        if op.code is Code.KNOWN and constant(bare(op.operands[0])) is not None:
            given[op.result] = STAYS
    degrees = Degrees(given)
    try:
        for op in kernel.body.ops:
            examine(op, degrees, None)
    except NotOneError:
        return None
    return widths


def _loads(kernel: Kernel, name: str) -> Iterator[Op | None]:
    """The loads from an argument that no condition is on; None for what else is done with it."""
    always = set(_always(kernel.body))
    for op in kernel.ops:
        base = op.attributes.get("base")
        if any(isinstance(value, Value) and value.name == name and value.is_pointer for value in (*op.operands, base)):
            yield op if op.code is Code.LOAD and op.result.is_float and op in always else None


def _always(block: Block) -> Iterator[Op]:
    for op in block.ops:
        yield op
        if op.code is Code.FOR:
            yield from _always(op.blocks[0])
