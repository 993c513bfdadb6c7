"""What a measurement rests on beside the GPU: the pair at its BENCH, its cost there, and records of what failed."""

from __future__ import annotations

import pytest

from kernel_agent.bench.records import Basis, Measurement, ShapeTime
from kernel_agent.collection.measuring import OPTIONS, at_bench, speed_of
from kernel_agent.collection.speeds import SpeedStatus
from kernel_agent.data import pairs_root
from kernel_agent.gate.verdict import CaseResult, GradientScore, Status, Verdict
from kernel_agent.oracle import describe
from kernel_agent.oracle.costs import costs
from kernel_agent.pairs.spec import KernelSpec
from kernel_agent.pairs.userfile import read_file, read_source
from kernel_agent.sandbox import Sandbox

SOFTMAX = pairs_root() / "softmax" / "softmax_row.py"
M, N = 8192, 4096


@pytest.fixture(scope="module")
def spec(sandbox: Sandbox) -> KernelSpec:
    return at_bench(describe(read_file(SOFTMAX), sandbox))


def test_a_pair_at_its_bench_is_the_same_pair_with_other_entries(spec: KernelSpec):
    assert [entry.label for entry in spec.sweep] == [f"M={M} N={N} dtype=float32"]
    again = read_source(spec.facts.source, SOFTMAX)
    assert again.model_copy(update={"path": spec.facts.path}) == spec.facts


def test_a_record_holds_what_the_cost_counter_says_of_the_backward(spec: KernelSpec, sandbox: Sandbox):
    # Softmax's backward reads y and its cotangent and writes dx, all float32: 12 bytes an element; y is all it saves.
    (cost,) = costs(spec.facts, sandbox, "H200", (0,), OPTIONS.count_limits)
    score = GradientScore(grad="x", passed=True, ratio=0.5)
    case = CaseResult(case="native", required=True, status=Status.GREEN, grads=(score,))
    verdict = Verdict(status=Status.GREEN, cases=(case,), tier="native")
    shape = ShapeTime(label=cost.label, median_us=200.0, spread=0.01, eager_us=300.0, compiled_us=210.0)
    found = Measurement(basis=Basis.MEASURED, device="NVIDIA H200", shapes=(shape,))
    speed = speed_of(read_file(SOFTMAX), shape, found, verdict, cost)
    assert speed.status is SpeedStatus.MEASURED
    assert speed.gb_s == pytest.approx(12 * M * N / 200e-6 / 1e9, rel=1e-3)
    assert speed.tflops is None
    assert speed.atomics == 0
    assert speed.saved_bytes == 0  # of the form of the input, which it could share memory with
    assert speed.of_bound == pytest.approx(12 * M * N / 4.8e12 / 200e-6, abs=1e-3)
    assert (speed.to_compiled, speed.to_eager) == (1.05, 1.5)
    assert speed.worst == 0.5
