"""What a reply's record takes and what it makes of it."""

from __future__ import annotations

from kernel_agent.models.protocol import Reply


def test_halves_of_characters_in_a_reply_can_be_written() -> None:
    # JSON from a server may name them; a file and the ledger take none, and the run would end without a verdict.
    reply = Reply(text="a \ud83d\ude00 and \ud800 alone", reasoning="\udfff", model="m")
    assert reply.text == "a \U0001f600 and \ufffd alone"
    assert reply.reasoning == "\ufffd"
    assert Reply.model_validate_json(reply.model_dump_json()) == reply
