"""Run one example under Triton's own interpreter, on CPU tensors, and time the call. Started by `executor.py`.

The clock runs around the call of the stub alone. Where Triton would try several configurations, the first one runs,
as in our executor.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime.autotuner import Autotuner

from kernel_agent.autodiff import MARK
from kernel_agent.pairs.arguments import build_arguments
from kernel_agent.pairs.spec import ShapeEntry


def main(path: Path, dims: dict[str, Any], target: Path) -> None:
    """Write the outputs, the seconds of the fastest of up to three calls, and a sum over the inputs."""
    torch.set_num_threads(1)
    assert triton.knobs.runtime.interpret, "start me with TRITON_INTERPRET=1"
    tuned = Autotuner.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.configs = self.configs[:1]
        return tuned(self, *args, **kwargs)

    Autotuner.run = run
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    stub = next(value for value in vars(module).values() if callable(value) and hasattr(value, MARK))
    given = build_arguments(module, ShapeEntry(dims=dims), device="cpu", seed=0)
    total = sum(float(value.double().sum()) for value in given.args if isinstance(value, torch.Tensor))
    seconds: list[float] = []
    while len(seconds) < 3 and sum(seconds) < 2.0:
        start = time.process_time()
        outputs = stub(*given.args, **given.kwargs)
        seconds.append(time.process_time() - start)
    torch.save({"outputs": outputs, "seconds": min(seconds), "inputs": total}, target)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), Path(sys.argv[3]))
