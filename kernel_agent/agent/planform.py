"""Plans as text: the form that is asked for, and a plan as the reply that a model gave."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from kernel_agent.agent.events import RetrievedPair
from kernel_agent.agent.plan import ExtraSaved, Plan, Reduction
from kernel_agent.agent.reflection import plan_skeleton
from kernel_agent.pairs.spec import KernelSpec

MEANINGS = {
    Reduction.PLAIN_STORE: "one program holds all contributions and stores the result once",
    Reduction.PARTIALS: "every program stores a partial sum in a float32 buffer, a second step adds them",
    Reduction.ATOMICS: "programs add into one float32 buffer of zeros",
    Reduction.LOOP_SWAP: "the grid runs over what the forward looped over, so that the owner of a tile sees them all",
    Reduction.SCAN: "contributions are carried along an axis from block to block",
}
"""What the kinds of reductions are, for whoever chooses one."""


def plan_form(spec: KernelSpec, pairs: Sequence[RetrievedPair]) -> str:
    """The JSON that is asked for: every pair and gradient in its place, `...` for what is to be said."""
    form: dict[str, object] = json.loads(plan_skeleton(spec, pairs))
    return _by_lines(form)


def extra_form() -> str:
    """One element of `extra`, with what belongs into each field."""
    fields = ExtraSaved.model_fields.items()
    return "{" + ", ".join(f'"{name}": <{field.description or name}>' for name, field in fields) + "}"


def plan_json(plan: Plan) -> str:
    """A plan as a reply would hold it."""
    return _by_lines(plan.model_dump(mode="json"))


def _by_lines(form: Mapping[str, object]) -> str:
    """JSON with one line per element of the lists at the top: short, and still to be read."""
    parts = []
    for name, value in form.items():
        if isinstance(value, list) and value:
            items = ",\n".join(f"    {json.dumps(item, ensure_ascii=False)}" for item in value)
            parts.append(f'  "{name}": [\n{items}\n  ]')
        else:
            parts.append(f'  "{name}": {json.dumps(value, ensure_ascii=False)}')
    return "{\n" + ",\n".join(parts) + "\n}"
