"""Exact outputs and gradients of any function that launches Triton kernels, for use from Python without the agent.

Nothing needs to be decorated, and no GPU is needed: the kernels are executed from their Triton IR in float64
(`kernel_agent.ir`), with autograd through every launch and through the torch code between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_map

from kernel_agent.autodiff import MARK
from kernel_agent.errors import InputError
from kernel_agent.ir import ExecOptions, Execution, Finding, FindingKind, IRError, execute
from kernel_agent.ir.capture.signature_names import argument_names, path_name

_MEMORY = (FindingKind.OUT_OF_BOUNDS, FindingKind.WILD_POINTER)
_PLAIN = ExecOptions(sanitize=False)


class BrokenForward(IRError):
    """The forward leaves the bounds of its buffers: what it computes is undefined."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(
            f"what the forward computes is undefined: {finding.message}",
            remedy="Mend the kernel; kernel_agent.sanitize(stub, ...) lists everything that is wrong with it.",
            kernel=finding.kernel,
            file=finding.file,
            line=finding.line,
        )


def outputs(stub: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What `stub(*args, **kwargs)` returns, computed exactly: nothing is rounded, floats come back as float64.

    The arguments are not changed. Raises `BrokenForward` when the kernels leave their buffers, `IRError` for what
    cannot be executed, and whatever the stub raises.
    """
    execution = execute(stub, args, kwargs, options=_PLAIN)
    _refuse_broken(execution)
    return tree_map(lambda value: _plain(value) if isinstance(value, Tensor) else value, execution.result)


def gradients(
    stub: Callable[..., Any],
    *args: Any,
    cotangents: Tensor | Sequence[Tensor | None] | None = None,
    wrt: Sequence[str | int] | str | int | None = None,
    **kwargs: Any,
) -> dict[str, Tensor]:
    """Exact gradients of a function that launches Triton kernels, float64, by argument name in argument order.

    `cotangents` holds one tensor per output of the stub, in position and of the output's shape; None, and what is
    missing at the end, counts as zero. A bare tensor belongs to the first output. It may be left out for a single
    output of one element. A stub that returns no tensor is differentiated through the arguments it writes, in argument
    order. `wrt` names the wanted arguments (or gives their positions); by default all floating tensors, also those
    nested in tuples, lists and dicts (`weights[0]`); a module's parameters follow its arguments. An argument without
    influence has a zero gradient. For a stub with `@autodiff(nondiff_outputs=...)` those outputs take no cotangent.

    The derivative is that of what the kernels compute in real arithmetic: casts and stores do not round. Raises
    `InputError` for cotangents or names that do not fit, `BrokenForward` when the kernels leave their buffers,
    `IRError` for what cannot be executed, and whatever the stub raises.
    """
    inputs = _chosen(stub, args, kwargs, wrt)
    execution = execute(stub, args, kwargs, leaves=[item.key for item in inputs], options=_PLAIN)
    _refuse_broken(execution)
    found = _outputs(stub, execution)
    pulled = [pair for pair in _pair(found, cotangents) if pair.output.requires_grad]
    leaves = [execution.leaves[item.key] for item in inputs]
    grads: Sequence[Tensor | None] = [None] * len(leaves)
    if pulled and leaves:
        grads = torch.autograd.grad(
            [pair.output for pair in pulled], leaves, [pair.cotangent for pair in pulled], allow_unused=True
        )
    return {
        item.name: torch.zeros_like(leaf) if grad is None else grad.detach()
        for item, leaf, grad in zip(inputs, leaves, grads, strict=True)
    }


@dataclass(frozen=True)
class _Input:
    """One argument to differentiate by."""

    name: str
    key: int | str
    """How `execute` is told of it: the position of a positional argument, else the name."""


@dataclass(frozen=True)
class _Pulled:
    """One output with the cotangent that is pulled back through it."""

    output: Tensor
    cotangent: Tensor


def _chosen(
    stub: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], wrt: Sequence[str | int] | str | int | None
) -> list[_Input]:
    names = argument_names(stub, len(args))
    floating: list[_Input] = []
    known: list[str] = []
    for path, value in tree_flatten_with_path((list(args), dict(kwargs)))[0]:
        name = path_name(path, names)
        known.append(name)
        if isinstance(value, Tensor) and value.is_floating_point():
            floating.append(_Input(name, path[1].idx if path[0].idx == 0 and len(path) == 2 else name))
    if isinstance(stub, torch.nn.Module):
        floating += [_Input(name, name) for name, value in stub.named_parameters() if value.is_floating_point()]
    if wrt is None:
        return floating
    asked = [wrt] if isinstance(wrt, (str, int)) else list(wrt)
    wanted = [names[item] if isinstance(item, int) and -len(args) <= item < len(args) else item for item in asked]
    for item in wanted:
        if item not in {entry.name for entry in floating}:
            what = "is no floating tensor" if item in known else "is no argument of this call"
            raise InputError(
                f"wrt: {item!r} {what}",
                remedy=f"Choose from {', '.join(entry.name for entry in floating) or 'nothing: no floating tensors'}.",
            )
    return [entry for entry in floating if entry.name in wanted]


def _outputs(stub: Callable[..., Any], execution: Execution) -> list[Tensor | None]:
    """Outputs in position: None for what is no tensor or declared to have no gradient."""
    result = execution.result
    if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
        return [execution.arguments[name] for name in execution.mutated]
    if isinstance(result, (tuple, list)) and all(leaf is None or not _nested(leaf) for leaf in result):
        listed = list(result)
    else:
        listed = tree_leaves(result)
    mark = getattr(stub, MARK, None)
    nondiff = mark.nondiff_outputs if mark is not None else ()
    return [value if isinstance(value, Tensor) and place not in nondiff else None for place, value in enumerate(listed)]


def _nested(value: Any) -> bool:
    return isinstance(value, (tuple, list, dict))


def _pair(found: list[Tensor | None], cotangents: Tensor | Sequence[Tensor | None] | None) -> list[_Pulled]:
    """Outputs with their cotangents as float64. Raises `InputError` where they do not fit."""
    if not any(value is not None for value in found):
        raise InputError(
            "the stub returns no tensor and writes to none of its arguments", remedy="Give a stub with an output."
        )
    if cotangents is None:
        cotangents = _unit(found)
    given = [cotangents] if isinstance(cotangents, Tensor) else list(cotangents)
    if len(given) > len(found):
        raise InputError(
            f"{len(given)} cotangents for {len(found)} outputs", remedy="Give one per output, in the order of outputs."
        )
    pairs = []
    for place, (output, cotangent) in enumerate(zip(found, given, strict=False)):
        if cotangent is None:
            continue
        if output is None:
            raise InputError(
                f"output {place} has no gradient and takes no cotangent", remedy="Give None in its position."
            )
        if cotangent.shape != output.shape:
            raise InputError(
                f"cotangent {place} has shape {tuple(cotangent.shape)}, but the output has {tuple(output.shape)}",
                remedy="A cotangent has the shape of its output; expand it where it is to be broadcast.",
            )
        pairs.append(_Pulled(output, cotangent.detach().to(output.device, torch.float64)))
    return pairs


def _unit(found: list[Tensor | None]) -> list[Tensor | None]:
    """The cotangent of a single number."""
    real = [value for value in found if value is not None]
    if len(real) != 1 or real[0].numel() != 1:
        raise InputError(
            "cotangents are needed: the stub returns more than one number",
            remedy="Pass cotangents=..., one tensor per output and of its shape, such as torch.randn_like(output).",
        )
    return [None if value is None else torch.ones_like(value) for value in found]


def _refuse_broken(execution: Execution) -> None:
    for finding in execution.findings:
        if finding.kind in _MEMORY and not finding.in_storage:
            raise BrokenForward(finding)


def _plain(tensor: Tensor) -> Tensor:
    """A tensor of its own, without the declared dtype of an image."""
    return tensor.detach().clone()
