"""What runs in the candidate child of the native tier: its real kernels on the GPU. No truth is near."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernel_agent.bench.launches import coarsest_dot
from kernel_agent.bench.realdevice import begin, import_file, on_gpu, outputs_of, unpacked
from kernel_agent.bench.timing_child import failure
from kernel_agent.gate.child import FILE, MODULE

if TYPE_CHECKING:
    from kernel_agent.sandbox import Call


class Failed(Exception):
    """The candidate failed and the parent was told."""


def answered(call: Call) -> None:
    """Payload: `device`, `source`, `calls` of each backward, `own_forward`, `entries`: each with `arguments` (see
    `packed`) and `cotangents` (tensor keys or None per output).

    Sends one message per entry: `returned` (type names), `layouts`, `dot_bits` of the backward's kernels, and the
    gradients as tensors by position (`0`); where one of the calls gives something else, that (`again.0`), and how far
    the calls lie apart in every element (`width.0`); with the outputs (`out.0`) of a forward of its own; or `failure`
    with `where`.
    """
    begin(call)
    warnings.simplefilter("ignore")
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty holds NaN then
    path = call.scratch / FILE
    path.write_text(call.payload["source"], encoding="utf-8")
    where, number = "importing the file", -1
    try:
        module = import_file(path, MODULE)
        for number, entry in enumerate(call.payload["entries"]):
            where = "forward"
            arguments = unpacked(entry["arguments"], call.tensors)
            cotangents = [None if key is None else on_gpu(call.tensors[key]) for key in entry["cotangents"]]
            with torch.no_grad():
                made = module.forward(*arguments.args, **arguments.kwargs)
                torch.cuda.synchronize()
                where = "backward"
                _answer(call, module, number, made, cotangents)
            torch.cuda.empty_cache()
    except (Exception, SystemExit) as error:
        call.send({"entry": number, "where": where, "failure": failure(error, Path(path)).model_dump(mode="json")})


def _layout(value: Any) -> dict[str, Any]:
    if not isinstance(value, Tensor):
        return {"type": type(value).__name__}
    return {"type": "tensor", "strides": list(value.stride()), "on_host": value.device.type == "cpu"}


class Repeats:
    """What further calls with the same arguments give that the first one did not."""

    def __init__(self, first: tuple[Any, ...]) -> None:
        self._first = first
        self._other: dict[int, Tensor] = {}
        self._low: dict[int, Tensor] = {}
        self._high: dict[int, Tensor] = {}

    def add(self, again: tuple[Any, ...]) -> None:
        """One more call."""
        for i, (value, before) in enumerate(zip(again, self._first, strict=False)):
            if not isinstance(value, Tensor) or (isinstance(before, Tensor) and _identical(value, before)):
                continue
            self._other[i] = value
            if isinstance(before, Tensor) and before.shape == value.shape and before.dtype == value.dtype:
                self._low[i] = torch.minimum(self._low.get(i, before), value)
                self._high[i] = torch.maximum(self._high.get(i, before), value)

    def tensors(self) -> dict[str, Tensor]:
        """The last other result of each gradient, and how far all of them lie apart."""
        found = {f"again.{i}": value.detach().contiguous() for i, value in self._other.items()}
        return found | {f"width.{i}": (self._high[i] - low).detach().contiguous() for i, low in self._low.items()}


def _identical(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and bool(torch.equal(one, other))


def _answer(call: Call, module: Any, number: int, made: Any, cotangents: list[Tensor | None]) -> None:
    saved = tuple(made[1])
    results: list[tuple[Any, ...]] = []
    bits = coarsest_dot(lambda: results.append(outputs_of(module.backward(saved, *cotangents))))
    (first,) = results
    repeats = Repeats(first)
    for _ in range(call.payload["calls"] - 1):
        repeats.add(outputs_of(module.backward(saved, *cotangents)))
    torch.cuda.synchronize()
    record = {
        "entry": number,
        "returned": ["tensor" if isinstance(value, Tensor) else type(value).__name__ for value in first],
        "layouts": [_layout(value) for value in first],
        "dot_bits": bits,
    }
    tensors = {str(i): value.detach().contiguous() for i, value in enumerate(first) if isinstance(value, Tensor)}
    tensors |= repeats.tensors()
    if call.payload["own_forward"]:
        outputs = outputs_of(made[0])
        tensors |= {f"out.{i}": o.detach().contiguous() for i, o in enumerate(outputs) if isinstance(o, Tensor)}
    call.send(record, tensors)
