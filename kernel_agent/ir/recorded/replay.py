"""Carries out a program: as a function that an execution calls, so that everything is judged as in any other call."""

from __future__ import annotations

import inspect
import itertools
import types
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction

from kernel_agent.ir.memory import ADDRESS_BITS
from kernel_agent.ir.recorded.forms import CannotRecord, Reader, kernel_line, looked_up
from kernel_agent.ir.recorded.program import Constant, Launch, Program, Torch, Workspace

Kernels = Mapping[tuple[str, int], JITFunction[Any]]
"""Kernels by name and line of the `def`."""

_PARTS = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})


def find_kernels(module: types.ModuleType) -> dict[tuple[str, int], JITFunction[Any]]:
    """The kernels at the top level of a module, those under autotuning included."""
    found: dict[tuple[str, int], JITFunction[Any]] = {}
    for value in vars(module).values():
        while not isinstance(value, JITFunction) and hasattr(value, "fn"):
            value = value.fn
        if isinstance(value, JITFunction):
            found[value.fn.__name__, kernel_line(value)] = value
    return found


class Replayed:
    """A program as a function of its arguments; the calls and launches that it makes are those of its steps."""

    __name__ = "replayed"

    def __init__(self, program: Program, kernels: Kernels, parameters: Sequence[str] = ()) -> None:
        """`parameters`: of the function that was recorded; what is told of arguments names them so."""
        self._program = program
        self._kernels = kernels
        known = itertools.takewhile(str.isidentifier, parameters)
        listed = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in known]
        rest = inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)
        self.__signature__ = inspect.Signature([*listed, *([] if "args" in parameters else [rest])])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the program. Raises `CannotRecord` for steps that no call can have made."""
        if self._program.refused:
            raise CannotRecord(self._program.refused)
        tensors = [leaf for leaf in tree_leaves((list(args), dict(kwargs))) if isinstance(leaf, Tensor)]
        reader = Reader(tensors, _Named(self._kernels), _start)
        memories: dict[int, Tensor] = {}
        for step in self._program.steps:
            if isinstance(step, Launch):
                self._launch(step, reader)
            elif isinstance(step, Constant):
                _keep(tensors, step.result, _constant(step))
            elif isinstance(step, Workspace):
                _keep(tensors, step.result, _workspace(step, memories))
            else:
                result = tree_leaves(_call(step, reader))
                if len(result) != len(step.results):
                    raise CannotRecord(
                        f"torch function {step.name} gives {len(result)} results, not {len(step.results)}"
                    )
                for number, leaf in zip(step.results, result, strict=True):
                    if number is not None:
                        _keep(tensors, number, leaf)
        return reader.value(self._program.result)

    def _launch(self, step: Launch, reader: Reader) -> None:
        kernel = _Named(self._kernels)[step.kernel, step.line]
        values, options = reader.value(step.values), reader.value(step.options)
        if not isinstance(values, dict) or not isinstance(options, dict):
            raise CannotRecord(f"kernel {step.kernel} is launched without arguments by name")
        kernel[step.grid](**values, **options)


class _Named:
    """Kernels, with an answer for those that are not there."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def __getitem__(self, key: tuple[str, int]) -> JITFunction[Any]:
        """The kernel. Raises `CannotRecord`."""
        if key not in self._kernels:
            raise CannotRecord(
                f"kernel {key[0]} is none that stands at the top level of the file and can be compiled by itself",
                remedy="Define kernels at the top level with @triton.jit; let them use triton.language and constants.",
            )
        return self._kernels[key]


def _call(step: Torch, reader: Reader) -> Any:
    args, kwargs = reader.value(step.args), reader.value(step.kwargs)
    if step.space == "part":
        if step.name not in _PARTS or len(args) != 1 or not isinstance(args[0], Tensor):
            raise CannotRecord(f"{step.name} is no part of a tensor")
        return getattr(args[0], step.name)
    return looked_up(step.space, step.name)(*args, **kwargs)


def _constant(step: Constant) -> Tensor:
    return torch.tensor(list(step.values), dtype=_dtype(step.dtype), device="cuda").reshape(step.shape)


def _workspace(step: Workspace, memories: dict[int, Tensor]) -> Tensor:
    """A part of memory that nobody wrote, or that holds one number."""
    if step.first == step.result:
        kind: dict[str, Any] = {"dtype": _dtype(step.dtype), "device": "cuda"}
        empty = step.holds is None
        memories[step.first] = (
            torch.empty((step.elements,), **kind) if empty else torch.full((step.elements,), step.holds, **kind)
        )
    if step.first not in memories:
        raise CannotRecord("a step names memory that no step before it made")
    return torch.as_strided(memories[step.first], step.shape, step.strides, step.offset)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CannotRecord(f"{name} is no dtype")
    return found


def _start(tensor: Tensor) -> int:
    """The address at which the memory of a tensor starts."""
    return int(tensor.data_ptr()) >> ADDRESS_BITS << ADDRESS_BITS


def _keep(tensors: list[Tensor], number: int, value: Any) -> None:
    if not isinstance(value, Tensor) or not 0 <= number <= len(tensors):
        raise CannotRecord("the numbers of a program's tensors are out of order")
    if number == len(tensors):
        tensors.append(value)
    else:
        tensors[number] = value
