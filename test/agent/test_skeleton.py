"""The reply to fill in: valid Python with the exact form that the gate accepts, in dims instead of numbers."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from kernel_agent.agent.shapewords import dim_lines, tensor_words, told
from kernel_agent.agent.skeleton import gradient_name, skeleton
from kernel_agent.pairs.observe import observe
from kernel_agent.pairs.spec import ArgumentFacts, ArgumentKind, KernelSpec, ShapeEntry
from kernel_agent.pairs.userfile import read_file

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def example(name: str) -> KernelSpec:
    return observe(read_file(EXAMPLES / f"{name}.py"))


def lines(name: str) -> list[str]:
    return [line.strip() for line in skeleton(example(name)).splitlines()]


@pytest.mark.parametrize("name", ["layernorm", "gated_recurrence", "softmax", "rotary"])
def test_it_is_python_with_one_parameter_per_output_and_one_value_per_gradient(name: str) -> None:
    spec = example(name)
    (function,) = ast.parse(skeleton(spec)).body
    assert isinstance(function, ast.FunctionDef)
    names = [argument.arg for argument in function.args.args]
    assert names == ["saved", *(f"grad_{facts.name}" for facts in spec.outputs), "needs"]
    (returned,) = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
    values = returned.elts if isinstance(returned, ast.Tuple) else [returned]
    assert [ast.unparse(value) for value in values if value is not None] == [gradient_name(g) for g in spec.grads]


def test_slots_are_told_in_dims_and_dtypes() -> None:
    shown = lines("layernorm")
    assert "# x          (M, N), float32 or bfloat16" in shown
    assert "# rstd       (M,), float32; an output" in shown
    assert "# eps        a plain value" in shown


def test_cotangents_say_when_they_are_none() -> None:
    layernorm, recurrence = lines("layernorm"), lines("gated_recurrence")
    assert "# grad_mean  always None" in layernorm
    assert any("grad_out0" in line and line.endswith("never None") for line in layernorm), "the only one"
    assert any("grad_o " in line and "None when it gets no gradient" in line for line in recurrence)


def test_a_tensor_that_is_not_contiguous_is_pointed_out() -> None:
    # Indexing q as (B, H, T, D) in memory order is the commonest mistake in attention backwards.
    assert any(line.startswith("# q ") and "not contiguous: use its strides" in line for line in lines("attention"))


def test_the_gradient_of_what_is_not_saved_is_not_allocated_like_it() -> None:
    spec = observe(read_file(EXAMPLES.parent / "datasets" / "kernel_pairs" / "norm_row" / "layernorm_persistent.py"))
    text = skeleton(spec)
    assert "empty_like(bias)" not in text, "bias is no slot of saved there"
    assert "dbias = ...  # (N,), float32, float16 or bfloat16 as bias, which is not saved" in text


def test_sizes_are_ranges_and_flags_are_named() -> None:
    assert dim_lines(example("attention")) == (
        "`B` from 1 to 4, `H` from 2 to 32, `T` from 33 to 16384, `S` from 65 to 16384, `D` from 32 to 128",
        "`causal`: True or False",
        "`sm_scale`: 0.3 or left out",
    )


def test_a_spec_of_an_earlier_ledger_is_named_from_its_smallest_entry() -> None:
    # Runs that were recorded before axes were looked at can be resumed.
    tensor = ArgumentFacts(name="x", kind=ArgumentKind.TENSOR, dtype="float32", shape=(31, 31, 7))
    old = example("softmax").model_copy(
        update={"inputs": (tensor,), "sweep": (ShapeEntry(dims={"M": 31, "N": 31, "K": 7}),)}
    )
    assert tensor_words(told(old).inputs[0]) == "(?, ?, K), float32"
