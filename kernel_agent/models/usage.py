"""Tokens of a reply that nobody counted, estimated from its texts."""

from __future__ import annotations

from kernel_agent.models.protocol import Conversation, Reply, Usage, UsageKind
from kernel_agent.models.tokens import estimate_tokens


def usage_words(usage: Usage) -> str:
    """`11,603 tokens in (9,216 cached), 2,114 out (512 reasoning)`, or `about ... (estimated)`."""
    if usage.kind is UsageKind.ESTIMATED:
        return f"about {usage.input:,} tokens in, {usage.output:,} out (estimated)"
    return f"{usage.input:,} tokens in ({usage.cached:,} cached), {usage.output:,} out ({usage.reasoning:,} reasoning)"


def estimated_usage(conversation: Conversation, reply: Reply) -> Usage:
    """What asking and answering took, by `estimate_tokens`; nothing is known of a cache."""
    asked = estimate_tokens(conversation.system) + sum(estimate_tokens(turn.text) for turn in conversation.turns)
    answered = estimate_tokens(reply.text) + estimate_tokens(reply.reasoning or "")
    return Usage(kind=UsageKind.ESTIMATED, input=asked, output=answered)
