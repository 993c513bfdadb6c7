"""Every shipped example: its file reads, its stub computes its reference, and its gradients are the reference's.

The kernels run in float64 in the executor, so agreement is to rounding, not to a tolerance of some dtype.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from corpus.case import BLOCK_POINTERS

from kernel_agent.ir import Execution, execute, standin
from kernel_agent.pairs.arguments import Arguments, build_arguments
from kernel_agent.pairs.assemble import assemble
from kernel_agent.pairs.load import load_truth
from kernel_agent.pairs.observe import observe
from kernel_agent.pairs.spec import Candidate, FileFacts, ShapeEntry
from kernel_agent.pairs.userfile import read_file, read_source

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL: dict[str, list[dict[str, Any]]] = {
    "attention": [
        {"B": 2, "H": 2, "T": 77, "S": 133, "D": 48, "causal": False, "sm_scale": 0.25},
        {"B": 1, "H": 2, "T": 33, "S": 65, "D": 16, "causal": True},
        {"B": 1, "H": 1, "T": 150, "S": 150, "D": 16, "causal": True},
    ],
    "attention_block_ptr": [
        {"B": 1, "H": 2, "T": 200, "D": 16, "causal": True},
        {"B": 1, "H": 1, "T": 77, "D": 16, "causal": False},
    ],
    "cross_entropy": [{"M": 19, "V": 1000}, {"M": 2, "V": 9001}],
    "gated_recurrence": [{"B": 2, "H": 3, "T": 9, "K": 20, "V": 36}],
    "grouped_gemm": [{"M": 150, "N": 70, "K": 50, "E": 4}, {"M": 5, "N": 7, "K": 33, "E": 4}],
    "layernorm": [{"M": 5, "N": 100}],
    "matmul": [
        {"M": 31, "N": 100, "K": 70},
        {"M": 31, "N": 100, "K": 70, "transpose_b": True},
        {"M": 150, "N": 31, "K": 33, "transpose_a": True},
        {"M": 100, "N": 31, "K": 33, "transpose_a": True, "transpose_b": True},
    ],
    "rmsnorm": [{"batch": 3, "seq": 7, "hidden": 60}],
    "rotary": [{"B": 2, "T": 5, "HQ": 3, "HK": 1, "D": 48}],
    "softmax": [{"M": 5, "N": 100, "scale": 2.0}, {"M": 2, "N": 5000}],
    "swiglu": [{"tokens": 33, "hidden": 57}],
}
# log2(e) and sm_scale are float32 constants in the attention kernels, as on the device: relative 2e-8.
TOLERANCE = {"attention": 1e-7, "attention_block_ptr": 1e-7}
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
CASES = [pytest.param(name, dims, id=f"{name}-{ShapeEntry(dims=dims).label}") for name in NAMES for dims in SMALL[name]]

pytestmark = pytest.mark.filterwarnings("ignore:tl.make_block_ptr is deprecated:UserWarning")


def facts_of(name: str) -> FileFacts:
    if name == "attention_block_ptr" and not BLOCK_POINTERS:
        pytest.skip("this Triton has no block pointers")
    return read_file(EXAMPLES / f"{name}.py")


def as_tuple(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def relative_error(image: torch.Tensor, truth: torch.Tensor) -> float:
    error = image.detach().as_subclass(torch.Tensor) - truth.detach()
    return float(error.norm() / truth.detach().norm())


def wide(arguments: Arguments, leaves: dict[int, str]) -> list[Any]:
    """The arguments in float64, those at `leaves` requiring gradients."""
    return [
        value.double().requires_grad_(place in leaves)
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for place, value in enumerate(arguments.args)
    ]


@pytest.mark.parametrize(("name", "dims"), CASES)
def test_an_example_computes_its_reference_and_its_gradients(name: str, dims: dict[str, Any], tmp_path: Path) -> None:
    facts = facts_of(name)
    wanted = facts.inputs_require_grad
    module = load_truth(facts, tmp_path)
    tolerance = TOLERANCE.get(name, 1e-9)
    with standin():
        arguments = build_arguments(module, ShapeEntry(dims=dims), device="cpu", seed=1)
        leaves = {
            place: facts.parameters[place]
            for place, value in enumerate(arguments.args)
            if isinstance(value, torch.Tensor)
            and value.is_floating_point()
            and (wanted is None or place in wanted or facts.parameters[place] in wanted)
        }
        assert leaves
        execution: Execution = execute(
            getattr(module, facts.stub), arguments.args, arguments.kwargs, leaves=tuple(leaves)
        )
    assert execution.findings == ()
    assert execution.mutated == ()
    inputs = wide(arguments, leaves)
    outputs, truths = as_tuple(execution.result), as_tuple(module.reference(*inputs, **arguments.kwargs))
    assert len(outputs) == len(truths)
    for position, (output, truth) in enumerate(zip(outputs, truths, strict=True)):
        assert output.shape == truth.shape, f"shape of output {position}"
        assert relative_error(output, truth) <= tolerance, f"output {position}"

    generator = torch.Generator().manual_seed(2)
    cotangents = [torch.randn(truth.shape, generator=generator, dtype=torch.float64) for truth in truths]
    grads = torch.autograd.grad(list(outputs), [execution.leaves[place] for place in leaves], cotangents)
    expected = torch.autograd.grad(truths, [inputs[place] for place in leaves], cotangents)
    for leaf, grad, truth in zip(leaves.values(), grads, expected, strict=True):
        assert relative_error(grad, truth) <= tolerance, f"gradient of {leaf}"


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_observed_and_assembled_into_a_pair(name: str) -> None:
    """At its own smallest SWEEP entry, as the main job begins."""
    spec = observe(facts_of(name))
    assert spec.launches
    assert spec.facts.has_reference
    pair = assemble(spec, Candidate(backward="def backward(saved, *grads, needs=None):\n    return None\n"))
    facts = read_source(pair, Path(f"{name}_backward.py"))
    assert facts.is_pair
    assert facts.inputs_require_grad == spec.grads
    assert facts.nondiff_outputs == spec.facts.nondiff_outputs


def test_attention_covers_causal_and_full_and_odd_lengths() -> None:
    spec = observe(facts_of("attention"))
    assert {entry.dims["causal"] for entry in spec.sweep} == {True, False}
    assert any(int(str(entry.dims["T"])) % 2 for entry in spec.sweep)
