"""Backwards as correct people write them, each in a style of its own. All are green: a refusal is a false alarm.

A file of `styles/` is a pair for the truth of the one in `pairs/` that its folder is named after, or the backward
section of it alone. Each uses something
of Python, torch or Triton that the capture, the record of a call, the looks at lasting state or the kernels without
their file once took, or may take, for something else.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_agent.pairs.sections import FORWARD_MARKER

STYLES = sorted((Path(__file__).parent / "styles").glob("*/*.py"))


@pytest.mark.parametrize("path", STYLES, ids=[path.stem for path in STYLES])
def test_an_honest_backward_is_green_whatever_its_style(judge, path: Path) -> None:
    text = path.read_text()
    check = judge.check_source if FORWARD_MARKER in text else judge.with_backward
    verdict = check(path.parent.name, text)
    assert verdict.green, (verdict.status, verdict.message, verdict.details)
