"""What runs in the candidate child of a diagnosis: the backward again, watched for what it reads of what was saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernel_agent.gate.child import FILE, MODULE
from kernel_agent.ir import ExecOptions, execute, import_module, standin
from kernel_agent.ir.cost.meter import Access
from kernel_agent.ir.execution import run_once
from kernel_agent.ir.launch import LaunchOptions, launch
from kernel_agent.ir.memory import Buffer
from kernel_agent.ir.program import Block, Module, Op
from kernel_agent.ir.sanitizer.findings import Findings
from kernel_agent.ir.sanitizer.lanes import Lanes
from kernel_agent.ir.values import Active, RuntimeValue
from kernel_agent.oracle.wire import unpack

if TYPE_CHECKING:
    from kernel_agent.sandbox import Call

_OPTIONS = ExecOptions(sanitize=False)


@dataclass(eq=False)
class _Reader:
    """Notes which elements of each argument every line reads."""

    module: Module | None = None
    seen: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    """Argument -> line (0: unknown) -> which elements of its storage."""

    def __call__(
        self,
        module: Module,
        grid: tuple[int, int, int],
        arguments: Sequence[RuntimeValue],
        buffers: dict[int, Buffer],
        findings: Findings,
        options: LaunchOptions,
    ) -> None:
        """`launch`, watched."""
        self.module = module
        launch(module, grid, arguments, buffers, findings, options, self)

    def block(self, block: Block, active: Active) -> None:
        """Nothing of interest."""

    def access(self, kind: Access, op: Op, buffer: Buffer, lanes: Lanes) -> None:
        """Note a read."""
        if kind is Access.READ and self.module is not None:
            place = self.module.place(op)
            line = place.line if place is not None and Path(place.file).name == FILE else 0
            lines = self.seen.setdefault(buffer.name, {})
            lines.setdefault(line, torch.zeros(buffer.size, dtype=torch.bool))[lanes.index] = True


def read(call: Call) -> None:
    """Payload: `source`, `points` and `cases` as for `child.answered`; the first case is run.

    Sends a record for what is read in part of a saved tensor that is no input: `place` in saved, its `elements`, how
    many are `read`, and the `line` that reads them.
    """
    torch.set_num_threads(1)
    path = call.scratch / FILE
    path.write_text(call.payload["source"], encoding="utf-8")
    with standin():
        module = import_module(path, MODULE)
        case = call.payload["cases"][0]
        form = call.payload["points"][case["point"]]
        args, kwargs = unpack(form["args"], call.tensors), unpack(form["kwargs"], call.tensors)
        saved = tuple(execute(module.forward, tuple(args), kwargs, options=_OPTIONS).result[1])
        cotangents = [None if key is None else call.tensors[key] for key in case["cotangents"]]
        reader = _Reader()
        run_once(module.backward, (saved, *cotangents), {}, (), _OPTIONS, safe=False, runner=reader)
        inputs = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        for place, value in enumerate(saved):
            lines = reader.seen.get(f"saved[{place}]")
            if isinstance(value, Tensor) and lines and not _is_one_of(value, inputs):
                for line, read in _partly(lines, value.numel()):
                    call.send({"place": place, "elements": value.numel(), "read": read, "line": line})


def _partly(lines: dict[int, Tensor], elements: int) -> list[tuple[int, int]]:
    """(Line, elements it reads) where the rest is read by none, or the same and the rest by others."""
    together = torch.stack(list(lines.values())).any(0)
    if int(together.sum()) < elements:
        return [(min(lines), int(together.sum()))]
    alone = {line: [other for at, other in lines.items() if at != line] for line in lines}
    doubled = [line for line, others in alone.items() if others and int(torch.stack(others).any(0).sum()) == elements]
    return [(line, int(lines[line].sum())) for line in doubled]


def _is_one_of(value: Tensor, inputs: Sequence[Any]) -> bool:
    """Whether a saved tensor has the values of an input."""
    return any(value.shape == other.shape and bool((value.double() == other.double()).all()) for other in inputs)
