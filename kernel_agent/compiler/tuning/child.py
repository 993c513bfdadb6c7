"""What runs in the child that tries variants of a backward on the GPU: many are compiled at once, then each is timed.

Workers compile in processes of their own, without a GPU (a process that another one of the sandbox started may not use
it), into the one cache of the child; the clock runs when they are done. What is sent chooses among variants and accepts
none.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from kernel_agent.bench.clock import Clock, Pace
from kernel_agent.bench.launches import time_launches
from kernel_agent.bench.realdevice import begin, import_file, on_gpu, outputs_of
from kernel_agent.ir import standin
from kernel_agent.pairs.arguments import Arguments, build_arguments
from kernel_agent.pairs.spec import ShapeEntry

if TYPE_CHECKING:
    from kernel_agent.sandbox import Call

QUICK = Pace(repeats=7, flushes=3, host_us=200.0)
"""How each variant is timed: enough to tell 2 % apart, and what is chosen is measured again."""
FOOTPRINT = 5
"""Memory of one worker in units of the largest arguments: what torch makes between launches is real."""
SHARE = 0.6
"""Of the memory that the child may have, for all workers together."""
STARTING = 0.5
"""Share of the seconds for compiling that workers have beyond those, to end what they are compiling."""
IMPORTED_BYTES = 1 << 29
"""What a process takes before it has any tensor."""


def trials(call: Call) -> None:
    """Payload: `device`, `host_bytes` that the child may have, `flush_bytes`, `variants` (pair files), `entries`,
    `seed`, `workers`, and the seconds `compile_s` and `time_s`, for all workers and for all times.

    Sends per entry and variant `entry`, `variant` and either `kernels` and `us` or `problem`, and `sizes` with the
    first variant of each entry; and how many `seconds` each phase took.
    """
    phases = _Phases()
    paths = []
    for number, text in enumerate(call.payload["variants"]):
        paths.append(call.scratch / f"variant_{number}.py")
        paths[-1].write_text(text, encoding="utf-8")
    entries = [ShapeEntry.model_validate(form) for form in call.payload["entries"]]
    maker = import_file(paths[0], "variants_make_args")
    arguments = [build_arguments(maker, entry, device="cpu", seed=call.payload["seed"]) for entry in entries]
    phases.end("arguments")
    _compile(call, paths, arguments)
    phases.end("compiling")
    begin(call)
    clock = Clock(call.payload["flush_bytes"])
    modules = [_imported(path, number) for number, path in enumerate(paths)]
    phases.end("start")
    end = time.monotonic() + call.payload["time_s"]
    for place, given in enumerate(arguments):
        until = time.monotonic() + (end - time.monotonic()) / (len(arguments) - place)
        calls = _Calls(maker, given)
        for number, module in enumerate(modules):
            told = _told(call.scratch, number, place)
            record: dict[str, Any] = {"entry": place, "variant": number}
            if "problem" in told:
                record["problem"] = told["problem"]
            elif time.monotonic() > until and number:
                record["problem"] = "there was no time left"
            elif isinstance(module, str):
                record["problem"] = module
            else:
                record |= _timed(clock, calls, module)
            if "late" in told and number == 0:
                record["note"] = told["late"]
            if number == 0:
                record["sizes"] = calls.sizes
            call.send(record)
        del calls
        torch.cuda.empty_cache()
    phases.end("timing")
    call.send({"seconds": phases.seconds})


class _Phases:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def end(self, name: str) -> None:
        """A phase is over."""
        now = time.monotonic()
        self.seconds[name], self._last = round(now - self._last, 1), now


@dataclass
class _Calls:
    """The forward of one entry, run, and its backward."""

    module: ModuleType
    given: Arguments
    on_gpu: bool = True
    sizes: dict[str, int] = field(default_factory=dict)
    """See `sizes_in`."""

    def __post_init__(self) -> None:
        args, kwargs = self.given.args, self.given.kwargs
        if self.on_gpu:
            args, kwargs = tree_map(lambda leaf: on_gpu(leaf) if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        with torch.no_grad(), _first_config():
            made = self.module.forward(*args, **kwargs)
        outputs = outputs_of(made[0])
        self.saved = tuple(made[1])
        like = torch.randn_like if self.on_gpu else torch.empty_like
        self.cotangents = [
            like(one) if isinstance(one, Tensor) and one.is_floating_point() else None for one in outputs
        ]

    def backward(self, module: ModuleType) -> Callable[[], object]:
        """That of a variant."""

        def call() -> object:
            with torch.no_grad():
                return module.backward(self.saved, *self.cotangents)

        return call


def _timed(clock: Clock, calls: _Calls, module: ModuleType) -> dict[str, Any]:
    backward = calls.backward(module)
    try:
        with _launching(lambda launch: launch(), calls.sizes):
            backward()  # what is loaded at the first call
        whole = sorted(clock.times(backward, QUICK))
        kernels = time_launches(clock, backward, QUICK, QUICK.repeats)
    except Exception as error:  # whatever a variant does
        torch.cuda.synchronize()  # raises, and ends this child, when the context is lost
        return {"problem": f"{type(error).__name__}: {error}"[:300]}
    return {"us": whole[len(whole) // 2], "kernels": [kernel.model_dump(mode="json") for kernel in kernels]}


# --- compiling


def _compile(call: Call, paths: list[Path], arguments: list[Arguments]) -> None:
    """Compile all variants at all entries, or as many as the time allows, and leave what came of it in files."""
    payload = call.payload
    room = int(SHARE * payload["host_bytes"] / (FOOTPRINT * max(_bytes(given) for given in arguments) + IMPORTED_BYTES))
    count = max(1, min(payload["workers"], len(paths), room))
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=_work, args=(call, paths, arguments, k, count)) for k in range(count)]
    for worker in workers:
        worker.start()
    until = time.monotonic() + (1 + STARTING) * payload["compile_s"]
    for worker in workers:
        worker.join(max(0.0, until - time.monotonic()))
        if worker.is_alive():
            worker.kill()
            worker.join()


def _work(call: Call, paths: list[Path], arguments: list[Arguments], first: int, step: int) -> None:
    """One worker: every `step`-th variant, until its time is over."""
    mine = range(first, len(paths), step)
    until = time.monotonic() + call.payload["compile_s"]
    try:
        with standin():
            for number in mine:
                module = _imported(paths[number], number)
                for place, given in enumerate(arguments):
                    if time.monotonic() > until:
                        return
                    problem = module if isinstance(module, str) else compiled(module, given, forward=number == 0)
                    _tell(call.scratch, number, place, {"problem": problem} if problem else {})
    except Exception as error:  # told, since nobody sees where this process writes
        late = {"late": f"the compiling process failed: {type(error).__name__}: {error}"[:300]}
        for number, place in itertools.product(mine, range(len(arguments))):
            if "late" in _told(call.scratch, number, place):
                _tell(call.scratch, number, place, late)


def compiled(module: ModuleType, given: Arguments, *, forward: bool = False) -> str:
    """Compile the launches of a pair's backward, inside a stand-in: no kernel runs, and tensors hold anything.

    `forward`: those of its forward, too, which one variant has for all. Why that cannot be; empty where it was done.
    """
    try:
        with _launching(lambda launch: launch(warmup=True) if forward else None, {}):
            calls = _Calls(module, given, on_gpu=False)
        with _launching(lambda launch: launch(warmup=True), {}):
            calls.backward(module)()
    except Exception as error:  # Triton and ptxas fail in many ways
        return f"{type(error).__name__}: {error}"[:300]
    return ""


@contextmanager
def _launching(how: Callable[[Callable[..., Any]], Any], sizes: dict[str, int]) -> Iterator[None]:
    """Launches are done by `how`, which is given what launches; `sizes` gets whole numbers of the `backward` around."""
    real = JITFunction.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        sizes.update(sizes_in(_backward_frame()))
        return how(lambda **more: real(self, *args, **{**kwargs, **more}))

    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = real


@contextmanager
def _first_config() -> Iterator[None]:
    """Autotuned kernels take the first of their configs: a forward is run for what it saves, which all give alike."""
    real = Autotuner.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        every, self.configs = self.configs, self.configs[:1]
        try:
            return real(self, *args, **kwargs)
        finally:
            self.configs = every

    Autotuner.run = run
    try:
        yield
    finally:
        Autotuner.run = real


def _backward_frame() -> Mapping[str, Any]:
    """Locals of the `backward` that launches."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name != "backward":
        frame = frame.f_back
    return {} if frame is None else dict(frame.f_locals)


def sizes_in(found: Mapping[str, Any]) -> dict[str, int]:
    """Whole numbers among the locals of a backward, and how wide the elements of its tensors are, by expression."""
    sizes = {name: value for name, value in found.items() if type(value) in (int, bool)}
    wide = {
        f"{name}.element_size()": value.element_size() for name, value in found.items() if isinstance(value, Tensor)
    }
    return sizes | wide


def _tell(folder: Path, variant: int, entry: int, record: dict[str, Any]) -> None:
    place = folder / f"compiled_{variant}_{entry}.json"
    part = place.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(record))
    part.rename(place)


def _told(folder: Path, variant: int, entry: int) -> dict[str, Any]:
    place = folder / f"compiled_{variant}_{entry}.json"
    if not place.is_file():
        return {"late": "it was not compiled in time"}
    found: dict[str, Any] = json.loads(place.read_text())
    return found


def _imported(path: Path, number: int) -> ModuleType | str:
    """A variant, or why it cannot be imported."""
    try:
        return import_file(path, f"variant_{number}")
    except Exception as error:  # whatever a file does
        return f"{type(error).__name__}: {error}"[:300]


def _bytes(given: Arguments) -> int:
    tensors: list[Tensor] = []
    tree_map(lambda leaf: tensors.append(leaf) if isinstance(leaf, Tensor) else None, (given.args, given.kwargs))
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)
