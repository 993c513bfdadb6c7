"""`find_chains`: loops of online softmax, and the proof that what they end in does not depend on the maximum they take.

A loop is a turn of one if a carry becomes m' = max(m, X), and every other carry that has to do with m becomes
c' = c * alpha + E, where alpha is exp(r (m - m')) and E scales as alpha does when m' shifts. Unrolled, with any number
M in place of all maxima, c at the end is exp(r (M - m)) times sum(E at M): if in addition everything that is stored
stays when m shifts and c scales, the maxima may all be M, whatever that is, and alpha is 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kernel_agent.compiler.saved.arms import kept_arms
from kernel_agent.compiler.saved.degree import STAYS, Degree, Degrees, Kind, defined_in, gauge, is_guard
from kernel_agent.compiler.ssa.code import EFFECTS, Code
from kernel_agent.compiler.ssa.uses import captured, has_effects
from kernel_agent.compiler.ssa.value import VEILS, Block, Kernel, Op, Value, bare, unspread

EXTREMES = (Code.MAX, Code.MIN)
"""What finds the number that a softmax subtracts; a softmin adds the smallest."""


@dataclass(frozen=True)
class Step:
    """What a trip does to the carries of its loop."""

    yields: tuple[Value, ...]
    """What they become, in trips that change them."""
    branch: Op | None = None
    """Where some become that: an IF whose other side leaves them as they are."""
    side: int = 0
    """Of its blocks."""

    @classmethod
    def of(cls, block: Block) -> Step:
        """Of the body of a loop."""
        yields, found, side = list(block.yields), None, 0
        for place, (carry, last) in enumerate(zip(block.arguments[1:], block.yields, strict=True)):
            op = bare(last).producer
            if op is None or op.code is not Code.IF or op not in block.ops or found not in (None, op):
                continue
            sides = [inner.yields[op.results.index(bare(last))] for inner in op.blocks]
            for number, other in enumerate(reversed(sides)):
                if bare(other) is carry and (found is None or number == side):
                    found, side, yields[place] = op, number, sides[number]
                    break
        return cls(tuple(yields), found, side)

    def ops(self, block: Block) -> list[Op]:
        """Operations of the loop's body that run in trips that change the carries."""
        return [*block.ops, *([] if self.branch is None else self.branch.blocks[self.side].ops)]


@dataclass(frozen=True, eq=False)
class Turn:
    """A loop that keeps a running maximum."""

    loop: Op
    step: Step
    place: int
    """Of the maximum among the carries."""
    maxima: frozenset[Value]
    """The new maximum, in all the forms the body has of it."""
    decays: dict[int, Value]
    """Of the carries that scale: what they are multiplied with, as broadcast there."""
    degrees: dict[int, Degree]
    """Of the results at the same places, when the maximum shifts by one."""
    masses: frozenset[int]
    """Carries that are sums of all exponentials: zero only where all the others are."""

    @property
    def old(self) -> Value:
        """The maximum so far."""
        return self.loop.blocks[0].arguments[1 + self.place]

    @property
    def alphas(self) -> set[Value]:
        """The exponentials that the decays are."""
        return {bare(value) for value in self.decays.values()}

    def start(self, place: int) -> Value:
        """What a carry starts with."""
        return self.loop.operands[3 + place]


@dataclass(frozen=True, eq=False)
class Chain:
    """Turns one after another that hand on one maximum."""

    block: Block
    turns: tuple[Turn, ...]
    arms: Mapping[Value, Value] = field(default_factory=dict)
    """See `kept_arms`."""

    @property
    def last(self) -> Turn:
        """Whose results are the final ones."""
        return self.turns[-1]

    @property
    def maximum(self) -> Value:
        """The final one."""
        return self.last.loop.results[self.last.place]

    @property
    def of_largest(self) -> bool:
        """Whether it is a maximum, not a minimum."""
        maker = bare(self.last.step.yields[self.last.place]).producer
        return maker is not None and maker.code is Code.MAX

    def degrees(self) -> Degrees:
        """Of the values of the block around, when the final maximum shifts."""
        given: dict[Value, Degree | None] = {}
        masses: set[Value] = set()
        for turn in self.turns:
            given.update({turn.loop.results[place]: degree for place, degree in turn.degrees.items()})
            masses.update(turn.loop.results[place] for place in turn.masses)
        return Degrees(given, lambda value: bare(value) in masses, self.arms)


def find_chains(kernel: Kernel, differentiated: frozenset[str] | None, remarks: list[str]) -> list[Chain]:
    """The chains of a kernel for which the proof holds; remarks say of others why it does not.

    `differentiated`: arguments whose cotangents are not zero; None for all. Stores to others may depend on the maximum.
    """
    found: list[Chain] = []
    arms = kept_arms(kernel)

    def visit(block: Block) -> None:
        chain: Chain | None = None
        for op in block.ops:
            for inner in op.blocks:
                visit(inner)
            turn = _turn(op, differentiated, remarks) if op.code is Code.FOR else None
            if turn is None:
                continue
            if chain is not None and bare(turn.start(turn.place)) is chain.maximum and _goes_on(chain, turn):
                chain = Chain(block, (*chain.turns, turn), arms)
                found[-1] = chain
            else:
                chain = Chain(block, (turn,), arms)
                found.append(chain)

    visit(kernel.body)
    known = {bare(op.operands[1]) for op in kernel.ops if op.code is Code.KNOWN}  # found for a loop that has it already
    chains = [chain for chain in found if chain.maximum not in known]
    return [chain for chain in chains if _proved(chain, differentiated, remarks)]


def _turn(op: Op, differentiated: frozenset[str] | None, remarks: list[str]) -> Turn | None:
    """A loop as a turn; None where it is none."""
    (block,) = op.blocks
    step = Step.of(block)
    for place, old in enumerate(block.arguments[1:]):
        new = bare(step.yields[place])
        maker = new.producer
        if not old.is_float or maker is None or maker.code not in EXTREMES or old not in map(bare, maker.operands):
            continue
        maxima = {new, step.yields[place]}
        maxima.update(inner.results[0] for inner in step.ops(block) if inner.results and is_guard(inner, {new}))
        try:
            return _as_turn(op, step, place, maker, frozenset(maxima), differentiated)
        except NotOneError as reason:
            called = f"`{old.name}`" if old.name else "a running maximum"
            remarks.append(f"{called} keeps its place in the derivative: {reason}")
    return None


class NotOneError(Exception):
    """Why a maximum that is subtracted is not free to be another."""


def _as_turn(
    op: Op, step: Step, place: int, maker: Op, maxima: frozenset[Value], differentiated: frozenset[str] | None
) -> Turn:
    (block,) = op.blocks
    carries = block.arguments[1:]
    old = carries[place]
    if any(depends(value, set(carries)) for value in maker.operands if bare(value) is not old):
        raise NotOneError("what it is compared with depends on what the loop has found so far")
    if step.branch is not None and depends(step.branch.operands[0], set(carries)):
        raise NotOneError("which trips take part depends on what the loop has found so far")
    moved = {old, *maxima}
    plain: set[int] = {n for n in range(len(carries)) if n != place}
    while True:
        others = {value for n, value in enumerate(carries) if n not in plain}
        bad = {n for n in plain if depends(step.yields[n], moved | others)}
        if not bad:
            break
        plain -= bad
    given: dict[Value, Degree | None] = {value: None for n, value in enumerate(carries) if n not in plain}
    given |= {value: gauge(value) for value in maxima}
    degrees = Degrees(given)
    decaying = Degrees({**given, old: STAYS})
    decays: dict[int, Value] = {}
    rates: dict[int, Degree] = {place: gauge(old)}
    inside = {value.id for value in defined_in(op)}
    masses: set[int] = set()
    for n, carry in enumerate(carries):
        if n == place:
            continue
        if n in plain:
            rates[n] = STAYS
            continue
        decay, rest = decayed(step.yields[n], carry)
        called = f"`{carry.name}`" if carry.name else "another carry"
        if decay is None:
            raise NotOneError(f"{called} does not become {called} * exp(old - new) + something")
        alpha = bare(decay)
        rate = decaying[decay]
        exponential = alpha.producer is not None and alpha.producer.code in (Code.EXP, Code.EXP2)
        if not exponential or rate is None or not _vanishes(alpha.producer.operands[0], old, maxima):  # type: ignore[union-attr]
            raise NotOneError(f"{called} is not multiplied with exp(old - new)")
        if rate.within(inside):
            raise NotOneError(f"{called} is multiplied with exp(c (old - new)), and c is another one in every trip")
        for term in rest:
            degree = degrees[term]
            if degree is None or not (degree.kind is Kind.ZERO or degree.same(rate)):
                raise NotOneError(f"what is added to {called} does not scale as {called} does when the maximum shifts")
        decays[n], rates[n] = decay, rate
        if len(rest) == 1 and _is_mass(rest[0]):
            masses.add(n)
    if not decays:
        raise NotOneError("no carry is multiplied with exp(old - new)")
    for inner in block.ops:
        examine(inner, degrees, differentiated)
    alone = _one_exponential(step.ops(block), decays)
    return Turn(op, step, place, maxima, decays, rates, frozenset(masses) if alone else frozenset())


def examine(op: Op, degrees: Degrees, differentiated: frozenset[str] | None) -> None:
    """Raise NotOneError unless all effects of an operation and of what is nested in it stay."""
    if op.code is Code.FOR:
        degrees.loop(op)
    if not has_effects(op):
        return
    if op.code in EFFECTS:
        base = op.attributes.get("base")
        if differentiated is not None and isinstance(base, Value) and base.name not in differentiated:
            return
        for value in op.operands:
            if not degrees.stays(value):
                where = f"what is stored to {base.name}" if isinstance(base, Value) else f"a {op.code.value}"
                raise NotOneError(f"{where} changes when it shifts")
        return
    if op.code is Code.WHILE and not all(map(degrees.stays, (*op.operands, *captured(op.blocks)))):
        raise NotOneError("a while loop depends on it")
    if not all(map(degrees.stays, op.operands[: 3 if op.code is Code.FOR else None])):
        raise NotOneError("what runs depends on it")
    for block in op.blocks:
        for inner in block.ops:
            examine(inner, degrees, differentiated)


def _goes_on(chain: Chain, turn: Turn) -> bool:
    """Whether a turn starts with what a chain ended with, in the same gauge."""
    degrees = chain.degrees()
    for place, degree in turn.degrees.items():
        start = degrees[turn.start(place)]
        if start is None or not (start.same(degree) or (start.kind is Kind.ZERO and degree.kind is Kind.SCALE)):
            return False
    return True


def _proved(chain: Chain, differentiated: frozenset[str] | None, remarks: list[str]) -> bool:
    """Whether nothing that the rest of the block stores or yields depends on the maximum."""
    degrees = chain.degrees()
    loops = {turn.loop for turn in chain.turns}
    maximum = chain.maximum
    called = f"`{maximum.name}`" if maximum.name else "a running maximum"
    try:
        for op in chain.block.ops:
            if op not in loops:
                examine(op, degrees, differentiated)
        if not all(map(degrees.stays, chain.block.yields)):
            raise NotOneError("an outer loop carries on what changes when it shifts")
    except NotOneError as reason:
        remarks.append(f"{called} keeps its place in the derivative: {reason}")
        return False
    return True


def depends(value: Value, on: set[Value]) -> bool:
    """Whether a value is computed of one of `on`."""
    seen: set[Value] = set()
    stack = [value]
    while stack:
        value = stack.pop()
        if value in on:
            return True
        if value in seen:
            continue
        seen.add(value)
        if value.producer is not None:
            stack.extend((*value.producer.operands, *captured(value.producer.blocks)))
    return False


def decayed(value: Value, carry: Value) -> tuple[Value | None, list[Value]]:
    """The factor of a carry in a sum, and the other terms of the sum; None where there is not one such factor."""
    terms: list[Value] = []
    decays: list[Value] = []
    stack = [value]
    while stack:
        term = unspread(stack.pop())
        op = term.producer
        if op is not None and op.code is Code.ADD:
            stack.extend(op.operands)
        elif op is not None and op.code in (Code.FMA, Code.MUL) and carry in op.operands[:2]:
            decays.append(op.operands[1] if op.operands[0] is carry else op.operands[0])
            stack.extend(op.operands[2:])
        else:
            terms.append(term)
    return (decays[0] if len(decays) == 1 else None), terms


def _vanishes(value: Value, old: Value, maxima: frozenset[Value]) -> bool:
    """Whether a value is zero where the old maximum is the new one."""
    op = value.producer
    if op is None:
        return False
    if op.code in VEILS or op.code in (Code.NEG, Code.DIV):
        return _vanishes(op.operands[0], old, maxima)
    if op.code is Code.SUB:
        return _alike(op.operands[0], op.operands[1], old, maxima) or _alike(
            op.operands[1], op.operands[0], old, maxima
        )
    if op.code is Code.MUL:
        return any(_vanishes(operand, old, maxima) for operand in op.operands)
    return False


def _alike(a: Value, b: Value, old: Value, maxima: frozenset[Value]) -> bool:
    """Whether the first is of the old maximum what the second is of the new one."""
    if (a is old and b in maxima) or a is b:
        return True
    left, right = a.producer, b.producer
    if left is None or right is None or left.code is not right.code or left.attributes != right.attributes:
        return False
    if left.code in EFFECTS or left.blocks or left.code is Code.LOAD or len(left.operands) != len(right.operands):
        return False
    if not left.operands:
        return False
    return all(_alike(x, y, old, maxima) for x, y in zip(left.operands, right.operands, strict=True))


def _is_mass(value: Value) -> bool:
    """Whether this is a sum of exponentials."""
    op = bare(value).producer
    if op is None or op.code is not Code.SUM:
        return False
    inner = bare(op.operands[0]).producer
    return inner is not None and inner.code in (Code.EXP, Code.EXP2)


def _one_exponential(ops: Iterable[Op], decays: dict[int, Value]) -> bool:
    """Whether all that is summed is made of one exponential: a row where it is zero has nothing."""
    alphas = {bare(value) for value in decays.values()}
    made = [op for op in ops if op.code in (Code.EXP, Code.EXP2) and op.result not in alphas]
    return len(made) == 1
