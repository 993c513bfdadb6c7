"""What runs in the candidate child of a diagnosis: the backward again, with one operation changed at a time.

No truth is near, as in `child`: gradients go back, and the parent sees which of them are right.
"""

from __future__ import annotations

import time
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernel_agent.gate.child import FILE, MODULE
from kernel_agent.ir import ExecOptions, IRError, execute, import_module, standin
from kernel_agent.ir.execution import run_once
from kernel_agent.ir.trials import Edit, EditKind, Place, Watch
from kernel_agent.oracle.wire import unpack

if TYPE_CHECKING:
    from kernel_agent.sandbox import Call

_STRANGE = 8
"""Operations that make NaN that are tried, in the order of execution."""
_OPTIONS = ExecOptions(sanitize=False, poison=True)


def tried(call: Call) -> None:
    """Payload: `source`, `points` and `cases` as for `child.answered`, `seconds`, and `edits`: `all` that are
    found, `strange` for those that take NaN away where it begins, or a list of them.

    Sends a record per edit and case, with the gradients that are tensors: the first one of each case, without an edit,
    lists the places as well. Ends with the time.
    """
    torch.set_num_threads(1)
    deadline = time.monotonic() + call.payload["seconds"]
    path = call.scratch / FILE
    path.write_text(call.payload["source"], encoding="utf-8")
    with standin():
        module = import_module(path, MODULE)
        saved = [_saved(call, module, form) for form in call.payload["points"]]
        for number, case in enumerate(call.payload["cases"]):
            watch = Watch(look=True)
            _send(call, number, None, _gradients(call, module, case, saved, watch), watch, path)
            for edit in _asked(call.payload["edits"], watch, path):
                if time.monotonic() > deadline:
                    return
                try:
                    given = _gradients(call, module, case, saved, Watch(edit))
                except (IRError, RuntimeError, ValueError, IndexError):
                    continue  # a changed kernel may well fail: then this is not the mistake
                _send(call, number, edit, given, None, path)


def _asked(asked: str | list[dict[str, Any]], watch: Watch, path: Path) -> list[Edit]:
    if asked == "all":
        return [place.edit for place in watch.places.values() if _own(place, path)]
    if asked == "strange":
        return [found.place.edit for found in watch.strange.values() if _own(found.place, path)][:_STRANGE]
    return [Edit(**{**form, "kind": EditKind(form["kind"])}) for form in asked if isinstance(form, dict)]


def _saved(call: Call, module: ModuleType, form: dict[str, Any]) -> tuple[Any, ...]:
    args, kwargs = unpack(form["args"], call.tensors), unpack(form["kwargs"], call.tensors)
    return tuple(execute(module.forward, tuple(args), kwargs, options=_OPTIONS).result[1])


def _gradients(
    call: Call, module: ModuleType, case: dict[str, Any], saved: list[tuple[Any, ...]], watch: Watch
) -> tuple[Any, ...]:
    cotangents = [None if key is None else call.tensors[key] for key in case["cotangents"]]
    kwargs = {} if case["needs"] is None else {"needs": tuple(case["needs"])}
    arguments = (saved[case["point"]], *cotangents)
    execution, _ = run_once(module.backward, arguments, kwargs, (), _OPTIONS, safe=False, runner=watch.runner)
    result = execution.result
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def _own(place: Place, path: Path) -> bool:
    return place.line is not None and Path(place.file).name == path.name


def _send(call: Call, case: int, edit: Edit | None, given: tuple[Any, ...], watch: Watch | None, path: Path) -> None:
    record: dict[str, Any] = {"case": case, "edit": None if edit is None else _form(edit)}
    if watch is not None:
        record["places"] = [_told(place) for place in watch.places.values() if _own(place, path)]
        record["strange"] = [{**_told(s.place), "how": s.how} for s in watch.strange.values() if _own(s.place, path)]
    tensors = {
        str(i): value.detach().as_subclass(Tensor).contiguous()
        for i, value in enumerate(given)
        if isinstance(value, Tensor)
    }
    call.send(record, tensors)


def _form(edit: Edit) -> dict[str, Any]:
    return {
        "kernel": edit.kernel,
        "op": edit.op,
        "kind": edit.kind.value,
        "operand": edit.operand,
        "factor": edit.factor,
    }


def _told(place: Place) -> dict[str, Any]:
    told = {name: getattr(place, name) for name in ("name", "line", "variable", "column")}
    return {"edit": _form(place.edit), **told}
