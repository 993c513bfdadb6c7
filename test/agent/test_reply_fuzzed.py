"""Whatever text a model replies has a verdict, soon, and leaves nothing. The examples are those of bench/fuzz.py."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from fuzz import EDITS_REFUSED, SLOWEST_REPLY_S, TO_THE_SANDBOX, drawn, way_of_a_reply
from fuzzed_replies import HONEST, NESTINGS, REPLIES
from leftovers import left_since, own_temporary_folder, take_inventory
from scripted import FORWARD, Script, config, spec_of

from kernel_agent.agent.runs import run
from kernel_agent.gate.verdict import Status
from kernel_agent.pairs.userfile import read_file

SPEC = spec_of(read_file(FORWARD))
ENDS = {status.value for status in Status} - {Status.GREEN.value} | {EDITS_REFUSED, TO_THE_SANDBOX}


def test_any_reply_has_a_typed_end_in_time_and_leaves_nothing() -> None:
    # An exception that is not ours, a pattern that takes the square of a line's length, or a file that stays, fails.
    with own_temporary_folder() as folder:
        run_folder = folder / "run"
        assert way_of_a_reply(HONEST, SPEC, run_folder) == TO_THE_SANDBOX
        before = take_inventory(None, kept=run_folder)

        def ends(text: str) -> None:
            start = time.monotonic()
            assert way_of_a_reply(text, SPEC, run_folder) in ENDS
            assert time.monotonic() - start < SLOWEST_REPLY_S

        drawn(REPLIES, 80, 7, ends)
        left = left_since(before, None, kept=run_folder)
    assert left.nothing, left
    assert left.memory_bytes < 100 << 20


@pytest.mark.parametrize("depth", [400, 3000])
def test_code_that_nests_without_end_has_a_typed_end(tmp_path: Path, depth: int) -> None:
    # What Python's parser still takes, a function that calls itself for every level does not survive.
    for nesting in NESTINGS:
        text = HONEST.replace("return dx, dw", f"return dx, dw\n\n\n{nesting(depth)}")
        assert way_of_a_reply(text, SPEC, tmp_path) in ENDS, nesting(3)


def test_a_run_goes_on_after_any_replies(tmp_path: Path) -> None:
    # The whole loop: the ledger takes each reply, prompts quote it, and the next ask is made.
    replies: list[str] = []
    right, wrong = "tl.store(DW + cols, dy * tl.load(X", "tl.store(DW + cols, dy * tl.load(W"
    drawn(REPLIES, 12, 11, lambda text: replies.append(text.replace(right, wrong)))
    script = Script(*replies)
    finished = run(config(tmp_path, max_iters=len(replies)), tools=script.tools, model=script.model)
    assert len(finished.state.rounds) == len(replies)
    assert all(asked.settled for asked in finished.state.rounds)
