"""A worker whose pairs wait for a turn until a file is there, or work as long."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from kernel_agent.collection.turns import Turns

folder = Path(sys.argv[1])
turns = Turns(folder)
for line in sys.stdin:
    with turns._waiting() if Path(json.loads(line)["path"]).stem == "waits" else turns.some_memory():
        while not (folder / "free").exists():
            time.sleep(0.01)
    print("{}", flush=True)
