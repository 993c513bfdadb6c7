"""Shared by all rooms: one sandbox per test session, and one place that checks a pair or a mutant of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernel_agent.gate import GateOptions, Verdict, check
from kernel_agent.oracle import Truths, describe
from kernel_agent.pairs.sections import BACKWARD_MARKER, CHECK_MARKER
from kernel_agent.pairs.spec import KernelSpec
from kernel_agent.pairs.userfile import read_file
from kernel_agent.sandbox import Sandbox

PAIRS = Path(__file__).parent / "gate" / "pairs"

torch.set_num_threads(1)


class PairJudge:
    """Checks the pairs of `test/gate/pairs` and what changes make of them. Truths are computed once per session."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self._truths: dict[str, Truths] = {}

    def truths(self, name: str) -> Truths:
        """The truths of one pair, kept for the session."""
        if name not in self._truths:
            self._truths[name] = Truths(describe(read_file(PAIRS / f"{name}.py"), self.sandbox), self.sandbox)
        return self._truths[name]

    def spec(self, name: str) -> KernelSpec:
        """The spec of one pair."""
        return self.truths(name).spec

    def source(self, name: str, *changes: tuple[str, str]) -> str:
        """The pair's text with changes in its backward section. Each old text must stand there exactly once."""
        head, rest = (PAIRS / f"{name}.py").read_text().split(BACKWARD_MARKER)
        backward, check_section = rest.split(CHECK_MARKER)
        for old, new in changes:
            assert backward.count(old) == 1, f"{old!r} stands {backward.count(old)} times in the backward of {name}"
            backward = backward.replace(old, new)
        return head + BACKWARD_MARKER + backward + CHECK_MARKER + check_section

    def __call__(
        self, name: str, *changes: tuple[str, str], options: GateOptions | None = None, diagnose: bool = False
    ) -> Verdict:
        """The verdict on a pair, or on a mutant of it."""
        return self.check_source(name, self.source(name, *changes), options, diagnose=diagnose)

    def with_backward(self, name: str, backward: str, options: GateOptions | None = None) -> Verdict:
        """The verdict on a pair whose backward section is replaced."""
        text = self.source(name)
        head, rest = text.split(BACKWARD_MARKER)
        return self.check_source(
            name, f"{head}{BACKWARD_MARKER}\n{backward}\n\n{CHECK_MARKER}{rest.split(CHECK_MARKER)[1]}", options
        )

    def check_source(
        self, name: str, source: str, options: GateOptions | None = None, *, diagnose: bool = False
    ) -> Verdict:
        """The verdict on any text, with the named pair as the truth."""
        options, truths = options or GateOptions(), self.truths(name)
        return check(self.spec(name), source, self.sandbox, options, truths=truths, diagnose=diagnose)


@pytest.fixture(scope="session")
def sandbox() -> Iterator[Sandbox]:
    """One fork server for the whole session: starting it costs more than most tests."""
    with Sandbox() as shared:
        yield shared


@pytest.fixture(scope="session")
def judge(sandbox: Sandbox) -> PairJudge:
    """Checks pairs and mutants."""
    return PairJudge(sandbox)
