"""Symbols: which numbers of a kernel come from its constexprs, found by lowering it at several values of each.

A constexpr whose change alters the operations belongs to the configuration; a number that several changes of the others
explain by an expression gets that as its symbol.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kernel_agent.compiler.free_names import words
from kernel_agent.compiler.front.asked import Asked
from kernel_agent.compiler.front.expressions import explain, same, value_of
from kernel_agent.compiler.front.skeleton import RESULTS, Site, Skeleton, skeleton
from kernel_agent.compiler.ssa.special import Number, Special
from kernel_agent.ir.errors import IRError
from kernel_agent.ir.program import Module

Lower = Callable[[Mapping[str, Number]], Module]
"""Lower a kernel with these constexprs changed. Raises IRError."""
Row = tuple[dict[str, Number], Skeleton]
"""Values of constexprs, and the kernel lowered with them."""
_ROUNDS = 12
"""How often values are changed until extents differ."""
_ASKED = (0.0, 1.0)
"""Floats that kernels ask for."""


@dataclass(frozen=True)
class Lifted:
    """A module and what its numbers are called."""

    module: Module
    values: dict[str, Number]
    """The numbers among the constexprs it was lowered with."""
    symbols: dict[tuple[int, int], str]
    """For the reader: by identity of the operation and place."""
    extents: dict[int, str]
    """Extents of tiles that one expression gives."""
    fixed: frozenset[str] = frozenset()
    """Constexprs that the module holds for by no expression: with other values it may be another one."""
    special: Mapping[str, Special] = field(default_factory=dict)
    """Values of the others with which it is another one."""


def lift(
    lower: Lower,
    values: Mapping[str, Number],
    *,
    distinct: bool = True,
    others: Sequence[Mapping[str, Number]] = (),
    asked: Mapping[str, Asked] | None = None,
) -> Lifted:
    """Lower a kernel and find its symbols. `values`: numbers among its constexprs at the launch.

    With `distinct`, tiles may get other sizes than the launch had, so that extents of two names are two numbers.
    `others`: values of other launches, which the symbols hold for too, or the constexprs that tell them apart are
    fixed; one whose loops make several trips is taken for the general case. Raises IRError where the kernel cannot be
    lowered at `values`.
    """
    asked = asked or {}
    first = dict(values), skeleton(lower(values))
    known = [first, *_seen(lower, first, others)] if distinct else [first]
    base = max(known, key=lambda row: row[1].loops)  # the first of equals
    symbols, free = _general(lower, base, known, asked)
    if not _holds(lower, base, values, free, asked):
        base = first
        symbols, free = _general(lower, base, known, asked)
    chosen = base
    while distinct:
        chosen = _apart(lower, base, symbols, free) or base
        unclear = _unclear(chosen[1].numbers, symbols)
        if not unclear:
            break
        free = tuple(name for name in free if name not in unclear)
        symbols = {site: text for site, text in symbols.items() if _reads(text) <= frozenset(free)}
        if base is not first and not _holds(lower, base, values, free, asked):
            base = first
            symbols, free = _general(lower, base, known, asked, without=unclear)
    numbered = {(id(chosen[1].ops[at]), place): text for (at, place), text in symbols.items() if place > RESULTS}
    fixed = frozenset(values) - frozenset(free)
    special = {name: some for name in free if (some := _special(lower, name, chosen, asked))}
    return Lifted(chosen[1].module, chosen[0], numbered, _extents(chosen[1].numbers, symbols), fixed, special)


def _holds(
    lower: Lower, base: Row, values: Mapping[str, Number], free: Sequence[str], asked: Mapping[str, Asked]
) -> bool:
    """Whether the general kernel is that of the launch, too."""
    apart = [name for name, value in values.items() if base[0][name] != value]
    return all(name in free and values[name] not in _special(lower, name, base, asked) for name in apart)


def _general(
    lower: Lower, base: Row, known: Sequence[Row], asked: Mapping[str, Asked], without: frozenset[str] = frozenset()
) -> tuple[dict[Site, str], tuple[str, ...]]:
    """The symbols of a kernel, and the constexprs that may have other values than in `base`."""
    changes = ((name, _changed(lower, name, *base)) for name in base[0] if name not in without)
    rows = {name: (row, *_further(lower, name, base, row)) for name, row in changes if row is not None}
    symbols = _symbols(lower, base, rows)
    special = {name: _special(lower, name, base, asked) for name in rows}
    usual = [row for row in known if not any(row[0][name] in some for name, some in special.items())]
    apart = {name for row in usual for name in _told_apart(lower, base, row, symbols)}
    free = tuple(name for name in rows if name not in apart)
    return {site: text for site, text in symbols.items() if _reads(text) <= frozenset(free)}, free


def _special(lower: Lower, name: str, base: Row, asked: Mapping[str, Asked]) -> Special:
    """Values of a constexpr with which the kernel does other things, since it asks for them: `if beta == 0.0`. That a
    product with one is no product is no such thing."""
    own = base[0][name]
    kind, questions = type(own), asked.get(name, Asked())

    def other_moves(value: Number) -> bool | None:
        """Whether memory is accessed otherwise; None where all operations are the same."""
        try:
            other = skeleton(lower({**base[0], name: value}))
        except IRError:
            return True
        return None if other.like(base[1]) else other.moves != base[1].moves

    named = tuple(dict.fromkeys(kind(number) for number in questions.equal if kind(number) == number))
    found = [value for value in named if other_moves(value) is not None]
    found += [value for value in (_ASKED if kind is float else ()) if value not in named and other_moves(value)]
    beside = (probe for side in questions.sides for probe in _around(side, own) if other_moves(probe) is not None)
    apart = tuple(dict.fromkeys(beside))
    up_to = max((probe for probe in apart if probe < own), default=None)
    return Special(tuple(found), up_to, min((probe for probe in apart if probe > own), default=None))


def _around(side: Number, own: Number) -> tuple[Number, ...]:
    """Values at a number, and next to it on both sides. `own`: what the constexpr is."""
    if type(own) is int:
        return tuple(dict.fromkeys((math.ceil(side) - 1, math.floor(side), math.ceil(side), math.floor(side) + 1)))
    # Not the nearest floats: one is subtracted from 1 to be no number at all, and the kernel another one for that.
    step = 2.0**-12 * (abs(side) or abs(own) or 1.0)
    return side - step, float(side), side + step


def _seen(lower: Lower, first: Row, others: Sequence[Mapping[str, Number]]) -> list[Row]:
    """The kernel at other launches' values, each once."""
    found: list[Row] = []
    for values in others:
        other = {name: values.get(name, value) for name, value in first[0].items()}
        if other != first[0] and other not in [row[0] for row in found]:
            try:
                found.append((other, skeleton(lower(other))))
            except IRError:
                continue
    return found


def _changed(lower: Lower, name: str, values: Mapping[str, Number], base: Skeleton) -> Row | None:
    """The same operations where one constexpr is another; None where there are none, or where those that it does not
    change are no others for some values only: `-(SIDE // 2)` to `SIDE // 2` are as many for 2 as for 3."""
    idle, changes = None, False
    for other in _others(values[name]):
        changed = {**values, name: other}
        try:
            found = skeleton(lower(changed))
        except IRError:
            continue
        if not found.like(base):
            changes = True
        elif found.numbers != base.numbers:
            return changed, found
        else:
            idle = idle or (changed, found)
    return None if changes else idle


def _further(lower: Lower, name: str, base: Row, row: Row) -> Iterator[Row]:
    """The same operations where a constexpr is yet another one: `D // 2` is 12 for 24 as for 25, `D // 32` and
    `tl.cdiv(D, 32)` are as many for all multiples of 32."""
    value = base[0][name]
    for other in (value + 1, 2 * value) if type(value) is int else (1.25 * value,):
        values = {**base[0], name: other}
        if other != row[0][name] and (found := _lowered(lower, values, base[1])) is not None:
            yield values, found


def _told_apart(lower: Lower, base: Row, row: Row, symbols: Mapping[Site, str]) -> list[str]:
    """The constexprs that make a kernel at other values another one than the general kernel is there."""
    if _covers(base[1], symbols, row):
        return []
    names = [name for name, value in row[0].items() if value != base[0][name]]
    if folded := _folded(base, row[0], symbols).intersection(names):
        # A tile of one lane is folded away. The general kernel may be right for it all the same: the gate finds out.
        wider = {name: base[0][name] if name in folded else value for name, value in row[0].items()}
        try:
            return _told_apart(lower, base, (wider, skeleton(lower(wider))), symbols)
        except IRError:
            return names
    alone = []
    for name in names:
        values = {**base[0], name: row[0][name]}
        try:
            alone += [] if _covers(base[1], symbols, (values, skeleton(lower(values)))) else [name]
        except IRError:
            continue
    return alone or names


def _covers(general: Skeleton, symbols: Mapping[Site, str], row: Row) -> bool:
    """Whether a kernel is the general one with other numbers, or one of whose loops some make a single trip: Triton
    writes those out, and drops what became of their indices."""
    values, found = row
    if found.like(general):
        return all(
            same(value_of(symbols[site], values) if site in symbols else general.numbers[site], number)
            for site, number in found.numbers.items()
        )
    return found.loops < general.loops and found.moves <= general.moves


def _folded(base: Row, values: Mapping[str, Number], symbols: Mapping[Site, str]) -> set[str]:
    """Constexprs with which Triton drops something that it computes in the general kernel: by what they are, or since
    a tile with an expression of them has one lane."""
    found = {name for name, value in values.items() if value == 1 or (value == 0 and isinstance(value, float))}
    for (_, place), text in symbols.items():
        if place < 0 and value_of(text, values) == 1 != value_of(text, base[0]):
            found |= _reads(text)
    return found


def _reads(text: str) -> frozenset[str]:
    return words(text) - {"bit_length"}


def _others(value: Number) -> tuple[Number, ...]:
    """Other values to try: sizes of tiles are powers of two."""
    if isinstance(value, float):
        return (0.75 * value, 1.25 * value) if math.isfinite(value) and value not in _ASKED else ()
    if value < 2:
        return ()
    return (value + 1, 2 * value, value - 1) if value & (value - 1) else (2 * value, value // 2, 4 * value)


def _lowered(lower: Lower, values: Mapping[str, Number], base: Skeleton) -> Skeleton | None:
    """The same operations at other values; None where they are not the same, or Triton refuses them."""
    try:
        found = skeleton(lower(values))
    except IRError:
        return None
    return found if found.like(base) else None


def _symbols(lower: Lower, base: Row, rows: dict[str, tuple[Row, ...]]) -> dict[Site, str]:
    """The expression of every number that changes. Constexprs with numbers that none explains leave `rows`."""
    while True:
        changed = {name: some[0][0][name] * (4 if k % 2 else 1) for k, (name, some) in enumerate(rows.items())}
        values = {**base[0], **changed}
        together = _lowered(lower, values, base[1]) if len(rows) > 1 else None
        every = [base, *itertools.chain(*rows.values()), *([] if together is None else [(values, together)])]
        symbols: dict[Site, str] = {}
        blamed: Counter[str] = Counter()
        for site, number in base[1].numbers.items():
            numbers = [row[1].numbers[site] for row in every]
            if all(other == number for other in numbers):
                continue
            names = [name for name, some in rows.items() if any(row[1].numbers[site] != number for row in some)]
            text = explain(names or list(rows), [row[0] for row in every], numbers)
            if text is None:
                blamed.update(names or list(rows))
            else:
                symbols[site] = text
        if not blamed:
            return symbols
        del rows[blamed.most_common(1)[0][0]]


def _extents(numbers: Mapping[Site, Number], symbols: Mapping[Site, str]) -> dict[int, str]:
    """Extents that have one name."""
    found = _names_of_extents(numbers, symbols)
    return {extent: text for extent, texts in found.items() if len(texts) == 1 for text in texts if text is not None}


def _names_of_extents(numbers: Mapping[Site, Number], symbols: Mapping[Site, str]) -> dict[int, set[str | None]]:
    """What extents of tiles are called; None: a number in the source."""
    found: dict[int, set[str | None]] = defaultdict(set)
    for site, number in numbers.items():
        if site[1] < 0 and number != 1:
            found[int(number)].add(symbols.get(site))
    return found


def _unclear(numbers: Mapping[Site, Number], symbols: Mapping[Site, str]) -> frozenset[str]:
    """Constexprs in one of several names of an extent: tiles of that extent are printed as the number."""
    several = [texts for texts in _names_of_extents(numbers, symbols).values() if len(texts) > 1]
    return frozenset(name for texts in several for text in texts if text is not None for name in _reads(text))


def _apart(lower: Lower, base: Row, symbols: Mapping[Site, str], names: tuple[str, ...]) -> Row | None:
    """Other values at which extents of several names are several numbers, as far as that is possible."""
    sites = {site: number for site, number in base[1].numbers.items() if site[1] < 0}

    def clashes(values: Mapping[str, Number]) -> int:
        numbers = {site: value_of(symbols[site], values) if site in symbols else n for site, n in sites.items()}
        return sum(len(texts) - 1 for texts in _names_of_extents(numbers, symbols).values())

    now = clashes(base[0])
    if not now:
        return None
    spread = dict(base[0])
    names = tuple(name for name in names if type(base[0][name]) is int)
    for name in names:
        choices = ({**spread, name: base[0][name] * factor} for factor in (1, 2, 4, 8, 16, 32))
        spread = min(choices, key=clashes)  # the first of equals
    if clashes(spread) == 0 and (found := _lowered(lower, spread, base[1])) is not None:
        return spread, found
    trials = []
    for count in (1, 2, 3):
        for some in itertools.combinations(names, count):
            for factors in itertools.product((2, 4, 8), repeat=count):
                values = {**base[0], **{n: base[0][n] * factor for n, factor in zip(some, factors, strict=True)}}
                trials.append((clashes(values), sum(factors), values))
        if trials and min(trial[0] for trial in trials) == 0:
            break
    for count, _, values in sorted(trials, key=lambda trial: trial[:2])[:_ROUNDS]:
        if count < now and (found := _lowered(lower, values, base[1])) is not None:
            return values, found
    return None
