"""Imports the truth of a file, in a child: everything but a pair's backward section, under the stand-in device."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from kernel_agent.autodiff import MARK, AutodiffMark
from kernel_agent.errors import InputError
from kernel_agent.ir import import_module, standin
from kernel_agent.pairs.blame import blame_file, line_in
from kernel_agent.pairs.sections import truth_source
from kernel_agent.pairs.spec import FileFacts
from kernel_agent.pairs.timelimit import TimeUp, time_limit

IMPORT_SECONDS = 30.0
"""Processor seconds that an import may take; a file that needs more is at work, not being defined."""


class Launched(Exception):
    """A kernel was launched where none may be."""

    def __init__(self, kernel: str) -> None:
        super().__init__(f"kernel {kernel} is launched")
        self.kernel = kernel


@contextmanager
def no_launches() -> Iterator[None]:
    """Raise `Launched` for a launch inside of the block: outside of an execution nothing could run it."""

    def run(self: Any, *_: Any, **__: Any) -> Any:
        raise Launched(getattr(self.fn, "__name__", "") or self.base_fn.__name__)

    with mock.patch.object(JITFunction, "run", run), mock.patch.object(Autotuner, "run", run):
        yield


class _AsItIs:
    """What `torch.compiler.disable` gives, as a decorator or as a context, where torch compiles nothing."""

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function

    def __enter__(self) -> None:
        """Nothing is to be disabled."""

    def __exit__(self, *_exception: object) -> None:
        """See `__enter__`."""


@contextmanager
def disabling_nothing() -> Iterator[None]:
    """Let `torch.compiler.disable` leave functions as they are: it imports all of torch's compiler, for a second."""

    def disable(fn: Callable[..., Any] | None = None, *_args: object, **_options: object) -> Any:
        return _AsItIs() if fn is None else fn

    with mock.patch.object(torch.compiler, "disable", disable):
        yield


def load_truth(
    facts: FileFacts,
    folder: Path,
    *,
    seconds: float = IMPORT_SECONDS,
    source: str | None = None,
    compiles: bool = True,
) -> ModuleType:
    """Write the truth source into `folder` and import it from there, so that what runs is what was read.

    `source` takes its place where the file's own backward is wanted, too: never where a verdict depends on it.
    `compiles`: whether torch may compile what is imported; False only where the whole process never does.

    Raises `InputError` with the line when the file raises, exits or launches while imported, or takes longer than
    `seconds` of processor time.
    """
    path = folder / f"{facts.stem}.py"
    remedy = 'Move it into functions or under `if __name__ == "__main__":`.'
    path.write_text(truth_source(facts.source) if source is None else source, encoding="utf-8")
    start = time.process_time()
    try:
        with standin(), no_launches(), time_limit(seconds), nullcontext() if compiles else disabling_nothing():
            module = import_module(path, f"kernel_agent_truth_{facts.hash8}")
    except Launched as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        raise InputError(
            f"heavy work at module level: the kernel `{error.kernel}` is launched",
            remedy=remedy,
            path=path,
            line=frames[0].lineno if frames else None,  # the statement of the file, not the line of the stub
        ) from error
    except TimeUp as error:
        message = f"heavy work at module level: importing the file does not end within {seconds:g} s"
        raise InputError(message, remedy=remedy, path=path, line=line_in(error, path)) from error
    except (Exception, SystemExit) as error:
        remedy = 'Importing the file must only define things; put the rest under `if __name__ == "__main__":`.'
        raise blame_file(error, path, "the file fails while it is imported", remedy) from error
    used = time.process_time() - start
    if used > seconds:
        raise InputError(
            f"heavy work at module level: importing the file takes {used:.0f} s of processor time",
            remedy=remedy,
            path=path,
        )
    stub = getattr(module, facts.stub)
    mark = getattr(stub, MARK, None)
    if isinstance(mark, AutodiffMark) and (mark.backward is not None or mark.jit):
        # An operator that trains stands in front of the stub; the truth is the stub itself.
        setattr(module, facts.stub, stub.__wrapped__)
    return module
