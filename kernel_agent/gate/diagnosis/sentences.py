"""Explanations of the truth child as sentences in words of the user's forward."""

from __future__ import annotations

from kernel_agent.gate.diagnosis.factors import Factors
from kernel_agent.gate.diagnosis.records import Fault, Hypothesis
from kernel_agent.gate.words import line_text
from kernel_agent.oracle.residual import same
from kernel_agent.oracle.terms import Explanation, Form, Place
from kernel_agent.pairs.spec import KernelSpec

_FAULTS = {-1.0: Fault.MISSING_TERM, 1.0: Fault.DOUBLED_TERM, -2.0: Fault.TERM_SIGN}
_SAID = {-1.0: "is missing", 1.0: "is counted twice", -2.0: "has the wrong sign"}
_SAID_OF_SEVERAL = {-1.0: "are missing", 1.0: "are counted twice", -2.0: "have the wrong sign"}


_FACTORS_SAID = {
    Form.DROPPED: "{0} is missing",
    Form.TWICE: "{0} stands twice",
    Form.REPLACED: "{1} stands in place of {0}",
}


class Sentences:
    """What explanations say about one spec."""

    def __init__(self, spec: KernelSpec, factors: Factors) -> None:
        self.spec = spec
        self.factors = factors

    def hypothesis(self, found: Explanation) -> Hypothesis:
        """The explanation as the verdict carries it."""
        fault, statement = self._said(found)
        line = found.places[0].line if found.places else None
        return Hypothesis(grad=found.grad, fault=fault, statement=statement, left_over=found.left_over, line=line)

    def _said(self, found: Explanation) -> tuple[Fault, str]:
        if found.form is Form.OUTPUT:
            ignored = same(found.factor, -1.0) and not found.elsewhere
            fault = Fault.OUTPUT_IGNORED if ignored else _fault(found.factor)
            return fault, f"the part that comes from {self._output(found)} {self._verdict(found.factor)}"
        if found.form is Form.STRIDES:
            return Fault.STRIDES_IGNORED, "it is the gradient of the cotangent read as if it were contiguous"
        if found.form is Form.BLOCK:
            where = f"the last {found.size} of dimension {found.dim} of the cotangent of {self._output(found)}"
            return Fault.LAST_BLOCK_SKIPPED, f"{where} are left out"
        if found.form is Form.FACTOR:
            of = f" of the term through {self._place(found.places[0])}" if found.places else ""
            return Fault.FACTOR, f"the factor {found.other}{of}"
        if found.form in _FACTORS_SAID:
            factor = f"the factor `{found.other}`" if found.other else "the other factor"
            said = _FACTORS_SAID[found.form].format(factor, f"`{found.instead}`")
            return Fault.FACTOR, f"in the derivative of {self._place(found.places[0])}, {said}"
        if found.form is Form.TERM:
            return _fault(
                found.factor
            ), f"the term through {self._place(found.places[0])} {self._verdict(found.factor)}"
        listed = " and ".join(self._place(place) for place in found.places)
        said = _lookup(_SAID_OF_SEVERAL, found.factor) or f"have the factor {self.factors.written(1 + found.factor)}"
        return _fault(found.factor), f"the terms through {listed} {said}"

    def _verdict(self, factor: float) -> str:
        return _lookup(_SAID, factor) or f"has the factor {self.factors.written(1.0 + factor)} instead of 1"

    def _place(self, place: Place) -> str:
        text = line_text(self.spec.facts.source, place.line)
        name = f"`{place.variable}` in " if place.variable else "a part of "
        return f"{name}line {place.line} of the forward (`{text}`)"

    def _output(self, found: Explanation) -> str:
        position = found.output or 0
        known = position < len(self.spec.outputs)
        return f"output `{self.spec.outputs[position].name}`" if known else f"output {position}"


def _fault(factor: float) -> Fault:
    return next((fault for known, fault in _FAULTS.items() if same(known, factor)), Fault.SCALE)


def _lookup(words: dict[float, str], factor: float) -> str:
    return next((text for known, text in words.items() if same(known, factor)), "")
