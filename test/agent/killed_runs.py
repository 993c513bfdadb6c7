"""Kill a scripted run with SIGKILL at every event, resume it, and print what came of each as JSON. Run by test_resume.

One process is forked for each run and one for each resume, so that nothing survives a kill but what is on disk.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

from scripted import CRASHING, NO_CODE, OTHER_WRONG, PLAN, SWAPPED, Script, config, reply_text

from kernel_agent.agent.events import Entry, Event
from kernel_agent.agent.ledger import Ledger, read_ledger
from kernel_agent.agent.runs import resume, run

BAD_EDIT = "<<<<<<< SEARCH\nnothing like it\n=======\n\n>>>>>>> REPLACE\n"


def script(out: Path) -> Script:
    """A plan, two drafts at once, an edit that fails, no code, a crash (rolls back), and what a splice makes right."""
    texts = [reply_text(code) for code in (CRASHING, SWAPPED, CRASHING + "# again\n", OTHER_WRONG)]
    replies = (PLAN, *texts[:2], BAD_EDIT, NO_CODE, *texts[2:])
    return Script(*replies, log=out.with_suffix(".asks"), retrieve_techniques=lambda spec, wanted, shown: ())


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
        if here:
            # A reply that is still on its way when a run dies is asked for again: let those of the drafts arrive.
            for thread in threading.enumerate():
                if thread is not threading.current_thread():
                    thread.join(10)
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
        run(config(out, patience=2, reflect=True, candidates=2), tools=mine.tools, model=mine.model)

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
        "asks": sorted(mine.log.read_text().split()) if mine.log else [],
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
