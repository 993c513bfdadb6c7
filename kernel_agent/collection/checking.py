"""A check of many pairs: what is asked of their texts at once, what is recorded already, and what must be judged."""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernel_agent.collection.likeness import near_duplicates
from kernel_agent.collection.pairfiles import pair_files, results_folder
from kernel_agent.collection.verdicts import PairVerdict, Standing, VerdictBook
from kernel_agent.collection.worker import COMMAND, Answer, Task
from kernel_agent.collection.workers import Begun, Workers
from kernel_agent.data import is_own
from kernel_agent.errors import InputError
from kernel_agent.pairs.lint import lint
from kernel_agent.pairs.sections import split_sections


class Outcome(str, enum.Enum):
    """What a check says of a pair."""

    GREEN = "GREEN"
    RED = "RED"
    NOT_JUDGED = "NOT JUDGED"


@dataclass(frozen=True)
class Row:
    """One pair and what is known of it now."""

    path: Path
    complaints: tuple[str, ...] = ()
    """Broken rules of the collection, likeness to other pairs among them."""
    verdict: PairVerdict | None = None
    recorded: bool = False
    """The verdict was recorded before, and nothing was run."""
    problem: str = ""
    """Why there is no verdict."""
    seconds: float = 0.0
    """Processor time of the judgement."""

    @property
    def outcome(self) -> Outcome:
        """Green needs a green verdict and no complaint."""
        if self.verdict is None:
            return Outcome.NOT_JUDGED
        return Outcome.GREEN if self.verdict.green and not self.complaints else Outcome.RED


@dataclass(frozen=True)
class Options:
    """How a check goes."""

    jobs: int
    fresh: bool = False
    """Judge again what is recorded."""
    quick: bool = False
    """One small shape, and no compile."""
    record: bool = True
    """Write full verdicts beside the pairs."""


def check_pairs(files: Sequence[Path], options: Options) -> Iterator[Begun | Row]:
    """Judge pairs in several processes, telling which one a process begins with and each result as it comes.

    What is recorded comes first. A verdict is recorded before it is told, so that stopping keeps what was judged.
    Raises `InputError` for a damaged record, `EnvironmentProblem` where a verdict cannot be written.
    """
    from kernel_agent.collection.proof import RULES  # loads torch

    complaints = complaints_about(files)
    if options.record:
        for path in {path.resolve().parent: path for path in files}.values():
            book = VerdictBook.beside(path)
            if book is not None:
                book.tidy(path)
    tasks = []
    for path in files:
        book = VerdictBook.beside(path)
        standing, known = (Standing.NONE, None) if book is None else book.standing(path, RULES)
        if standing is Standing.CURRENT and not options.fresh:
            yield Row(path, complaints[path], known, recorded=True)
        else:
            tasks.append(Task(path=path, quick=options.quick))
    with Workers(COMMAND, options.jobs) as workers:
        for event in workers.run(tasks):
            if isinstance(event, Begun):
                yield event
                continue
            path = event.task.path
            answer = Answer.model_validate_json(event.line) if event.line else Answer(problem=event.why)
            if answer.verdict is not None and options.record and not options.quick:
                _record(path, answer.verdict)
            yield Row(path, complaints[path], answer.verdict, problem=answer.problem, seconds=answer.seconds)


def _record(path: Path, verdict: PairVerdict) -> None:
    from kernel_agent.collection.proof import PASSING

    book = VerdictBook.beside(path)
    if book is not None and verdict.status not in PASSING:
        book.record(path, verdict)


def complaints_about(files: Sequence[Path]) -> dict[Path, tuple[str, ...]]:
    """Broken rules by file: those of lint, and too much likeness to any pair of the same dataset.

    Own pairs need to be right, not to read as one collection.
    """
    found: dict[Path, list[str]] = defaultdict(list)
    every, files = files, [path for path in files if not is_own(path.resolve().parent.parent)]
    for path in files:
        try:
            found[path] += [complaint.rule for complaint in lint(path)]
        except InputError as error:
            found[path].append(str(error))
    roots = {path.resolve().parent.parent for path in files if results_folder(path) is not None}
    known = {file: file for root in roots for file in pair_files([root])}
    known |= {file.resolve(): file for file in files}
    texts = {shown: file.read_text(encoding="utf-8") for file, shown in known.items()}
    readable = {path: text for path, text in texts.items() if _is_pair(text)}
    for twins in near_duplicates(readable):
        for path in (twins.one, twins.other):
            if path in found:
                found[path].append(str(twins))
    return {path: tuple(found[path]) for path in every}


def _is_pair(text: str) -> bool:
    try:
        split_sections(text)
    except InputError:
        return False
    return True
