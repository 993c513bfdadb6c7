"""Whether a backward gives the same bits in every call: what leaves the order of its float additions to chance."""

from __future__ import annotations

from collections.abc import Iterable

from kernel_agent.gate.answer import Answer, ByChance, Stage
from kernel_agent.gate.judge import Problem
from kernel_agent.gate.naming import passed_as
from kernel_agent.gate.verdict import Status
from kernel_agent.gate.words import quoted
from kernel_agent.pairs.adjoints import plain_name

_WITHOUT_ORDER = frozenset(
    {"index_add", "scatter_add", "scatter_reduce", "index_put", "index_reduce", "put", "histc", "bincount", "cumsum"}
)
"""torch functions that add floats in no fixed order on a GPU: torch.use_deterministic_algorithms lists them."""
REMEDY = (
    "Let every program store its partial sums in rows of its own and add these up in a second kernel, or give all "
    "additions to one element to one program that loops over them."
)


def without_order(answer: Answer, source: str) -> tuple[str, ...]:
    """One sentence per place, in the words of the candidate's code; empty where the same call gives the same bits."""
    places = [_said(place, source) for place in answer.unordered]
    functions = {call.name for call in answer.calls if call.kind != "INDEX" and plain_name(call.name) in _WITHOUT_ORDER}
    return (*places, *(f"torch's {name} adds in no fixed order on a GPU" for name in sorted(functions)))


def order_problem(answer: Answer, source: str) -> Problem | None:
    """What a backward that is otherwise right is rejected for where the same bits are asked for."""
    found = without_order(answer, source)
    if not found:
        return None
    line = answer.unordered[0].line if answer.unordered else None
    return Problem(Status.NONDETERMINISTIC, found[0], line, details="\n".join((*found[1:], REMEDY)))


def distinct(answers: Iterable[Answer], source: str) -> tuple[str, ...]:
    """The sentences of several answers; a place is told once, with the most programs."""
    most: dict[tuple[str, int | None, str], ByChance] = {}
    calls = {call: None for answer in answers for call in answer.calls}
    for place in (place for answer in answers for place in answer.unordered):
        key = (place.kernel, place.line, place.buffer)
        if key not in most or most[key].programs < place.programs:
            most[key] = place
    answer = Answer(stage=Stage.BACKWARD, unordered=tuple(most.values()), calls=tuple(calls))
    return without_order(answer, source)


def _said(place: ByChance, source: str) -> str:
    many = f"{place.programs} programs" if place.programs > 1 else "several lanes of one program"
    name = passed_as(place.kernel, place.buffer, source)
    return (
        f"the order of float additions is not fixed: kernel {place.kernel} {place.how} {name} from {many}"
        f"{quoted(source, place.line)}"
    )
