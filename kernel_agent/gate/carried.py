"""How much of a program hangs on the values of a cotangent: places in which it differs from those of others like it.

A call whose cotangent differs from another's by its values takes the same steps, but for what hangs on numbers that
host code reads. Whoever computes a gradient elsewhere must bring it in: in numbers, bits among them, or in steps.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from itertools import takewhile
from typing import Any

from kernel_agent.ir.recorded.program import Constant, Program, Torch, Workspace
from kernel_agent.ir.recorded.program import Step as AnyStep

_MOST_MATCHED = 400
"""Steps that are matched with others where their kinds differ; beyond, all of them count as different."""

Place = tuple[str | int, ...]
Step = tuple[tuple[Place, Any], ...]
"""Every number, name and tensor of a step, with its place in it."""


def carried(program: Program, others: Sequence[Program]) -> int:
    """In so many places a program differs from whichever of the others is most like it; 0 where there is no other.

    What one number became throughout, as a stride or a block, counts once for each place in a step.
    """
    mine = [_step(step) for step in program.steps]
    least = None
    for other in others:
        found = _difference(mine, [_step(step) for step in other.steps])
        least = found if least is None else min(least, found)
        if not least:
            break
    return least or 0


def _step(step: AnyStep) -> Step:
    if isinstance(step, Constant):
        return tuple(_leaves(step.values, ("constant",)))
    if isinstance(step, Workspace):
        where = [step.elements, list(step.shape), list(step.strides), step.offset, step.result - step.first]
        return tuple(_leaves([step.holds, where], ("workspace",)))
    if isinstance(step, Torch):
        return tuple(_leaves([step.args, step.kwargs, list(step.results)], (step.name,)))
    return tuple(_leaves([step.values, step.options, list(step.grid)], (step.kernel, step.line)))


def _leaves(form: Any, place: Place) -> Iterator[tuple[Place, Any]]:
    if isinstance(form, dict):
        for key, part in form.items():
            yield from _leaves(part, (*place, key))
    elif isinstance(form, (list, tuple)):
        for number, part in enumerate(form):
            yield from _leaves(part, (*place, number))
    else:
        yield place, repr(form)


def _difference(mine: list[Step], theirs: list[Step]) -> int:
    kinds, others = [_kind(step) for step in mine], [_kind(step) for step in theirs]
    begin = _alike(kinds, others)
    end = _alike(kinds[begin:][::-1], others[begin:][::-1])
    here, there = mine[begin : len(mine) - end], theirs[begin : len(theirs) - end]
    pairs = [*zip(mine[:begin], theirs[:begin], strict=True)]
    pairs += zip(mine[len(mine) - end :], theirs[len(theirs) - end :], strict=True)
    alone = sum(map(len, here)) + sum(map(len, there))
    if max(len(here), len(there)) <= _MOST_MATCHED:
        matcher = SequenceMatcher(None, [_kind(step) for step in here], [_kind(step) for step in there], autojunk=False)
        for first, second, size in matcher.get_matching_blocks():
            matched = [*zip(here[first : first + size], there[second : second + size], strict=True)]
            alone -= sum(len(one) + len(other) for one, other in matched)
            pairs += matched
    return alone + _changes(pairs)


def _kind(step: Step) -> tuple[Place, ...]:
    return tuple(place for place, _ in step)


def _alike(some: list[tuple[Place, ...]], others: list[tuple[Place, ...]]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(some, others, strict=False)))


def _changes(pairs: Sequence[tuple[Step, Step]]) -> int:
    became: dict[tuple[Place, Any], Counter[Any]] = defaultdict(Counter)
    for step, other in pairs:
        for (place, value), (_, before) in zip(step, other, strict=True):
            became[place, before][value] += 1
    total = 0
    for (_, before), values in became.items():
        usual, times = values.most_common(1)[0]
        total += (usual != before) + values.total() - times
    return total
