"""Phase 3: the proven backward is timed, its launch parameters are swept, then it is made faster, ask by ask."""

from __future__ import annotations

import math

from kernel_agent.agent import events as ev
from kernel_agent.agent.asks import next_ask, send_if_affordable
from kernel_agent.agent.desk import Desk
from kernel_agent.agent.phases import OPTIMIZE
from kernel_agent.agent.rounds import finish_open, roll_back_if_stuck
from kernel_agent.agent.standing import measured
from kernel_agent.agent.tools import NotTimed
from kernel_agent.bench.records import Basis, Measurement
from kernel_agent.config import Backend


def optimize(desk: Desk) -> None:
    """Ask until nothing more is to be gained, patience ends or the budget does. The best candidate is always proven."""
    if OPTIMIZE.name in desk.state.over:
        return
    why_not = _why_not(desk)
    if why_not:
        desk.record(ev.PhaseSkipped(phase=OPTIMIZE.name, line=why_not))
        return
    desk.begin(OPTIMIZE)
    _tune(desk)
    while desk.state.open or _ask(desk):
        finish_open(desk)
    desk.end(OPTIMIZE, f"the best takes {_time(desk)}; {desk.state.exhausted or _enough(desk)}")


def _why_not(desk: Desk) -> str:
    """Why there is nothing to optimise; empty once the proven backward is timed."""
    best = desk.state.best
    if best is None or not best.verdict.green:
        return "there is no proven backward to make faster"
    if desk.tools.measure is None:
        return desk.tools.unmeasured
    if desk.config.backend is Backend.COMPILER and desk.tools.basis is Basis.MODELLED:
        return "no GPU here, so schedules and launch parameters cannot be timed: the compiler's own choice stands"
    try:
        measured(desk, best.digest)
    except NotTimed as error:
        return f"the proven backward cannot be timed: {error.message}"
    return ""


def _tune(desk: Desk) -> None:
    """Sweep launch parameters once, before anybody is asked."""
    best, tune = desk.state.best, desk.tools.tune
    config = desk.config
    none = config.tune_seconds == 0 if config.backend is Backend.COMPILER else config.tune_variants == 0
    if tune is None or best is None or desk.state.tuned is not None or none:
        return
    found = tune(desk.spec, desk.snapshots.get(best.digest), measured(desk, best.digest), desk.observer.on_variant)
    tuned = found.tuned
    if found.candidate is not None:
        tuned = tuned.model_copy(update={"best": desk.snapshots.put(found.candidate)})
    desk.record(ev.TunedEvent(digest=best.digest, tuned=tuned, verdict=found.verdict))


def _ask(desk: Desk) -> bool:
    """Send what comes next. False when the budget refuses it, or there is no reason to."""
    roll_back_if_stuck(desk)
    if desk.state.exhausted or _enough(desk):
        return False
    return send_if_affordable(desk, OPTIMIZE, next_ask(desk, OPTIMIZE))


def _enough(desk: Desk) -> str:
    """Why no further ask is worth its price; empty while one is."""
    best, asks = desk.state.best, desk.state.idle
    if best is None:
        return "there is no proven backward"
    time = measured(desk, best.digest)
    left = headroom(time)
    if left is not None and left < desk.config.min_rel_impr:
        return f"no implementation can take {desk.config.min_rel_impr:.0%} less: it is within {left:.1%} of the bound"
    if asks >= desk.config.patience:
        return f"{asks} asks brought no progress (--patience)"
    return ""


def headroom(time: Measurement) -> float | None:
    """Part of the time that is above what no implementation can beat; None where a bound is unknown."""
    logs = [math.log(shape.bound_us / shape.median_us) for shape in time.shapes if shape.bound_us]
    if len(logs) < len(time.shapes):
        return None
    return max(0.0, 1.0 - math.exp(sum(logs) / len(logs)))


def _time(desk: Desk) -> str:
    assert desk.state.best is not None
    time = measured(desk, desk.state.best.digest)
    return f"{time.geomean_us:.1f} us ({time.basis.value})"
