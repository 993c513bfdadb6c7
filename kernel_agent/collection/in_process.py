"""Runs the children of the bench in this process: for pairs of the dataset, which are vouched for.

A child of its own for every question costs seconds each time, to start CUDA and to compile again; a pair that is ours
needs no walls. What executes on a CPU still goes to the sandbox.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from kernel_agent.collection.turns import Turns
from kernel_agent.sandbox import Call, Ending, Job, Message, Report, Sandbox

T = TypeVar("T")
HERE = "kernel_agent.bench."
"""Entries of this room use a GPU."""
PROOFS = tuple(f"{HERE}{child}:" for child in ("native_truth_child", "native_child", "kinks_child"))
"""Of these, they hold exact gradients in the GPU's memory."""
_NO_MEMORY = (
    "OutOfMemory",
    "out of memory",
    "MemoryError",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "more memory than this GPU has",
)


def lacks_memory(said: str) -> bool:
    """Whether a message, of whatever library, tells of too little memory."""
    return any(word in said for word in _NO_MEMORY)


class MemoryTaken(Exception):
    """A job lacks memory that other processes may hold: it is ended at once, and worth another try without them."""


_FAILURES = ("refusal", "failed", "failure", "notes")
"""Under which children tell what went wrong, or is missing."""


class LocalCall(Call):
    """A call that stays in the process. What is sent is kept, with tensors on the CPU."""

    def __init__(
        self,
        job: Job,
        scratch: Path,
        turns: Turns,
        on_message: Callable[[Message], None] | None,
        has_all: bool,
    ) -> None:
        self.payload = job.payload
        self.tensors = dict(job.tensors)
        self.scratch = scratch
        self.label = job.label
        self.messages: list[Message] = []
        self._turns = turns
        self._on_message = on_message
        self._has_all = has_all

    def alone(self) -> contextlib.AbstractContextManager[object]:
        """See `Call.alone`."""
        return self._turns.alone()

    def send(self, record: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
        """See `Call.send`. Raises `MemoryTaken` for a failure that there may be none of with all of the memory."""
        told = [record[key] for key in _FAILURES if key in record]
        if not self._has_all and lacks_memory(str(told)):
            raise MemoryTaken(str(told))
        message = Message(dict(record), {name: tensor.detach().cpu() for name, tensor in (tensors or {}).items()})
        self.messages.append(message)
        if self._on_message is not None:
            self._on_message(message)


class InProcess(Sandbox):
    """A sandbox whose jobs on GPUs run here, in turns with other processes on the same GPUs."""

    def __init__(self, turns: Turns, proves_on: int = 0) -> None:
        """`proves_on`: number of the GPU for exact gradients, as torch counts them."""
        super().__init__()
        self.proves_on = proves_on
        self._turns = turns
        self._has_all = False
        self._known: dict[str, Report] = {}

    def with_memory(self, work: Callable[[], T]) -> T:
        """Do something that holds memory of the GPU beside others; where it lacks any, once more with all of it.

        Raises what `work` raises, then.
        """
        try:
            with self._turns.some_memory(), _left_free():
                return work()
        except (MemoryTaken, RuntimeError) as error:
            if not isinstance(error, MemoryTaken) and not lacks_memory(str(error)):
                raise
        with self._turns.all_memory(), _left_free():
            self._has_all = True
            try:
                return work()
            finally:
                self._has_all = False

    def _place(self, job: Job) -> contextlib.AbstractContextManager[object]:
        """Where a job may run: proofs few at a time, all others at once, but for their clocks."""
        if self._has_all or not job.entry.startswith(PROOFS):
            return contextlib.nullcontext()
        return self._turns.proof()

    def run(
        self,
        job: Job,
        on_message: Callable[[Message], None] | None = None,
        *,
        cancelled: Any = None,
    ) -> Report:
        """See `Sandbox.run`. What raises here raises for the caller: there is no other process that it could end."""
        if not job.entry.startswith(HERE):
            return self._elsewhere(job, on_message, cancelled)
        start = time.monotonic()
        module, _, name = job.entry.partition(":")
        with tempfile.TemporaryDirectory(prefix="kernel-agent-") as scratch:
            call = LocalCall(job, Path(scratch), self._turns, on_message, self._has_all)
            with self._place(job), _numerics():
                getattr(importlib.import_module(module), name)(call)
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
        return Report(Ending.FINISHED, "the entry returned", tuple(call.messages), seconds=time.monotonic() - start)

    def _elsewhere(self, job: Job, on_message: Callable[[Message], None] | None, cancelled: Any) -> Report:
        """The cost of one backward is asked for twice, and counted once."""
        key = f"{job.entry} {job.payload}"
        if job.tensors or key not in self._known:
            self._known = {key: super().run(job, on_message, cancelled=cancelled)}
        return self._known[key]


@contextlib.contextmanager
def _left_free() -> Iterator[None]:
    """Whatever happens in this block, no memory of the GPU is held after it."""
    try:
        try:
            yield
        except Exception as error:
            met: BaseException | None = error
            while met is not None:  # frames hold tensors, and the error outlives this block
                traceback.clear_frames(met.__traceback__)
                met = met.__context__
            raise
    finally:
        torch.compiler.reset()  # what was compiled keeps its arguments
        gc.collect()
        torch.cuda.empty_cache()


@contextlib.contextmanager
def _numerics() -> Any:
    """Children set these for themselves, and are gone afterwards; here the next one would inherit them."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.set_num_threads(threads)
