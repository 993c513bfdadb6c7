"""What a child of the gate says to its parent: answers with their tensors, and failures, after which it ends."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernel_agent.gate.answer import Answer, Failure, FailureKind, Frame, Stage
from kernel_agent.ir import IRError, LoweringError, UnsupportedOp
from kernel_agent.ir.recorded.forms import CannotRecord

if TYPE_CHECKING:
    from kernel_agent.sandbox import Call


class Ended(Exception):
    """The candidate failed and the parent was told: nothing further is worth running."""


def say(call: Call, answer: Answer, values: tuple[Any, ...] = ()) -> None:
    """Send an answer with the tensors among its values."""
    with torch._C.DisableTorchFunction():  # whoever watches torch is told nothing of what only leaves the process
        _send(call, answer, values)


def _send(call: Call, answer: Answer, values: tuple[Any, ...]) -> None:
    tensors = {
        str(i): value.detach().as_subclass(Tensor).contiguous()
        for i, value in enumerate(values)
        if isinstance(value, Tensor)
    }
    call.send(answer.model_dump(mode="json"), tensors)


def told(call: Call, stage: Stage, number: int, failure: Failure) -> Ended:
    """Tell the parent of a failure; the result is to be raised."""
    say(call, Answer(stage=stage, number=number, failure=failure))
    return Ended(failure.message)


def tell_failure(call: Call, stage: Stage, number: int, error: BaseException, path: Path) -> Ended:
    """Tell the parent of an exception; the result is to be raised."""
    return told(call, stage, number, _failure(error, path))


def _failure(error: BaseException, path: Path) -> Failure:
    """An exception as a record, with the frames that are the candidate's own."""
    frames = tuple(
        Frame(line=frame.lineno or 0, function=frame.name)
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == str(path)
    )[-20:]
    line = frames[-1].line if frames else None
    kind, column = FailureKind.PYTHON, None
    message = str(error)
    if isinstance(error, SyntaxError):
        kind, line, message = FailureKind.COMPILE, error.lineno, error.msg
        column = max(0, error.offset - 1) if error.offset else None
    elif isinstance(error, IRError):
        kind = FailureKind.LAUNCH
        if isinstance(error, LoweringError):
            kind = FailureKind.COMPILE
        elif isinstance(error, UnsupportedOp):
            kind = FailureKind.UNSUPPORTED
        elif isinstance(error, CannotRecord):
            kind = FailureKind.UNEXPLAINED
        message = error.message
        if error.line is not None and (not error.file or Path(error.file).name == path.name):
            line, column = error.line, error.column
    name = type(error).__name__
    return Failure(kind=kind, type=name, message=message[:20_000], line=line, column=column, frames=frames)
