"""Runs a stub at sizes that are too large to be executed whole: a few programs of each launch, and nothing else.

What those programs write is exact, and so are the gradients of what they write: programs of a launch do not depend on
each other. A launch whose results other code of the stub reads cannot be cut like that and is run whole; where sums
over programs, memory that is not fresh, or torch code stand in the way, sampling is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from kernel_agent.ir.capture.torch_calls import CallClass, TorchCall
from kernel_agent.ir.errors import IRError
from kernel_agent.ir.execution import ExecOptions, Execution, Safety, run_once
from kernel_agent.ir.launch import LaunchOptions, launch
from kernel_agent.ir.memory import CPU, Buffer
from kernel_agent.ir.program import Module
from kernel_agent.ir.sanitizer.findings import FindingKind, Findings
from kernel_agent.ir.sanitizer.provenance import written_buffers
from kernel_agent.ir.transfer import reachable
from kernel_agent.ir.values import RuntimeValue

_PLAIN = ExecOptions()
_HARMLESS = frozenset({CallClass.ALLOCATION, CallClass.VIEW})


class CannotSample(IRError):
    """Programs of this stub cannot be looked at one by one."""


@dataclass(frozen=True)
class Share:
    """How much of one launch was run."""

    kernel: str
    programs: int
    of: int

    def __str__(self) -> str:
        return f"{self.programs} of {self.of} programs of {self.kernel}"


@dataclass(frozen=True)
class Sampled:
    """What a few programs did."""

    execution: Execution
    """Elements of its result that no program wrote hold NaN (integers: anything)."""
    known: tuple[Tensor | None, ...]
    """Per leaf of the result, which elements are exact, of its shape, bool; None for what is no tensor."""
    shares: tuple[Share, ...]
    """One per launch, in order."""

    def cotangents(self, seed: int = 0) -> tuple[Tensor | None, ...]:
        """Random normal cotangents, float64, zero outside of what is known: their gradients are exact as a whole.

        None for results without gradient.
        """
        generator = torch.Generator(CPU).manual_seed(seed)
        found: list[Tensor | None] = []
        for leaf, known in zip(tree_leaves(self.execution.result), self.known, strict=True):
            if known is None or not leaf.requires_grad:
                found.append(None)
                continue
            values = torch.randn(int(known.sum()), generator=generator, dtype=torch.float64, device=CPU)
            found.append(leaf.new_zeros(leaf.shape).masked_scatter_(known, values.to(leaf.device)))
        return tuple(found)


def execute_sampled(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    leaves: Collection[int | str] = (),
    options: ExecOptions = _PLAIN,
    programs: int = 4,
) -> Sampled:
    """`execute`, but of each launch only `programs` programs run, spread over the grid: the first, the last, between.

    Raises `CannotSample`, and what `execute` raises.
    """
    whole: set[int] = set()
    while True:
        sampler = _Sampler(programs, whole)
        safe = options.safety is Safety.ALWAYS
        try:
            for again in (False, True):
                sampler.begin()
                execution, tame = run_once(
                    fn,
                    args,
                    kwargs or {},
                    leaves,
                    replace(options, sanitize=True, poison=True),
                    safe=safe or again,
                    runner=sampler,
                    on_call=sampler.refuse_torch_code,
                )
                if tame or options.safety is not Safety.AUTO:
                    break
        except _NeedsWhole as needs:
            whole |= needs.launches
            continue
        known = tuple(_known(leaf, sampler) for leaf in tree_leaves(execution.result))
        findings = tuple(f for f in execution.findings if f.kind is not FindingKind.UNWRITTEN_OUTPUT)
        return Sampled(replace(execution, findings=findings), known, tuple(sampler.shares))


class _NeedsWhole(Exception):
    """A later launch reads what these launches wrote."""

    def __init__(self, launches: set[int]) -> None:
        super().__init__()
        self.launches = launches


@dataclass
class _Sampler:
    """Takes the place of `launch`."""

    programs: int
    whole: set[int]
    """Launches, by position, that are run whole."""
    shares: list[Share] = field(default_factory=list)
    partly: dict[int, int] = field(default_factory=dict)
    """Id of each buffer that is written in part -> the launch that did."""
    met: dict[int, Buffer] = field(default_factory=dict)
    """Buffers by the address of their storage."""

    def begin(self) -> None:
        """A new call of the stub."""
        self.shares, self.partly, self.met = [], {}, {}

    def refuse_torch_code(self, call: TorchCall) -> None:
        """Allocations and views do no harm; what else follows a launch that was cut might read what is not there."""
        if self.partly and call.kind not in _HARMLESS:
            kernel = self.shares[next(iter(self.partly.values()))].kernel
            raise CannotSample(f"torch function {call.name} may read what kernel {kernel} wrote")

    def __call__(
        self,
        module: Module,
        grid: tuple[int, int, int],
        arguments: Sequence[RuntimeValue],
        buffers: dict[int, Buffer],
        findings: Findings,
        options: LaunchOptions,
    ) -> None:
        """Run some programs of a launch."""
        place, total, kernel = len(self.shares), math.prod(grid), module.entry.name
        touched = reachable(module, arguments, buffers)
        needed = {self.partly[id(buffer)] for buffer in touched if id(buffer) in self.partly}
        if needed:
            raise _NeedsWhole(needed)
        self.met |= {buffer.root.untyped_storage().data_ptr(): buffer for buffer in touched}
        chosen = None
        if place not in self.whole and total > self.programs:
            self._check(module, arguments, touched, kernel)
            chosen = (
                torch.linspace(0, total - 1, self.programs, dtype=torch.float64, device=CPU).round().to(torch.int64)
            )
            written = written_buffers(module, arguments)
            self.partly |= {id(buffer): place for buffer in touched if written is None or id(buffer) in written}
        self.shares.append(Share(kernel, total if chosen is None else self.programs, total))
        launch(module, grid, arguments, buffers, findings, options, chosen=chosen)

    def _check(self, module: Module, arguments: Sequence[RuntimeValue], touched: list[Buffer], kernel: str) -> None:
        if any(op.name.startswith("tt.atomic") for op in module.all_ops):
            raise CannotSample(
                f"kernel {kernel} adds up over programs by atomics, so that no program's result is final"
            )
        written = written_buffers(module, arguments)
        stale = [b for b in touched if (written is None or id(b) in written) and b.written is None]
        if stale:
            raise CannotSample(f"kernel {kernel} writes {stale[0].name}, which holds values already")


def _known(leaf: Any, sampler: _Sampler) -> Tensor | None:
    """Which elements of a result are exact: those that some program wrote, where a launch was cut that writes it."""
    if not isinstance(leaf, Tensor):
        return None
    buffer = sampler.met.get(leaf.untyped_storage().data_ptr())
    if buffer is None or buffer.written is None or id(buffer) not in sampler.partly:
        return torch.ones(leaf.shape, dtype=torch.bool, device=leaf.device)
    return buffer.written.as_strided(leaf.size(), leaf.stride(), leaf.storage_offset())
