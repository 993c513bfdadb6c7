"""Phase 2: a plan, first drafts at once, then repair of the best red candidate until one is proven.

Where a derived backward is proven already, the drafts are to beat it, and nothing is planned or repaired.
"""

from __future__ import annotations

from kernel_agent.agent.asks import next_ask, send_if_affordable
from kernel_agent.agent.desk import Desk
from kernel_agent.agent.drafts import drafts_begun, plan_drafts, send_drafts
from kernel_agent.agent.phases import BACKWARD
from kernel_agent.agent.planning import look_up_techniques, plan_ask
from kernel_agent.agent.rounds import finish_open, roll_back_if_stuck
from kernel_agent.config import Backend
from kernel_agent.errors import PausedRun


def backward(desk: Desk) -> None:
    """Ask until a candidate is proven or the budget ends. Drafts that were sent are judged to the last one.

    Raises `PausedRun` when the phase ends green and the run was to stop there; called again it has nothing to do.
    """
    if not desk.begin(BACKWARD):
        return
    while send_drafts(desk) or desk.state.open or (_wanting(desk) and _ask(desk)):
        finish_open(desk)
    count = desk.state.asks
    asks = f"after {count} ask{'' if count == 1 else 's'}" if count else "before any ask"
    desk.end(BACKWARD, f"proven {asks}" if desk.state.green else f"not proven {asks}: {desk.state.exhausted}")
    if desk.config.pause and desk.state.green and not desk.state.confirmed:
        raise PausedRun(
            f"phase 2 is over, the backward is proven {asks}; phase 3 waits (--pause)",
            remedy=f"go on here or, packed, on another machine: {desk.folder.resume_command}",
        )


def _wanting(desk: Desk) -> bool:
    """Whether there is something to ask: nothing is proven, or a model may still beat what was derived."""
    return not desk.state.green or (not drafts_begun(desk) and desk.config.backend is not Backend.COMPILER)


def _ask(desk: Desk) -> bool:
    """Send what comes next. False when the budget refuses it."""
    roll_back_if_stuck(desk)
    if desk.state.exhausted:
        return False
    if desk.state.green:
        return plan_drafts(desk) and send_drafts(desk)
    plan = plan_ask(desk)
    if plan is not None:
        return send_if_affordable(desk, BACKWARD, plan)
    look_up_techniques(desk)
    if not drafts_begun(desk):
        return plan_drafts(desk) and send_drafts(desk)
    return send_if_affordable(desk, BACKWARD, next_ask(desk, BACKWARD))
