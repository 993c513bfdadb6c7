"""Functions of a file that launch are written into its stub; what they compute stays the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernel_agent.compiler.stub.inline import without_helpers

HEAD = """
import torch


class Kernel:
    def __getitem__(self, grid):
        return lambda x, y, factor: y.copy_(x * factor + grid)


kernel = Kernel()
SCALE = 3.0
"""
FUNCTION = """
class Scaled(torch.autograd.Function):
    @staticmethod
    def forward({ctx}x, factor=2.0):
        {first}y = torch.empty_like(x)
        kernel[1](x, y, factor)
        {told}return y
"""
STUB = """
def stub(a, b):
    return Scaled.apply(a, 0.5) + Scaled.apply(Scaled.apply(b))
"""
SAVING = "ctx.save_for_backward(x)\n        ctx.factor, ctx.shape = factor, x.shape\n        "


def results(source: str) -> Any:
    scope: dict[str, Any] = {}
    exec(source, scope)
    return scope["stub"](torch.arange(4.0), torch.arange(4.0) * 2)


def forward(ctx: str = "ctx, ", first: str = "", told: str = SAVING) -> str:
    return HEAD + FUNCTION.format(ctx=ctx, first=first, told=told)


@pytest.mark.parametrize(
    "function",
    [
        forward(),
        forward(ctx="", told="") + "\n    @staticmethod\n    def setup_context(ctx, inputs, output):\n        pass\n",
    ],
)
def test_the_forward_of_an_autograd_function_is_written_into_the_stub(function: str) -> None:
    # a context that is left in, or a default that is lost, is a name that the stub does not have
    source = function + STUB
    changed = without_helpers(source, "stub")
    assert ".apply(" not in changed[changed.index("def stub") :]
    assert torch.equal(results(changed), results(source))


def test_an_operator_is_written_into_the_stub_under_both_of_its_names() -> None:
    operator = HEAD + (
        '\n\n@torch.library.custom_op("kernel_agent_inlined::scaled", mutates_args=())\n'
        "def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:\n    y = torch.empty_like(x)\n"
        "    kernel[1](x, y, factor)\n    return y\n\n\n"
        "def stub(a, b):\n    return scaled(a, 0.5) + torch.ops.kernel_agent_inlined.scaled(b, 2.0)\n"
    )
    changed = without_helpers(operator.replace("    kernel[1]", "    torch.library.wrap_triton(kernel)[1]"), "stub")
    assert "wrap_triton" not in changed[changed.index("def stub") :]
    assert "scaled(" not in changed[changed.index("def stub") :]
    assert torch.equal(results(changed), results(operator))


@pytest.mark.parametrize(
    "told",
    [
        "ctx.mark_non_differentiable(y)\n        ",
        "y = y * len(ctx.needs_input_grad)\n        ",
        "ctx.y = kernel[2](x, y, factor)\n        ",
    ],
)
def test_a_forward_that_asks_its_context_or_marks_results_stays(told: str) -> None:
    # without these lines it computes other numbers, or has a gradient that it does not have
    source = forward(told=told) + STUB
    assert without_helpers(source, "stub") == source


def test_a_function_stays_that_reads_a_name_of_the_module_which_the_stub_has_too() -> None:
    # written into the stub it would read the stub's own number
    source = forward(first="x = x * SCALE\n        ") + (
        "\n\ndef stub(a, b):\n    SCALE = 5.0\n    return Scaled.apply(a, SCALE) + b\n"
    )
    assert without_helpers(source, "stub") == source


LOOPED = """

def scaled(x, factor=2.0, offset=None, has_offset=False):
    y = torch.empty_like(x)
    kernel[offset.stride(0) if has_offset else 0](x, y, factor)
    x = y + 1
    return x


def stub(a, b):
    y, found = b, []
    for n in range(3):
        x = scaled(a + n, n)
        found.append(scaled(x, 3.0, None, False) * 2)
        y = y + scaled(b, offset=b, has_offset=True)
    return torch.stack([*found, x, y])
"""


def test_a_helper_that_a_loop_calls_is_written_into_its_trips() -> None:
    # In front of the loop it would compute once what each trip computes anew; its names are not the stub's, which has
    # others by them.
    source = HEAD + LOOPED
    changed = without_helpers(source, "stub")
    stub = changed[changed.index("def stub") :]
    assert "scaled(" not in stub
    assert stub.index("for n in range(3):") < stub.index("kernel[")
    assert torch.equal(results(changed), results(source))


def test_a_function_in_a_helper_keeps_a_parameter_that_is_called_like_the_helpers_own() -> None:
    # The helper's is what the call gives; read there in the lambda's place, it would count nothing.
    source = forward(first="x = sum(map(lambda factor: factor * x, (1, 2)))\n        ") + STUB
    changed = without_helpers(source, "stub")
    assert ".apply(" not in changed[changed.index("def stub") :]
    assert torch.equal(results(changed), results(source))


def test_a_choice_that_the_call_of_a_helper_has_made_is_gone() -> None:
    # `None.stride(0)` is no question that anything could answer, though no call would ask it.
    changed = without_helpers(HEAD + LOOPED, "stub")
    stub = changed[changed.index("def stub") :]
    assert "None.stride" not in stub
    assert " if " not in stub
    assert "kernel[b.stride(0)](" in stub


def test_a_helper_in_the_line_of_a_loop_stays() -> None:
    # Written out behind the head it would have its first statement there alone, or none.
    source = HEAD + LOOPED[: LOOPED.index("def stub")] + "def stub(a, b):\n    for n in range(3): a = scaled(a)\n"
    assert without_helpers(source, "stub") == source
