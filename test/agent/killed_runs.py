"""Kill a scripted run with SIGKILL at every event, resume it, and print what came of each as JSON. Run by test_resume.

One process is forked for each run and one for each resume, so that nothing survives a kill but what is on disk.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from scripted import BACKWARD, CRASHING, NO_CODE, SWAPPED, Script, config, reply_text

from kernel_agent.agent.events import Entry, Event
from kernel_agent.agent.ledger import Ledger, read_ledger
from kernel_agent.agent.runs import resume, run

REPLIES = (SWAPPED, CRASHING, CRASHING + "# again\n", BACKWARD)


def script(out: Path) -> Script:
    """Wrong, crash, no code, crash (rolls back), right: every kind of event but those of a GPU."""
    texts = [reply_text(code) for code in REPLIES]
    return Script(*texts[:2], NO_CODE, *texts[2:], log=out.with_suffix(".asks"))


def forked(work: object) -> int:
    """Run a callable in a child and return its wait status."""
    child = os.fork()
    if child == 0:
        try:
            work()  # type: ignore[operator]
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def kill_at(number: int, *, written: bool) -> None:
    """Make this process die of SIGKILL at the nth event, just before it is written or just after."""
    append = Ledger.append

    def dying(ledger: Ledger, event: Event) -> Entry:
        here = len(tuple(ledger)) + 1 == number
        if here and not written:
            os.kill(os.getpid(), signal.SIGKILL)
        entry = append(ledger, event)
        if here:
            os.kill(os.getpid(), signal.SIGKILL)
        return entry

    Ledger.append = dying  # type: ignore[method-assign]


def killed_and_resumed(out: Path, number: int | None, *, written: bool) -> dict[str, object]:
    """One run, killed at the nth event (None: never) and resumed."""
    mine = script(out)

    def first() -> None:
        if number is not None:
            kill_at(number, written=written)
        run(config(out, patience=2), tools=mine.tools, model=mine.model)

    died = os.WTERMSIG(forked(first))
    (path,) = out.glob("product-*/runs/2*")
    status = 0 if number is None else forked(lambda: resume(path, tools=mine.tools, model=mine.model))
    entries = read_ledger(path / "trace.jsonl").entries
    kept = [
        entry.event.model_dump(mode="json") for entry in entries if entry.event.event not in {"run_started", "resumed"}
    ]
    return {
        "died": died,
        "resumed": status,
        "events": kept,
        "asks": mine.log.read_text().split() if mine.log else [],
        "delivered": (path.parent.parent / "product_backward.py").read_text(),
        "trace": (path / "trace.md").is_file(),
        "files": sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()),
    }


def main(folder: Path) -> None:
    """Print the outcome of the undisturbed run, then one for every way to be killed."""
    whole = killed_and_resumed(folder / "whole", None, written=True)
    print(json.dumps(whole))
    count = len(whole["events"]) + 1  # type: ignore[arg-type]
    for number in range(1, count + 1):
        for written in (False, True):
            if number == 1 and not written:
                continue  # before its first event a run has neither asked nor stored anything
            print(json.dumps(killed_and_resumed(folder / f"{number}-{written}", number, written=written)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
