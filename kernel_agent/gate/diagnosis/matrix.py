"""Which gradients pass in which cases of the red shape, and what the pattern says: often that is the diagnosis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kernel_agent.gate.diagnosis.records import MatrixRow
from kernel_agent.oracle.cotangents import LAYOUTS, CotangentKind

if TYPE_CHECKING:
    from kernel_agent.gate.batch import Outcome

_LAYOUTS = frozenset(LAYOUTS)
_IN_WORDS = {
    CotangentKind.RANDOM: "contiguous",
    **LAYOUTS,
    CotangentKind.ONE_HOT: "one-hot",
    CotangentKind.TINY: "tiny",
    CotangentKind.HUGE: "huge",
    CotangentKind.ZERO: "zero",
}
_PARTIAL = frozenset({CotangentKind.NONE, CotangentKind.LAST_ONLY})


def pass_matrix(outcomes: Sequence[Outcome]) -> tuple[MatrixRow, ...]:
    """One row per case of the red shape that compared gradients. `outcomes` are those of one shape."""
    return tuple(
        MatrixRow(
            case=outcome.case.name,
            passed=tuple(score.grad for score in outcome.result.grads if score.passed),
            failed=tuple(score.grad for score in outcome.result.grads if not score.passed),
        )
        for outcome in outcomes
        if outcome.result.grads
    )


def readings(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    """What the pattern says of each wrong gradient, where it says something: one line per pattern.

    Says nothing of a gradient that was compared in one kind of case alone.
    """
    names = dict.fromkeys(score.grad for outcome in outcomes for score in outcome.result.grads)
    said: dict[str, list[str]] = {}
    for name in names:
        text = _reading([(o, s.passed) for o in outcomes for s in o.result.grads if s.grad == name])
        if text:
            said.setdefault(text, []).append(name)
    return tuple(f"{_listed(grads)} {text}" for text, grads in said.items())


def _reading(seen: list[tuple[Outcome, bool]]) -> str:
    """The pattern of one gradient; `seen` holds each case with whether the gradient passed there."""
    failed = [outcome.case for outcome, passed in seen if not passed]
    passed = [outcome.case for outcome, passed in seen if passed]
    if not failed or not passed:
        return "is wrong in every case" if failed and len(seen) > 1 else ""
    full = [case for case in passed if not case.partial]
    bad, good = {case.kind for case in failed if not case.partial}, {case.kind for case in full}
    if not bad:
        subsets = " and ".join(sorted(str(case.needs) for case in failed))
        return f"fails only where some gradients are not needed: needs={subsets}"
    if bad == {CotangentKind.STRIDED} and good & (_LAYOUTS - bad) and all(case.needs for case in failed):
        return "fails only where `needs` asks for all gradients, as an operator in training does"
    if bad <= good:
        seeds = sorted({case.point.seed for case in failed} - {case.point.seed for case in passed})
        return f"fails only with the arguments of seed {seeds[0]}" if len(seeds) == 1 else ""
    return _by_kind(bad - good, good - bad)


def _by_kind(bad: set[CotangentKind], good: set[CotangentKind]) -> str:
    """The reading of kinds of cotangents that always fail, and kinds that always pass."""
    if bad <= _LAYOUTS and CotangentKind.RANDOM in good:
        fine = [CotangentKind.RANDOM, *sorted(good & _LAYOUTS)]
        also = f", and passes when it is {_either(fine)}"
        return f"fails only when the cotangent is {_either(sorted(bad))}{also}: its strides are not respected"
    if bad <= {CotangentKind.TINY, CotangentKind.ZERO}:
        return (
            f"fails only when the cotangent is {_either(sorted(bad))}: something is added that does not scale with it"
        )
    if bad == {CotangentKind.HUGE}:
        return "fails only when the cotangent is huge: something is clipped, overflows or does not scale with it"
    if bad <= _PARTIAL:
        left_out = "the last output" if bad == {CotangentKind.NONE} else "an output"
        if bad == {CotangentKind.LAST_ONLY}:
            left_out = "every output but the last"
        return f"fails only when the cotangent of {left_out} is None"
    if bad == {CotangentKind.ONE_HOT}:
        return "fails only when the cotangent is zero in all elements but one"
    if good == {CotangentKind.ZERO}:
        return "is wrong in every case but under a zero cotangent, where there is nothing to get wrong"
    if good <= {CotangentKind.ZERO, CotangentKind.EXPANDED} and CotangentKind.EXPANDED in good:
        return "passes only when the cotangent is constant along its last dimension: elements of a row are mixed up"
    if good <= _PARTIAL | {CotangentKind.ZERO} and good & _PARTIAL:
        which = "every output but the last" if CotangentKind.LAST_ONLY in good else "the last output"
        return f"passes only when the cotangent of {which} is None: the part that comes from there is wrong"
    return ""


def _either(kinds: Sequence[CotangentKind]) -> str:
    words = [_IN_WORDS.get(kind, kind.value) for kind in kinds]
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]


def _listed(names: list[str]) -> str:
    if len(names) == 1:
        return f"the gradient of {names[0]}"
    return f"each of the gradients of {', '.join(names[:-1])} and {names[-1]}"
