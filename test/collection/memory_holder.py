"""A process that holds memory beside others, or asks for all of it, and says what it does in files of a folder."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from kernel_agent.collection.turns import Turns


def wait_for(path: Path) -> None:
    """Until somebody touches a file."""
    while not path.exists():
        time.sleep(0.005)


folder, name, kind = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
turns = Turns(folder)
(folder / f"{name}.asks").touch()
with turns.some_memory() if kind == "some" else turns.all_memory():
    (folder / f"{name}.has").touch()
    wait_for(folder / f"{name}.leave")
(folder / f"{name}.left").touch()
