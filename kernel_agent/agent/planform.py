"""The form of a plan, by example: made of the `Plan` record itself, so that it cannot drift from what is checked."""

from __future__ import annotations

import json

from kernel_agent.agent.brief import Brief
from kernel_agent.agent.plan import Difference, ExtraSaved, GradientPlan, PairReading, Plan, Reduction

MEANINGS = {
    Reduction.PLAIN_STORE: "one program holds all contributions and stores the result once",
    Reduction.PARTIALS: "every program stores a partial sum in a float32 buffer, a second step adds them",
    Reduction.ATOMICS: "programs add into one float32 buffer of zeros",
    Reduction.LOOP_SWAP: "the grid runs over what the forward looped over, so that the owner of a tile sees them all",
    Reduction.SCAN: "contributions are carried along an axis from block to block",
}
"""What the kinds of reductions are, for whoever chooses one."""


def example_plan(brief: Brief) -> Plan:
    """A valid plan whose texts say what belongs in their place."""
    slug = brief.pairs[0].slug if brief.pairs else None
    reading = [PairReading(slug=slug, match="<what carries over>", mismatch="<what does not>")] if slug else []
    return Plan(
        pairs=tuple(reading),
        anchor=slug,
        differences=(Difference(difference="<what is different here>", implies="<what that means for the backward>"),),
        extra=(ExtraSaved(name="<name>", dtype="float32", shape=("<dim or expression of dims>", 64)),),
        gradients=(
            GradientPlan(
                grad=brief.grads[0],
                owner="<what one program owns of it>",
                reduction=Reduction.PLAIN_STORE,
                techniques=("recompute",),
                saved=brief.saved[:1],
                recomputed=("<value>",),
            ),
        ),
    )


def plan_json(plan: Plan) -> str:
    """A plan as JSON with one line per element."""
    parts = []
    for name, value in plan.model_dump(mode="json").items():
        if isinstance(value, list) and value:
            items = ",\n".join(f"    {json.dumps(item, ensure_ascii=False)}" for item in value)
            parts.append(f'  "{name}": [\n{items}\n  ]')
        else:
            parts.append(f'  "{name}": {json.dumps(value, ensure_ascii=False)}')
    return "{\n" + ",\n".join(parts) + "\n}"
