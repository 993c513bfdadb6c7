"""Imports the truth of a file, in a child: everything but a pair's backward section, under the stand-in device."""

from __future__ import annotations

import time
from pathlib import Path
from types import ModuleType

from kernel_agent.autodiff import MARK, AutodiffMark
from kernel_agent.errors import InputError
from kernel_agent.ir import import_module, standin
from kernel_agent.pairs.blame import blame_file, line_in
from kernel_agent.pairs.sections import truth_source
from kernel_agent.pairs.spec import FileFacts
from kernel_agent.pairs.timelimit import TimeUp, time_limit

IMPORT_SECONDS = 30.0
"""Processor seconds that an import may take; a file that needs more is at work, not being defined."""


def load_truth(facts: FileFacts, folder: Path, *, seconds: float = IMPORT_SECONDS) -> ModuleType:
    """Write the truth source into `folder` and import it from there, so that what runs is what was read.

    Raises `InputError` with the line when the file raises or exits while imported, or takes longer than `seconds` of
    processor time.
    """
    path = folder / f"{facts.stem}.py"
    remedy = 'Move it into functions or under `if __name__ == "__main__":`.'
    path.write_text(truth_source(facts.source), encoding="utf-8")
    start = time.process_time()
    try:
        with standin(), time_limit(seconds):
            module = import_module(path, f"kernel_agent_truth_{facts.hash8}")
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
    if isinstance(mark, AutodiffMark) and mark.backward is not None:
        # `@autodiff(backward=...)` put a delivered operator in front of the stub; the truth is the stub itself.
        setattr(module, facts.stub, stub.__wrapped__)
    return module
