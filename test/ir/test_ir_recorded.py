"""A call that is written down and carried out again does the same, for ways in which host code touches memory."""

from __future__ import annotations

import json
from collections import namedtuple

import pytest
import torch

from kernel_agent.ir import ExecOptions
from kernel_agent.ir.execution import run_once
from kernel_agent.ir.recorded.forms import CannotRecord, Reader, Writer
from kernel_agent.ir.recorded.program import Program
from kernel_agent.ir.recorded.recorder import Recorder
from kernel_agent.ir.recorded.replay import Replayed

TABLE = torch.arange(6.0).reshape(2, 3)
LARGE = torch.zeros(5000)


def in_place(x):
    y = torch.zeros_like(x)
    y[0] = x[1]
    y[:, 1:].add_(2.0)
    y.T[2] -= 1
    return y, y.sum(0), x.new_full((2,), float("-inf"))


def several_results(x):
    a, b = x.unbind(0)
    values, places = x.max(dim=1)
    return torch.stack([b, a]), values, places.to(torch.int32), x.split(1, 1)[2]


def with_a_table(x):
    return x * TABLE.to(x.device), [3, None, 1e-300, float("nan")]


def by_number(x):
    return torch.tensor([x.shape[0], 7], device=x.device), x[..., ::2], x.permute(1, 0).contiguous()


@pytest.mark.parametrize("call", [in_place, several_results, with_a_table, by_number], ids=lambda call: call.__name__)
def test_a_call_carried_out_again_gives_the_same_bits(call) -> None:
    x = torch.randn(2, 3)
    recorder = Recorder()
    execution, _ = run_once(call, (x,), {}, (), ExecOptions(), safe=False, recorder=recorder)
    program = Program.model_validate_json(recorder.program.model_dump_json())
    again, _ = run_once(Replayed(program, {}), (x,), {}, (), ExecOptions(), safe=False)
    torch.testing.assert_close(again.result, execution.result, rtol=0, atol=0, equal_nan=True)
    assert again.torch_ops == execution.torch_ops


def doubled(x, count):
    x.mul_(count)
    return x


def test_what_a_call_writes_into_has_the_name_that_its_function_gives_it() -> None:
    # Named by its place instead, it would not be found among what the user's own stub writes into.
    recorder = Recorder()
    execution, _ = run_once(doubled, (torch.ones(3), 2), {}, (), ExecOptions(), safe=False, recorder=recorder)
    named = Replayed(recorder.program, {}, ("x", "count"))
    again, _ = run_once(named, (torch.ones(3), 2), {}, (), ExecOptions(), safe=False)
    assert again.mutated == execution.mutated == ("x",)


def test_other_arguments_give_another_result() -> None:
    # A record that held the values instead of the steps would pass every test above.
    recorder = Recorder()
    run_once(in_place, (torch.zeros(2, 3),), {}, (), ExecOptions(), safe=False, recorder=recorder)
    x = torch.randn(2, 3)
    again, _ = run_once(Replayed(recorder.program, {}), (x,), {}, (), ExecOptions(), safe=False)
    direct, _ = run_once(in_place, (x,), {}, (), ExecOptions(), safe=False)
    torch.testing.assert_close(again.result, direct.result, rtol=0, atol=0)


def test_memory_of_an_earlier_call_is_refused() -> None:
    recorder = Recorder()
    run_once(lambda x: x + LARGE.to(x.device), (torch.ones(1),), {}, (), ExecOptions(), safe=False, recorder=recorder)
    assert "neither is an argument" in recorder.program.refused
    with pytest.raises(CannotRecord, match="neither is an argument"):
        run_once(Replayed(recorder.program, {}), (torch.ones(1),), {}, (), ExecOptions(), safe=False)


def test_every_number_of_a_record_is_counted() -> None:
    recorder = Recorder()
    run_once(with_a_table, (torch.ones(2, 3),), {}, (), ExecOptions(), safe=False, recorder=recorder)
    assert recorder.program.constants() >= set(range(6))


def test_a_named_tuple_keeps_its_names() -> None:
    # A kernel reads its parts by them; the names of a forged record make no class that runs anything.
    point = namedtuple("point", ["left", "right"])(1, (2, 3))
    form = Writer(None, lambda _number: None).form(point)
    again = Reader([], {}, None).value(json.loads(json.dumps(form)))
    assert (again.left, again.right, again) == (1, (2, 3), point)
    for names in (["a", "a"], ["_a", "b"], ["a, b): pass #", "b"], ["a"]):
        with pytest.raises(CannotRecord):
            Reader([], {}, None).value({"tuple": [1, 2], "names": names})
