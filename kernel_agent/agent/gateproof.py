"""The gate proves itself on a run's own forward: what is wrong must be red before anything green is believed.

Gradients need only the truth, and come in phase 1. Mutants of a backward need one that is proven: they are made of what
is about to be delivered, so that its certificate speaks of the very file.
"""

from __future__ import annotations

from kernel_agent.agent.desk import Desk


def try_gradients(desk: Desk) -> None:
    """Hold wrong gradients to the rule, once per run."""
    tried = any(event.digest is None for event in desk.state.tried)
    if desk.tools.try_gradients is not None and desk.config.mutant_seconds and not tried:
        desk.record(desk.tools.try_gradients(desk.spec))


def try_backward(desk: Desk) -> None:
    """Judge mutants of the best candidate, where it is proven, once and for as long as the configuration allows."""
    best, judge = desk.state.best, desk.tools.try_backward
    if best is None or not best.verdict.green or judge is None or not desk.config.mutant_seconds:
        return
    if all(event.digest != best.digest for event in desk.state.tried):
        event = judge(desk.spec, desk.file(best.digest), desk.observer.on_mutant)
        desk.record(event.model_copy(update={"digest": best.digest}))
