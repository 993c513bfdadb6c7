"""`counting`: a while loop that counts up to a bound, `while t < n: ...; t += 1`, is a for loop of as many trips."""

from __future__ import annotations

from dataclasses import dataclass

from kernel_agent.ir.program import Block, Op, Value

_LESS, _GREATER = 2, 4
"""Predicates of `arith.cmpi`, signed."""


@dataclass(frozen=True)
class Counting:
    """What counts in a while loop, and the rest of it as a for loop."""

    place: int
    """Of the counter among what the loop carries."""
    bound: tuple[Op, int]
    """An operation and an operand of it: what the counter stays below."""
    step: tuple[Op, int]
    """What every trip adds to it."""
    loop: Op
    """Without its bounds: the counter is the index, and the others are carried."""


def counting(op: Op) -> Counting | None:
    """The for loop that a while loop is; None for any other. That the step is above zero remains to be asked."""
    (before,), (body,) = op.regions
    *asked, condition = before.ops
    tests = [one for one in asked if one.name != "arith.constant"]
    if len(tests) != 1 or tests[0].name != "arith.cmpi" or condition.operands[1:] != before.arguments:
        return None
    (test,) = tests
    less = {_LESS: 0, _GREATER: 1}.get(int(test.attributes["predicate"]))
    if condition.operands[0] is not test.results[0] or less is None or test.operands[less] not in before.arguments:
        return None
    outside = set(op.captures)
    place = before.arguments.index(test.operands[less])
    last, counter = body.ops[-1], body.arguments[place]
    made = next((one for one in body.ops if last.operands[place] in one.results), None)
    if made is None or made.name != "arith.addi" or counter not in made.operands:
        return None
    added = 1 - made.operands.index(counter)
    if test.operands[1 - less].id not in outside or made.operands[added].id not in outside:
        return None
    yielded = Op(last.name, _without(last.operands, place), [], {}, [], [], last.location)
    block = Block(body.label, [counter, *_without(body.arguments, place)], [*body.ops[:-1], yielded])
    loop = Op("scf.for", _without(op.operands, place), _without(op.results, place), {}, [[block]], [], op.location)
    return Counting(place, (test, 1 - less), (made, added), loop)


def _without(items: list[Value], place: int) -> list[Value]:
    return [*items[:place], *items[place + 1 :]]
