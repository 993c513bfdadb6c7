"""Costs found without executing anything agree with those of executed kernels, on the files that users see first."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from corpus.case import BLOCK_POINTERS
from cost_kernels import bucket_then_gather, causal_sums, matmul, median_by_bits

from kernel_agent.ir import import_module, standin
from kernel_agent.ir.cost.cost import Counts, Effort, count_call, execute_call, report
from kernel_agent.ir.cost.cost_report import CostReport
from kernel_agent.ir.cost.counting import How
from kernel_agent.ir.cost.devices import device_table
from kernel_agent.ir.cost.work import Work
from kernel_agent.ir.memory import Buffer
from kernel_agent.pairs.arguments import Arguments, build_arguments
from kernel_agent.pairs.sweep import read_sweep, smallest
from kernel_agent.pairs.userfile import read_file

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL_BUDGET = Effort(budget=1, sample=192)
"""Makes every launch of more than a few programs too large to be walked whole."""


def on_h100(counts: Counts) -> CostReport:
    return report(counts, device_table().find("H100 SXM"))


def example(name: str) -> tuple[ModuleType, str]:
    path = EXAMPLES / f"{name}.py"
    return import_module(path, f"cost_{name}"), read_file(path).stub


def smallest_call(module: ModuleType, name: str) -> Arguments:
    entry = smallest(read_sweep(module.SWEEP, EXAMPLES / f"{name}.py"))
    with standin():
        return build_arguments(module, entry, device="cpu", seed=0)


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_walked_costs_of_an_example_are_those_of_its_execution(name: str):
    if name == "attention_block_ptr" and not BLOCK_POINTERS:
        pytest.skip("this Triton has no block pointers")
    module, stub = example(name)
    call = smallest_call(module, name)
    walked = on_h100(count_call(getattr(module, stub), call.args, call.kwargs))
    executed = on_h100(execute_call(getattr(module, stub), call.args, call.kwargs))
    assert [launch.how for launch in walked.launches] == [How.WALKED] * len(executed.launches)
    for one, other in zip(walked.launches, executed.launches, strict=True):
        assert replace(one, how=other.how) == other
    assert walked.torch == executed.torch


def test_a_wrong_itemsize_would_show_in_that_comparison(monkeypatch: pytest.MonkeyPatch):
    module, stub = example("softmax")
    call = smallest_call(module, "softmax")
    executed = on_h100(execute_call(getattr(module, stub), call.args, call.kwargs))
    right = Buffer.__init__

    def wrong(self: Buffer, *args: object, **kwargs: object) -> None:
        right(self, *args, **kwargs)
        self.itemsize = 8

    monkeypatch.setattr(Buffer, "__init__", wrong)
    walked = on_h100(count_call(getattr(module, stub), call.args, call.kwargs))
    assert walked.launches[0].buffers != executed.launches[0].buffers


def test_a_matmul_of_4096_cubed_is_walked_whole_in_seconds():
    module, _ = example("matmul")
    a = torch.empty(4096, 4096, dtype=torch.float16, device="meta")
    begin = time.perf_counter()
    launch = on_h100(count_call(module.matmul, (a, a.clone()))).launches[0]
    seconds = time.perf_counter() - begin
    assert launch.how is How.WALKED
    assert launch.operations(Work.DOT_FP16) == 2 * 4096**3
    assert [b.unique_bytes for b in launch.buffers] == [2 * 4096**2] * 3
    assert [b.read.issued_bytes // b.read.unique_bytes for b in launch.buffers[:2]] == [32, 32]
    assert seconds < 30  # about one on a quiet machine (bench/cost_accuracy.py prints it); CI shares its cores


def test_a_launch_needs_no_memory_of_its_tensors():
    # 2**42 elements would be 16 TiB: only walking, never allocating, ends.
    x = torch.empty(1 << 21, 1 << 21, device="meta")
    launch = on_h100(count_call(matmul, (x[:64, :128], x[:128, :64]))).launches[0]
    assert launch.buffers[0].size_bytes == 4 << 42


def test_a_sample_says_so_and_is_within_5_percent_of_all_programs():
    x = torch.empty(1024 * 32, device="meta")
    whole = on_h100(count_call(causal_sums, (x,))).launches[0]
    sampled = on_h100(count_call(causal_sums, (x,), effort=SMALL_BUDGET)).launches[0]
    assert (whole.how, sampled.how) == (How.WALKED, How.SAMPLED)
    assert sampled.walked < 500
    assert sampled.operations(Work.FP32) == pytest.approx(whole.operations(Work.FP32), rel=0.05)
    assert sampled.issued_bytes == pytest.approx(whole.issued_bytes, rel=0.05)
    assert sampled.loops[0].mean == pytest.approx(whole.loops[0].mean, rel=0.05)
    assert sampled.loops[0].maximum == 1024  # the last program is always among them
    assert "sampled" in str(on_h100(count_call(causal_sums, (x,), effort=SMALL_BUDGET)))


@pytest.mark.parametrize("name", ["matmul", "attention", "layernorm", "softmax", "swiglu"])
def test_a_sample_of_an_example_is_within_5_percent_of_the_whole(name: str):
    calls = {
        "matmul": lambda m: m.matmul(big(2000, 1000), big(1000, 3000)),
        "attention": lambda m: m.attention(*[big(2, 8, 4096, 64) for _ in range(3)], causal=False),
        "layernorm": lambda m: m.layernorm(big(4000, 1000), big(1000), big(1000)),
        "softmax": lambda m: m.softmax(big(4000, 1000)),
        "swiglu": lambda m: m.swiglu(big(4096, 11008), big(4096, 11008)),
    }
    module, _ = example(name)
    whole = on_h100(count_call(calls[name], (module,)))
    sampled = on_h100(count_call(calls[name], (module,), effort=SMALL_BUDGET))
    one, other = whole.launches[0], sampled.launches[0]
    assert (one.how, other.how) == (How.WALKED, How.SAMPLED)
    assert other.issued_bytes == pytest.approx(one.issued_bytes, rel=0.05)
    assert other.unique_bytes == pytest.approx(one.unique_bytes, rel=0.05)
    assert other.bound.seconds == pytest.approx(one.bound.seconds, rel=0.05)
    for work in one.work:
        assert other.operations(work.kind) == pytest.approx(work.operations, rel=0.05)


def big(*shape: int) -> torch.Tensor:
    """A tensor whose memory nobody needs."""
    return torch.empty(*shape, dtype=torch.float16, device="meta")


def test_a_count_leaves_the_arguments_as_they_were():
    x = torch.randn(6, 16)
    before = x.clone()
    count_call(bucket_then_gather, (x,))
    assert torch.equal(x, before)


def test_a_loop_that_carries_bits_of_floats_is_walked_where_they_choose_what_is_read():
    # the bits were asked for the amount they grow by, which they do not have
    x = torch.rand(3, 9) + 1
    walked = on_h100(count_call(median_by_bits, (x,)))
    executed = on_h100(execute_call(median_by_bits, (x,)))
    assert walked.launches[0].unique_bytes == executed.launches[0].unique_bytes
