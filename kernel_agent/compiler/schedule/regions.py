"""`in_regions`: a gradient that is added to in several places, as several that lie apart.

Queries, keys and values of one packed tensor, the halves of a head, or planes that are filled in orders of their own
have one buffer, but no element in common: each can be owned, or have a kernel, as if it had memory to itself. That
they lie apart is proved as `injective` proves that elements do: both addresses are sums of the same digits, and of one
that is smaller in the one than in the other. What the digits of one place do not share with the other's is one digit
that reaches as far as they do together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

from kernel_agent.compiler.errors import CannotDerive, DoesNotApply
from kernel_agent.compiler.plan import Fact
from kernel_agent.compiler.schedule.claims import Claim, Claims
from kernel_agent.compiler.schedule.forms import Forms, Launch
from kernel_agent.compiler.schedule.injective import Digit, Injectivity, groupings, ordered
from kernel_agent.compiler.schedule.linear import Form, Kind
from kernel_agent.compiler.schedule.mirror import mirrored, reversed_axes
from kernel_agent.compiler.schedule.ownership import Ownership, proof
from kernel_agent.compiler.schedule.polynomial import ONE, Polynomial
from kernel_agent.compiler.schedule.sites import Site, bounds, sites
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.rebuild import Copier, emptied
from kernel_agent.compiler.ssa.value import Kernel, Op, Value

if TYPE_CHECKING:
    from kernel_agent.compiler.schedule.draft import Draft

_ADDS = frozenset((Code.ATOMIC_ADD,))
_TWO = Polynomial.integer(2)
MOST_PLACES = 8
"""Of a gradient: each is compared with the others."""
MOST = 2
"""Ways to see an address as digits that are tried: the first have the most of what masks say."""


@dataclass(frozen=True)
class Regions:
    """A kernel that adds to parts of gradients as to gradients of their own."""

    kernel: Kernel
    gradients: dict[str, str]
    """As of any kernel, by names that only this one's arguments have."""
    parts: dict[str, str]
    """Of gradients' arguments: part -> whole. The first part has the name of the whole."""
    facts: tuple[Fact, ...]
    """Under which parts lie apart."""

    def rejoined(self, found: Ownership, gradients: Mapping[str, str]) -> tuple[Ownership, dict[str, str]]:
        """What was found of the parts in a kernel, and its gradients, in terms of the whole ones.

        Raises CannotDerive where a part is not stored: then the others cannot be, in the same memory.
        """
        written = {site.op.base.name for site in sites(found.kernel.body, frozenset((Code.STORE, Code.ATOMIC_ADD)))}
        wholes = {whole for part, whole in self.parts.items() if part in written}
        mine = {part for part, whole in self.parts.items() if whole in wholes and part in written}
        asked = {one.gradient for one in found.censuses} | {one.gradient for one in found.later}
        if not mine <= set(found.empty_if) or not mine.isdisjoint(asked):
            raise CannotDerive("a part of a gradient stays atomic")
        stored = {name: text for name, text in found.empty_if.items() if name not in mine}
        counts = {name: reached for name, reached in found.counts.items() if name not in mine}
        for whole in sorted(wholes):
            some = [found.counts.get(part) for part in sorted(mine) if self.parts[part] == whole]
            stored[whole] = ""
            reached = some[0]
            for other in some[1:]:
                reached = None if reached is None or other is None else reached.beside(other)
            if reached is not None:
                counts[whole] = reached
        axes = {name: () if name in wholes else found.axes[name] for name in stored}
        tensors = {part: tensor for tensor, part in self.gradients.items()}
        named = {tensors[part]: tensors[whole] for part, whole in self.parts.items()}
        facts = tuple(dict.fromkeys(_renamed(fact, named) for fact in found.facts))
        joint = _of_wholes(found.kernel, self.parts)
        rest = {tensor: name for tensor, name in gradients.items() if name not in self.parts}
        rest |= {tensor: name for tensor, name in self.gradients.items() if name in wholes}
        made = replace(found, kernel=joint, empty_if=stored, counts=counts, axes=axes, facts=facts)
        return made, rest


def _renamed(fact: Fact, named: Mapping[str, str]) -> Fact:
    return replace(fact, tensor=named.get(fact.tensor, fact.tensor))


def in_regions(kernel: Kernel, gradients: Mapping[str, str], names: Set[str], launch: Launch) -> Regions | None:
    """The kernel with those of some gradients in parts that have any; None where none has.

    `gradients`: by name of the input's argument the name of its gradient's; `names`: those to look at.
    """
    rising = mirrored(kernel, reversed_axes(kernel))
    forms = Forms(rising, launch)
    places: dict[str, list[Site]] = {}
    for site in sites(rising.body, _ADDS):
        places.setdefault(site.op.base.name, []).append(site)
    additions: dict[str, list[Op]] = {}
    for op in kernel.ops:
        if op.code is Code.ATOMIC_ADD:
            additions.setdefault(op.base.name, []).append(op)
    found: dict[Op, Value] = {}
    parts: dict[str, str] = {}
    tensors: dict[str, Value] = {}
    facts: dict[Fact, None] = {}
    for tensor, name in gradients.items():
        some = places.get(name, [])
        if name not in names or not 1 < len(some) <= MOST_PLACES or not isinstance(proof(forms, some), str):
            continue
        groups, texts = _groups(forms, some)
        if len(groups) < 2:
            continue
        facts |= dict.fromkeys(Fact(text, f"parts of {name} lie apart", tensor) for text in texts)
        parts[name] = name
        whole = kernel.argument(name)
        for number, group in enumerate(groups[1:], 2):
            part = Value(whole.element, (), kernel.free_name(f"{name}_part_{number}"))
            given = kernel.argument(tensor)
            tensors[part.name] = Value(given.element, (), kernel.free_name(f"{tensor}_part_{number}"))
            parts[part.name] = name
            for place in group:
                found[additions[name][place]] = part
    if not found:
        return None
    made = _Parts(kernel, found, list(tensors.values())).copy()
    own = {value.name: part for part, value in tensors.items()}
    return Regions(made, {**gradients, **own}, parts, tuple(facts))


def with_regions(
    make: Callable[[Kernel, Mapping[str, str], Launch, Regions | None], Draft],
    kernel: Kernel,
    gradients: Mapping[str, str],
    launch: Launch,
) -> Draft:
    """What a schedule makes of gradients, those in parts of which all can be stored then. Raises CannotDerive where
    that is nothing."""
    draft, refusal = None, None
    try:
        draft = make(kernel, gradients, launch, None)
    except DoesNotApply as reason:
        refusal = reason
    left = set(gradients.values()) - (set() if draft is None else {*draft.stored, *draft.alone})
    for names in dict.fromkeys((frozenset(left), *(frozenset((one,)) for one in sorted(left)))):
        found = in_regions(kernel, gradients, names, launch)
        if found is None:
            continue
        try:
            better = make(found.kernel, found.gradients, launch, found)
        except CannotDerive:
            continue  # another of the gradients may still have it
        better.facts += found.facts
        return better
    if draft is None:
        assert refusal is not None
        raise refusal
    return draft


def _groups(forms: Forms, some: Sequence[Site]) -> tuple[list[list[int]], list[str]]:
    """Places that may meet, by their numbers, and facts under which those of different groups do not."""
    groups: list[list[int]] = []
    texts: list[str] = []
    for number, site in enumerate(some):
        joint = [number]
        for group in list(groups):
            proofs = [apart(forms, some[other], site) for other in group]
            if all(one is not None for one in proofs):
                texts += [text for one in proofs if one is not None for text in one.facts()]
            else:
                groups.remove(group)
                joint = [*group, *joint]
        groups.append(joint)
    return sorted(groups), texts


def apart(forms: Forms, one: Site, other: Site) -> Injectivity | None:
    """The proof that no program, trip and lane of one place has an element that any of another place has; None where
    there is none. What is left to check holds in all calls that were seen."""
    if any(loop.code is Code.WHILE for site in (one, other) for loop in site.loops):
        return None
    calls, best = forms.launch.calls, None
    seen = [list(islice(_numbers(forms, site), MOST)) for site in (one, other)]
    for left in seen[0]:
        for right in seen[1]:
            for low, high in ((left, right), (right, left)):
                for proved in _proofs(low, high):
                    found = _reduced(proved)
                    facts = found.facts()
                    if not facts:
                        return found
                    if calls.show(facts) and (best is None or len(facts) < len(best.facts())):
                        best = found
    return best


def _reduced(found: Injectivity) -> Injectivity:
    """The proof with what is left to check in the fewest words."""
    orders = [tuple(one.reduced if isinstance(one, Claim) else one for one in order) for order in found.orders]
    return replace(found, orders=tuple(orders))


@dataclass(frozen=True)
class _Number:
    """An address as a base and digits that are added to it."""

    base: Polynomial
    digits: Mapping[Polynomial, tuple[Polynomial, ...]]
    """Coefficient -> what the digit is less than."""
    claims: Claims

    def reach(self, kept: Set[Polynomial]) -> Polynomial | None:
        """The most that digits other than those kept add up to."""
        found = Polynomial()
        for coefficient, extents in self.digits.items():
            if coefficient in kept:
                continue
            if not extents:
                return None
            found = found + coefficient * (extents[0] - ONE)
        return found


def _numbers(forms: Forms, site: Site) -> Iterator[_Number]:
    """Ways to see an address so. A digit that counts down is one that counts up from where it ends."""
    form: Form = forms.of(site.op.offset)
    if any(atom.kind is Kind.OPAQUE for atom, _ in form.terms):
        return
    for digits, claims in groupings(form, bounds(forms, site, likely=True)):
        base, made = form.base, dict[Polynomial, tuple[Polynomial, ...]]()
        for digit in digits:
            extents = digit.extents
            if digit.falls:
                extents = extents[:1]
                if not extents:
                    break
                base = base - digit.coefficient * (extents[0] - ONE)
            if digit.coefficient in made:
                break
            made[digit.coefficient] = extents
        else:
            yield _Number(base, made, claims)


def _proofs(low: _Number, high: _Number) -> Iterator[Injectivity]:
    """Proofs that one number is less in a digit than another, and that all other digits are alike."""
    distance = high.base - low.base
    if not distance.terms or not distance.likely(1):
        return
    claims = (*low.claims, *high.claims)
    both = {
        coefficient: tuple(extent for extent in extents if extent in high.digits[coefficient])
        for coefficient, extents in low.digits.items()
        if coefficient in high.digits
    }
    shared = {c: extents for c, extents in both.items() if extents or not (low.digits[c] or high.digits[c])}
    rest = _rest(low, high, shared.keys())
    if rest is not None:
        digits = [Digit(c, extents) for c, extents in shared.items()]
        found = ordered([*digits, *rest.digits, Digit(distance, (_TWO,))], (*claims, *rest.claims))
        if found is not None:
            yield found
    for coefficient in both:
        steps = distance.quotient(coefficient)
        others = {c: extents for c, extents in shared.items() if c != coefficient}
        if steps is None or set(low.digits) != set(high.digits) or len(others) != len(both) - 1:
            continue
        digits = [Digit(c, extents) for c, extents in others.items()]
        digits.append(Digit(coefficient, tuple(steps + extent for extent in high.digits[coefficient])))
        for extent in low.digits[coefficient]:
            found = ordered(digits, (*claims, Claim(steps, extent))) if high.digits[coefficient] else None
            if found is not None:
                yield found


@dataclass(frozen=True)
class _Rest:
    """One digit, if any, in place of those that two numbers do not share."""

    digits: tuple[Digit, ...]
    claims: Claims


def _rest(low: _Number, high: _Number, shared: Set[Polynomial]) -> _Rest | None:
    """None where it is not known how far they reach."""
    ends = [number.reach(shared) for number in (low, high)]
    first, second = ends
    if first is None or second is None:
        return None
    if not first.terms and not second.terms:
        return _Rest((), ())
    longer, shorter = (first, second) if (first - second).likely(0) else (second, first)
    return _Rest((Digit(ONE, (longer + ONE,)),), (Claim(longer, shorter),))


class _Parts(Copier):
    """Additions to parts."""

    def __init__(self, source: Kernel, parts: Mapping[Op, Value], tensors: Sequence[Value]) -> None:
        new = list(dict.fromkeys(parts.values()))
        super().__init__(source, Builder(emptied(source, arguments=[*source.arguments, *tensors, *new])))
        self.b.written = self.written | frozenset(new)
        self.parts = parts

    def effect(self, op: Op) -> None:
        """One of them."""
        if self.slicing or op not in self.parts:
            super().effect(op)
            return
        self[op.base] = self.parts[op]
        super().effect(op)
        self[op.base] = op.base


def _of_wholes(kernel: Kernel, parts: Mapping[str, str]) -> Kernel:
    """The kernel that stores to whole gradients."""
    stored = [op.base for op in kernel.ops if op.code is Code.STORE and op.base.name in parts]
    wholes = {parts[base.name]: Value(base.element, (), parts[base.name]) for base in stored}
    arguments = [value for value in kernel.arguments if value.name not in parts]
    name = kernel.name
    for part, whole in parts.items():
        name = name.replace(f"_{part}", "" if f"_{whole}" in name.replace(f"_{part}", "") else f"_{whole}")
    made = emptied(kernel, name=name, arguments=[*arguments, *wholes.values()])
    copier = Copier(kernel, Builder(made))
    copier.b.written = (copier.written - frozenset(stored)) | frozenset(wholes.values())
    for base in stored:
        copier[base] = wholes[parts[base.name]]
    return copier.copy()
