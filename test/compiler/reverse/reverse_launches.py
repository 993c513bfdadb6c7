"""Triton kernels, read and differentiated, against autograd through the executor of Triton's IR."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from reverse_checks import gradients_of
from torch import Tensor

from kernel_agent.compiler.front import read_launch
from kernel_agent.compiler.reverse import Adjoint, differentiate
from kernel_agent.compiler.ssa.value import Kernel
from kernel_agent.ir import execute
from kernel_agent.ir.execution import ExecOptions


def kernel_of_launch(kernel: Any, grid: Sequence[int], arguments: dict[str, Any]) -> Kernel:
    """The kernel of a launch with these arguments, at its own tile sizes."""

    def stub(tensors: dict[str, Tensor]) -> None:
        kernel[tuple(grid)](**{**arguments, **tensors})

    given = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    (launch,) = execute(stub, (given,), options=ExecOptions(sanitize=False)).launches
    return read_launch(launch, distinct=False)


def agrees(
    kernel: Any, grid: Sequence[int], arguments: dict[str, Any], outputs: Sequence[str], *, tolerance: float = 1e-9
) -> Adjoint:
    """Assert that the gradients of all float tensors that are no outputs are those of the executor's autograd."""
    torch.manual_seed(3)
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    inputs = [name for name, value in tensors.items() if value.is_floating_point() and name not in outputs]
    places = {name: place for place, name in enumerate(tensors)}

    def stub(*given: Tensor) -> tuple[Tensor, ...]:
        kernel[tuple(grid)](**{**arguments, **dict(zip(tensors, given, strict=True))})
        return tuple(given[places[name]] for name in outputs)

    execution = execute(stub, tuple(tensors.values()), leaves=[places[name] for name in inputs])
    cotangents = {name: torch.randn(tensors[name].shape, dtype=torch.float64) for name in outputs}
    truth = torch.autograd.grad(
        list(execution.result),
        [execution.leaves[places[name]] for name in inputs],
        list(cotangents.values()),
    )
    read = kernel_of_launch(kernel, grid, arguments)
    adjoint = differentiate(read, read=frozenset(inputs), written=frozenset(outputs))
    names = {value.name for value in read.arguments}
    known = {name: value for name, value in arguments.items() if name in names}
    for name, value in tensors.items():
        known[name] = value.double() if value.is_floating_point() else value
    for name, found in zip(outputs, execution.result, strict=True):
        known[name] = found.detach().clone()
    gradients = gradients_of(adjoint, grid, known, cotangents)
    for name, wanted in zip(inputs, truth, strict=True):
        assert wanted is not None, f"the executor has no gradient of {name}"
        assert wanted.abs().sum() > 0, f"a gradient of zeros shows nothing: {name}"
        torch.testing.assert_close(
            gradients[name], wanted, rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"d{n}: {text}"
        )
    return adjoint
