"""What a file costs at entries of its SWEEP, counted in a child: its own code runs, at its own sizes.

Floating arguments are made without contents first: they are never looked at unless an address depends on them, and the
user's real sizes may be far larger than this machine.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from kernel_agent.errors import InputError
from kernel_agent.ir import IRError, LoweringError, UnsupportedOp, standin
from kernel_agent.ir.capture.images import declare, declared_dtype
from kernel_agent.ir.cost.cost import Counts, execute_call, report, walk_call
from kernel_agent.ir.cost.devices import device_table
from kernel_agent.ir.cost.ghost import NeedsValues
from kernel_agent.ir.cost.ghost_images import META, GhostCapture
from kernel_agent.ir.launch import LaunchOptions, launch
from kernel_agent.oracle.child import answered
from kernel_agent.oracle.records import TruthError
from kernel_agent.pairs.arguments import Arguments, argument_names, build_arguments
from kernel_agent.pairs.blame import blame
from kernel_agent.pairs.load import load_truth
from kernel_agent.pairs.observe import describe_value
from kernel_agent.pairs.outputnames import output_names
from kernel_agent.pairs.spec import FileFacts, ShapeEntry
from kernel_agent.pairs.sweep import read_sweep

if TYPE_CHECKING:
    from kernel_agent.sandbox import Call


class Called(Protocol):
    """What is known of a call that was not run on a device."""

    @property
    def result(self) -> Any:
        """The return value; tensors in it may be without contents."""


Known = TypeVar("Known", bound=Called)
"""`Counts` where `walk_call` or `execute_call` looks at the calls, `Launched` where `launched_by` does."""


def costs(call: Call) -> None:
    """Payload: `facts`, `entries` (positions in SWEEP, empty for all), `device`, `apart` (see `costs.costs`).

    Sends one message per entry with its label and one report per part of the file.
    """
    with answered(call):
        facts = FileFacts.model_validate(call.payload["facts"])
        try:
            _send_costs(call, facts)
        except InputError as error:  # what was imported is a copy: the place is in the user's file
            if error.path is None or error.path.parent != call.scratch:
                raise
            raise InputError(error.message, remedy=error.remedy, path=facts.path, line=error.line) from error


def _send_costs(call: Call, facts: FileFacts) -> None:
    device = device_table().find(call.payload["device"])
    module = load_truth(facts, call.scratch, source=facts.source)
    sweep = read_sweep(module.SWEEP, facts.path)
    for position in call.payload["entries"] or range(len(sweep)):
        if position >= len(sweep):
            raise InputError(
                f"--entry {position}: SWEEP has the entries 0 to {len(sweep) - 1}",
                remedy="; ".join(f"{place}: {entry.label}" for place, entry in enumerate(sweep)),
                path=facts.path,
            )
        arguments, parts = _entry_costs(module, facts, sweep[position], apart=call.payload["apart"])
        message = {
            "position": position,
            "entries": len(sweep),
            "label": sweep[position].label,
            "parts": {name: report(counts, device).to_dict() for name, counts in parts.items()},
            "inputs": _described(argument_names(getattr(module, facts.stub), arguments), arguments),
            "outputs": _outputs(facts, parts["forward"].result),
            "saved_bytes": _saved_bytes(facts, arguments, parts["forward"].result),
        }
        call.send(message)


def _entry_costs(
    module: ModuleType, facts: FileFacts, entry: ShapeEntry, *, apart: bool
) -> tuple[Arguments, dict[str, Counts]]:
    """Counts of every part of the file: without values where that is possible, else by executing it."""
    separated = _separated if apart else _unchanged
    try:
        arguments = separated(shapes_of(module, entry))
        return arguments, part_counts(module, facts, arguments, walk_call)
    except NeedsValues:
        pass
    with standin():
        arguments = separated(build_arguments(module, entry, device="cpu", seed=0))
    try:
        return arguments, part_counts(module, facts, arguments, functools.partial(walk_call, values=True))
    except NeedsValues as reason:
        note = f"executed in full at these sizes: {reason.message}"
        parts = part_counts(module, facts, arguments, execute_call)
        return arguments, {name: replace(counts, notes=(note,)) for name, counts in parts.items()}


def _unchanged(arguments: Arguments) -> Arguments:
    return arguments


def _separated(arguments: Arguments) -> Arguments:
    """The arguments, each floating tensor that is a part of some memory in memory of its own, with its strides."""

    def own(value: Any) -> Any:
        if not isinstance(value, Tensor) or not declared_dtype(value).is_floating_point or 0 in value.stride():
            return value
        if value.numel() * value.element_size() == value.untyped_storage().nbytes():
            return value
        twin = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)
        if not value.is_meta:
            twin.copy_(value)
        return declare(twin, declared_dtype(value))

    return Arguments(tuple(tree_map(own, arguments.args)), tree_map(own, arguments.kwargs))


def _described(names: Sequence[str], arguments: Arguments) -> list[dict[str, Any]]:
    values = (*arguments.args, *arguments.kwargs.values())
    return [describe_value(name, value).model_dump(mode="json") for name, value in zip(names, values, strict=True)]


def _outputs(facts: FileFacts, result: Any) -> list[dict[str, Any]]:
    """What the stub returns, by the names that the spec gives it."""
    found = result[0] if facts.is_pair else result
    values = tuple(found) if isinstance(found, (tuple, list)) else (found,)
    return _described(output_names(facts, len(values)), Arguments(values, {}))


def _saved_bytes(facts: FileFacts, arguments: Arguments, result: Any) -> int:
    """Declared bytes of saved tensors that have not the form of an input, which they then could have been."""
    if not facts.is_pair:
        return 0
    values = (*arguments.args, *arguments.kwargs.values())
    inputs = [(value.shape, declared_dtype(value)) for value in values if isinstance(value, Tensor)]
    saved = [(value.shape, declared_dtype(value)) for value in result[1] if isinstance(value, Tensor)]
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in saved if (shape, dtype) not in inputs)


def shapes_of(module: ModuleType, entry: ShapeEntry) -> Arguments:
    """Arguments whose floating tensors have no contents."""
    capture = GhostCapture(options=LaunchOptions(sanitize=False), runner=launch)
    try:
        with standin(), capture.running():
            built = build_arguments(module, entry, device="cpu", seed=0)
    except InputError as error:  # what make_args needs may have been a value
        raise NeedsValues("make_args asks for values") from error

    def known(value: Any) -> Any:
        if isinstance(value, Tensor) and not value.is_meta and capture.is_unknown(value):
            raise NeedsValues("an argument is made of values")
        return value

    return Arguments(tuple(tree_map(known, built.args)), tree_map(known, built.kwargs))


def part_counts(
    module: ModuleType, facts: FileFacts, arguments: Arguments, count: Callable[..., Known]
) -> dict[str, Known]:
    """What `count` tells of the forward and, for a pair, of the backward of its outputs. Raises what it raises."""
    forward = _counted(module, facts, "forward", count, getattr(module, facts.stub), arguments.args, arguments.kwargs)
    parts = {"forward": forward}
    if facts.is_pair and hasattr(module, "backward"):
        outputs, saved = forward.result
        outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
        cotangents = [_cotangent(output) for output in outputs]
        parts["backward"] = _counted(module, facts, "backward", count, module.backward, (saved, *cotangents), {})
    return parts


def _cotangent(output: Any) -> Any:
    """A cotangent for an output of a pair's forward; None where there is none."""
    if not isinstance(output, Tensor) or not declared_dtype(output).is_floating_point:
        return None
    if output.is_meta:
        return declare(torch.empty(output.shape, dtype=output.dtype, device=META), declared_dtype(output))
    generator = torch.Generator().manual_seed(0)
    return declare(torch.randn(output.shape, generator=generator, dtype=output.dtype), declared_dtype(output))


def _counted(
    module: ModuleType,
    facts: FileFacts,
    part: str,
    count: Callable[..., Known],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Known:
    try:
        return count(function, args, kwargs)
    except (NeedsValues, InputError):
        raise
    except (UnsupportedOp, LoweringError, IRError) as error:
        where = f"line {error.line}: " if error.line and not error.message.startswith(error.kernel) else ""
        raise TruthError(f"the {part} cannot be counted: {where}{error.message}", remedy=error.remedy) from error
    except MemoryError as error:
        raise TruthError(
            f"the {part} needs more memory than there is", remedy="Choose a smaller entry with --entry."
        ) from error
    except Exception as error:  # the user's code
        raise blame(error, module, f"the {part} fails", f"Correct {facts.stub}, or choose another --entry.") from error
