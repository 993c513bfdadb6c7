"""A call that is written down and carried out again does the same, for ways in which host code touches memory."""

from __future__ import annotations

import json
from collections import namedtuple

import pytest
import torch
import triton
import triton.language as tl

from kernel_agent.ir import ExecOptions, FindingKind
from kernel_agent.ir.capture.images import Images
from kernel_agent.ir.execution import run_once
from kernel_agent.ir.recorded.forms import CannotRecord, Reader, Writer, kernel_line
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


@triton.jit
def _through(S, WS, OUT, n, WRITES: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    inside = i < n
    if WRITES:
        tl.store(WS + i, tl.load(S + i, mask=inside), mask=inside)
    old = tl.load(WS + i, mask=inside)
    tl.store(WS + i, old + 1.0, mask=inside)
    tl.store(OUT + i, old, mask=inside)


@triton.jit
def _beside(WS, X, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    inside = i < n
    tl.store(X + i, tl.load(X + i, mask=inside) * 2, mask=inside)


def workspace_written_first(x, whole):
    y = torch.empty_like(x)
    _through[(1,)](x, whole[100:], y, x.numel(), WRITES=True, BLOCK=8)
    return y


def workspace_read_first(x, whole):
    y = torch.empty_like(x)
    _through[(1,)](x, whole[100:], y, x.numel(), WRITES=False, BLOCK=8)
    return y


def workspace_not_used(x, whole):
    y = x.clone()
    _beside[(1,)](whole, y, x.numel(), BLOCK=8)
    return y


def workspace_in_two_tensors(x, whole, low, high):
    high[:6].copy_(x.flatten())
    low.zero_()
    whole[3000:3003] = 0.0
    return high[:6].clone(), low[:2].clone()


def workspace_by_torch(x, whole):
    return whole[:6].copy_(x.flatten()).clone()


def workspace_returned(x, whole):
    return whole[:6].copy_(x.flatten())


def second_call(call, x, *outside):
    """The record of the second of two calls that share tensors which are no arguments, and what it did."""
    images = Images()
    for _ in range(2):
        recorder = Recorder()
        about = {"recorder": recorder, "images": Images(outside=images)}
        execution, _ = run_once(lambda x: call(x, *outside), (x,), {}, (), ExecOptions(), safe=False, **about)
    return Program.model_validate_json(recorder.program.model_dump_json()), execution


KERNELS = {(kernel.fn.__name__, kernel_line(kernel)): kernel for kernel in (_through, _beside)}


@pytest.mark.parametrize(
    "call",
    [workspace_written_first, workspace_not_used, workspace_by_torch, workspace_in_two_tensors],
    ids=lambda call: call.__name__,
)
def test_a_workspace_of_an_earlier_call_is_explained_where_its_content_does_not_matter(call) -> None:
    # Too large to be written down with its elements, and none of them stands in the record.
    x, whole = torch.randn(2, 3), torch.randn(6000)
    parts = (whole[:3000], whole[3000:]) if call is workspace_in_two_tensors else ()
    program, execution = second_call(call, x, whole, *parts)
    assert not program.refused
    assert not program.constants() & {*whole.tolist()}
    again, _ = run_once(Replayed(program, KERNELS), (x,), {}, (), ExecOptions(), safe=False)
    torch.testing.assert_close(again.result, execution.result, rtol=0, atol=0)
    assert again.findings == execution.findings == ()


def test_what_an_earlier_call_left_in_a_workspace_is_not_there_when_the_call_is_carried_out_again() -> None:
    # The call itself finds it: that it hangs on what was left shows nowhere else.
    x = torch.randn(2, 3)
    program, execution = second_call(workspace_read_first, x, torch.randn(6000))
    assert execution.findings == ()
    again, _ = run_once(Replayed(program, KERNELS), (x,), {}, (), ExecOptions(), safe=False)
    assert [found.kind for found in again.findings] == [FindingKind.UNINITIALIZED_READ]
    assert bool(again.result.isnan().all())


def test_a_workspace_that_is_cleared_is_told_by_one_number() -> None:
    # Sums and locks that a call clears behind it are as large as they like, and hold nothing of an earlier call.
    def summed(x, whole):
        whole[:6] += x.flatten()
        found = whole[:6].clone()
        whole.zero_()
        return found

    x = torch.randn(2, 3)
    program, execution = second_call(summed, x, torch.zeros(6000))
    again, _ = run_once(Replayed(program, {}), (x,), {}, (), ExecOptions(), safe=False)
    torch.testing.assert_close(again.result, execution.result, rtol=0, atol=0)
    torch.testing.assert_close(again.result, x.double().flatten(), rtol=0, atol=0)


def test_a_count_that_calls_keep_is_not_counted_twice() -> None:
    # Written down as it is after the first step that changes it, it would be changed once more.
    def counted(x, count):
        count.add_(1)
        return x * count

    program, execution = second_call(counted, torch.ones(2), torch.zeros(1, dtype=torch.int64))
    assert execution.result.tolist() == [2.0, 2.0]
    again, _ = run_once(Replayed(program, {}), (torch.ones(2),), {}, (), ExecOptions(), safe=False)
    assert again.result.tolist() == [2.0, 2.0]


def test_memory_that_the_next_call_writes_over_is_not_returned() -> None:
    program, _ = second_call(workspace_returned, torch.randn(2, 3), torch.randn(6000))
    assert "returns memory of an earlier call" in program.refused


def test_the_size_of_a_workspace_is_a_number_of_the_record() -> None:
    # An answer in sizes of memory would be seen by nobody else.
    program, _ = second_call(workspace_by_torch, torch.randn(2, 3), torch.randn(6000))
    assert 6000 in program.constants()
    assert 6000 not in program.constants(sizes=False), "memory that others made larger is no number of this call"
