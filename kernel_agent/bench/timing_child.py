"""What runs in the timed child: a candidate without its check section, at real sizes, on the GPU.

The clock is made before the candidate is imported. Between repetitions the cotangents change by a factor and elements
of every gradient are kept: a backward that does not compute its answer anew each time is seen by the parent. In some
repetitions they change right ahead of the call, behind work that keeps the device busy: a backward that does not wait
for its stream, or whose stream does not wait for it, gives a wrong answer there.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernel_agent.bench.clock import Clock, Pace, Probe, look
from kernel_agent.bench.launches import KernelSeen, time_launches
from kernel_agent.bench.realdevice import begin, import_file, on_gpu, outputs_of, unpacked
from kernel_agent.gate.answer import Failure, FailureKind, Frame
from kernel_agent.gate.child import FILE, MODULE

if TYPE_CHECKING:
    from kernel_agent.sandbox import Call

FACTORS = (1.0, -1.0, 0.5, -0.5, 2.0, -2.0)
"""Powers of two: a gradient is linear in its cotangents, and these round nothing."""
SERIES = 3
"""Of calls back to back that the parent's own clock looks at; the quickest counts."""
UNHURRIED_S = 0.05
"""Length of each."""


class Failed(Exception):
    """The candidate failed and the parent was told."""


def timed(call: Call) -> None:
    """Payload: `device`, `source`, `own_forward`, `flush_bytes`, `budget_s`, `seed`, `entries`: each with `arguments`
    (see `packed`), `cotangents` (tensor keys or None per output) and `probes` (tensor keys or None per
    gradient).

    Sends per entry: times of a `forward` of its own; `times`, `hidden_us`, `host_us` in microseconds, how many
    repetitions were `late` and not timed, and the tensor `probes` (all repetitions x elements, divided by the factors);
    then `begin` and `end` around that many calls, `SERIES` times; then `kernels`.
    """
    begin(call)
    with call.alone():
        clock = Clock(call.payload["flush_bytes"])
    choose = random.Random(call.payload["seed"])
    path = call.scratch / FILE
    path.write_text(call.payload["source"], encoding="utf-8")
    try:
        module = _guarded(call, path, "importing the file", lambda: import_file(path, MODULE))
        for number, entry in enumerate(call.payload["entries"]):
            _entry(call, clock, choose, module, path, number, entry)
    except Failed:
        return


def _entry(
    call: Call,
    clock: Clock,
    choose: random.Random,
    module: ModuleType,
    path: Path,
    number: int,
    entry: dict[str, Any],
) -> None:
    arguments = unpacked(entry["arguments"], call.tensors)
    base = [None if key is None else on_gpu(call.tensors[key]) for key in entry["cotangents"]]
    cotangents = [None if tensor is None else tensor.clone() for tensor in base]
    probes = [None if key is None else Probe.at(call.tensors[key]) for key in entry["probes"]]

    def forward() -> Any:
        with torch.no_grad():
            return module.forward(*arguments.args, **arguments.kwargs)

    made = _guarded(call, path, "forward", forward)
    if call.payload["own_forward"]:
        with call.alone():
            took = _guarded(
                call, path, "forward", lambda: clock.times(forward, clock.pace(forward, call.payload["budget_s"]))
            )
        call.send({"entry": number, "forward": took})
    saved = tuple(made[1])
    del made
    given: list[Any] = []

    def backward() -> None:
        given[:] = outputs_of(module.backward(saved, *cotangents))

    def work() -> None:
        with torch.no_grad():
            backward()  # what is compiled at the first call
            clock.synchronize()
            with call.alone():
                _time(call, clock, choose, number, backward, given, (base, cotangents), probes)

    _guarded(call, path, "backward", work)
    torch.cuda.empty_cache()


def _time(
    call: Call,
    clock: Clock,
    choose: random.Random,
    number: int,
    backward: Callable[[], None],
    given: list[Any],
    cotangents: tuple[list[Tensor | None], list[Tensor | None]],
    probes: list[Probe | None],
) -> None:
    pace = clock.pace(backward, call.payload["budget_s"])
    factors = _factors(choose, pace.repeats)
    late = set(choose.sample(range(1, pace.repeats), max(2, pace.repeats // 6)))
    seen: list[Tensor] = []

    def before(repetition: int) -> None:
        for kept, used in zip(*cotangents, strict=True):
            if kept is not None and used is not None:
                used.copy_(kept).mul_(factors[repetition])

    def after(repetition: int) -> None:
        seen.append(look(given, probes) / factors[repetition])

    took = clock.times(backward, pace, before, after, late)
    record = {
        "entry": number,
        "times": took,
        "late": len(late),
        "flushes": pace.flushes,
        "host_us": pace.host_us,
        "hidden_us": clock.hidden_us(backward),
    }
    call.send(record, {"probes": torch.stack(seen).cpu()})
    _unhurried(call, clock, number, backward, pace, sorted(took)[len(took) // 2])
    kernels: list[KernelSeen] = time_launches(clock, backward, pace)
    call.send({"entry": number, "kernels": [kernel.model_dump(mode="json") for kernel in kernels]})


def _factors(choose: random.Random, count: int) -> list[float]:
    """One per repetition, each another than the one before it: an answer that comes too late shows."""
    found = [1.0]
    while len(found) < count:
        found.append(choose.choice([factor for factor in FACTORS if factor != found[-1]]))
    return found


def _unhurried(
    call: Call, clock: Clock, number: int, backward: Callable[[], None], pace: Pace, median_us: float
) -> None:
    """Calls back to back, for the parent's own clock: it sees the messages come."""
    once_s = max(median_us, pace.host_us) * 1e-6
    calls = max(3, min(2000, int(UNHURRIED_S / once_s)))
    for _ in range(SERIES):
        clock.synchronize()
        call.send({"entry": number, "begin": calls})
        for _ in range(calls):
            backward()
        clock.synchronize()
        call.send({"entry": number, "end": calls})


def _guarded(call: Call, path: Path, where: str, work: Callable[[], Any]) -> Any:
    """Do something of the candidate's; its exception becomes a record."""
    try:
        return work()
    except (Exception, SystemExit) as error:
        call.send({"where": where, "failure": failure(error, path).model_dump(mode="json")})
        raise Failed(where) from error


def failure(error: BaseException, path: Path) -> Failure:
    """An exception on the device as a record, with the frames that are the candidate's own."""
    frames = tuple(
        Frame(line=frame.lineno or 0, function=frame.name)
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == str(path)
    )[-20:]
    name = type(error).__name__
    compiling = name in ("CompilationError", "CompileTimeAssertionFailure", "PTXASError") or isinstance(
        error, SyntaxError
    )
    kind = FailureKind.COMPILE if compiling else FailureKind.PYTHON
    line = frames[-1].line if frames else None
    return Failure(kind=kind, type=name, message=str(error)[:20_000], line=line, frames=frames)
