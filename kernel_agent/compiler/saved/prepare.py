"""`prepared`: a forward as it should be differentiated: what it stored is at hand, and softmaxes have their gauge."""

from __future__ import annotations

from dataclasses import replace

from kernel_agent.compiler.saved.earlier import use_earlier
from kernel_agent.compiler.saved.fields import use_fields
from kernel_agent.compiler.saved.gauge import use_gauge
from kernel_agent.compiler.saved.joint import Joint
from kernel_agent.compiler.saved.moments import use_moments
from kernel_agent.compiler.saved.outputs import Saved, use_saved
from kernel_agent.compiler.saved.picked_elements import use_picks
from kernel_agent.compiler.saved.pivots import use_pivots
from kernel_agent.compiler.saved.prefetch import without_prefetch
from kernel_agent.compiler.saved.quotients import use_quotients
from kernel_agent.compiler.saved.remainder import with_last_trips
from kernel_agent.compiler.saved.softmax import settle_maxima
from kernel_agent.compiler.saved.taps import use_taps
from kernel_agent.compiler.saved.winners import use_winners
from kernel_agent.compiler.schedule.calls import Calls
from kernel_agent.compiler.ssa.value import Kernel


def prepared(
    kernel: Kernel,
    written: frozenset[str],
    lost: frozenset[str] = frozenset(),
    calls: Calls | None = None,
    joint: Joint | None = None,
) -> Saved:
    """A kernel with the same derivative that spares its backward work.

    `written`: arguments whose cotangents are given, as for `differentiate`. `lost`: arguments that are overwritten
    after the forward, and not read for that. `calls`: launches that were seen. `joint`: results that may shift and
    scale together. Reads of what the forward wrote are right only if nobody else writes there before the backward.
    """
    found = Saved(with_last_trips(without_prefetch(kernel)), frozenset())
    found = _after(found, use_moments(found.kernel), lost)
    found = _after(found, use_pivots(found.kernel), lost)
    found = _after(found, use_quotients(found.kernel, written), lost)
    found = _after(found, use_gauge(found.kernel, written, joint, lost), lost)
    found = _after(found, settle_maxima(found.kernel, written, joint, lost), lost)
    found = _after(found, use_winners(found.kernel, calls), lost)
    found = _after(found, use_taps(found.kernel), lost)
    found = _after(found, use_picks(found.kernel), lost)
    found = _after(found, use_fields(found.kernel, calls), lost)
    found = _after(found, use_earlier(found.kernel), lost)
    return _after(found, use_saved(found.kernel, lost, calls), lost)


def _after(found: Saved, step: Saved, lost: frozenset[str]) -> Saved:
    """What was found with what a step made of it, unless that reads what is lost."""
    gone = sorted(step.read & lost)
    if gone:
        remark = f"what the forward stored is not read back: {', '.join(gone)} is overwritten later"
        return replace(found, remarks=tuple(dict.fromkeys((*found.remarks, remark))))
    remarks = tuple(dict.fromkeys((*found.remarks, *step.remarks)))
    return Saved(step.kernel, found.read | step.read, remarks, (*found.facts, *step.facts))
