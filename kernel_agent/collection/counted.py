"""What the cost counter says of a timed backward: the part of a record that any machine can count."""

from __future__ import annotations

from kernel_agent.collection.speeds import PairSpeed
from kernel_agent.ir.cost.work import Work
from kernel_agent.oracle.costs import EntryCost
from kernel_agent.sandbox import Limits

COUNT_LIMITS = Limits(wall_s=120.0, memory_bytes=24 << 30)
"""Arguments at real sizes are counted in float64."""
PRODUCTS = tuple(kind for kind in Work if "dot" in kind.value)


def with_cost(speed: PairSpeed, cost: EntryCost | None) -> PairSpeed:
    """The record with bound, rates and atomics; as it is where the backward was not counted or not timed."""
    report = None if cost is None else cost.parts.get("backward")
    us = speed.backward_us
    if cost is None or report is None or us is None:
        return speed
    bound_us = report.whole_seconds * 1e6
    operations = sum(report.operations(kind) for kind in PRODUCTS)
    return speed.model_copy(
        update={
            "bound_us": round(bound_us, 3) if bound_us else None,
            "of_bound": round(bound_us / us, 3) if bound_us else None,
            "gb_s": round(report.unique_bytes / us * 1e-3, 1),
            "tflops": round(operations / us * 1e-6, 1) if operations else None,
            "atomics": sum(launch.atomics for launch in report.launches),
            "saved_bytes": cost.saved_bytes,
        }
    )
