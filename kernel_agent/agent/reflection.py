"""`read_plan`: from the reply to the ask for a plan to a `Plan` that holds together, or to all that is wrong with it.

What is only spelt otherwise (`dx` for `x`, `norm_row/layernorm_row`, `plain_store`) is put right. What would leave the
code without a plan (an empty statement, a technique that nobody knows, a gradient that is not there) is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from kernel_agent.agent.events import RetrievedPair
from kernel_agent.agent.plan import Plan, Reduction
from kernel_agent.agent.planchecks import PlanChecks, nearest
from kernel_agent.agent.planjson import NotJson, find_object
from kernel_agent.models.protocol import StopReason
from kernel_agent.pairs.forward_facts import ForwardFacts
from kernel_agent.pairs.generated import saved_layout
from kernel_agent.pairs.spec import KernelSpec

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

UNSAID = "..."
"""Stands in the skeleton for a statement that the model is to make."""


@dataclass(frozen=True)
class PlanReading:
    """What a reply to the ask for a plan holds."""

    plan: Plan | None
    """None when there is a problem."""
    problem: str = ""
    """Everything that is wrong, one line each under a headline; empty for a plan."""
    notes: tuple[str, ...] = ()
    """What is doubtful in the plan, or was put right; one sentence each."""


def read_plan(
    text: str,
    spec: KernelSpec,
    pairs: Sequence[RetrievedPair],
    *,
    facts: ForwardFacts | None = None,
    freeze_forward: bool = False,
    stop: StopReason = StopReason.COMPLETE,
) -> PlanReading:
    """Find the plan in a reply and check it against the spec and the retrieved pairs that were shown.

    `facts` tell which gradients sum over programs. With `freeze_forward` a plan may save nothing of its own.
    """
    try:
        found = find_object(text, stop)
    except NotJson as problem:
        return PlanReading(None, str(problem))
    try:
        plan = Plan.model_validate(_spelt(found, spec, pairs))
    except ValidationError as error:
        return PlanReading(None, _problem(_in_words(error)))
    checks = PlanChecks(spec, tuple(pairs), facts, freeze_forward)
    plan = checks.run(plan)
    if checks.problems:
        return PlanReading(None, _problem(checks.problems))
    return PlanReading(plan, notes=tuple(checks.notes))


def plan_skeleton(spec: KernelSpec, pairs: Sequence[RetrievedPair]) -> str:
    """The JSON that is asked for, with every slug and gradient in its place and `...` for what is to be said.

    It would be refused as it stands: `...` says nothing.
    """
    gradient = {
        "owner": UNSAID,
        "whole": [UNSAID],
        "reduction": " | ".join(reduction.value for reduction in Reduction),
        "techniques": [UNSAID],
        "saved": list(saved_layout(spec)[:1]) or [UNSAID],
        "recomputed": [],
    }
    return json.dumps(
        {
            "pairs": [{"slug": pair.slug, "match": UNSAID, "mismatch": UNSAID} for pair in pairs],
            "anchor": pairs[0].slug if pairs else None,
            "differences": [{"difference": UNSAID, "implies": UNSAID}] if pairs else [],
            "extra": [],
            "scratch": [],
            "gradients": [{"grad": grad, **gradient} for grad in spec.grads],
        },
        indent=1,
    )


def _spelt(found: dict[str, Any], spec: KernelSpec, pairs: Sequence[RetrievedPair]) -> dict[str, Any]:
    """The object with names as this package spells them; what is of another kind is left for the validation."""
    plan = dict(found)
    plan["pairs"] = [_changed(item, slug=_slug) for item in _items(plan, "pairs")]
    if isinstance(plan.get("anchor"), str):
        nothing = plan["anchor"].strip().lower() in ("", "none", "null")
        plan["anchor"] = None if nothing else _slug(plan["anchor"])
    elif "anchor" not in plan and not pairs:
        plan["anchor"] = None
    plan["gradients"] = [
        _changed(item, grad=lambda name: _grad(name, spec), reduction=_reduction, techniques=_tags)
        for item in _items(plan, "gradients")
    ]
    return plan


def _items(plan: dict[str, Any], name: str) -> Any:
    value = plan.get(name, [])
    return value if isinstance(value, list) else [value]


def _changed(item: Any, **changes: Callable[[Any], Any]) -> Any:
    if not isinstance(item, dict):
        return item
    return {name: changes[name](value) if name in changes else value for name, value in item.items()}


def _slug(said: Any) -> Any:
    return said.strip().rpartition("/")[2].removesuffix(".py") if isinstance(said, str) else said


def _grad(said: Any, spec: KernelSpec) -> Any:
    """`x` for `dx`, `grad_x` or `d_x`, unless an input has that very name."""
    if not isinstance(said, str) or said in spec.grads:
        return said
    for prefix in ("grad_", "d_", "d"):
        if said.removeprefix(prefix) in spec.grads:
            return said.removeprefix(prefix)
    return said


def _reduction(said: Any) -> Any:
    return " ".join(_bare(said).lower().replace("_", " ").replace("-", " ").split()) if isinstance(said, str) else said


def _tags(said: Any) -> Any:
    if not isinstance(said, list):
        return said
    return ["-".join(_bare(tag).lower().replace("_", " ").split()) if isinstance(tag, str) else tag for tag in said]


def _bare(said: str) -> str:
    """A word without the remark in brackets behind it."""
    return said.partition("(")[0]


def _in_words(error: ValidationError) -> list[str]:
    return [_complaint(item) for item in error.errors()]


def _complaint(item: ErrorDetails) -> str:
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in item["loc"]).removeprefix(".")
    if item["type"] == "missing":
        return f"`{place}` is missing."
    if item["type"] == "extra_forbidden":
        return f"`{place}` is no field of a plan."
    if item["type"] == "enum" and isinstance(item["input"], str):
        known = [reduction.value for reduction in Reduction]
        listed = ", ".join(f"`{value}`" for value in known)
        return f"`{place}` is `{item['input']:.60}`{nearest(item['input'], known)}; it is one of {listed}."
    return f"`{place}`: {item['msg'][:1].lower()}{item['msg'][1:]}, not {json.dumps(item['input'])[:60]}."


def _problem(lines: Sequence[str]) -> str:
    count = "One thing is" if len(lines) == 1 else f"{len(lines)} things are"
    return f"{count} wrong with the plan:\n" + "\n".join(f"- {line}" for line in lines)
