"""A worker whose pairs count for a while, or die while they hold the clock and have the others stopped."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from kernel_agent.collection.turns import Turns

folder = Path(sys.argv[1])
turns = Turns(folder)
for line in sys.stdin:
    task = Path(json.loads(line)["path"])
    (folder / f"{task.stem}.begun").touch()
    while len(list(folder.glob("*.begun"))) < 2:
        time.sleep(0.01)
    if task.stem == "dies":
        with turns.alone():
            (folder / "stopped").touch()
            os._exit(3)
    while not (folder / "stopped").exists():  # this process is stopped in here
        time.sleep(0.01)
    print("{}", flush=True)
