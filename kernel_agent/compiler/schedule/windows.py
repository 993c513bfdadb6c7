"""`windowed`: gradients of what windows share, gathered by the programs that own their elements.

A window reads `x[m o + t]` for taps t, so an element has additions from several outputs o. What tap t adds at output o
goes to y = m o + t: the owner of y computes for every tap what o = (y - t) / m would have added, where that divides and
such an output is there. So additions at one address are left, which `merged` makes one and `owned` a store.

The number of an output may be counted by programs and lanes, and o one of its digits (`counted`); a kernel of its own
then counts elements instead, on a grid of its own (`regrid`). What a tap adds must be known lane by lane (`lanewise`).
Where an address is folded, as at a reflected border, each side of the fold is a tap (`folds`, `reach`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.schedule.claims import Claim, Claims, open_claims
from kernel_agent.compiler.schedule.counted import Counted, counted
from kernel_agent.compiler.schedule.folds import unfolded
from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.schedule.gather import parts_of
from kernel_agent.compiler.schedule.linear import Atom, Form, Kind
from kernel_agent.compiler.schedule.owner import without
from kernel_agent.compiler.schedule.ownership import WRITES
from kernel_agent.compiler.schedule.polynomial import ONE, ZERO, Polynomial, ceiling
from kernel_agent.compiler.schedule.reach import Axis, Moves, impossible
from kernel_agent.compiler.schedule.regrid import Regrid
from kernel_agent.compiler.schedule.shifted import Windower
from kernel_agent.compiler.schedule.sites import Site, bounds, negatives, sites
from kernel_agent.compiler.schedule.zeros import Zeros
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.value import Kernel, Value


@dataclass(frozen=True)
class Count:
    """A number of outputs that becomes one of elements."""

    number: Counted
    axes: tuple[Axis, ...]
    """Of its digits, from the lowest."""
    outputs: Polynomial
    """There are so many."""
    guarded: tuple[bool, ...]
    """By tap, whether its own mask leaves out numbers beyond."""

    @property
    def total(self) -> Polynomial:
        """Elements."""
        return reduce(Polynomial.__mul__, (axis.high - axis.low for axis in self.axes), ONE)


@dataclass(frozen=True)
class Window:
    """What taps add, as a kernel of its own."""

    kernel: Kernel
    launch: Launch
    claims: Claims


@dataclass(frozen=True)
class Tap:
    """An addition, its address taken apart."""

    site: Site
    digits: tuple[dict[int, Polynomial], ...]
    """By number: coefficients of the digits."""
    taken: tuple[Form, ...]
    """By number: what these are in the address."""
    rest: Form
    conditions: tuple[Form, ...]
    """Not negative where it takes part."""


def windowed(kernel: Kernel, name: str, launch: Launch) -> Window | None:
    """The additions to one gradient at the elements' own addresses; None where no taps move them.

    Raises CannotDerive where they cannot be moved.
    """
    alone = without(kernel, {v.name for v in forms_written(kernel) if v.name != name})
    if alone is None:
        return None
    sides = unfolded(alone)
    alone = sides or alone
    forms = Forms(alone, launch)
    added = sites(alone.body, WRITES)
    if any(site.op.code is not Code.ATOMIC_ADD or site.conditions or site.branches for site in added):
        return None
    if any(loop.code is not Code.FOR for site in added for loop in site.loops):
        return None
    offsets = [forms.of(site.op.offset) for site in added]
    known = [[Form(base=-ONE) - part for part in negatives(forms, site)] for site in added]
    numbers = counted([*offsets, *(form for some in known for form in some)])
    found = [_tap(numbers, site, offset, some) for site, offset, some in zip(added, offsets, known, strict=True)]
    taps = [tap for tap in found if tap is not None]
    if not taps or len(taps) < len(found) or any(not _alike(tap, taps[0]) for tap in taps):
        return None
    counts, rests = _counts(alone, forms, numbers, taps, folded=sides is not None)
    kept = _possible(taps, counts)
    if len(kept) < len(taps):
        taps = kept
        counts, rests = _counts(alone, forms, numbers, taps, folded=sides is not None)
    if not counts:
        return None
    claims = [claim for count in counts for axis in count.axes for some in axis.claims for claim in some]
    claims += [Claim(axis.step, ONE) for count in counts for axis in count.axes if axis.step.number is None]
    grid = list(launch.grid)
    digits: dict[int, dict[Atom, Polynomial]] = {}
    for count in counts:
        program, width = count.number.program, count.number.width
        needed = ceiling(count.total, width)
        had = program.extent
        if had is None:
            raise CannotDerive("how many programs there are is not known")
        if program.kind is Kind.PROGRAM and needed != had and _as_many(alone, forms, count):
            claims.append(Claim(had * width, count.total))
        elif program.kind is Kind.PROGRAM:
            grid[program.number] = needed
        elif needed != had and width == ONE:  # what each program adds as a whole, its owners would compute again
            raise CannotDerive("programs that own elements would be others than those of the outputs")
        elif needed != had or program.whole is not None:
            for source in program.sources:
                digits.setdefault(source.number, {})[program] = needed
        if had * width != count.outputs and had != ceiling(count.outputs, width):
            claims.append(Claim(had * width, count.outputs))
    regrids = []
    for axis, sizes in digits.items():
        if any(size != program.extent for program, size in sizes.items()):
            regrid = Regrid.of(axis, grid[axis], sizes)
            if regrid is None:
                raise CannotDerive("programs that own elements would be others than those of the outputs")
            regrids.append(regrid)
            claims += regrid.claims
            grid[axis] = regrid.extent
    left = open_claims(claims)
    if left is None or any(not extent.printable for extent in grid):
        raise CannotDerive("whether the forward computes all outputs is not known")
    addresses = [(tap.site, rest) for tap, rest in zip(taps, rests, strict=True)]
    windower = Windower(alone, forms, counts, addresses, regrids)
    made = prune(windower.copy())
    scalars = {value.name: known for value, known in windower.write.told.items()}
    return Window(made, replace(launch, grid=tuple(grid), scalars={**launch.scalars, **scalars}), left)


def _as_many(kernel: Kernel, forms: Forms, count: Count) -> bool:
    """Whether outputs are as many as elements, so that the forward's programs are enough: by what a mask says of the
    number of the output where a tile of it is read."""
    extent = count.number.program.extent
    if extent is None or forms.launch.calls.refute([Claim(extent * count.number.width, count.total).text()]):
        return False
    rising = dict(enumerate(count.number.places))
    for site in sites(kernel.body, frozenset((Code.LOAD,))):
        for bound in bounds(forms, site):
            seen = count.number.digits(bound.form) if bound.below == count.total else None
            if seen is not None and seen.parts == rising and not seen.rest.terms:
                return True
    return False


def forms_written(kernel: Kernel) -> list[Value]:
    """Arguments that a kernel writes to."""
    return list(dict.fromkeys(op.base for op in kernel.ops if op.code in WRITES))


def _tap(numbers: Sequence[Counted], site: Site, offset: Form, conditions: Sequence[Form]) -> Tap | None:
    found, taken, rest = [], [], offset
    for number in numbers:
        seen = number.digits(rest)
        if seen is None:
            return None
        found.append(seen.parts)
        taken.append(rest - seen.rest)
        rest = seen.rest
    return Tap(site, tuple(found), tuple(taken), rest, tuple(conditions))


def _alike(tap: Tap, other: Tap) -> bool:
    """Whether two taps go through the same digits, in the same or the opposite direction."""
    pairs = list(zip(tap.digits, other.digits, strict=True))
    if any(one.keys() != two.keys() for one, two in pairs):
        return False
    return all(number in (two[place], -two[place]) for one, two in pairs for place, number in one.items())


def _possible(taps: Sequence[Tap], counts: Sequence[Count]) -> list[Tap]:
    """The taps but for those that contradict what the others have to claim."""
    claims = [
        [claim for count in counts for axis in count.axes for claim in axis.claims[tap]] for tap in range(len(taps))
    ]
    kept = list(range(len(taps)))
    for tap in range(len(taps)):
        others = [claim for other in kept if other != tap for claim in claims[other]]
        if impossible(taps[tap].conditions, others):
            kept.remove(tap)
    left = [claim for tap in kept for claim in claims[tap]]
    gone = set(range(len(taps))) - set(kept)
    return [taps[tap] for tap in kept] if all(impossible(taps[tap].conditions, left) for tap in gone) else list(taps)


def _counts(
    kernel: Kernel, forms: Forms, numbers: Sequence[Counted], taps: Sequence[Tap], *, folded: bool
) -> tuple[list[Count], list[Form]]:
    """The numbers whose digits taps move, and what is left of the address without the taps' shifts. `folded`: the parts
    of an address say which digit a number moves."""
    fixed = frozenset(kernel.constants) | _coordinates(numbers, taps)
    units: dict[tuple[int, int], Polynomial] = {}
    steps: dict[tuple[int, int], Polynomial] = {}
    signs: dict[tuple[int, int], list[int]] = {}
    for which, parts in enumerate(taps[0].digits):
        for place, coefficient in parts.items():
            forward = -coefficient if _falls(coefficient) else coefficient
            steps[which, place], units[which, place] = _step(forward, fixed)
            signs[which, place] = [1 if tap.digits[which][place] == forward else -1 for tap in taps]
    shifts: dict[tuple[int, int], list[Form]] = {key: [] for key in units}
    rests: list[Form] = []
    for tap in taps:
        own, left = _named_shifts(forms, numbers, tap, units) if folded else ({}, tap.rest)
        own = {key: own.get(key, Form()) for key in units}
        kept = Form()
        for term in _terms(left):
            key, shift = _share(term, units, fixed)
            if key is None:
                kept = kept + term
            else:
                own[key] = own[key] + shift
        for key, form in own.items():
            shifts[key].append(form)
        rests.append(kept)
    alike = {_renamed(rest, tap.site) for rest, tap in zip(rests, taps, strict=True)}
    if len(alike) > 1:
        raise CannotDerive("its additions differ by more than the taps of a window")
    still = {
        key for key, some in shifts.items() if len(set(some)) == 1 and not some[0].terms and len(set(signs[key])) == 1
    }
    for key in still:
        rests = [rest + shift.times(units[key]) for rest, shift in zip(rests, shifts[key], strict=True)]
    counts = []
    zeros = Zeros(forms)
    for which, number in enumerate(numbers):
        if all((which, place) in still or (which, place) not in units for place in range(len(number.places))):
            continue
        outputs, guarded = _outputs(zeros, number, taps)
        sizes = [*number.radices, ceiling(outputs, number.places[-1])]
        axes = []
        for place, size in enumerate(sizes):
            key = which, place
            if key in still or key not in units:
                axes.append(Axis.still(taps[0].digits[which].get(place, ZERO), size, len(taps)))
            else:
                moves = [
                    Moves(shift, sign, tap.conditions)
                    for shift, sign, tap in zip(shifts[key], signs[key], taps, strict=True)
                ]
                axes.append(Axis.of(number, place, size, steps[key], units[key], moves, forms.launch.calls))
        counts.append(Count(number, tuple(axes), outputs, guarded))
    for which in range(len(numbers)):  # of numbers that stay as they are
        if all(count.number is not numbers[which] for count in counts):
            rests = [rest + tap.taken[which] for rest, tap in zip(rests, taps, strict=True)]
    return counts, rests


def _coordinates(numbers: Sequence[Counted], taps: Sequence[Tap]) -> frozenset[str]:
    """Sizes that coordinates are counted by, as conditions show them: `o * stride + k * dilation >= padding` asks about
    one digit and the loops of taps, whatever elements of memory are apart."""
    found: set[str] = set()
    for tap in taps:
        for form in tap.conditions:
            for number in numbers:
                seen = number.digits(form)
                if seen is None or len(seen.parts) != 1 or not seen.rest.terms:
                    continue
                if all(source.kind is Kind.TRIP for source in seen.rest.sources):
                    counted_by = [*seen.parts.values(), *(factor for _, factor in seen.rest.terms)]
                    found |= {symbol.text for factor in counted_by for symbol in factor.symbols}
    return frozenset(found)


def _falls(coefficient: Polynomial) -> bool:
    return len(coefficient.terms) == 1 and coefficient.terms[0][1] < 0


def _named_shifts(
    forms: Forms, numbers: Sequence[Counted], tap: Tap, units: Mapping[tuple[int, int], Polynomial]
) -> tuple[dict[tuple[int, int], Form], Form]:
    """What parts of an address that go with one digit each move it by, and what is left of the address."""
    own: dict[tuple[int, int], Form] = {}
    left = Form()
    for part in parts_of(tap.site.op.offset):
        rest, keys = forms.of(part), []
        for which, number in enumerate(numbers):
            seen = number.digits(rest)
            if seen is None:
                raise CannotDerive("its additions differ by more than the taps of a window")
            keys += [(which, place) for place in seen.parts]
            rest = seen.rest
        shift = rest.over(units[keys[0]]) if len(keys) == 1 and keys[0] in units else None
        if shift is None:
            left = left + rest
        else:
            own[keys[0]] = own.get(keys[0], Form()) + shift
    return own, left


def _renamed(form: Form, site: Site) -> Form:
    """With the trips of loops around by how deep these are."""
    numbers = {loop.blocks[0].arguments[0].id: -1 - depth for depth, loop in enumerate(site.loops)}
    terms = {
        Atom(Kind.TRIP, numbers[atom.number]) if atom.kind is Kind.TRIP and atom.number in numbers else atom: number
        for atom, number in form.terms
    }
    return Form.of(terms, form.base)


def _step(coefficient: Polynomial, fixed: frozenset[str]) -> tuple[Polynomial, Polynomial]:
    """A coefficient as the step of a window, of constexprs, times what elements are apart."""
    if len(coefficient.terms) != 1:
        return ONE, coefficient
    ((monomial, number),) = coefficient.terms
    step = Polynomial.of({tuple(symbol for symbol in monomial if symbol.text in fixed): number})
    unit = Polynomial.of({tuple(symbol for symbol in monomial if symbol.text not in fixed): 1})
    return step, unit


def _terms(form: Form) -> Iterable[Form]:
    """One by one."""
    for atom, number in form.terms:
        yield Form.of({atom: number})
    for monomial, count in form.base.terms:
        yield Form(base=Polynomial.of({monomial: count}))


def _share(
    term: Form, units: Mapping[tuple[int, int], Polynomial], fixed: frozenset[str]
) -> tuple[tuple[int, int] | None, Form]:
    """The digit that a term of an address moves, and by how much; None where it moves none."""
    number = term.terms[0][1] if term.terms else term.base
    if term.terms and any(source.kind is not Kind.TRIP for source in term.sources):
        return None, term
    for key, unit in sorted(units.items(), key=lambda item: -_degree(item[1])):
        found = number.quotient(unit)
        if found is not None and all(symbol.text in fixed for symbol in found.symbols):
            return key, Form.of({term.terms[0][0]: found}) if term.terms else Form(base=found)
    return None, term


def _degree(unit: Polynomial) -> int:
    return max((len(monomial) for monomial, _ in unit.terms), default=0)


def _outputs(zeros: Zeros, number: Counted, taps: Sequence[Tap]) -> tuple[Polynomial, tuple[bool, ...]]:
    """What all outputs that add something are less than, and by which taps' masks."""
    falling = {place: -count for place, count in enumerate(number.places)}
    found: list[Polynomial] = []
    guarded = []
    for tap in taps:
        seen = [number.digits(form) for form in tap.conditions]
        limits = [d.rest.base + ONE for d in seen if d is not None and d.parts == falling and not d.rest.terms]
        guarded.append(bool(limits))
        if not limits:
            known = zeros.outside(tap.site.op.stored) or ()
            parts = [(number.digits(bound.form), bound.below) for bound in known]
            rising = dict(enumerate(number.places))
            limits = [below for d, below in parts if d is not None and d.parts == rising and not d.rest.terms]
        found += limits[:1]
    if len(found) == len(taps) and len(set(found)) == 1:
        return found[0], tuple(guarded)
    programs = number.program.extent
    if programs is None:
        raise CannotDerive("how many outputs there are is not known")
    return programs * number.width, (False,) * len(taps)
