"""Launches that may begin before the ones in front of them are done: `launch_pdl`, and the wait in their kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernel_agent.ir.program import Module
from kernel_agent.ir.sanitizer.findings import Finding, FindingKind

EARLY = "launch_pdl"
_WAIT = "griddepcontrol.wait"


def begins_too_early(module: Module, keywords: Mapping[str, Any]) -> Finding | None:
    """What is wrong with a launch that may overlap the ones before it and waits for none of them."""
    if not keywords.get(EARLY):
        return None
    assembly = (str(op.attributes.get("asm_string", "")) for op in module.all_ops)
    if any(_WAIT in text for text in assembly):
        return None
    kernel = module.entry.name
    message = (
        f"{kernel} is launched with {EARLY} and never waits: it may read what the one before has not written yet; "
        "call tl.extra.cuda.gdc_wait() before its first access"
    )
    return Finding(FindingKind.RACE, message, kernel=kernel)
