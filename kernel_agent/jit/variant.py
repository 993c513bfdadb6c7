"""`Variant`: a proven pair as it runs: loaded, watched, and asked whether it is for the call at hand."""

from __future__ import annotations

import atexit
import functools
import hashlib
import importlib.util
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from kernel_agent.compiler.derived import Derived
from kernel_agent.ir import ExecOptions, Execution, declared_dtype, execute, standin
from kernel_agent.jit.conditions import Objection, conditions_of
from kernel_agent.jit.deriving import PROVEN_WAYS
from kernel_agent.jit.errors import CannotTrain
from kernel_agent.jit.ways import Way, noted, tests_of, watch, way_of

_EXACT = ExecOptions(sanitize=False)


class NotThisPair(Exception):
    """A call that a pair was not proven for. It has run the forward, and nothing else."""

    def __init__(self, why: Objection, words: str, way: Way, *, mutates: bool) -> None:
        super().__init__(words)
        self.why = why
        self.way = way
        self.mutates = mutates
        """Whether the forward wrote into arguments, so that it cannot be run again."""


class Variant:
    """One pair of a stub."""

    def __init__(self, derived: Derived, stub: str, *, exact: bool) -> None:
        """`exact`: its kernels are executed from their IR, where there is no GPU."""
        self.derived = derived
        self.module = _loaded(derived.draft.pair, stub)
        self.proven = frozenset(tuple(way) for way in getattr(self.module, PROVEN_WAYS))
        self._traced = frozenset(tests_of(way) for way in self.proven)
        self.mutates = "increment_version(" in derived.draft.pair
        self.named: Callable[..., Any] | None = None
        """Makes the named tuple that the stub returns of its fields, which autograd hands out as a plain one."""
        self._forward: Callable[..., Any] = getattr(self.module, "forward")  # noqa: B009
        self._backward: Callable[..., Any] = getattr(self.module, "backward")  # noqa: B009
        self._conditions = conditions_of(self.module, derived.draft.pair)
        self._operator = getattr(self.module, f"{stub}_autograd")
        asked = {"forward": self._asked_exactly, "backward": self._back_exactly} if exact else {"forward": self._asked}
        vars(self.module).update(asked)

    @property
    def traceable(self) -> Callable[..., Any]:
        """The operator as `torch.compile` traces it. What a call is asked is asked while it is traced, and what it was
        answered by is guarded."""
        return self._operator  # type: ignore[no-any-return]

    def __call__(self, arguments: Mapping[str, Any]) -> Any:
        """The outputs, with the pair's backward behind them. Raises `NotThisPair`."""
        outputs = self._operator(**arguments)
        for output in outputs if isinstance(outputs, tuple) else (outputs,):
            if isinstance(output, Tensor) and output.grad_fn is not None:
                output.grad_fn.register_hook(_once)
                break
        return outputs if self.named is None else self.named(*outputs)

    def _asked(self, *values: Any, **named: Any) -> tuple[Any, tuple[Any, ...]]:
        """The forward, and what the backward asks of it."""
        with noted() as notes:
            outputs, saved = self._forward(*values, **named)
        return self._admitted(outputs, saved, way_of(notes))

    def _asked_exactly(self, *values: Any, **named: Any) -> tuple[Any, tuple[Any, ...]]:
        with noted() as notes:
            execution = execute(self._forward, values, named, options=_EXACT)
        refuse_written(execution, self._operator.__name__.removesuffix("_autograd"))
        outputs, saved = tree_map(real, execution.result)
        return self._admitted(outputs, saved, way_of(notes))

    def _admitted(self, outputs: Any, saved: tuple[Any, ...], way: Way) -> tuple[Any, tuple[Any, ...]]:
        if way not in (self._traced if torch.compiler.is_compiling() else self.proven):
            raise NotThisPair(Objection.CONFIGURATION, _other_way(way, self.proven), way, mutates=self.mutates)
        objected = self._conditions(saved)
        if objected is not None:
            raise NotThisPair(objected.why, objected.words, way, mutates=self.mutates)
        if isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
            self.named = type(outputs)
        return outputs, saved

    def _back_exactly(self, saved: tuple[Any, ...], *grads: Any, **options: Any) -> Any:
        return tree_map(real, execute(self._backward, (saved, *grads), options, options=_EXACT).result)


class SecondDerivative(torch.autograd.Function):  # type: ignore[misc]
    """Stands behind gradients that were taken with `create_graph=True`: autograd would take them for constants."""

    @staticmethod
    def forward(_ctx: Any, gradient: Tensor, _anchor: Tensor) -> Tensor:
        """The gradient itself."""
        return gradient.view_as(gradient)

    @staticmethod
    def backward(_ctx: Any, *_gradients: Tensor) -> Any:
        """Raises."""
        raise CannotTrain(
            "gradients of gradients are not derived",
            remedy="Leave create_graph=True out, or compute what is differentiated twice in PyTorch.",
        )


def _once(gradients: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...] | None:
    """A hook of the operator's node."""
    if not torch.is_grad_enabled():
        return None
    return tuple(
        None if one is None else SecondDerivative.apply(one, torch.zeros((), requires_grad=True)) for one in gradients
    )


def refuse_written(execution: Execution, stub: str) -> None:
    """Raise `CannotTrain` where arguments were written into: what is executed are their images."""
    if execution.mutated:
        raise CannotTrain(
            f"`{stub}` writes into `{execution.mutated[0]}`, which is on the CPU", remedy="Move the tensors to a GPU."
        )


def real(value: Any) -> Any:
    """A tensor of an execution as one of its declared dtype, laid out as it is; other values as they are."""
    if not isinstance(value, Tensor):
        return value
    image, dtype = value.detach().as_subclass(Tensor), declared_dtype(value)
    made = image.to(dtype)
    if made.stride() == image.stride() or not image.numel():
        return made
    # A part of a larger tensor: torch closes the gaps between its rows, by whose strides kernels step.
    reach = 1 + sum((size - 1) * stride for size, stride in zip(image.shape, image.stride(), strict=True))
    room = torch.zeros(reach, dtype=dtype, device=image.device).as_strided(image.shape, image.stride())
    for axis, stride in enumerate(image.stride()):
        if stride == 0:
            room, image = room.narrow(axis, 0, 1), image.narrow(axis, 0, 1)
    room.copy_(image)
    return room.expand(made.shape)


def _other_way(way: Way, proven: frozenset[Way]) -> str:
    """Where a way leaves the nearest proven one."""
    nearest = min(proven, key=lambda one: len(set(one) ^ set(way)), default=())
    odd = sorted(set(way) ^ set(nearest))
    return f"the call goes another way through the stub than any that was proven: {', '.join(odd)}"


@functools.lru_cache(maxsize=1)
def _folder() -> Path:
    """Where this process keeps the files of loaded pairs: Triton reads the source of kernels from them."""
    folder = tempfile.TemporaryDirectory(prefix="kernel-agent-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


def _loaded(pair: str, stub: str) -> ModuleType:
    digest = hashlib.sha256(pair.encode()).hexdigest()[:16]
    path = _folder() / f"{stub}_{digest}.py"
    path.write_text(pair, encoding="utf-8")
    name = f"kernel_agent_jit_{stub}_{digest}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with nullcontext() if torch.cuda.is_available() else standin():
        spec.loader.exec_module(module)
    watch(module, pair)
    return module
