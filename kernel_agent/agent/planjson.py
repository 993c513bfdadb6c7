"""The JSON object in a reply: found between the fences, read strictly, refused with the line that is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from kernel_agent.agent.reply import Block, fenced_blocks
from kernel_agent.models.protocol import StopReason

LANGUAGES = frozenset({"json", "jsonc", "json5", ""})
ASKED_FOR = (
    'Answer with one fenced block that starts with ```json and holds one object: {"pairs": ..., "gradients": ...}.'
)


class NotJson(ValueError):
    """A reply without a readable object; the message says why, and at which line of the block."""


def find_object(text: str, stop: StopReason = StopReason.COMPLETE) -> dict[str, Any]:
    """The last complete fenced block that holds a plan, as an object; a reply that is nothing but an object counts.

    Raises `NotJson`.
    """
    blocks = [block for block in fenced_blocks(text, LANGUAGES) if block.text.lstrip().startswith("{")]
    complete = [block for block in blocks if block.complete]
    if not complete:
        bare = text.strip()
        if not blocks and bare.startswith("{") and bare.endswith("}"):
            complete = [Block(bare, complete=True)]
        else:
            raise NotJson(_nothing(blocks, stop))
    plans = [block for block in complete if '"gradients"' in block.text] or complete
    return _parse(plans[-1].text)


def _nothing(blocks: list[Block], stop: StopReason) -> str:
    if stop is StopReason.REFUSAL:
        return f"The model declined to answer. {ASKED_FOR}"
    if blocks or stop is StopReason.LENGTH:
        return f"The reply was cut off before its plan ended: keep the statements short. {ASKED_FOR}"
    return f"The reply holds no plan. {ASKED_FOR}"


def _parse(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text, object_pairs_hook=_without_twins, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise NotJson(f"The plan is no JSON: {_in_words(text, error)}") from None
    except RecursionError:
        raise NotJson("The plan is nested too deeply.") from None
    if not isinstance(found, dict):
        raise NotJson(f"The plan is no JSON object. {ASKED_FOR}")
    return found


def _in_words(text: str, error: json.JSONDecodeError) -> str:
    line, what = error.lineno, error.msg[:1].lower() + error.msg[1:]
    here = text[error.pos :]
    before = text[: error.pos].rstrip()
    if re.match(r"\s*[}\]]", here) and before.endswith(","):
        line, what = before.count("\n") + 1, "a trailing comma"
    elif re.match(r",\s*[}\]]", here):
        what = "a trailing comma"
    elif re.match(r"\s*(//|#|/\*)", here):
        what = "a comment"
    elif re.match(r"\s*'", here):
        what = "single quotes; strings stand in double quotes"
    elif error.msg.startswith("Invalid control character"):
        what = "a line break inside a string"
    said = text.split("\n")[line - 1].strip()
    return f"line {line} of the block, `{said:.80}`: {what}."


def _without_twins(items: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in items:
        if name in found:
            raise NotJson(f"The plan names `{name:.40}` twice in one object.")
        found[name] = value
    return found


def _no_constant(name: str) -> Iterator[None]:
    raise NotJson(f"The plan is no JSON: it holds {name}.")
