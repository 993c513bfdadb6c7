"""Options into a `RunConfig`, with complaints in the words of the command line."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from kernel_agent.config import RunConfig
from kernel_agent.errors import InputError

OPTIONS = {"file": "--file-path", "effort": "--reasoning-effort", "rag": "--no-rag", "wait": "--no-wait"}
"""Options whose name is not that of the field with dashes."""

ALLOWED = {
    "backend": "openai, anthropic, manual, replay or compiler",
    "device": "auto, cpu, cuda or cuda:N",
    "effort": "minimal, low, medium or high",
    "topk": "a whole number from 0 to 32",
    "min_sim": "a number from 0 to 1",
    "draft": "compiler, rag or none",
    "candidates": "a whole number from 1 to 16",
    "tune_variants": "a whole number of at least 0",
    "tune_seconds": "a number of at least 0",
    "max_iters": "a whole number of at least 1",
    "patience": "a whole number of at least 1",
    "min_rel_impr": "a number of at least 0",
    "max_cost_usd": "a number above 0",
    "max_tokens": "a whole number above 0",
}
"""What the values of an option may be."""


def make_config(**fields: Any) -> RunConfig:
    """Validated configuration. Raises `InputError` that names the option and what it may be."""
    try:
        return RunConfig.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0])
        option = OPTIONS.get(field, "--" + field.replace("_", "-"))
        wanted = f"must be {ALLOWED[field]}, not {first['input']!r}" if field in ALLOWED else first["msg"]
        raise InputError(f"{option} {wanted}", remedy="kernel-agent --help lists the options") from None
