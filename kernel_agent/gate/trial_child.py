"""What runs in the candidate child of a diagnosis: the backward again, with one operation changed at a time.

No truth is near, as in `child`: gradients go back, and the parent sees which of them are right.
"""

from __future__ import annotations

import time
from dataclasses import replace
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
_LAST = {EditKind.FACTOR: 1, EditKind.MASKED: 2, EditKind.TIMES: 3, EditKind.OVER: 4}
"""Kinds of which there are many are tried after those of which there are few."""
_OPTIONS = ExecOptions(sanitize=False, poison=True)


def tried(call: Call) -> None:
    """Payload: `source`, `points` and `cases` as for `child.answered`, `seconds` of processor time, and `edits`: `all`
    that are found, `strange` for those that take NaN away where it begins, or a list of them.

    Sends a record per edit and case, with the gradients that are tensors: the first one of each case, without an edit,
    lists the places as well. Ends with the time.
    """
    torch.set_num_threads(1)
    deadline = time.process_time() + call.payload["seconds"]
    path = call.scratch / FILE
    path.write_text(call.payload["source"], encoding="utf-8")
    with standin():
        module = import_module(path, MODULE)
        saved = [_saved(call, module, form) for form in call.payload["points"]]
        for number, case in enumerate(call.payload["cases"]):
            watch = Watch(look=True)
            _send(call, number, None, _gradients(call, module, case, saved, watch), watch, path)
            for asked, edit in _asked(call.payload["edits"], watch, path):
                if time.process_time() > deadline:
                    return
                try:
                    given = _gradients(call, module, case, saved, Watch(edit))
                except (IRError, RuntimeError, ValueError, IndexError):
                    continue  # a changed kernel may well fail: then this is not the mistake
                _send(call, number, edit, given, None, path, asked)


def _asked(asked: str | list[dict[str, Any]], watch: Watch, path: Path) -> list[tuple[int | None, Edit]]:
    """The edits to try, those of a list with their positions in it."""
    places = [place for place in watch.places.values() if _own(place, path)]
    if asked == "all":
        return [(None, edit) for edit in sorted((p.edit for p in places), key=lambda edit: _LAST.get(edit.kind, 0))]
    if asked == "strange":
        found = [strange.place.edit for strange in watch.strange.values() if _own(strange.place, path)]
        return [(None, edit) for edit in found[:_STRANGE]]
    named = dict(zip(names([_told(place) for place in places]), places, strict=True))
    forms = [(number, form) for number, form in enumerate(asked) if isinstance(form, dict)]
    return [
        (number, replace(named[form["name"]].edit, factor=form["factor"]))
        for number, form in forms
        if form["name"] in named
    ]


def names(told: list[dict[str, Any]]) -> list[str]:
    """A name for every place, the same where another layout of the arguments gives a kernel other operations."""
    seen: dict[str, int] = {}
    result = []
    for form in told:
        parts = (form["edit"]["kernel"], form["edit"]["kind"], form["edit"]["operand"])
        name = f"{form['line']}:{form['column']} {form['name']} {form['other']} {parts}"
        seen[name] = seen.get(name, -1) + 1
        result.append(f"{name} {seen[name]}")
    return result


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


def _send(
    call: Call,
    case: int,
    edit: Edit | None,
    given: tuple[Any, ...],
    watch: Watch | None,
    path: Path,
    asked: int | None = None,
) -> None:
    record: dict[str, Any] = {"case": case, "edit": None if edit is None else _form(edit), "asked": asked}
    if watch is not None:
        told = [_told(place) for place in watch.places.values() if _own(place, path)]
        record["places"] = [{**form, "key": key} for form, key in zip(told, names(told), strict=True)]
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
        "mask": edit.mask,
    }


def _told(place: Place) -> dict[str, Any]:
    told = {name: getattr(place, name) for name in ("name", "line", "variable", "other", "column")}
    return {"edit": _form(place.edit), **told}
