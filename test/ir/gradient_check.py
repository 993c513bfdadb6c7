"""Compares gradients through kernels with float64 autograd of a reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from kernel_agent.ir import ExecOptions, Execution, execute


def floats(value: Any) -> list[Tensor]:
    """Tensors of a result that carry a gradient."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.requires_grad]


def check_gradients(
    stub: Callable[..., Any],
    args: tuple[Any, ...],
    reference: Callable[..., Any],
    *,
    options: ExecOptions | None = None,
    clean: bool = True,
) -> Execution:
    """Run the stub with all floating arguments as leaves; outputs and gradients must equal the reference's.

    Two cotangents are pulled back through one recording: state left by the first must not leak into the second.
    """
    wanted = [place for place, arg in enumerate(args) if isinstance(arg, Tensor) and arg.is_floating_point()]
    execution = execute(stub, args, {}, leaves=wanted, options=options or ExecOptions())
    exact = [arg.detach().double().requires_grad_() if place in wanted else arg for place, arg in enumerate(args)]
    outputs, expected = floats(execution.result), floats(reference(*exact))
    assert len(outputs) == len(expected)
    for place, (ours, theirs) in enumerate(zip(outputs, expected, strict=True)):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11, msg=lambda text, k=place: f"output {k}: {text}")
    for seed in (0, 1):
        generator = torch.Generator().manual_seed(seed)
        cotangents = [torch.randn(output.shape, generator=generator, dtype=torch.float64) for output in outputs]
        got = torch.autograd.grad(outputs, list(execution.leaves.values()), cotangents, retain_graph=True)
        want = torch.autograd.grad(expected, [exact[place] for place in wanted], cotangents, retain_graph=True)
        for place, ours, theirs in zip(wanted, got, want, strict=True):
            torch.testing.assert_close(
                ours, theirs, rtol=1e-9, atol=1e-11, msg=lambda text, k=place: f"gradient of argument {k}: {text}"
            )
    if clean:
        assert execution.findings == ()
    return execution
