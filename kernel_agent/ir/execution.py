"""Runs a stub, a pair's forward or a backward exactly, on any machine: float64, autograd through every kernel."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from kernel_agent.errors import InputError
from kernel_agent.ir.budget import indexed, memory_for
from kernel_agent.ir.capture.capture import Capture, Launch
from kernel_agent.ir.capture.configurations import Configs, Turns, try_others
from kernel_agent.ir.capture.device import standin, start_cuda
from kernel_agent.ir.capture.images import Images
from kernel_agent.ir.capture.inputs import Inputs
from kernel_agent.ir.capture.torch_calls import TorchCall
from kernel_agent.ir.launch import LaunchOptions, Runner, launch
from kernel_agent.ir.memory import CPU
from kernel_agent.ir.numerics import Numerics
from kernel_agent.ir.recorded.recorder import Recorder
from kernel_agent.ir.sanitizer.findings import Finding, FindingKind, Unordered
from kernel_agent.ir.slopes import Slopes


class Safety(str, enum.Enum):
    """Whether zero cotangents are kept zero where derivatives are infinite."""

    AUTO = "AUTO"
    """Only if some derivative is infinite or undefined and a trial backward shows NaN."""
    ALWAYS = "ALWAYS"
    NEVER = "NEVER"


@dataclass(frozen=True)
class ExecOptions:
    """How an execution is run."""

    sanitize: bool = True
    """Judge reads of unwritten memory, unwritten outputs and races. Bounds are always judged."""
    poison: bool = True
    """Fresh `empty()` allocations hold NaN and count as unwritten."""
    safety: Safety = Safety.AUTO
    memory: int | None = None
    """Bytes that intermediate values may take, about; None: 1 GiB, on a GPU half of what is free there. What would take
    more is recomputed in the backward, in chunks of programs and segments of loops; the tensors themselves, and what
    their overwritten elements held, come on top."""
    numerics: Numerics = Numerics.EXACT
    """FAITHFUL rounds every result as the kernel would, in kernels and in torch code between them."""
    device: torch.device | None = None
    """Where everything is computed; None: on the GPU of the first argument that lives on one, else on the CPU."""
    configs: Configs = Configs.FIRST
    """Which configurations of autotuned kernels are run."""


@dataclass(frozen=True)
class Execution:
    """What one call did."""

    result: Any
    """The function's return value; tensors in it are float64 images, connected to `leaves` by autograd."""
    leaves: dict[int | str, Tensor] = field(default_factory=dict)
    """float64 leaf of each requested argument, by position or name."""
    launches: tuple[Launch, ...] = ()
    findings: tuple[Finding, ...] = ()
    unordered: tuple[Unordered, ...] = ()
    """Where several programs change one float element in no fixed order."""
    unpromised: tuple[str, ...] = ()
    """What a device may have any result for, such as a division by zero: a sentence each."""
    torch_calls: tuple[TorchCall, ...] = ()
    """Torch functions called outside kernels, each once, in order of first call."""
    mutated: tuple[str, ...] = ()
    """Argument tensors whose content changed: `x`, or `saved[0]` for nested ones."""
    arguments: dict[str, Tensor] = field(default_factory=dict)
    """Images of the argument tensors as the call left them, by the same names, in argument order."""
    tuned: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Configurations of every autotuned kernel after its own pruning; the first one that Triton accepts was run."""

    @property
    def torch_ops(self) -> tuple[str, ...]:
        """Names of torch functions that compute, or whose adjoint does, sorted."""
        return tuple(sorted({call.name for call in self.torch_calls if call.computes}))


def execute(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    leaves: Collection[int | str] = (),
    options: ExecOptions = ExecOptions(),
) -> Execution:
    """Call `fn` with images of its tensor arguments and execute every kernel it launches in float64.

    `args` and `kwargs` may hold tensors in tuples, lists and dicts; all are copied, with their strides and shared
    storages.
    `fn` may be any callable: a function, a method, a partial, an `autograd.Function`'s apply, a module. `leaves` names
    tensor arguments that results are connected to by autograd: by position, or by name (`x`, `weights[0]` for one in a
    tuple), and parameters of a module as `named_parameters` does; without any, nothing is recorded. Leaves have the
    argument's shape; an argument whose indices share elements (an expanded one) gets one element per index, and of two
    arguments that overlap each gets a gradient of its own.

    Raises what `fn` raises, `IRError`, and `InputError` for leaves in faithful arithmetic, which is for running forward
    and backward kernels, not for autograd. What the sanitizer finds is in the result, not raised.
    """
    if leaves and options.numerics is Numerics.FAITHFUL:
        raise InputError(
            "faithful arithmetic does not record gradients: rounding has no derivative",
            remedy="Execute the backward's own kernels, or take gradients with numerics=Numerics.EXACT.",
        )
    kwargs = kwargs or {}
    random = torch.get_rng_state()
    safe = options.safety is Safety.ALWAYS
    execution, tame = run_once(fn, args, kwargs, leaves, options, safe=safe)
    if leaves and options.safety is Safety.AUTO and not tame and _has_undefined_gradients(execution):
        execution, _ = run_once(fn, args, kwargs, leaves, options, safe=True)
    if options.configs is Configs.FIRST or options.numerics is Numerics.FAITHFUL or not execution.tuned:
        return execution

    def again(configs: Mapping[str, int]) -> Execution:
        with torch.random.fork_rng(devices=()):  # a stub that draws a seed shall draw the same one
            torch.set_rng_state(random)
            return run_once(fn, args, kwargs, (), options, safe=safe, configs=configs)[0]

    return replace(execution, findings=try_others(execution, again))


def run_once(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    leaves: Collection[int | str],
    options: ExecOptions,
    *,
    safe: bool,
    configs: Mapping[str, int] | None = None,
    runner: Runner = launch,
    on_call: Callable[[TorchCall], None] | None = None,
    recorder: Recorder | None = None,
    images: Images | None = None,
    turns: Turns | None = None,
) -> tuple[Execution, bool]:
    """The execution, and whether all derivatives that safe mode guards were finite.

    `runner` takes the place of `launch`; `on_call` is told of every torch function the stub calls, before its result
    is used; `recorder` writes the call down; `images` makes the images of tensors; `turns` chooses configurations of
    autotuned kernels, call by call.
    """
    device = options.device or device_of((args, kwargs))
    start_cuda(device)
    device = indexed(device)
    memory = memory_for(device) if options.memory is None else options.memory
    slopes = Slopes() if leaves and not safe else None
    launch_options = LaunchOptions(options.sanitize, safe, memory, options.numerics, slopes, device)
    capture = Capture(
        grad=bool(leaves), poison=options.poison, options=launch_options, runner=runner, configs=configs, turns=turns
    )
    capture.on_call, capture.recorder = on_call, recorder
    with standin(device):
        inputs = Inputs(fn, args, kwargs, leaves, capture, images)
        if recorder is not None:
            given = [leaf for leaf in tree_leaves((inputs.args, inputs.kwargs)) if isinstance(leaf, Tensor)]
            recorder.begin(given, capture.buffers, capture.known_buffer)
        with capture.running(), inputs.module_kept():
            result = fn(*inputs.args, **inputs.kwargs)
    result = tree_map(lambda part: capture.adopt(part) if isinstance(part, Tensor) else part, result)
    if recorder is not None:
        recorder.returned(result)
    if options.sanitize:
        find_unwritten(result, capture)
    execution = Execution(
        result,
        inputs.leaves,
        tuple(capture.launches),
        capture.findings.all(),
        capture.findings.unordered(),
        capture.findings.unpromised(),
        tuple(capture.calls),
        inputs.mutated(),
        inputs.images(),
        capture.tuned,
    )
    return execution, slopes is None or slopes.all_finite()


def device_of(values: Any) -> torch.device:
    """The GPU of the first tensor that is on one, else the CPU."""
    devices = [leaf.device for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    return next((device for device in devices if device.type == "cuda"), CPU)


def find_unwritten(result: Any, capture: Capture) -> None:
    """Report output tensors with elements that nothing wrote."""
    for place, tensor in enumerate(tree_leaves(result)):
        if not isinstance(tensor, Tensor):
            continue
        buffer = capture.known_buffer(tensor)
        missing = None if buffer is None else buffer.unwritten(tensor)
        if buffer is None or missing is None or missing.size(0) == 0:
            continue
        first = tuple(missing[0].tolist())
        count = missing.size(0)
        message = (
            f"{count} of {tensor.numel()} elements of output {place} ({buffer.name}) were never written, "
            f"the first is {list(first)}"
        )
        offset = sum(at * step for at, step in zip(first, tensor.stride(), strict=True))
        kind = FindingKind.UNWRITTEN_OUTPUT
        capture.findings.add(
            Finding(kind, message, buffer=buffer.name, offset=offset, size=tensor.numel(), lane=first, count=count)
        )


def _has_undefined_gradients(execution: Execution) -> bool:
    """Whether a trial cotangent gives a gradient with NaN although the outputs have none."""
    outputs = [leaf for leaf in tree_leaves(execution.result) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not outputs or not execution.leaves or any(bool(output.isnan().any()) for output in outputs):
        return False
    generator = torch.Generator(CPU).manual_seed(0)
    cotangents = [
        torch.randn(output.shape, generator=generator, dtype=output.dtype, device=CPU).to(output.device)
        for output in outputs
    ]
    gradients = torch.autograd.grad(
        outputs, list(execution.leaves.values()), cotangents, retain_graph=True, allow_unused=True
    )
    return any(gradient is not None and bool(gradient.isnan().any()) for gradient in gradients)
