"""Runs the children of the bench in this process: for pairs of the dataset, which are vouched for.

A child of its own for every question costs seconds each time, to start CUDA and to compile again; a pair that is ours
needs no walls. What executes on a CPU still goes to the sandbox.
"""

from __future__ import annotations

import contextlib
import importlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernel_agent.collection.turns import Turns
from kernel_agent.sandbox import Call, Ending, Job, Message, Report, Sandbox

HERE = "kernel_agent.bench."
"""Entries of this room use a GPU."""
PROOFS = ("kernel_agent.bench.native_truth_child:", "kernel_agent.bench.native_child:")
"""Of these, they hold exact gradients in the GPU's memory."""


class LocalCall(Call):
    """A call that stays in the process. What is sent is kept, with tensors on the CPU."""

    def __init__(self, job: Job, scratch: Path, turns: Turns, on_message: Callable[[Message], None] | None) -> None:
        self.payload = job.payload
        self.tensors = dict(job.tensors)
        self.scratch = scratch
        self.label = job.label
        self.messages: list[Message] = []
        self._turns = turns
        self._on_message = on_message

    def alone(self) -> contextlib.AbstractContextManager[object]:
        """See `Call.alone`."""
        return self._turns.alone()

    def send(self, record: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
        """See `Call.send`."""
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

    @contextlib.contextmanager
    def all_memory(self) -> Iterator[None]:
        """What is proven in this block is proven while no other process proves anything."""
        with self._turns.all_proofs():
            self._has_all = True
            try:
                yield
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
            call = LocalCall(job, Path(scratch), self._turns, on_message)
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
def _numerics() -> Any:
    """Children set these for themselves, and are gone afterwards; here the next one would inherit them."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.set_num_threads(threads)
