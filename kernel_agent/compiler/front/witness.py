"""Symbols: which numbers of a kernel come from its constexprs, found by lowering it at several sizes of its tiles.

A constexpr whose change alters the operations belongs to the configuration; a number that several changes of the others
explain by an expression gets that as its symbol.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kernel_agent.compiler.front.expressions import explain, value_of
from kernel_agent.compiler.front.skeleton import RESULTS, Number, Site, Skeleton, skeleton
from kernel_agent.ir.errors import IRError
from kernel_agent.ir.program import Module

Lower = Callable[[Mapping[str, int]], Module]
"""Lower a kernel with these constexprs changed. Raises IRError."""
Row = tuple[dict[str, int], Skeleton]
"""Values of constexprs, and the kernel lowered with them."""
_ROUNDS = 12
"""How often values are changed until extents differ."""


@dataclass(frozen=True)
class Lifted:
    """A module and what its numbers are called."""

    module: Module
    values: dict[str, int]
    """The whole numbers among the constexprs it was lowered with."""
    symbols: dict[tuple[int, int], str]
    """For the reader: by identity of the operation and place."""
    extents: dict[int, str]
    """Extents of tiles that one expression gives."""
    fixed: frozenset[str] = frozenset()
    """Constexprs that the module holds for by no expression: with other values it may be another one."""


def lift(lower: Lower, values: Mapping[str, int], *, distinct: bool = True) -> Lifted:
    """Lower a kernel and find its symbols. `values`: the whole numbers among its constexprs at the launch.

    With `distinct`, tiles may get other sizes than the launch had, so that extents of two names are two numbers. Raises
    IRError where the kernel cannot be lowered at `values`.
    """
    base = skeleton(lower(values))
    rows: dict[str, Row] = {}
    for name, value in values.items():
        for other in _others(value):
            changed = {**values, name: other}
            found = _lowered(lower, changed, base)
            if found is not None:
                rows[name] = changed, found
                break
    symbols = _symbols(lower, (dict(values), base), rows)
    chosen, final = (dict(values), base), None
    if distinct:
        final = _apart(lower, chosen, symbols, tuple(rows))
    chosen = final or chosen
    numbered = {(id(chosen[1].ops[at]), place): text for (at, place), text in symbols.items() if place > RESULTS}
    fixed = frozenset(values) - frozenset(rows)
    return Lifted(chosen[1].module, chosen[0], numbered, _extents(chosen[1].numbers, symbols), fixed)


def _others(value: int) -> tuple[int, ...]:
    """Other values to try: sizes of tiles are powers of two."""
    if value < 2:
        return ()
    return (value + 1, 2 * value, value - 1) if value & (value - 1) else (2 * value, value // 2, 4 * value)


def _lowered(lower: Lower, values: Mapping[str, int], base: Skeleton) -> Skeleton | None:
    """The same operations at other values; None where they are not the same, or Triton refuses them."""
    try:
        found = skeleton(lower(values))
    except IRError:
        return None
    return found if found.form == base.form and found.numbers.keys() == base.numbers.keys() else None


def _symbols(lower: Lower, base: Row, rows: dict[str, Row]) -> dict[Site, str]:
    """The expression of every number that changes. Constexprs with numbers that none explains leave `rows`."""
    while True:
        changed = {name: row[0][name] * (4 if k % 2 else 1) for k, (name, row) in enumerate(rows.items())}
        values = {**base[0], **changed}
        together = _lowered(lower, values, base[1]) if len(rows) > 1 else None
        every = [base, *rows.values(), *([] if together is None else [(values, together)])]
        symbols: dict[Site, str] = {}
        blamed: Counter[str] = Counter()
        for site, number in base[1].numbers.items():
            numbers = [row[1].numbers[site] for row in every]
            if all(other == number for other in numbers):
                continue
            names = [name for name, row in rows.items() if row[1].numbers[site] != number]
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


def _apart(lower: Lower, base: Row, symbols: Mapping[Site, str], names: tuple[str, ...]) -> Row | None:
    """Other values at which extents of several names are several numbers, as far as that is possible."""
    sites = {site: number for site, number in base[1].numbers.items() if site[1] < 0}

    def clashes(values: Mapping[str, int]) -> int:
        numbers = {site: value_of(symbols[site], values) if site in symbols else n for site, n in sites.items()}
        return sum(len(texts) - 1 for texts in _names_of_extents(numbers, symbols).values())

    now = clashes(base[0])
    if not now:
        return None
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
