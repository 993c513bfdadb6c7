"""The worked example of docs/compiler.md is what the compiler prints."""

from __future__ import annotations

import re
from pathlib import Path

from kernel_agent.compiler.derive import drafts
from kernel_agent.compiler.schedule.schedules import SCHEDULES
from kernel_agent.oracle import describe
from kernel_agent.pairs.userfile import read_file
from kernel_agent.sandbox import Sandbox

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "compiler.md").read_text()
FORWARD, BACKWARD, *ATTENTION = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_forward_of_the_worked_example_is_that_of_the_file():
    body = "".join(f"    {line}\n" if line else "\n" for line in FORWARD.splitlines())
    assert body in (ROOT / "examples" / "rmsnorm.py").read_text()


def test_the_backward_of_the_worked_example_is_what_is_derived(sandbox: Sandbox):
    # A kernel, a check or a buffer that is printed otherwise would differ from the page.
    written, _ = drafts(describe(read_file(ROOT / "examples" / "rmsnorm.py"), sandbox), sandbox, ("rows",))
    assert written[0].schedules == ("rows",)
    assert written[0].candidate.backward.strip() == BACKWARD.strip()


def test_what_the_page_shows_of_attention_is_what_is_derived(sandbox: Sandbox):
    # Loops without masks, bounds solved for the diagonal, products the right way round: each by a pass of its own.
    written, _ = drafts(describe(read_file(ROOT / "examples" / "attention.py"), sandbox), sandbox, ("split",))
    assert written[0].schedules == ("split", "split")
    backward = written[0].candidate.backward
    assert "atomic" not in backward
    assert max(map(len, backward.splitlines())) <= 120
    for shown in ATTENTION:
        for part in re.split(r"(?<=\n)(?=    \S)", shown):
            assert part in backward


def test_every_schedule_has_a_row_in_the_order_in_which_they_are_tried():
    assert tuple(re.findall(r"^\| `(rows|split|owned|plain)` \|", PAGE, re.MULTILINE)) == SCHEDULES
