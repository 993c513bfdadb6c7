"""A process that speaks as `gpu_worker` does, for pairs whose slug says how they end. It imports nothing heavy."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path

for line in sys.stdin:
    path = Path(json.loads(line)["path"])
    if "hangs" in path.stem:
        time.sleep(600)
    if "crashes" in path.stem:
        os._exit(3)
    speed = {
        "slug": path.stem,
        "family": path.parent.name,
        "hash": hashlib.sha256(path.read_text().strip().encode()).hexdigest(),
        "device": "GPU of this test",
        "entry": "M=8",
        "status": "measured",
        "backward_us": 10.0,
        "bound_us": 5.0,
    }
    answer = {"speeds": [speed]}
    if "tunes" in path.stem:
        answer["source"] = path.read_text() + "# with 8 warps\n"
    answer["last"] = "unclean" in path.stem
    print(json.dumps(answer), flush=True)
    if answer["last"]:
        time.sleep(1.0)  # an interpreter with CUDA takes its time to end
        sys.exit(0)
