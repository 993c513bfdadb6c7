"""One sitting at a GPU: the pairs that are not measured there yet, families in turn, each line on disk at once."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernel_agent.collection.gpu_worker import Answer, command
from kernel_agent.collection.measuring import failed
from kernel_agent.collection.speeds import PairSpeed, SpeedBook, SpeedStatus, spread_out
from kernel_agent.collection.turns import waited
from kernel_agent.collection.worker import Task
from kernel_agent.collection.workers import Begun, Done, Workers
from kernel_agent.pairs.spec import content_hash


@dataclass(frozen=True)
class Options:
    """How a sitting goes."""

    device: str
    """Name of the GPU."""
    jobs: int
    """Pairs that are prepared at a time; one is timed."""
    seconds: float | None = None
    """On the clock, after which what is not measured is left for another sitting."""
    limit_s: float = 240.0
    """On the clock, for one pair; while it waits for other pairs, the clock stands still."""
    fresh: bool = False
    """Measure again what is recorded."""
    proves_on: int = 0
    """Number of the GPU that computes exact gradients. With one of their own, GPU 0 does nothing but time."""
    proofs: int = 1
    """Exact gradients computed at a time."""
    variants: int = 0
    """Of each backward, with other block sizes, warps and stages, to try before it is measured."""
    write: Path | None = None
    """Folder for texts that are faster so, as `<family>/<slug>.py`."""


@dataclass(frozen=True)
class Measured:
    """One pair's records, which are on disk."""

    path: Path
    speeds: tuple[PairSpeed, ...]
    faster: Path | None = None
    """Where its faster text lies, which the records are of."""


def left_over(files: Sequence[Path], book: SpeedBook, options: Options) -> list[Path]:
    """What this sitting would measure, in its order."""
    known = set() if options.fresh else book.known(options.device)
    texts = {path: content_hash(path.read_text(encoding="utf-8")) for path in files}
    return spread_out(path for path in files if (path.stem, texts[path]) not in known)


def sit(
    files: Sequence[Path],
    book: SpeedBook,
    options: Options,
    worker: Sequence[str] | None = None,
) -> Iterator[Begun | Measured]:
    """Measure `files`, telling which pair is begun and what is recorded. The book is sorted in the end.

    `worker`: the command of the processes that measure, `gpu_worker` for None.
    """
    deadline = None if options.seconds is None else time.monotonic() + options.seconds
    try:
        with (
            tempfile.TemporaryDirectory(prefix="kernel-agent-") as turns,
            Workers(
                worker or command(Path(turns), options.proofs, options.proves_on, options.variants),
                options.jobs,
                options.limit_s,
                lambda pid: waited(Path(turns), pid),
            ) as workers,
        ):
            for event in workers.run([Task(path=path) for path in files], deadline):
                if isinstance(event, Begun):
                    yield event
                    continue
                answer = _answer(event, options)
                book.append(answer.speeds)
                yield Measured(event.task.path, answer.speeds, _kept(event.task.path, answer.source, options.write))
    finally:
        if book.path.is_file():
            book.tidy()


def _kept(path: Path, source: str | None, folder: Path | None) -> Path | None:
    if source is None or folder is None:
        return None
    place = folder / path.resolve().parent.name / path.name
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(source, encoding="utf-8")
    return place


def _answer(done: Done, options: Options) -> Answer:
    if done.line:
        return Answer.model_validate_json(done.line)
    path = done.task.path
    status = SpeedStatus.TIMED_OUT if done.timed_out else SpeedStatus.CRASHED
    message = f"not measured within {options.limit_s:.0f} s" if done.timed_out else done.why
    return Answer(speeds=(failed(path, path.read_text(encoding="utf-8"), options.device, status, message),))
