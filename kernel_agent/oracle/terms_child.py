"""What runs in the truth child that explains residuals: hypotheses are tried from the likely to the far-fetched.

Each predicts the residual, or its direction, from the graph of the user's forward alone. One that explains the first
case to 1e-6 must explain the others with the same factor, or nothing is said of it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from kernel_agent.ir import standin
from kernel_agent.oracle.adjoint import Adjoint, Trial
from kernel_agent.oracle.child import Stub, answered, load
from kernel_agent.oracle.records import Point
from kernel_agent.oracle.term_bank import Terms
from kernel_agent.oracle.terms import Explanation

if TYPE_CHECKING:
    from kernel_agent.sandbox import Call


def explained(call: Call) -> None:
    """Payload: `spec`, `blocks`, `seconds`, `cases`: point, keys of cotangents and residuals, `wrong` gradients.

    Sends one message per explanation.
    """
    torch.set_num_threads(1)
    deadline = time.process_time() + call.payload["seconds"]
    with answered(call), standin():
        stub = load(call)
        for explanation in _explanations(_Trials(stub, call), call, deadline):
            call.send({"explanation": explanation.model_dump(mode="json")})


class _Trials:
    """The cases as trials; those at one point share a graph."""

    def __init__(self, stub: Stub, call: Call) -> None:
        self.stub, self.call = stub, call
        self._adjoints: dict[str, Adjoint] = {}
        self._made: dict[int, Trial] = {}

    def __getitem__(self, number: int) -> Trial:
        if number not in self._made:
            self._made[number] = self._make(self.call.payload["cases"][number])
        return self._made[number]

    def more(self, grad: str) -> list[int]:
        """The cases after the first in which a gradient is wrong."""
        return [i for i, form in enumerate(self.call.payload["cases"]) if i > 0 and grad in form["residuals"]]

    def others(self, grad: str) -> list[Trial]:
        """Those as trials."""
        return [self[i] for i in self.more(grad)]

    def _make(self, form: dict[str, Any]) -> Trial:
        point = Point.model_validate(form["point"])
        if point.label not in self._adjoints:
            self._adjoints[point.label] = Adjoint.at(self.stub, point)
        adjoint, tensors = self._adjoints[point.label], self.call.tensors
        cotangents = tuple(None if key is None else tensors[key] for key in form["cotangents"])
        residuals = {name: tensors[key].to(torch.float64) for name, key in form["residuals"].items()}
        if 0 in self._made:
            adjoint.neutral = self._made[0].adjoint.neutral
        return Trial(adjoint, cotangents, residuals, adjoint.gradients(cotangents), frozenset(form["wrong"]))


def _explanations(trials: _Trials, call: Call, deadline: float) -> Iterator[Explanation]:
    first = trials[0]
    file = str(call.scratch / f"{trials.stub.spec.facts.stem}.py")
    unsaid = set(first.residuals)
    for guess in Terms(first, file, call.payload["blocks"]).guesses():
        if not unsaid or time.process_time() > deadline:
            return
        directions = guess.effect(first) if guess.known is None else guess.known
        for grad in sorted(unsaid):
            said = guess.explains(grad, first, directions[grad], alone=not trials.more(grad))
            sure = said and guess.confirmed(said, trials.others(grad))
            if sure:
                unsaid.discard(grad)
                yield sure
