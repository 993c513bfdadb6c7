"""`Claim`: an inequality between numbers of a launch: decided here, or printed for the stub to decide."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kernel_agent.compiler.plan import RISING
from kernel_agent.compiler.schedule.polynomial import Polynomial


@dataclass(frozen=True)
class Claim:
    """left >= right."""

    left: Polynomial
    right: Polynomial

    @property
    def proved(self) -> bool:
        """Whatever the launch."""
        return (self.left - self.right).surely(0)

    @property
    def refuted(self) -> bool:
        """For all launches like the present one but odd ones, with sizes of 1: no claim to build a plan on."""
        return (self.right - self.left).likely(1)

    @property
    def printable(self) -> bool:
        """Whether a stub can evaluate it."""
        return self.left.printable and self.right.printable

    @property
    def reduced(self) -> Claim:
        """The same with nothing that is subtracted, and nothing that both sides have."""
        terms = (self.left - self.right).terms
        left = Polynomial.of({monomial: count for monomial, count in terms if count > 0})
        return Claim(left, Polynomial.of({monomial: -count for monomial, count in terms if count < 0}))

    def text(self) -> str:
        """Python."""
        return f"{self.left.text()} >= {self.right.text()}"


@dataclass(frozen=True)
class Rising:
    """No element of a tensor of bounds is less than the one before: what lies between two that follow each other is
    between no other two. Only a launch can tell."""

    tensor: str
    """Argument of the forward's launch."""
    proved = False
    refuted = False
    printable = True

    def text(self) -> str:
        """Python."""
        return f"{RISING}({self.tensor})"


Claims = tuple[Claim | Rising, ...]
"""All of them."""


def open_claims(claims: Iterable[Claim | Rising]) -> Claims | None:
    """Those that are not proved, each once; None where one is refuted or cannot be printed."""
    kept = {claim: None for claim in claims if not claim.proved}
    if any(claim.refuted or not claim.printable for claim in kept):
        return None
    return tuple(kept)


def conjunction(claims: Claims) -> str:
    """Python for all of them; empty for none."""
    return " and ".join(claim.text() for claim in claims)


def any_of(alternatives: Sequence[Claims]) -> str:
    """Python for one of several conjunctions; empty where one of them is of nothing."""
    texts = [conjunction(claims) for claims in alternatives]
    if "" in texts:
        return ""
    return texts[0] if len(texts) == 1 else " or ".join(f"({text})" for text in texts)
