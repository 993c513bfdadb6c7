"""`Observer`: who watches a run while it happens. It is told, and decides nothing."""

from __future__ import annotations

from typing import Protocol

from kernel_agent.agent.events import Entry
from kernel_agent.gate.mutants.records import MutantResult
from kernel_agent.gate.verdict import CaseResult
from kernel_agent.models.protocol import Notice


class Observer(Protocol):
    """Receives what happens, in order, after it is in the ledger."""

    def on_event(self, entry: Entry) -> None:
        """One line was added to the ledger."""
        ...

    def on_text(self, piece: str) -> None:
        """A piece of a reply arrived."""
        ...

    def on_case(self, case: CaseResult, done: int, planned: int) -> None:
        """The gate finished one case of `planned`."""
        ...

    def on_variant(self, change: str, done: int, planned: int) -> None:
        """One variant of launch parameters of `planned` was tried, or where nobody counts them, what is done."""
        ...

    def on_mutant(self, mutant: MutantResult, done: int, planned: int) -> None:
        """The gate judged one mutant of `planned`; the time for them may end before the last."""
        ...

    def on_notice(self, notice: Notice) -> None:
        """The model has something to say beside its reply, such as that it waits."""
        ...


class Unwatched:
    """The observer of a run that nobody watches."""

    def on_event(self, entry: Entry) -> None:
        """See `Observer`."""

    def on_text(self, piece: str) -> None:
        """See `Observer`."""

    def on_case(self, case: CaseResult, done: int, planned: int) -> None:
        """See `Observer`."""

    def on_variant(self, change: str, done: int, planned: int) -> None:
        """See `Observer`."""

    def on_mutant(self, mutant: MutantResult, done: int, planned: int) -> None:
        """See `Observer`."""

    def on_notice(self, notice: Notice) -> None:
        """See `Observer`."""
