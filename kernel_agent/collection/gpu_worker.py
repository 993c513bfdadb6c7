"""A process that measures pairs on one GPU, one after the other: CUDA is started once, what was compiled is kept."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from kernel_agent.collection.speeds import PairSpeed
from kernel_agent.collection.worker import Task
from kernel_agent.record import Record

HELD_BYTES = 1 << 28
"""Memory of the GPU that a process may hold between two pairs."""


class Answer(Record):
    """The records of one pair."""

    speeds: tuple[PairSpeed, ...]
    source: str | None = None
    """A faster text of the pair, which the records are of."""
    last: bool = False
    """This process takes no other pair."""


def command(turns: Path, proofs: int, proves_on: int, variants: int = 0) -> tuple[str, ...]:
    """What `Workers` start; the number of the worker follows. GPU 0 times.

    `turns`: folder of `Turns`; `proofs`: exact gradients computed at a time, on the GPU number `proves_on`;
    `variants`: of each backward to try first.
    """
    numbers = (str(number) for number in (proofs, proves_on, variants))
    return (sys.executable, "-m", "kernel_agent.collection.gpu_worker", str(turns), *numbers)


def main() -> None:
    """Answer until the input ends, or until a pair leaves the GPU unusable for this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever prints does not answer
    # Inductor starts a pool of processes as soon as it is imported, one a core; with a pool each, workers starve.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    import torch

    from kernel_agent.collection.in_process import InProcess
    from kernel_agent.collection.turns import Turns

    torch.set_num_threads(4)
    turns = Turns(Path(sys.argv[1]), int(sys.argv[2]))
    with InProcess(turns, proves_on=int(sys.argv[3])) as sandbox:
        for line in sys.stdin:
            task = Task.model_validate_json(line)
            answer = _answered(task, sandbox, int(sys.argv[4]))
            answers.write(answer.model_dump_json() + "\n")
            answers.flush()
            if answer.last:
                return


def _answered(task: Task, sandbox: object, variants: int) -> Answer:
    """What this process says of a pair."""
    import torch

    from kernel_agent.collection.in_process import InProcess
    from kernel_agent.collection.measuring import Sat, failed, measured
    from kernel_agent.collection.speeds import SpeedStatus

    assert isinstance(sandbox, InProcess)
    device = torch.cuda.get_device_name()
    try:
        sat = measured(task.path, sandbox, device, variants)
    except Exception as error:  # whatever a pair does on a GPU is one line of the result
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        source = task.path.read_text(encoding="utf-8")
        sat = Sat((failed(task.path, source, device, SpeedStatus.CRASHED, said),))
    return Answer(speeds=sat.speeds, source=sat.source, last=not _is_clean(task.path.stem))


def _is_clean(name: str) -> bool:
    """Whether this process can go on with another pair: the GPU answers it, and it holds no memory there."""
    import gc

    import torch

    try:
        torch.cuda.synchronize()
        torch.compiler.reset()  # what was compiled keeps its arguments
        gc.collect()
        torch.cuda.empty_cache()
        held = torch.cuda.memory_allocated()
    except RuntimeError:  # an illegal access: nothing runs in this process any more
        return False
    if held > HELD_BYTES:  # a process that keeps more with every pair would leave none for the others
        sys.stderr.write(f"{name}: {held / 1e9:.1f} GB are still held after it; another process goes on\n")
    return bool(held <= HELD_BYTES)


if __name__ == "__main__":
    main()
