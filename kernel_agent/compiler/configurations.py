"""The configurations of a stub: what its kernels were compiled with at the entries of SWEEP, as far as it changes them.

Runs in a child: the stub is called, though none of its kernels runs.
"""

from __future__ import annotations

import ast
import itertools
import math
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.front import accepted, read_launch
from kernel_agent.compiler.ssa.special import Special
from kernel_agent.compiler.ssa.value import Kernel
from kernel_agent.compiler.stub.decisions import Decision, apart, decisions, shared, torch_path
from kernel_agent.compiler.stub.descriptors import block_names, by_axis
from kernel_agent.compiler.stub.flow import launch_places
from kernel_agent.compiler.stub.loops import Loop
from kernel_agent.compiler.stub.narrow import is_narrow
from kernel_agent.compiler.stub.source import StubSource
from kernel_agent.compiler.stub.trace import LaunchSeen, Trace, trace
from kernel_agent.compiler.stub.ways import NoneOf
from kernel_agent.errors import InputError
from kernel_agent.gate.options import STANDARD
from kernel_agent.ir import IRError
from kernel_agent.ir.capture.images import declared_dtype
from kernel_agent.oracle.child import Stub
from kernel_agent.oracle.fit import fit_entry
from kernel_agent.oracle.outline import Outline
from kernel_agent.pairs.arguments import build_arguments
from kernel_agent.pairs.blame import first_line
from kernel_agent.pairs.spec import ShapeEntry

ELEMENTS, VOLUME = 1 << 16, 1 << 22
"""Sizes of the entries that are looked at: their numbers do not matter, what is launched does."""
NARROW = 16
"""Tiles of products have no shorter sides."""

Key = tuple[tuple[tuple[str, tuple[tuple[str, str], ...]], ...], tuple[tuple[str, int], ...]]
"""Per launch: the kernel, and parameters with what they are compiled for; and the torch functions on the way."""
Condition = tuple[int, str, object]
"""A launch, a parameter, and what it is given."""


@dataclass
class Configuration:
    """Calls that compile the same programs."""

    trace: Trace
    """The call to derive from: one with all tensors that any is given and with narrow floats, since there every
    conversion shows."""
    programs: dict[int, Kernel]
    """Of its launches, by their position among the trace's events."""
    conditions: tuple[Condition, ...] = ()
    """What it was compiled for, sizes that are only numbers in it aside."""
    decisions: tuple[Decision, ...] = ()
    """How conditions of the stub fell, where other calls go another way through its torch code or launches."""
    calls: tuple[Trace, ...] = ()
    """All that were followed, those at sizes of real work too."""
    real: bool = False
    """Whether there are such among them."""

    @property
    def optional(self) -> frozenset[str]:
        """Tensors that `trace` was given and another call was not."""
        always = frozenset.intersection(*(frozenset(call.inputs) for call in (self.trace, *self.calls)))
        return frozenset(self.trace.inputs) - always


def configurations(stub: Stub, source: StubSource) -> tuple[list[Configuration], list[str]]:
    """One configuration per way that the stub goes at its SWEEP entries, and remarks on entries that were not seen.

    Raises `CannotDerive` where no entry can be followed, a kernel cannot be read, ways cannot be told apart, or a loop
    that launches has one trip at all entries, so that nothing would show what its trips have to do with each other.
    """
    groups: dict[Key, list[Trace]] = {}
    entries: dict[Key, list[ShapeEntry]] = {}
    remarks: list[str] = []
    for entry in stub.spec.sweep:
        seen = _seen(stub, entry, source)
        if not isinstance(seen, str) and _is_too_narrow(seen):
            wider = _seen(stub, entry, source, elements=STANDARD.max_elements)
            seen = seen if isinstance(wider, str) else wider
        if isinstance(seen, str):
            remarks.append(f"{entry.label} was not looked at: {seen}")
        else:
            groups.setdefault(_key(seen), []).append(seen)
            entries.setdefault(_key(seen), []).append(entry)
    for key, traces in groups.items():
        taken = [place for place, seen in enumerate(traces) if not _is_too_narrow(seen) or _is_accepted(seen)]
        taken = taken or list(range(len(traces)))
        first = entries[key][taken[0]]
        groups[key] = traces = [traces[place] for place in taken]
        if not any(map(is_narrow, traces)):
            traces += _narrowed(stub, first, source, key)
    if not groups:
        raise CannotDerive(remarks[0] if remarks else "SWEEP has no entry", remedy="Give SWEEP a small required entry.")
    for loop in source.loops:
        trips = [len(source.value(loop.steps, seen.names)) for traces in groups.values() for seen in traces]
        if max(trips) < 2:
            raise CannotDerive(
                f"at every entry of SWEEP the loop in line {loop.first}, which launches kernels, has one trip",
                remedy="Give SWEEP an entry at which it has two or three.",
                line=loop.first,
            )
    fallen = _told_apart(source, groups)
    outline = Outline(stub.module)
    looked = [_seen(stub, entry, source, outline) for entry in stub.spec.facts.bench]
    real = [seen for seen in looked if not isinstance(seen, str)]
    large = [
        other for traces in groups.values() for seen in (*traces, *real) for other in _stretched(stub, seen, source)
    ]
    found = [
        replace(configuration, decisions=fallen[key])
        for key, traces in groups.items()
        for configuration in _divided(
            source,
            traces,
            [seen for seen in real if _key(seen) == key],
            [seen for seen in large if [launch.name for launch in seen.launches] == [name for name, _ in key[0]]],
        )
    ]
    return found, remarks


def _narrowed(stub: Stub, entry: ShapeEntry, source: StubSource, key: Key) -> list[Trace]:
    """The call at an entry in the first narrow dtype that another entry names, if all its kernels can be read: callers
    go other ways in that dtype, too, and conversions that their sums need do not show in float32."""
    named = [other.dims.get("dtype") for other in stub.spec.sweep]
    narrow = [name for name in named if isinstance(name, str) and _itemsize(name) < 4]
    if not narrow:
        return []
    seen = _seen(stub, entry.model_copy(update={"dims": {**entry.dims, "dtype": narrow[0]}}), source)
    if isinstance(seen, str) or not is_narrow(seen) or _key(seen) != key:
        return []
    return [seen] if _is_accepted(seen) else []  # a kernel that takes no such tensors: nobody gives it any


def _is_accepted(seen: Trace) -> bool:
    """Whether Triton takes the kernels of a call."""
    return all(map(accepted, seen.launches))


def _itemsize(dtype: str) -> int:
    found = getattr(torch, dtype, None)
    return int(found.itemsize) if isinstance(found, torch.dtype) and found.is_floating_point else 8


def _is_too_narrow(seen: Trace) -> bool:
    """Whether a size that a kernel is compiled for is less than what products take, as heads of 64 columns are where no
    other size could be made smaller."""
    small = {size for name, size in seen.sizes.items() if size < NARROW <= seen.asked[name]}
    return any(type(value) is int and value in small for one in seen.launches for value in one.constants.values())


def _stretched(stub: Stub, seen: Trace, source: StubSource) -> list[Trace]:
    """Calls at which a size that a kernel is compiled for is what was asked for, and not what is left of it where an
    entry was made small: `range(0, N, BLOCK_N)` has one trip then, and Triton writes no loop."""
    compiled = {value for launch in seen.launches for value in launch.constants.values() if type(value) is int}
    found = []
    for name, asked in seen.asked.items():
        size = seen.sizes[name]
        if size == asked or size not in compiled:
            continue
        dims: dict[str, Any] = {**seen.dims, name: asked}
        while math.prod(dims[one] for one in seen.sizes) > ELEMENTS:
            others = [other for other in seen.sizes if other != name and dims[other] > 1]
            if not others:
                break
            dims[max(others, key=lambda one: int(dims[one]))] //= 2
        other = _seen(stub, ShapeEntry(dims=dims), source, elements=VOLUME)
        if not isinstance(other, str) and other.sizes[name] == asked:
            found.append(other)
    return found


def _told_apart(source: StubSource, groups: Mapping[Key, Sequence[Trace]]) -> dict[Key, tuple[Decision, ...]]:
    """What conditions of the stub tell of each group that launches or calls other things than another one.

    Raises `CannotDerive` where no condition tells two of them apart.
    """
    fallen = {key: shared([decisions(source, seen) for seen in traces]) for key, traces in groups.items()}
    asked: dict[Key, set[tuple[int, int]]] = {key: set() for key in groups}
    for one, other in itertools.combinations(groups, 2):
        launched = [[name for name, _ in key[0]] for key in (one, other)]
        if launched[0] == launched[1] and one[1] == other[1]:
            continue
        places = apart(fallen[one], fallen[other])
        if not places:
            what = " or ".join(dict.fromkeys(_counted(names) for names in launched))
            same = launched[0] == launched[1]
            looped = set(launched[0]) == set(launched[1])
            raise CannotDerive(
                f"the stub {'calls other torch functions' if same else f'launches {what}'} at entries of SWEEP that "
                "no condition of its text tells apart",
                remedy="Launch once, with the loop as an axis of the grid, or write out a fixed number of launches."
                if looped and not same
                else "Give each way a stub and a file of its own.",
            )
        asked[one].update(places)
        asked[other].update(places)
    return {key: tuple(fallen[key][place] for place in sorted(places)) for key, places in asked.items()}


def _counted(names: Sequence[str]) -> str:
    """Launches by kernel, with how often each is launched."""
    return ", ".join(f"`{name}` {count} times" if count > 1 else f"`{name}`" for name, count in Counter(names).items())


def _divided(
    source: StubSource, traces: Sequence[Trace], real: Sequence[Trace], large: Sequence[Trace]
) -> list[Configuration]:
    """Configurations of calls that differ in numbers alone: some numbers make another program. `real`: calls at sizes
    of real work, which are only looked at; `large`: at some size of an entry that was made small."""
    found: list[Configuration] = []
    left = sorted(traces, key=lambda one: (-len(one.inputs), _narrowness(one)))
    while left:
        tied = [source.tiles(seen) for seen in left[0].launches]
        floats = [source.changing_floats(seen) for _, seen in launch_places(left[0])]
        programs = {
            place: read_launch(
                seen,
                others=[other.launches[number].values for other in (*left[1:], *large)],
                tiles=by_axis(seen.descriptors, tied[number]),
                floats=floats[number],
            )
            for number, (place, seen) in enumerate(launch_places(left[0]))
        }
        fixed = [
            programs[place].fixed
            | (frozenset(block_names(seen.descriptors)) - tied[number].keys())
            | (_floats(seen) - floats[number])
            for number, (place, seen) in enumerate(launch_places(left[0]))
        ]
        special = [programs[place].special for place, _ in launch_places(left[0])]
        conditions = _conditions(left[0], fixed, special)
        values = _comparable(conditions)
        same = [other for other in (*left, *real) if _comparable(_conditions(other, fixed, special)) == values]
        known = any(one is other for one in same for other in real)
        found.append(Configuration(left[0], programs, conditions, calls=tuple(same), real=known))
        left = [other for other in left if not any(other is one for one in same)]
    return found


def _floats(seen: LaunchSeen) -> frozenset[str]:
    return frozenset(name for name in seen.constants if type(seen.values.get(name)) is float)


def _conditions(
    seen: Trace, fixed: Sequence[frozenset[str]], special: Sequence[Mapping[str, Special]]
) -> tuple[Condition, ...]:
    """What the launches of a call were compiled for. `fixed`: the numbers of each that count; `special`: values of
    others that do."""
    found = []
    for place, launch in enumerate(seen.launches):
        for name, form in _forms(launch).items():
            value = launch.values[name]
            if form not in ("number", "float") or name in fixed[place] or isinstance(value, Tensor):
                found.append((place, name, value))
            elif name in special[place]:
                those = special[place][name]
                found.append((place, name, value if value in those else NoneOf(those)))
    return tuple(found)


def _comparable(conditions: Sequence[Condition]) -> tuple[object, ...]:
    return tuple("tensor" if isinstance(value, Tensor) else repr(value) for _, _, value in conditions)


def _seen(
    stub: Stub, entry: ShapeEntry, source: StubSource, outline: Outline | None = None, elements: int = ELEMENTS
) -> Trace | str:
    """The call at an entry, or why it cannot be followed. `outline`: for one of real work, as of `fit_entry`."""
    try:
        fit = fit_entry(
            entry,
            lambda other: build_arguments(stub.module, other, device="cpu", seed=0),
            max_elements=elements,
            max_volume=VOLUME,
            outline=outline,
        )
        arguments = build_arguments(stub.module, fit.entry, device="cpu", seed=0)
        seen = trace(stub.function, arguments.args, arguments.kwargs, Path(stub.module.__file__ or ""))
        sizes, asked = (
            {name: size for name, size in one.dims.items() if type(size) is int} for one in (fit.entry, entry)
        )
        handed = {one.name for loop in source.loops for one in loop.carries}  # other values, as the whole stub ends
        names = {name: value for name, value in seen.names.items() if name not in handed}
        return replace(seen, names=names, sizes=sizes, asked=asked, dims=fit.entry.dims)
    except (InputError, IRError) as error:
        return error.message
    except Exception as error:  # the user's code, at a size of ours
        loop = _without_trips(error, source)
        if loop is None:
            return first_line(error)
        if fit.entry == entry and entry in stub.spec.sweep and _launches_there_alone(loop, source):
            raise CannotDerive(
                f"at {entry.label} the loop in line {loop.first}, which launches kernels, has no trip",
                remedy="Leave that entry out of SWEEP: where nothing is launched, there is no gradient to judge.",
                line=loop.first,
            ) from error
        return f"the loop in line {loop.first}, which launches kernels, has no trip there"


def _without_trips(error: Exception, source: StubSource) -> Loop | None:
    """The loop that has no first trip, if an error is for that."""
    frames = traceback.extract_tb(error.__traceback__)
    if not isinstance(error, IndexError) or frames[-1].filename != source.module.__file__:
        return None
    return next((one for one in source.loops if one.first == frames[-1].lineno), None)


def _launches_there_alone(loop: Loop, source: StubSource) -> bool:
    """Whether a stub launches, and calls what may, in one loop alone."""
    calls = [node for node in ast.walk(source.function) if isinstance(node, ast.Call)]
    launches = [call.lineno for call in calls if isinstance(call.func, ast.Subscript)]
    return source.loops == (loop,) and all(map(loop.has, launches))


def _key(seen: Trace) -> Key:
    return tuple((launch.name, tuple(_forms(launch).items())) for launch in seen.launches), torch_path(seen)


def _forms(launch: LaunchSeen) -> Mapping[str, str]:
    """By parameter: the value of what is compiled in, sizes aside; whether it is None of what may be."""
    constants = launch.constants
    return {name: _form(name, value, constants) for name, value in launch.values.items()}


def _form(name: str, value: Any, constants: Mapping[str, Any]) -> str:
    if value is None:
        return "None"
    if isinstance(value, Tensor):
        return "float" if declared_dtype(value).is_floating_point else str(declared_dtype(value))
    if name not in constants or type(value) in (int, float):
        return "number"
    return getattr(value, "__name__", None) or repr(value)


def _narrowness(seen: Trace) -> int:
    """Bytes per element of all floating tensors together."""
    return sum(
        declared_dtype(tensor).itemsize
        for launch in seen.launches
        for tensor in launch.tensors.values()
        if declared_dtype(tensor).is_floating_point
    )
