"""A backward proven where there is no GPU is judged with its real kernels before it is timed or delivered on one."""

from __future__ import annotations

from kernel_agent.agent import events as ev
from kernel_agent.agent.desk import Desk

NATIVE = "native"
"""Stands in the tier of a verdict for which real kernels ran."""


def confirmed(desk: Desk) -> bool:
    """Judge the best candidate on this machine's GPU unless that was done. False when it is red there."""
    best, confirm = desk.state.best, desk.tools.confirm
    if best is None or not best.verdict.green or confirm is None or NATIVE in best.verdict.tier:
        return True
    if best.digest in desk.state.confirmed:
        return True  # no shape could be checked here, which its notes say
    verdict = confirm(desk.spec, desk.file(best.digest), best.verdict, desk.observer.on_case)
    desk.record(ev.Confirmed(digest=best.digest, verdict=verdict))
    return verdict.green
