"""`CompilerModel`: answers the nth ask with the nth best pair that the compiler derives of the forward.

Nothing of an ask is read: what the compiler needs is the file. No network, no key, no cost.
"""

from __future__ import annotations

import time
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from kernel_agent.errors import ExitCode
from kernel_agent.models.errors import ModelError
from kernel_agent.models.exchange import Exchange
from kernel_agent.models.protocol import Conversation, OnNotice, Progress, Reply, unheard
from kernel_agent.pairs.sections import BACKWARD_MARKER, FORWARD_MARKER
from kernel_agent.pairs.userfile import read_file

if TYPE_CHECKING:
    from kernel_agent.compiler.derived import Draft

MODELS = "Models are asked with --backend openai, anthropic or manual."
"""Said behind every remedy: a backward may be had without the compiler."""


class NothingDerived(ModelError):
    """The compiler has no backward for this forward, or none that the gate accepts."""

    exit_code = ExitCode.RED


class CompilerModel:
    """A source of backwards that derives them."""

    name = "compiler"

    def __init__(self, file: Path, run: Path, *, on_notice: OnNotice = unheard) -> None:
        """`file`: the forward; `run`: the folder of the run that asks, which tells how many replies it has taken."""
        self._file = file
        self._asking = Exchange(run)
        self._taken = 0
        self._on_notice = on_notice

    @cached_property
    def _drafts(self) -> list[Draft]:
        from kernel_agent.compiler.derive import drafts
        from kernel_agent.compiler.errors import CannotDerive
        from kernel_agent.compiler.preload import PRELOAD
        from kernel_agent.oracle import describe
        from kernel_agent.sandbox import Sandbox

        try:
            with Sandbox(PRELOAD) as sandbox:
                return drafts(describe(read_file(self._file), sandbox), sandbox)[0]
        except CannotDerive as error:
            place = f" (line {error.line})" if error.line else ""
            raise NothingDerived(
                f"the compiler cannot derive this forward{place}: {error.message}",
                remedy=f"{error.remedy} {MODELS}".lstrip(),
            ) from error

    def _unproven(self) -> NothingDerived:
        from kernel_agent.compiler.faults import unproven
        from kernel_agent.compiler.preload import PRELOAD
        from kernel_agent.sandbox import Sandbox

        reason = "no derived backward is proven: the gate accepts none of the compiler's schedules"
        with Sandbox(PRELOAD) as sandbox:
            error = unproven(reason, read_file(self._file), sandbox)
        return NothingDerived(error.message, remedy=f"{error.remedy} {MODELS}")

    @property
    def limit(self) -> int:
        """Pairs that were derived."""
        return len(self._drafts)

    def ask(
        self,
        conversation: Conversation,  # noqa: ARG002 - the file says it all
        *,
        number: int | None = None,
        on_text: Progress | None = None,
        max_output: int | None = None,  # noqa: ARG002 - source text is not cut
    ) -> Reply:
        """The derived pair with this number. Raises `NothingDerived` after the last one, or where there is none."""
        start = time.perf_counter()
        number = number or max(self._taken, self._asking.received()) + 1
        if number > self.limit:
            raise self._unproven()
        self._taken = number
        text = _told(self._drafts[number - 1])
        if on_text is not None:
            on_text(text)
        return Reply(text=text, latency_s=time.perf_counter() - start, cost_usd=0.0, model=self.name)


def _told(draft: Draft) -> str:
    """The reply: which schedule, why not another, and both sections."""
    schedules = ", ".join(dict.fromkeys(draft.schedules)) or draft.schedule
    remarks = "".join(f"- {remark}\n" for remark in draft.remarks)
    forward = f"{FORWARD_MARKER}\n{(draft.candidate.forward or '').rstrip()}\n\n\n"
    backward = f"{BACKWARD_MARKER}\n{draft.candidate.backward.rstrip()}\n"
    return f"Derived from the kernels' IR, schedule: {schedules}.\n{remarks}\n```python\n{forward}{backward}```\n"
