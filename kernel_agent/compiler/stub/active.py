"""`active_before`: which memory of a stub depends on inputs that gradients are wanted of."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.stub.flow import Flow, is_float, storage_of, tensors_in
from kernel_agent.compiler.stub.trace import LaunchSeen, Trace
from kernel_agent.compiler.stub.wording import Launched


def active_before(trace: Trace, launches: Mapping[int, Launched], flow: Flow) -> dict[int, frozenset[int]]:
    """Memory that depends on differentiable inputs before each launch, by place; `flow.active` has all of it then. What
    a loop hands on does from the first trip, if it does behind one. Raises `CannotDerive` for a launch that is given
    tensors in a form that cannot be followed."""
    carries = [(trace.names[one.before], trace.names[one.behind]) for loop in flow.source.loops for one in loop.carries]
    while True:
        before = _once(trace, launches, flow)
        handed = [(one, other) for one, other in carries if isinstance(one, Tensor) and isinstance(other, Tensor)]
        more = {storage_of(one) for one, other in handed if storage_of(other) in flow.active} - flow.active
        if not more and not _is_late(trace, launches, flow, before):
            return before
        flow.active |= more


def _is_late(trace: Trace, launches: Mapping[int, Launched], flow: Flow, before: Mapping[int, frozenset[int]]) -> bool:
    """Whether a launch reads memory that is only known to depend on inputs behind it, and that a loop around both
    stores to: in later trips it does ahead of the launch."""
    loops = {place: flow.source.loop_at(event.site.outer) for place, event in enumerate(trace.events)}
    for place, one in launches.items():
        if loops[place] is None:
            continue
        there = [at for at, loop in loops.items() if loop is loops[place]]
        stored = {storage_of(part) for part in flow.written_at(there)} & flow.active
        read = {storage_of(one.seen.tensors[name]) for name in one.accesses.read if name in one.seen.tensors}
        if (read & stored) - before[place]:
            return True
    return False


def _once(trace: Trace, launches: Mapping[int, Launched], flow: Flow) -> dict[int, frozenset[int]]:
    """The same, as far as what is known of the start of trips tells."""
    active, before = flow.active, {}
    for place, event in enumerate(trace.events):
        if isinstance(event, LaunchSeen):
            accesses, tensors = launches[place].accesses, event.tensors
            _refuse_hidden(event)
            before[place] = frozenset(active)
            if any(storage_of(tensors[name]) in active for name in accesses.read if name in tensors):
                active |= {
                    storage_of(tensors[name])
                    for name in accesses.written
                    if name in tensors and is_float(tensors[name])
                }
        elif any(map(flow.is_active, tensors_in((event.args, event.kwargs)))):
            made = (event.args[0],) if event.name == "__setitem__" else (event.result,)
            active |= {storage_of(part) for part in tensors_in(made) if is_float(part)}
    return before


def _refuse_hidden(seen: LaunchSeen) -> None:
    """Raise `CannotDerive` where a launch is given floating tensors otherwise than one by one: what it reads and writes
    of them has no name in the backward."""
    for name, value in seen.values.items():
        what = "a tensor descriptor" if isinstance(value, TensorDescriptor) else "a tuple of tensors"
        parts = (value.base,) if isinstance(value, TensorDescriptor) else value
        if not isinstance(parts, Tensor) and any(is_float(part) for part in tensors_in((parts,))):
            raise CannotDerive(
                f"the launch of `{seen.name}` (line {seen.site.line}) is given {what} for `{name}`",
                remedy="Pass each tensor as an argument of its own; make descriptors in the kernel.",
                line=seen.site.line or None,
            )
