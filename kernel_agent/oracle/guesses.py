"""A guess: one way to make a wrong gradient of the exact adjoint, and how it is held against residuals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from kernel_agent.oracle.adjoint import Trial
from kernel_agent.oracle.residual import ENOUGH, fit, norm, same, telling
from kernel_agent.oracle.terms import Explanation, Form, Place

_PLAIN = (-1.0, 1.0, -2.0)
"""Factors that are a mistake by themselves: a term that is missing, doubled, or has the wrong sign."""

Effect = Callable[[Trial], Mapping[str, Tensor]]
"""The direction of the residual of every gradient in one case."""


@dataclass(frozen=True)
class Guess:
    """One hypothesis."""

    form: Form
    effect: Effect
    places: tuple[Place, ...] = ()
    free: bool = False
    """Whether the residual may be any multiple of the direction, instead of the direction itself."""
    output: int | None = None
    dim: int | None = None
    size: int | None = None
    other: str = ""
    instead: str = ""
    known: Mapping[str, Tensor] | None = None
    """Its direction in the first case, where that is known already."""

    def explains(self, grad: str, trial: Trial, direction: Tensor, *, alone: bool) -> Explanation | None:
        """What it says of a residual; None where it does not fit. `alone`: no other case will be asked."""
        residual = trial.residuals[grad]
        found = fit(residual, direction)
        if not found.exact or not (self.free or same(found.factor, 1.0)):
            return None
        plain = not self.free or any(same(found.factor, factor) for factor in _PLAIN)
        if alone and telling(residual) < (ENOUGH // 2 if plain else ENOUGH):
            return None
        return Explanation(
            grad=grad,
            form=self.form,
            factor=found.factor,
            left_over=found.left_over,
            places=self.places,
            elsewhere=self._right_elsewhere(trial),
            output=self.output,
            dim=self.dim,
            size=self.size,
            other=self.other,
            instead=self.instead,
        )

    def _right_elsewhere(self, trial: Trial) -> bool:
        """Whether a gradient that this would change too is right."""
        changed = self.effect(trial) if self.known is None else self.known
        return any(norm(part) > 1e-3 * norm(trial.truth[n]) for n, part in changed.items() if n not in trial.wrong)

    def confirmed(self, said: Explanation, others: list[Trial]) -> Explanation | None:
        """The explanation, if other cases are explained in the same way; None otherwise."""
        worst = said.left_over
        for trial in others:
            if said.grad not in trial.residuals:
                continue
            found = fit(trial.residuals[said.grad], self.effect(trial)[said.grad])
            if not found.exact or not same(found.factor, said.factor):
                return None
            worst = max(worst, found.left_over)
        return said.model_copy(update={"left_over": worst})

    def with_known(self, known: Mapping[str, Tensor]) -> Guess:
        """The same with its direction in the first case."""
        return replace(self, known=known)
