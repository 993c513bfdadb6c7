"""Autotuned kernels under every configuration: a backward or a truth must not depend on which one a clock prefers.

Nor may it depend on being launched once: Triton launches a kernel many times, on the same memory, to choose.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from kernel_agent.ir.errors import LoweringError
from kernel_agent.ir.sanitizer.findings import Finding, FindingKind, Findings

if TYPE_CHECKING:
    from kernel_agent.ir.execution import Execution

_AGREEMENT = 1e-9
"""Largest difference of two configurations in exact arithmetic, relative to the largest element of a tensor."""


class Configs(str, enum.Enum):
    """Which configurations of an autotuned kernel are run."""

    FIRST = "FIRST"
    """The first one that survives pruning and that Triton accepts."""
    ALL = "ALL"
    """The first one makes the result; then the call is repeated with every other one. Findings tell where outputs or
    changed arguments differ, and what else is wrong with that configuration."""


@dataclass
class Turns:
    """Of the calls of one process: each has autotuned kernels take another configuration than the call before."""

    calls: int = 0
    """So many were made before the one that is running, in this process or in one before it."""
    chosen: set[tuple[Any, ...]] = field(default_factory=set)
    """Kernels with the values of their `key` for which a real process would have chosen a configuration by now."""
    taken: dict[str, str] = field(default_factory=dict)
    """What the kernels of the running call took, by name: those that had a choice."""
    choices: int = 0
    """Of so many that compute differently the kernel with most of them had a choice in the running call."""

    def begin_call(self, number: int) -> None:
        """The call begins before which so many were made; one that is made again has the number that it had."""
        self.calls = number
        self.taken, self.choices = {}, 0

    def place(self, tuner: Any, configs: Sequence[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        """Which configuration the running call takes first, once another one was run as if to choose."""
        apart = _that_differ(configs)
        self.choices = max(self.choices, len(apart))
        place = apart[self.calls % len(apart)]
        if len(configs) > 1:
            if self._chooses(tuner, {**dict(zip(tuner.arg_names, args, strict=False)), **kwargs}):
                _time(tuner, configs[place - 1], args, kwargs)
            self.taken[tuner.base_fn.__name__] = str(configs[place])
        return place

    def _chooses(self, tuner: Any, given: Mapping[str, Any]) -> bool:
        """Whether Triton would choose now, as it does once for the values of the kernel's `key` and the dtypes."""
        named = [given[name] for name in tuner.arg_names if name in given]
        dtypes = [str(value.dtype) for value in named if hasattr(value, "dtype")]
        key = (tuner.base_fn.__name__, *(repr(given.get(name)) for name in tuner.keys), *dtypes)
        new = key not in self.chosen
        self.chosen.add(key)
        return new


def _that_differ(configs: Sequence[Any]) -> list[int]:
    """Places of configurations that compute differently: those that only count warps or stages do as others do."""
    seen: dict[tuple[Any, ...], int] = {}
    for place, config in enumerate(configs):
        named = sorted((name, repr(value)) for name, value in config.kwargs.items())
        seen.setdefault((*named, id(config.pre_hook)), place)
    return list(seen.values())


def _time(tuner: Any, config: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Run a configuration as `Autotuner` does to time it: what it leaves in memory, the next launch finds there.

    `reset_to_zero`, `restore_value` and hooks act as they do there. A configuration that Triton refuses leaves nothing.
    """
    current = {**kwargs, **config.all_kwargs()}
    named = {**dict(zip(tuner.arg_names, args, strict=False)), **current}
    if config.pre_hook is not None:
        config.pre_hook(named)
    tuner.pre_hook(named)
    try:
        tuner.fn.run(*args, **current)
    except LoweringError as error:
        tuner.post_hook(named, exception=error)
    else:
        tuner.post_hook(named, exception=None)
    tuner.pre_hook(named, reset_only=True)


def try_others(execution: Execution, again: Callable[[Mapping[str, int]], Execution]) -> tuple[Finding, ...]:
    """Findings of an execution and of its repetitions, one for every other configuration of every autotuned kernel.

    `again` repeats the call with the configurations of the given places. Configurations that Triton refuses are left
    out, as its own benchmark does.
    """
    findings = Findings()
    for finding in execution.findings:
        findings.add(finding)
    for kernel, configs in execution.tuned.items():
        for place in range(1, len(configs)):
            try:
                other = again({kernel: place})
            except LoweringError:
                continue
            for finding in (*other.findings, *_differences(kernel, configs[0], execution, other)):
                if not any(_same_place(finding, known) for known in execution.findings):
                    findings.add(replace(finding, message=f"{finding.message}; with {configs[place]}"))
    return findings.all()


def _same_place(one: Finding, other: Finding) -> bool:
    return (one.kind, one.kernel, one.line, one.buffer) == (other.kind, other.kernel, other.line, other.buffer)


def _differences(kernel: str, first: str, one: Execution, other: Execution) -> Iterator[Finding]:
    for (name, ours), theirs in zip(_named_tensors(one), _tensors(other), strict=False):
        offset = _worst(ours, theirs)
        if offset is not None:
            yield Finding(
                FindingKind.CONFIG_DISAGREEMENT,
                f"{kernel}: {name} differs at element {offset} from what it is with {first}",
                kernel=kernel,
                buffer=name,
                offset=offset,
                size=ours.numel(),
            )


def _tensors(execution: Execution) -> list[Tensor]:
    outputs = [leaf for leaf in tree_leaves(execution.result) if isinstance(leaf, Tensor)]
    return [tensor.detach() for tensor in (*outputs, *execution.arguments.values())]


def _named_tensors(execution: Execution) -> list[tuple[str, Tensor]]:
    tensors = _tensors(execution)
    outputs = len(tensors) - len(execution.arguments)
    return list(zip([*(f"output {place}" for place in range(outputs)), *execution.arguments], tensors, strict=True))


def _worst(ours: Tensor, theirs: Tensor) -> int | None:
    """The element that differs most, in row-major order; None when the tensors agree."""
    if ours.shape != theirs.shape:
        return 0
    if ours.numel() == 0:
        return None
    if not ours.is_floating_point():
        differs = ours != theirs
        return int(differs.flatten().int().argmax()) if bool(differs.any()) else None
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    error = torch.where(same, 0.0, (ours - theirs).abs()).nan_to_num(nan=torch.inf)
    scale = float(torch.where(ours.isfinite(), ours, 0.0).abs().max())
    return int(error.flatten().argmax()) if float(error.max()) > _AGREEMENT * scale else None
