"""`find_chains`: loops of online softmax, and the proof that what they end in does not depend on the maximum they take.

A loop is a turn of one if a carry becomes m' = max(m, X), and every other carry that has to do with m becomes
c' = c * alpha + E, where alpha is exp(r (m - m')) and E scales as alpha does when m' shifts. Unrolled, with any number
M in place of all maxima, c at the end is exp(r (M - m)) times sum(E at M): if in addition everything that is stored
stays when m shifts and c scales, the maxima may all be M, whatever that is, and alpha is 1. A trip may take several
steps, as one whose source is unrolled does: each has its maximum, and its alpha from that of the one before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from kernel_agent.compiler.saved.arms import kept_arms
from kernel_agent.compiler.saved.degree import STAYS, Degree, Degrees, Kind, gauge
from kernel_agent.compiler.saved.joint import Joint, Ties
from kernel_agent.compiler.saved.meeting import EXPONENTIALS, met
from kernel_agent.compiler.saved.trip import NotOneError, Raise, Raised, Step, raises, stepped
from kernel_agent.compiler.ssa.code import EFFECTS, Code
from kernel_agent.compiler.ssa.uses import captured, depends, has_effects
from kernel_agent.compiler.ssa.value import Block, Kernel, Op, Value, bare


@dataclass(frozen=True, eq=False)
class Turn:
    """A loop that keeps a running maximum."""

    loop: Op
    step: Step
    place: int
    """Of the maximum among the carries."""
    maxima: frozenset[Value]
    """The new maximum, in all the forms the body has of it, and those of steps before it."""
    decays: dict[int, Value]
    """Of the carries that scale: what they are multiplied with first, as broadcast there."""
    alphas: frozenset[Value]
    """The exponentials that the decays of all steps are."""
    degrees: dict[int, Degree]
    """Of the results at the same places, when the maximum shifts by one."""
    masses: frozenset[int]
    """Carries that are sums of all exponentials: zero only where all the others are."""

    @property
    def old(self) -> Value:
        """The maximum so far."""
        return self.loop.blocks[0].arguments[1 + self.place]

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

        def is_mass(value: Value) -> bool:
            meeting = met(self.block, self.maximum, value) if masses else None
            return bare(value) in masses or (meeting is not None and meeting.of_each in masses)

        return Degrees(given, is_mass, self.arms)


def find_chains(
    kernel: Kernel, differentiated: frozenset[str] | None, remarks: list[str], joint: Joint | None = None
) -> list[Chain]:
    """The chains of a kernel for which the proof holds; remarks say of others why it does not.

    `differentiated`: arguments whose cotangents are not zero; None for all. Stores to others may depend on the maximum.
    `joint`: arguments that may follow it.
    """
    found = turned_alone(kernel, differentiated, remarks)
    known = {bare(op.operands[1]) for op in kernel.ops if op.code is Code.KNOWN}  # found for a loop that has it already
    chains = [chain for chain in found if chain.maximum not in known]
    ties = Ties.of(kernel, joint)
    return [chain for chain in chains if _proved(chain, differentiated, remarks, ties)]


def turned_alone(
    kernel: Kernel, differentiated: frozenset[str] | None = None, remarks: list[str] | None = None
) -> list[Chain]:
    """The chains of a kernel, as far as their loops say."""
    remarks = [] if remarks is None else remarks
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
    return found


def _turn(op: Op, differentiated: frozenset[str] | None, remarks: list[str]) -> Turn | None:
    """A loop as a turn; None where it is none."""
    (block,) = op.blocks
    step = Step.of(block)
    for place, old in enumerate(block.arguments[1:]):
        found = raises(step, block, place)
        if not found:
            continue
        try:
            return _as_turn(op, step, place, found, differentiated)
        except NotOneError as reason:
            called = f"`{old.name}`" if old.name else "a running maximum"
            remarks.append(f"{called} keeps its place in the derivative: {reason}")
    return None


def _as_turn(op: Op, step: Step, place: int, found: Sequence[Raise], differentiated: frozenset[str] | None) -> Turn:
    (block,) = op.blocks
    carries = block.arguments[1:]
    for rise in found:
        if any(depends(value, set(carries)) for value in rise.maker.operands if bare(value) is not rise.before):
            raise NotOneError("what it is compared with depends on what the loop has found so far")
    if step.branch is not None and depends(step.branch.operands[0], set(carries)):
        raise NotOneError("which trips take part depends on what the loop has found so far")
    maxima = frozenset[Value]().union(*(rise.maxima for rise in found))
    moved = {carries[place], *maxima}
    plain: set[int] = {n for n in range(len(carries)) if n != place}
    while True:
        others = {value for n, value in enumerate(carries) if n not in plain}
        bad = {n for n in plain if depends(step.yields[n], moved | others)}
        if not bad:
            break
        plain -= bad
    fixed: dict[Value, Degree | None] = {value: None for n, value in enumerate(carries) if n not in plain}
    fixed |= dict.fromkeys(maxima, None)
    steps = [Raised(rise, fixed, op) for rise in found]
    decays: dict[int, Value] = {}
    alphas: set[Value] = set()
    rates: dict[int, Degree] = {place: gauge(carries[place])}
    masses: set[int] = set()
    for n, carry in enumerate(carries):
        if n == place:
            continue
        if n in plain:
            rates[n] = STAYS
            continue
        value = step.yields[n]
        called = f"`{carry.name}`" if carry.name else "another carry"
        for one in reversed(steps):
            before, decay, rest = stepped(value, carry, first=one is steps[0])
            rates[n] = one.rate(decay, rest, called, rates.get(n))
            alphas.add(bare(decay))
            decays[n], value = decay, before
        if len(rest) == 1 and _is_mass(rest[0]):
            masses.add(n)
    if not decays:
        raise NotOneError("no carry is multiplied with exp(old - new)")
    for inner in block.ops:
        for one in steps:
            examine(inner, one.degrees, differentiated)
    alone = len(steps) == 1 and _one_exponential(step.ops(block), alphas)
    return Turn(op, step, place, maxima, decays, frozenset(alphas), rates, frozenset(masses) if alone else frozenset())


def examine(op: Op, degrees: Degrees, differentiated: frozenset[str] | None, ties: Ties | None = None) -> None:
    """Raise NotOneError unless all effects of an operation and of what is nested in it stay, or are tied to others."""
    if op.code is Code.FOR:
        degrees.loop(op)
    if not has_effects(op):
        return
    if op.code in EFFECTS:
        base = op.attributes.get("base")
        if differentiated is not None and isinstance(base, Value) and base.name not in differentiated:
            return
        if ties is not None and ties.hold(op, degrees):
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


def _proved(chain: Chain, differentiated: frozenset[str] | None, remarks: list[str], ties: Ties | None) -> bool:
    """Whether nothing that the rest of the block stores or yields depends on the maximum."""
    degrees = chain.degrees()
    loops = {turn.loop for turn in chain.turns}
    maximum = chain.maximum
    called = f"`{maximum.name}`" if maximum.name else "a running maximum"
    try:
        for op in chain.block.ops:
            if op not in loops:
                examine(op, degrees, differentiated, ties)
        if not all(map(degrees.stays, chain.block.yields)):
            raise NotOneError("an outer loop carries on what changes when it shifts")
    except NotOneError as reason:
        remarks.append(f"{called} keeps its place in the derivative: {reason}")
        return False
    return True


def _is_mass(value: Value) -> bool:
    """Whether this is a sum of exponentials, or one in each lane."""
    op = bare(value).producer
    if op is not None and op.code is Code.SUM:
        op = bare(op.operands[0]).producer
    return op is not None and op.code in EXPONENTIALS


def _one_exponential(ops: Iterable[Op], alphas: Set[Value]) -> bool:
    """Whether all that is summed is made of one exponential: a row where it is zero has nothing."""
    made = [op for op in ops if op.code in EXPONENTIALS and op.result not in alphas]
    return len(made) == 1
