"""Print what the agent itself takes between a reply and the next ask, and to its first ask: wall clock and processor.

Run: python bench/overhead.py [TIMES] > bench/overhead.txt      (a minute or two each on an idle machine)

Layernorm is run with replies that are at hand: a plan, and a draft in which a term of dx is forgotten, so that it is
red. First in one process, as with a hosted model; then ask by ask, each reply read by a process of its own, as with
`--backend manual --no-wait`. What the gate takes to judge is left out, the reference phase as well: they run kernels.
Processor time is that of the process and of all its children.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kernel_agent.agent.events import Entry, Judged
from kernel_agent.agent.observer import Unwatched
from kernel_agent.agent.runs import Changes, resume, run
from kernel_agent.config import Backend, RunConfig
from kernel_agent.errors import KernelAgentError
from kernel_agent.models.protocol import Conversation, OnNotice, Progress, Reply

ROOT = Path(__file__).resolve().parents[1]
FORWARD = ROOT / "examples" / "layernorm.py"
RIGHT = ROOT / "bench" / "layernorm_reply.md"
SLIP = ("(b_wdy - along_one - b_xhat * along_xhat) * rstd", "(b_wdy - along_one) * rstd")


@dataclass(frozen=True)
class Mark:
    """One event, when it was in the ledger."""

    event: str
    wall_s: float
    cpu_s: float
    """Of the process and its children, from its start."""
    judged_s: float = 0.0
    """That a verdict took, on the wall clock."""


@dataclass(frozen=True)
class Spent:
    """Time of one step."""

    step: str
    wall_s: float
    cpu_s: float | None
    """None where the gate's share cannot be told apart."""


class Marks(Unwatched):
    """Notes when events happen."""

    def __init__(self) -> None:
        self.marks: list[Mark] = []

    def on_event(self, entry: Entry) -> None:
        """See `Observer.on_event`."""
        event = entry.event
        judged = event.verdict.seconds if isinstance(event, Judged) else 0.0
        self.marks.append(Mark(event.event, time.time(), processor(), judged))


def processor() -> float:
    """Seconds of processor that this process and its children have taken."""
    tick = os.sysconf("SC_CLK_TCK")
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    own = [f"/proc/{pid}/stat" for pid in ("self", *children)]
    fields = [Path(path).read_text().rpartition(")")[2].split() for path in own if Path(path).exists()]
    return sum(int(number) for field in fields for number in field[11:15]) / tick


def plan_for(ask: str) -> str:
    """A plan of layernorm's backward that reads the pairs which the ask shows."""
    slugs = list(dict.fromkeys(re.findall(r'\{"slug": "(\w+)"', ask)))
    rows = {"owner": "a share of the rows", "whole": ["N"], "reduction": "partials", "saved": ["x", "mean", "rstd"]}
    row = {**rows, "owner": "one row", "reduction": "plain store", "techniques": ["row-local"]}
    plan = {
        "pairs": [{"slug": slug, "match": "the sums", "mismatch": "the layout"} for slug in slugs],
        "anchor": slugs[0] if slugs else None,
        "differences": [{"difference": "strides of rows", "implies": "they are passed"}],
        "gradients": [
            {"grad": "x", **row},
            {"grad": "weight", **rows, "techniques": ["persistent-grid"]},
            {"grad": "bias", **rows, "techniques": ["persistent-grid"]},
        ],
    }
    return f"```json\n{json.dumps(plan)}\n```\n"


def reply_to(ask: str, number: int) -> str:
    """The first reply is a plan, the second a draft with a slip."""
    return plan_for(ask) if number == 1 else RIGHT.read_text(encoding="utf-8").replace(*SLIP)


class AtHand:
    """A model that takes no time."""

    name = "at hand"
    limit: int | None = None

    def __init__(self, config: RunConfig, run_dir: Path, /, *, on_notice: OnNotice) -> None:
        """As `kernel_agent.models.make_model` is called."""

    def ask(
        self,
        conversation: Conversation,
        *,
        number: int | None = None,
        on_text: Progress | None = None,  # noqa: ARG002
        max_output: int | None = None,  # noqa: ARG002
    ) -> Reply:
        """See `Model.ask`; after two replies the run has what is measured."""
        if (number or 1) > 2:
            raise KernelAgentError("enough", remedy="none is needed")
        return Reply(text=reply_to(conversation.turns[-1].text, number or 1), model=self.name)


def marks_of(arguments: Sequence[str]) -> list[Mark]:
    """Run this file in a process of its own; its first mark is its start."""
    start = time.time()
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=True)
    marks = [Mark(**mark) for mark in json.loads(done.stdout.splitlines()[-1])]
    return [Mark("started", start, 0.0), *marks]


def one_process(folder: Path) -> list[Spent]:
    """All replies in one process."""
    marks = marks_of(["--all", str(folder)])
    places = [place for place, mark in enumerate(marks) if mark.event == "replied"]
    steps = ("plan -> next ask", "red verdict -> next ask")
    return [_gap(marks, place, step) for step, place in zip(steps, places, strict=False)]


def own_processes(folder: Path) -> list[Spent]:
    """Each reply in a process of its own."""
    spent = [_first(marks_of(["--first", str(folder)]))]
    (path,) = (path for path in folder.glob("*/runs/*") if not path.is_symlink())
    for number, step in ((1, "plan -> next ask, own process"), (2, "red verdict -> next ask, own process")):
        ask = (path / "asks" / f"{number:04d}.md").read_text(encoding="utf-8")
        (path / "replies" / f"{number:04d}.md").write_text(reply_to(ask, number), encoding="utf-8")
        spent.append(_gap(marks_of(["--next", str(path)]), 0, step))
    return spent


def _first(marks: Sequence[Mark]) -> Spent:
    """From the start to the first ask, without the reference phase."""
    at = {mark.event: mark for mark in marks}
    reference = at["phase_ended"].wall_s - at["spec_described"].wall_s
    return Spent("start -> first ask, without phase 1", at["asked"].wall_s - marks[0].wall_s - reference, None)


def _gap(marks: Sequence[Mark], place: int, step: str) -> Spent:
    """From a mark to the next ask, without what judging took in between."""
    end = next(n for n, mark in enumerate(marks) if n > place and mark.event == "asked")
    judged = [n for n in range(place, end) if marks[n].event == "judged"]
    wall = marks[end].wall_s - marks[place].wall_s - sum(marks[n].judged_s for n in judged)
    cpu = marks[end].cpu_s - marks[place].cpu_s
    if judged and marks[place].event == "started":
        return Spent(step, wall, None)  # the gate's server starts while its first case waits
    return Spent(step, wall, cpu - sum(marks[n].cpu_s - marks[n - 1].cpu_s for n in judged))


def table(rounds: Sequence[Sequence[Spent]]) -> str:
    """Median and largest of every step."""
    lines = [f"{'step':<40} {'wall s, median':>14} {'largest':>8} {'processor s, median':>20} {'largest':>8}"]
    for spent in zip(*rounds, strict=True):
        wall, cpu = [one.wall_s for one in spent], [one.cpu_s for one in spent if one.cpu_s is not None]
        work = f"{statistics.median(cpu):>20.2f} {max(cpu):>8.2f}" if cpu else f"{'-':>20} {'-':>8}"
        lines.append(f"{spent[0].step:<40} {statistics.median(wall):>14.2f} {max(wall):>8.2f} {work}")
    return "\n".join(lines)


def _in_this_process(arguments: Sequence[str]) -> None:
    """What `marks_of` runs."""
    watch = Marks()
    kind, path = arguments
    config = RunConfig(file=FORWARD, device="cpu", out=Path(path), backend=Backend.MANUAL, wait=False)
    try:
        if kind == "--all":
            run(config, watch, model=AtHand)
        elif kind == "--first":
            run(config, watch)
        else:
            resume(Path(path), watch, Changes(wait=False))
    except KernelAgentError:  # it waits for a reply
        pass
    print(json.dumps([vars(mark) for mark in watch.marks]))


def main(times: int) -> None:
    """Print the figures and the load they were taken on."""
    before, rounds = os.getloadavg()[0], []
    for _ in range(times):
        with tempfile.TemporaryDirectory() as folder:
            rounds.append([*one_process(Path(folder, "one")), *own_processes(Path(folder, "own"))])
    print(table(rounds))
    load = f"load average {before:.1f} before and {os.getloadavg()[0]:.1f} after"
    print(f"\n{times} times; {os.cpu_count()} processors, {load}")


if __name__ == "__main__":
    given_arguments = sys.argv[1:]
    if given_arguments and given_arguments[0].startswith("--"):
        _in_this_process(given_arguments)
    else:
        main(int(given_arguments[0]) if given_arguments else 3)
