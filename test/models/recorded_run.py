"""A recorded run as the tool leaves it: ledger, asks and replies."""

from __future__ import annotations

import json
from pathlib import Path

from kernel_agent.models import Conversation, Exchange, Reply, Usage
from kernel_agent.pairs.spec import content_hash

FORWARD = "def forward(x):\n    return x\n"


def record(run: Path, conversation: Conversation, *texts: str, source: str = FORWARD) -> list[Reply]:
    """A recorded run: the same conversation asked once per text."""
    run.mkdir(parents=True)
    started = {"number": 1, "at": "", "event": {"event": "run_started", "hash8": content_hash(source)[:8]}}
    (run / "trace.jsonl").write_text(json.dumps(started) + "\n")
    replies = [
        Reply(
            text=text, reasoning=f"why {text}", usage=Usage(input=9, output=3), cost_usd=0.5, latency_s=2.0, model="m"
        )
        for text in texts
    ]
    for number, reply in enumerate(replies, start=1):
        Exchange(run).write_ask(number, conversation)
        Exchange(run).write_reply(number, reply)
    return replies
