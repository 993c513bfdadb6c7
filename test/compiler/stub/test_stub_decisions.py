"""Calls that go another way through a stub's torch code are told apart by its conditions, or not at all."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path

import torch
from compiler.stub.torch_only import imported

from kernel_agent.compiler.stub.decisions import apart, decisions, shared, torch_path
from kernel_agent.compiler.stub.source import StubSource
from kernel_agent.compiler.stub.trace import Trace, trace

TEXT = """
import torch


def stub(x, flip=False, scale=1.0):
    x = x.T if flip else x
    if scale > 1.0:
        scale = 2.0
    y = torch.empty(3) if x.dim() == 2 else torch.empty(3).view(3, 1)
    return x.reshape(-1)
"""


def seen(folder: Path, *calls: Sequence[object]) -> tuple[StubSource, list[Trace]]:
    path = folder / "file.py"
    path.write_text(TEXT)
    module = imported(path, "traced")
    traces = [trace(module.stub, (torch.randn(3, 4), *call), {}, path) for call in calls]
    return StubSource(TEXT, "stub", module), traces


def test_a_view_of_an_input_under_a_condition_is_another_way(tmp_path: Path) -> None:
    # launches get the same kernels with other strides: without the torch functions both would be one configuration,
    # and the gradient of the transposed call would come back in the wrong shape
    source, (plain, flipped) = seen(tmp_path, (), (True,))
    assert torch_path(plain) != torch_path(flipped)
    fallen = [decisions(source, one) for one in (plain, flipped)]
    assert [fallen[0][place].line for place in apart(*fallen)] == [6]


def test_ways_of_calls_that_differ_in_numbers_alone_are_one(tmp_path: Path) -> None:
    _, (one, other) = seen(tmp_path, (True, 1.0), (True, 3.0))
    assert torch_path(one) == torch_path(other)


def test_conditions_on_what_is_bound_again_are_not_asked(tmp_path: Path) -> None:
    source, (one,) = seen(tmp_path, (False, 3.0))
    assert [found.line for found in decisions(source, one).values()] == [6, 9]


LATER = """
import torch


def stub(x, bias=None, other=None, scale=None):
    if bias is not None:
        bias = bias.reshape(-1).contiguous()
    if other is not None:
        other = None
    if scale is None:
        scale = x.abs()
    return x.reshape(-1)
"""


def test_whether_a_tensor_is_there_is_asked_after_methods_of_it_are_bound_to_its_name(tmp_path: Path) -> None:
    # `bias = bias.contiguous()` under its condition is how stubs are written: calls with and without a bias were not
    # told apart. What is bound to None, or was None before, would be asked wrongly at the end.
    path = tmp_path / "file.py"
    path.write_text(LATER)
    module = imported(path, "later")
    one = trace(module.stub, (torch.randn(3, 4), torch.randn(2, 2), torch.randn(3)), {}, path)
    found = decisions(StubSource(LATER, "stub", module), one)
    assert [(ast.unparse(each.node), each.line, each.value) for each in found.values()] == [
        ("bias is not None", 7, True)
    ]


def test_what_falls_in_two_ways_within_a_group_tells_nothing_of_it(tmp_path: Path) -> None:
    source, traces = seen(tmp_path, (), (True,))
    both = shared([decisions(source, one) for one in traces])
    assert [found.line for found in both.values()] == [9]
