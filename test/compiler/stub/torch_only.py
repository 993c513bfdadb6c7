"""Stubs without launches, taken back: what the backward does around kernels, shown without the gate."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kernel_agent.compiler.stub.section import write_sections
from kernel_agent.compiler.stub.source import StubSource
from kernel_agent.compiler.stub.trace import trace
from kernel_agent.compiler.stub.ways import Way
from kernel_agent.pairs.spec import ArgumentFacts, ArgumentKind, Candidate, KernelSpec
from kernel_agent.pairs.userfile import read_source

_FILE = """import torch
import triton
import triton.language as tl

from kernel_agent import autodiff


@autodiff
{stub}


SWEEP = [dict(M=1)]


def make_args(M):
    return ()
"""


def candidate(stub: str, arguments: Sequence[Any], folder: Path) -> Candidate:
    """The sections that are derived of a stub without launches, for gradients of all its floating tensors."""
    path = folder / "file.py"
    path.write_text(_FILE.format(stub=stub.strip()))
    facts = read_source(path.read_text(), path)
    module = imported(path, "traced")
    seen = trace(getattr(module, facts.stub), tuple(arguments), {}, path)
    result = seen.result if isinstance(seen.result, tuple) else (seen.result,)
    outputs = tuple(
        ArgumentFacts(name=f"out{place}", kind=ArgumentKind.TENSOR, needs_grad=True) for place in range(len(result))
    )
    floats = [isinstance(one, Tensor) and one.is_floating_point() for one in arguments]
    grads = tuple(name for name, is_float in zip(facts.parameters, floats, strict=False) if is_float)
    spec = KernelSpec(
        facts=facts, sweep=(), inputs=(), outputs=outputs, returns_tuple=len(result) > 1, grads=grads, launches=()
    )
    source = StubSource(path.read_text(), facts.stub, module)
    return write_sections(spec, source, [Way(seen, {}, _no_plan, _no_plan)], _no_plan).candidate


def gradients(found: Candidate, arguments: Sequence[Any], folder: Path, **given: Any) -> tuple[list[Any], list[Any]]:
    """What the derived backward returns for normal cotangents, and what autograd does through the derived forward."""
    path = folder / "pair.py"
    path.write_text("import torch\nimport triton\n\n\n" + (found.forward or "") + "\n\n" + found.backward)
    module = imported(path, "pair")
    leaves = [one.requires_grad_() if isinstance(one, Tensor) and one.is_floating_point() else one for one in arguments]
    outputs, saved = module.forward(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    cotangents = [torch.randn_like(output) for output in outputs]
    wanted = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    true = torch.autograd.grad(outputs, wanted, cotangents, allow_unused=True, materialize_grads=True)
    with torch.no_grad():
        returned = module.backward(saved, *cotangents, **given)
    return list(returned if isinstance(returned, tuple) else (returned,)), list(true)


def imported(path: Path, name: str) -> ModuleType:
    """The module of a file."""
    described = importlib.util.spec_from_file_location(name, path)
    assert described is not None
    assert described.loader is not None
    module = importlib.util.module_from_spec(described)
    described.loader.exec_module(module)
    return module


def _no_plan(*_: Any) -> Any:
    raise AssertionError("nothing is launched")
