"""Which cases a candidate has to pass: shapes of SWEEP and odd ones beside them, seeds, kinds of cotangents.

The plan comes from the spec and one drawn seed, so that every candidate of a run meets the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice

from kernel_agent.errors import InputError
from kernel_agent.gate.derived_shapes import Alternatives, apart_entries, odd_entries
from kernel_agent.gate.options import GateOptions
from kernel_agent.gate.other_values import usable, value_points
from kernel_agent.oracle import (
    CotangentKind,
    Fit,
    ForwardTruth,
    Point,
    Refusal,
    RefusalKind,
    TruthError,
    Truths,
    at_full_size,
)
from kernel_agent.oracle.cotangents import OF_ROWS
from kernel_agent.pairs.spec import ShapeEntry

_BOTH = (CotangentKind.RANDOM, CotangentKind.STRIDED)
_SPECIAL = (
    CotangentKind.EXPANDED,
    CotangentKind.EXPANDED_ROWS,
    CotangentKind.APART,
    CotangentKind.TRANSPOSED,
    CotangentKind.ONE_HOT,
    CotangentKind.TINY,
    CotangentKind.HUGE,
    CotangentKind.ZERO,
)
_ALONE = 4
"""Gradients up to which each is asked for alone."""
_NAMED = 3
"""Refused odd sizes that a note names."""


@dataclass(frozen=True)
class Case:
    """One call of the candidate's backward."""

    point: Point
    kind: CotangentKind
    required: bool
    needs: tuple[bool, ...] | None = None
    """Passed as `needs=`; None: not passed."""
    again: bool = False
    """Once more what was asked before, after other cases: a second backward through a retained graph."""
    configuration: int | None = None
    """Of autotuned kernels that have more of them than there are other cases."""

    @property
    def partial(self) -> bool:
        """Whether some gradients are not needed."""
        return self.needs is not None and not all(self.needs)

    @property
    def name(self) -> str:
        """`M=17 N=100 seed=0 cotangent=strided`."""
        if self.partial:
            return f"{self.point.label} needs={self.needs}"
        told = " needs=all" if self.needs is not None else ""
        beside = "" if self.configuration is None else f" configuration={self.configuration}"
        return f"{self.point.label} cotangent={self.kind.value}{' again' if self.again else ''}{told}{beside}"


@dataclass(frozen=True)
class ShapePlan:
    """All cases at one shape, run in one process."""

    entry: ShapeEntry
    required: bool
    elements: int
    cases: tuple[Case, ...] = ()


@dataclass(frozen=True)
class Plan:
    """Shapes in the order in which they are run, and what was shrunk or left out."""

    shapes: tuple[ShapePlan, ...]
    notes: tuple[str, ...]
    left_out: int = 0
    """Cases for which there was no room."""
    faults: tuple[str, ...] = ()
    """Those of the notes that say what is wrong with the user's own kernels."""

    @property
    def size(self) -> int:
        """Number of cases."""
        return sum(len(shape.cases) for shape in self.shapes)


def make_plan(truths: Truths, options: GateOptions, *, accepts_needs: bool) -> Plan:
    """Plan the cases of one spec. Runs the forward at every shape considered, once per spec and cache.

    Raises `InputError` when the forward fails at a required entry as it stands, `TruthError` when the executor cannot
    run it there.
    """
    notes: list[str] = []
    swept = _swept(truths, options, notes)
    wanted = list(swept.values())
    odd = [entry for entry in odd_entries([shape.entry for shape in wanted]) if entry.label not in swept]
    likely = odd[: options.odd_sizes]
    small = min((shape for shape in wanted if shape.required), key=lambda s: s.elements, default=None)
    other = [] if small is None else value_points(truths, small.entry, options)
    known = {entry.label for entry in likely} | swept.keys()
    apart = _first_affordable(truths, apart_entries([shape.entry for shape in wanted], known, options), options)
    apart = [entry for entry in apart if entry.label not in known]
    answers = _forwards(truths, [*[shape.entry for shape in wanted], *likely, *apart], options, other)
    apart_answers, odd_answers = answers[len(wanted) + len(likely) :], answers[len(wanted) :][: len(likely)]
    if len(odd) > len(likely) and any(isinstance(answer, Refusal) or answer.findings for answer in odd_answers):
        odd_answers += _forwards(truths, odd[len(likely) :], options)
    shapes: list[ShapePlan] = []
    faults: list[str] = []
    for shape, answer in zip(wanted, answers, strict=False):
        if isinstance(answer, Refusal):
            _leave_out(truths, shape.entry, answer, notes)
            continue
        shapes.append(replace(shape, elements=answer.elements))
        faults += [f"the forward itself at {shape.entry.label}: {finding}" for finding in answer.findings[:1]]
    notes += faults
    shapes += _odd_shapes(odd[: len(odd_answers)], odd_answers, options, notes)
    planned = _with_cases(truths, _cheap_first(shapes), options, accepts_needs)
    planned += _once(truths, apart, apart_answers, {shape.entry.label for shape in shapes}, accepts_needs)
    if small is not None and other:
        planned[1:1] = _other_values(truths, small, other, options, notes)
    return replace(_within_budget(planned, options, notes), faults=tuple(faults))


def _forwards(
    truths: Truths, entries: list[ShapeEntry], options: GateOptions, other: Sequence[Point] = ()
) -> tuple[ForwardTruth | Refusal, ...]:
    """The forward at entries and the first seed. The other points will be asked for: one child answers all."""
    points = [Point(entry=entry, seed=seed) for seed in options.seeds for entry in entries]
    return truths.forwards([*points, *other])[: len(entries)]


def _other_values(
    truths: Truths, shape: ShapePlan, points: list[Point], options: GateOptions, notes: list[str]
) -> list[ShapePlan]:
    """A shape once more, on a seed and values of its own."""
    usual, *answers = truths.forwards([Point(entry=shape.entry, seed=options.seeds[0]), *points])
    if isinstance(usual, Refusal):
        return []
    cases = [Case(point, CotangentKind.RANDOM, False) for point in usable(points, answers, usual, notes)]
    return [ShapePlan(shape.entry, False, shape.elements, tuple(cases))]


def looks(truths: Truths, options: GateOptions) -> Callable[[], tuple[str, ...]]:
    """Begin to look at shapes that had to be shrunk, at the size that was asked for; the result waits for the words.

    Verdicts quote them and no case depends on them, so they are found beside the cases.
    """
    fits = _required_fits(truths, options)
    beside = ThreadPoolExecutor(1)
    found = beside.submit(at_full_size, truths, fits, options.seeds[0])
    beside.shutdown(wait=False)
    return lambda: tuple(part.words for part in found.result())


def forward_findings(truths: Truths, options: GateOptions) -> tuple[str, ...]:
    """What the sanitizer says of the user's own kernels at the swept shapes: `M=8 N=64: ...`, one line per shape.

    The forwards are those that `make_plan` asks for, which finds them computed. Raises as it does.
    """
    notes: list[str] = []
    wanted = list(_swept(truths, options, notes).values())
    answers = truths.forwards([Point(entry=shape.entry, seed=options.seeds[0]) for shape in wanted])
    found = []
    for shape, answer in zip(wanted, answers, strict=True):
        if isinstance(answer, Refusal):
            _leave_out(truths, shape.entry, answer, notes)
        else:
            found += [f"{shape.entry.label}: {finding}" for finding in answer.findings[:1]]
    return tuple(found)


def _swept(truths: Truths, options: GateOptions, notes: list[str]) -> dict[str, ShapePlan]:
    """The entries of SWEEP that can be run, shrunk where they must be, by label."""
    fits = truths.fit(truths.spec.sweep, max_elements=options.max_elements, max_volume=options.max_volume)
    found: dict[str, ShapePlan] = {}
    shrunk: list[str] = []
    left_out: list[str] = []
    for fit in fits:
        required = fit.asked.required
        if fit.shrunk and not required:
            left_out.append(fit.asked.label)
            continue
        if fit.refusal:
            if required and not fit.shrunk:
                raise InputError(
                    fit.refusal, path=truths.spec.facts.path, remedy="Correct make_args or the SWEEP entry."
                )
            notes.append(f"{fit.asked.label} left out: make_args refuses smaller sizes ({_short(fit.refusal)})")
            continue
        label = fit.entry.label
        if fit.shrunk:
            shrunk.append(f"{fit.asked.label} to {label}")
        if label not in found or required:
            found[label] = ShapePlan(fit.entry, required, fit.elements)
    if shrunk:
        notes.append("shrunk, since the exact tier runs on a CPU: " + "; ".join(shrunk))
    if left_out:
        notes.append("left out as too large for a CPU and not required: " + "; ".join(left_out))
    return found


def _required_fits(truths: Truths, options: GateOptions) -> list[Fit]:
    fits = truths.fit(truths.spec.sweep, max_elements=options.max_elements, max_volume=options.max_volume)
    return [fit for fit in fits if fit.asked.required and not fit.refusal]


def _leave_out(truths: Truths, entry: ShapeEntry, answer: Refusal, notes: list[str]) -> None:
    """Note a swept shape that the forward refuses; raises when the user wrote it so and requires it."""
    if not (entry.required and entry in truths.spec.sweep):
        notes.append(f"{entry.label} left out: {_short(str(answer))}")
        return
    where = f"at the required SWEEP entry {entry.label}"
    if answer.kind in (RefusalKind.UNSUPPORTED, RefusalKind.RESOURCES):
        raise TruthError(f"{answer} ({where})")
    raise InputError(
        f"{answer} ({where})",
        remedy='Correct the forward, or mark the entry with "required": False.',
        path=truths.spec.facts.path,
        line=answer.line,
    )


def _odd_shapes(
    entries: list[ShapeEntry], answers: tuple[ForwardTruth | Refusal, ...], options: GateOptions, notes: list[str]
) -> list[ShapePlan]:
    """The derived shapes to run: the first ones whose forward is sound."""
    shapes: list[ShapePlan] = []
    refused: list[str] = []
    for entry, answer in zip(entries, answers, strict=True):
        if len(shapes) == options.odd_sizes:
            break
        if isinstance(answer, Refusal):
            refused.append(f"{entry.label} ({_short(str(answer))})")
        elif answer.findings:
            refused.append(f"{entry.label} ({_short(answer.findings[0])})")
        else:
            shapes.append(ShapePlan(entry, False, answer.elements))
    if refused:
        more = [f"and {len(refused) - _NAMED} more"] if len(refused) > _NAMED else []
        notes.append("odd sizes that the forward itself does not take: " + "; ".join([*refused[:_NAMED], *more]))
    return shapes


def affordable(truths: Truths, entries: list[ShapeEntry], elements: int, options: GateOptions) -> list[ShapeEntry]:
    """Those whose arguments have at most so many elements, asked before a forward runs: a dim that stands twice in a
    shape squares them."""
    fits = truths.fit(entries, max_elements=elements, max_volume=options.max_volume) if entries else ()
    return [fit.asked for fit in fits if not fit.shrunk and not fit.refusal]


def _first_affordable(truths: Truths, groups: Sequence[Alternatives], options: GateOptions) -> list[ShapeEntry]:
    """Of each group the first that is small enough, if any; no shape twice."""
    every = list({entry.label: entry for group in groups for entry in group.entries}.values())
    most = max((options.max_elements // group.share for group in groups), default=0)
    fits = truths.fit(every, max_elements=most, max_volume=options.max_volume) if every else ()
    sizes = {fit.asked.label: fit.elements for fit in fits if not fit.shrunk and not fit.refusal}
    chosen: dict[str, ShapeEntry] = {}
    for group in groups:
        allowed = options.max_elements // group.share
        small = (entry for entry in group.entries if sizes.get(entry.label, allowed + 1) <= allowed)
        chosen |= {entry.label: entry for entry in islice(small, 1)}
    return list(chosen.values())


def _once(
    truths: Truths,
    entries: list[ShapeEntry],
    answers: Sequence[ForwardTruth | Refusal],
    known: Collection[str],
    accepts_needs: bool,
) -> list[ShapePlan]:
    """One case at each of them that has a sound forward; at the first one what is asked of a part of the call, too.

    Where an output has no cotangent, or a gradient is not needed, other kernels run on other grids.
    """
    everything = (True,) * len(truths.spec.grads) if accepts_needs else None
    sound = [
        ShapePlan(entry, False, answer.elements, (Case(answer.point, CotangentKind.STRIDED, False, everything),))
        for entry, answer in zip(entries, answers, strict=True)
        if isinstance(answer, ForwardTruth) and not answer.findings and entry.label not in known
    ]
    for shape in sound[:1]:
        partial = _partial(truths, shape.cases[0].point, accepts_needs)
        halves = [case for case in partial if case.kind is CotangentKind.RANDOM][:2]
        more = [case for case in partial if case.kind is not CotangentKind.RANDOM] + halves
        sound[0] = replace(shape, cases=(*shape.cases, *(replace(case, required=False) for case in more)))
    return sound


def _cheap_first(shapes: list[ShapePlan]) -> list[ShapePlan]:
    """The cheapest required shape, which says most about most mistakes, then all others by size."""
    ordered = sorted(shapes, key=lambda shape: (shape.elements, not shape.required))
    first = next((shape for shape in ordered if shape.required), None)
    return ordered if first is None else [first, *(shape for shape in ordered if shape is not first)]


def _with_cases(truths: Truths, shapes: list[ShapePlan], options: GateOptions, accepts_needs: bool) -> list[ShapePlan]:
    """Give every shape its cases: the cheapest required one all kinds, other required ones both seeds and layouts.

    Where the cotangent is strided, a backward that takes `needs` is told that it needs all: so does an operator in
    training, while who calls it by hand leaves that out.
    """
    first = next((shape for shape in shapes if shape.required), None)
    everything = (True,) * len(truths.spec.grads) if accepts_needs else None
    told = {CotangentKind.STRIDED: everything}
    planned = []
    for shape in shapes:
        points = [Point(entry=shape.entry, seed=seed) for seed in options.seeds]
        if shape.required:
            cases = [Case(point, kind, True, told.get(kind)) for point in points for kind in _BOTH]
        else:  # an odd shape asks about bounds; one seed per layout will do
            pairs = zip(points, _BOTH, strict=False)
            cases = [Case(point, kind, False, told.get(kind)) for point, kind in pairs]
        if shape is first:
            flat = all(len(output.shape) < 2 for output in truths.spec.outputs if output.needs_grad)
            special = [kind for kind in _SPECIAL if not (flat and kind in OF_ROWS)]
            cases.append(Case(points[0], CotangentKind.RANDOM, True, again=True))
            cases += [Case(points[0], kind, True) for kind in special]
            cases += _partial(truths, points[0], accepts_needs)
        planned.append(replace(shape, cases=tuple(cases)))
    return planned


def _partial(truths: Truths, point: Point, accepts_needs: bool) -> list[Case]:
    """Cases in which an output has no cotangent, or not every gradient is needed."""
    cases = []
    if sum(output.needs_grad for output in truths.spec.outputs) > 1:
        cases += [Case(point, kind, True) for kind in (CotangentKind.NONE, CotangentKind.LAST_ONLY)]
    count = len(truths.spec.grads)
    if accepts_needs and count > 1:
        cases += [Case(point, CotangentKind.RANDOM, True, needs) for needs in _subsets(count)]
    return cases


def _subsets(count: int) -> list[tuple[bool, ...]]:
    """Which of several gradients are needed: every second one, the others, and each alone where they are few.

    Alone, a gradient cannot lean on what was computed for another one. Training asks for the first alone where weights
    are frozen, and for all but the first in a model's first layer.
    """
    halves = [tuple(i % 2 == parity for i in range(count)) for parity in (1, 0)]
    alone = [tuple(i == chosen for i in range(count)) for chosen in range(count) if count <= _ALONE or chosen == 0]
    first_layer = tuple(i > 0 for i in range(count))
    return list(dict.fromkeys([*halves, *alone, first_layer]))


def _within_budget(shapes: list[ShapePlan], options: GateOptions, notes: list[str]) -> Plan:
    """Keep at most `max_cases`, one of every required shape first, then in order."""
    order = [case for shape in shapes if shape.required for case in shape.cases[:1]]
    kept = {id(case) for case in order}
    for case in [case for shape in shapes for case in shape.cases]:
        if id(case) not in kept and len(kept) < options.max_cases:
            kept.add(id(case))
    total = sum(len(shape.cases) for shape in shapes)
    if total > len(kept):
        notes.append(f"{total - len(kept)} of {total} cases left out: the budget is {options.max_cases}")
    trimmed = [replace(s, cases=tuple(c for c in s.cases if id(c) in kept)) for s in shapes]
    return Plan(tuple(shape for shape in trimmed if shape.cases), tuple(notes), total - len(kept))


def _short(text: str) -> str:
    line = text.strip().splitlines()[0] if text.strip() else ""
    return line if len(line) <= 120 else line[:117] + "..."
