"""What runs in the candidate child: the candidate without its check section, inputs and cotangents. No truth is near.

The parent imports nothing from here; it knows the entry by name. One message per forward and per case goes back,
with what was done as a program. None of it is believed where it speaks for the candidate: see `replay_child`.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernel_agent.gate.answer import Answer, ByChance, Called, Failure, FailureKind, Found, Returned, Stage
from kernel_agent.gate.child_answers import Ended, say, tell_failure, told
from kernel_agent.gate.foreign_attributes import Watched
from kernel_agent.gate.lasting_state import LastingState
from kernel_agent.gate.layout import is_handed_back, meets
from kernel_agent.gate.one_stream import OneStream
from kernel_agent.ir import (
    ExecOptions,
    Execution,
    Finding,
    FindingKind,
    Unordered,
    declared_dtype,
    import_module,
    made_on_host,
    standin,
)
from kernel_agent.ir.capture.configurations import Turns
from kernel_agent.ir.capture.images import Images, SameImages
from kernel_agent.ir.execution import run_once
from kernel_agent.ir.launch import Runner, launch
from kernel_agent.ir.lower import know, lowered
from kernel_agent.ir.memory import number_buffers_from
from kernel_agent.ir.recorded.program import Program
from kernel_agent.ir.recorded.recorder import Recorder
from kernel_agent.oracle.plainform import plain_form
from kernel_agent.oracle.wire import unpack

if TYPE_CHECKING:
    from kernel_agent.sandbox import Call

FILE = "candidate.py"
MODULE = "kernel_agent_candidate"
_OPTIONS = ExecOptions()
_OF_BACKWARDS = 1 << 16
"""Number of the first buffer of a backward: none of a forward has it, whose addresses may be among what is saved."""
_NAMED = 20
"""Changed states that are told."""
_MOST_BYTES = 1 << 20
"""Of one program: those of all cases together must pass the channel."""


@dataclass(frozen=True)
class Lasting:
    """Who tells what a candidate leaves behind in its process."""

    names: Watched
    """Of modules and classes."""
    state: LastingState
    """Of the process."""

    @contextmanager
    def excused(self) -> Iterator[None]:
        """What changes while the block runs counts for nobody."""
        with self.names.excused(), self.state.excused():
            yield

    def changed(self) -> tuple[str, ...]:
        """States and settings that are others now."""
        return (*self.state.changed(), *self.names.reset())[:_NAMED]


def answered(call: Call) -> None:
    """Payload: `source`, `users_lines`, `lowered` kernels, `points` (packed args and kwargs), `cases` (point, cotangent
    keys, needs)."""
    torch.set_num_threads(1)
    know(call.payload["lowered"])
    path = call.scratch / FILE
    path.write_text(call.payload["source"], encoding="utf-8")
    try:
        with standin():
            streams = OneStream()
            module, state, names = _imported(call, path, streams)
            saved: dict[int, tuple[Any, ...]] = {}
            cases, outside, turns = call.payload["cases"], Images(), Turns()
            images = SameImages(outside)
            for number, case in enumerate(cases):
                if case["point"] not in saved:
                    streams.refuses = False
                    own = _line(module.forward) <= call.payload["users_lines"]
                    users = own and not saved
                    forward = module.forward if users else state.attended(module.forward, may_draw=True)
                    with Lasting(names, state).excused() if users else nullcontext():
                        point = case["point"]
                        before = [*saved][-1:]
                        beside = None if own else outside
                        saved[point] = run_forward(call, forward, path, point, Recorder(), beside, users=own)
                        if before and not own:
                            _run_beside(call, forward, path, before[0], number, outside)
                    streams.refuses = True
                last = Lasting(names, state) if number == len(cases) - 1 else None
                given = saved[case["point"]]
                backward = state.attended(module.backward)
                known = None if last is None else call.payload["lowered"]
                runner = state.at_launches(launch)
                turns.begin_call(case["turn"])
                about = (Recorder(), last, images.begin(), known)
                run_backward(call, backward, path, number, given, *about, runner=runner, turns=turns)
    except Ended:
        return


def _imported(call: Call, path: Path, streams: OneStream) -> tuple[ModuleType, LastingState, Watched]:
    """The candidate's module, and what there was where the user's statements end, to compare with."""
    looked: list[tuple[LastingState, Watched]] = []

    def below() -> None:
        streams.begin()
        looked.append((LastingState(), Watched(sys.modules[MODULE])))

    try:
        module = import_module(path, MODULE, call.payload["users_lines"], below)
    except (Exception, SystemExit) as error:
        raise tell_failure(call, Stage.IMPORT, 0, error, path) from error
    for name in ("forward", "backward"):
        if not callable(getattr(module, name, None)):
            message = f"the file defines no function `{name}`"
            raise told(call, Stage.IMPORT, 0, Failure(kind=FailureKind.FORM, type="", message=message))
    say(call, Answer(stage=Stage.IMPORT))
    return module, *looked[0]


def _line(function: Any) -> float:
    """Where a function is defined; beyond any line where that is not known."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code.co_firstlineno if isinstance(code, CodeType) and code.co_filename.endswith(FILE) else math.inf


def run_forward(
    call: Call,
    forward: Callable[..., Any],
    path: Path,
    number: int,
    recorder: Recorder | None = None,
    outside: Images | None = None,
    *,
    options: ExecOptions = _OPTIONS,
    users: bool = False,
) -> tuple[Any, ...]:
    """Run a forward at one point and tell the parent; the result are its saved values. Raises `Ended`.

    Calls with the same images `outside` find what others left in globals. `users`: it is the user's own, whose promises
    to the compiler are no candidate's.
    """
    args, kwargs = _arguments(call, number)
    try:
        execution = _run(forward, args, kwargs, options, recorder, outside)
    except (Exception, SystemExit) as error:
        raise tell_failure(call, Stage.FORWARD, number, error, path) from error
    result = execution.result
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], (tuple, list))):
        message = "`forward` does not return (outputs, saved) with a flat tuple of saved values"
        raise told(call, Stage.FORWARD, number, Failure(kind=FailureKind.FORM, type="", message=message))
    outputs, saved = result[0], tuple(result[1])
    values = tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)
    known = {v.untyped_storage()._cdata for v in values if isinstance(v, Tensor)}
    shapes = [(v.shape, declared_dtype(v)) for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
    answer = _answer(Stage.FORWARD, number, execution, values)
    update = {"extra_saved_bytes": _extra_bytes(saved, known, shapes), "program": _written(recorder)}
    if users:
        kept = [finding for finding in answer.findings if finding.kind != FindingKind.FALSE_PROMISE.value]
        update["findings"] = tuple(kept)
    say(call, answer.model_copy(update=update), values)
    return saved


def _arguments(call: Call, number: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a forward is given at a point."""
    form = call.payload["points"][number]
    return tuple(unpack(form["args"], call.tensors)), unpack(form["kwargs"], call.tensors)


def _run(
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: ExecOptions,
    recorder: Recorder | None = None,
    outside: Images | None = None,
) -> Execution:
    number_buffers_from(1)
    images = None if outside is None else Images(outside=outside)
    return run_once(forward, args, kwargs, (), options, safe=False, recorder=recorder, images=images)[0]


def _run_beside(call: Call, forward: Callable[..., Any], path: Path, point: int, case: int, outside: Images) -> None:
    """Run a candidate's forward once more at another point, as that of a second layer runs before the first's backward.

    What it keeps of its last call anywhere but in `saved` is another call's then. Raises `Ended`.
    """
    try:
        _run(forward, *_arguments(call, point), _OPTIONS, outside=outside)
    except (Exception, SystemExit) as error:
        raise tell_failure(call, Stage.BACKWARD, case, error, path) from error


def run_backward(
    call: Call,
    backward: Callable[..., Any],
    path: Path,
    number: int,
    saved: tuple[Any, ...],
    recorder: Recorder | None = None,
    lasting: Lasting | None = None,
    images: Images | None = None,
    known: Collection[str] | None = None,
    *,
    options: ExecOptions = _OPTIONS,
    runner: Runner = launch,
    turns: Turns | None = None,
) -> None:
    """Run a backward on one case and tell the parent, with what lasts after it. Raises `Ended`.

    What it is given has the same addresses in every case. `turns` chooses configurations of autotuned kernels. Where
    `known` is given, IR that was lowered in this process and is not known is told, too.
    """
    number_buffers_from(_OF_BACKWARDS)
    case = call.payload["cases"][number]
    cotangents = [None if key is None else _amid(call.tensors[key]) for key in case["cotangents"]]
    kwargs = {} if case["needs"] is None else {"needs": tuple(case["needs"])}
    try:
        execution, _ = run_once(
            backward,
            (saved, *cotangents),
            kwargs,
            (),
            options,
            safe=False,
            runner=runner,
            recorder=recorder,
            images=images,
            turns=turns,
        )
    except (Exception, SystemExit) as error:
        raise tell_failure(call, Stage.BACKWARD, number, error, path) from error
    result = execution.result
    values = tuple(result) if isinstance(result, (tuple, list)) else (result,)
    answer = _answer(Stage.BACKWARD, number, execution, values)
    also: dict[str, Any] = {"program": _written(recorder)}
    if turns is not None:
        also["tuned"] = tuple(f"{name} with {config}"[:500] for name, config in list(turns.taken.items())[:100])
        also["choices"] = turns.choices
    if lasting is not None:
        also |= {"replaced": lasting.names.replaced(), "changed": lasting.changed()}
    if known is not None:
        also["lowered"] = lowered(known)
    say(call, answer.model_copy(update=also), values)


def _amid(cotangent: Tensor) -> Tensor:
    """A cotangent; one with gaps stands behind NaN in its memory, as a part of something wider does.

    Where elements lie side by side it begins at a multiple of 16 bytes, as a row has to that a descriptor takes.
    """
    if cotangent.is_contiguous():
        return cotangent
    flat = cotangent.as_strided((cotangent.untyped_storage().nbytes() // cotangent.element_size(),), (1,))
    before = 16 // cotangent.element_size() if cotangent.stride(-1) == 1 else 1
    whole = torch.cat([torch.full((before,), math.nan, dtype=cotangent.dtype), flat])
    return whole.as_strided(cotangent.size(), cotangent.stride(), before)


def _written(recorder: Recorder | None) -> str:
    if recorder is None:
        return ""
    text = recorder.program.model_dump_json()
    too_long = Program(refused=f"its steps take {len(text)} bytes, more than {_MOST_BYTES}")
    return text if len(text) <= _MOST_BYTES else too_long.model_dump_json()


def _answer(stage: Stage, number: int, execution: Execution, values: tuple[Any, ...]) -> Answer:
    return Answer(
        stage=stage,
        number=number,
        returned=tuple(_returned(value, execution, values[:i]) for i, value in enumerate(values)),
        launches=len(execution.launches),
        calls=tuple(Called(name=c.name, kind=c.kind.value) for c in execution.torch_calls),
        findings=tuple(_found(f) for f in execution.findings),
        mutated=execution.mutated,
        unordered=tuple(_by_chance(place) for place in execution.unordered),
    )


def _found(finding: Finding) -> Found:
    """A line counts only in the candidate's own file: Triton's standard library has lines too."""
    own = not finding.file or Path(finding.file).name == FILE
    message = finding.message.replace(f"{FILE}:", "line ")  # the candidate never sees that name
    return Found(kind=finding.kind.value, message=message[:5000], line=finding.line if own else None)


def _by_chance(place: Unordered) -> ByChance:
    own = not place.file or Path(place.file).name == FILE
    return ByChance(
        kernel=place.kernel[:500],
        line=place.line if own else None,
        buffer=place.buffer[:500],
        programs=place.programs,
        how=place.how,
    )


def _returned(value: Any, execution: Execution, earlier: tuple[Any, ...]) -> Returned:
    if isinstance(value, Tensor):
        return Returned(
            type="tensor",
            dtype=str(declared_dtype(value)).removeprefix("torch."),
            strides=tuple(value.stride()),
            on_host=made_on_host(value),
            handed_back=any(is_handed_back(value, given) for given in execution.arguments.values()),
            of_argument=any(value is given or meets(value, given) for given in execution.arguments.values()),
            meets=tuple(i for i, one in enumerate(earlier[:64]) if isinstance(one, Tensor) and meets(value, one)),
        )
    return Returned(type="None" if value is None else type(value).__name__, value=plain_form(value))


def _extra_bytes(saved: tuple[Any, ...], outputs: set[int], inputs: list[tuple[torch.Size, torch.dtype]]) -> int:
    """Declared bytes of saved tensors that are neither outputs nor shaped and typed like an input.

    Inputs are copied on their way into an execution, so they are known by form only; a saved copy of an input counts as
    the input, which it could have been.
    """
    return sum(
        value.numel() * declared_dtype(value).itemsize
        for value in saved
        if isinstance(value, Tensor)
        and value.untyped_storage()._cdata not in outputs
        and (value.shape, declared_dtype(value)) not in inputs
    )
