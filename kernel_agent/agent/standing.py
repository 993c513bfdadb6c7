"""How a candidate stands against the best one so far: by its verdict, then by its time, modelled or measured."""

from __future__ import annotations

from dataclasses import dataclass

from kernel_agent.agent import events as ev
from kernel_agent.agent.desk import Desk
from kernel_agent.agent.events import PhaseName
from kernel_agent.agent.state import Round, Work
from kernel_agent.agent.tools import NotTimed
from kernel_agent.bench.records import Basis, Measurement, decide


@dataclass(frozen=True)
class Standing:
    """Whether a candidate takes the place of the best."""

    better: bool
    line: str
    """In what it is better, or why it is not."""


def compare(desk: Desk, work: Work, asked: Round) -> Standing:
    """Compare a judged candidate with the best of the run, timing both where that decides."""
    best = desk.state.best
    if best is None:
        return Standing(True, "the first candidate")
    if asked.same_as is not None and work.digest == asked.candidate:
        known = f"in reply {asked.same_as}" if asked.same_as else "was derived"
        return Standing(False, f"the same code as {known}")
    if not (work.verdict.green and best.verdict.green):
        better = work.verdict.rank > best.verdict.rank
        return Standing(better, f"{'' if better else 'no '}better than {best.source}")
    if asked.phase is PhaseName.OPTIMIZE:
        return _faster(desk, work, best)
    return _cheaper(desk, work, best)


def _faster(desk: Desk, work: Work, best: Work) -> Standing:
    """By the rule that decides what is kept in the optimize phase."""
    try:
        after = measured(desk, work.digest)
    except NotTimed as error:
        return Standing(False, f"it cannot be timed: {error.message}")
    before = measured(desk, best.digest)
    if not _comparable(before, after):
        before = measured(desk, best.digest, anew=True)  # it was timed on another machine
    decision = decide(before, after, desk.config.min_rel_impr)
    return Standing(decision.kept, decision.line)


def _cheaper(desk: Desk, work: Work, best: Work) -> Standing:
    """Of several proven drafts the one whose modelled time is least goes on; only that one is measured."""
    after, before = _modelled(desk, work.digest), _modelled(desk, best.digest)
    if after is None or before is None or not _comparable(before, after):
        return Standing(False, f"proven like {best.source}")
    line = f"modelled at {after.geomean_us:.1f} us, {best.source} at {before.geomean_us:.1f} us"
    return Standing(after.geomean_us < before.geomean_us, line)


def measured(desk: Desk, digest: str, *, anew: bool = False) -> Measurement:
    """The time of a proven candidate as `Tools.measure` takes it; taken and recorded when it is not known.

    Raises `NotTimed`.
    """
    assert desk.tools.measure is not None
    known = None if anew else desk.state.measured(digest, desk.tools.basis)
    if known is not None:
        return known
    if desk.tools.recall is not None and desk.state.measurements:
        desk.tools.recall(desk.spec, desk.state.measurements[-1][1])
    measurement = desk.tools.measure(desk.spec, desk.snapshots.get(digest))
    desk.record(ev.Measured(digest=digest, measurement=measurement))
    return measurement


def _modelled(desk: Desk, digest: str) -> Measurement | None:
    known = desk.state.measured(digest, Basis.MODELLED)
    if known is not None or desk.tools.modelled_cost is None:
        return known
    measurement = desk.tools.modelled_cost(desk.spec, desk.snapshots.get(digest))
    if measurement is not None:
        desk.record(ev.Measured(digest=digest, measurement=measurement))
    return measurement


def _comparable(before: Measurement, after: Measurement) -> bool:
    same = (before.basis, before.device) == (after.basis, after.device)
    return same and {shape.label for shape in before.shapes} == {shape.label for shape in after.shapes}
